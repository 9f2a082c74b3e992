"""What the main job tells: a live line, a summary and a picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOKS = ("put", "acked", "dropped", "dead", "lost", "resident")
STARVED = 0.15  # above this share of waiting or idling a side counts as held up by the other
SMOOTHING = 0.9  # of the loss on the live line


@dataclass
class Progress:
    """Measurements of one training run, as draft rank 0 sees it.

    Times are seconds of training: the clock starts with ``begin`` and stands still during evaluations.
    """

    total_steps: int
    num_drafts: int
    num_targets: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    acceptances: list[tuple[float, float]] = field(default_factory=list)  # (seconds, tokens per target forward)
    wait_shares: list[tuple[float, float]] = field(default_factory=list)
    idle_shares: list[tuple[float, float]] = field(default_factory=list)
    evaluated_s: float = 0.0
    waited_s: float = 0.0
    bytes: int = 0
    _begin: float = field(default_factory=time.monotonic)
    _shown: float = float("-inf")
    _smooth: float | None = None

    def begin(self) -> None:
        """Start the clock: after loading and connecting."""
        self._begin = time.monotonic()

    def now(self) -> float:
        """Seconds of training so far."""
        return max(time.monotonic() - self._begin - self.evaluated_s, 1e-9)

    def step(self, loss: float, waited_s: float) -> None:
        """Record one optimizer step of this rank, which waited ``waited_s`` for its batch."""
        self.losses.append(loss)
        self.seconds.append(self.now())
        self.waited_s += waited_s
        self.wait_shares.append((self.seconds[-1], self.wait_share))
        self._smooth = loss if self._smooth is None else SMOOTHING * self._smooth + (1 - SMOOTHING) * loss

    def observe(self, statistics: Mapping[str, Any]) -> None:
        """Take over what the stream counted on all ranks; a producer that is held back is an idle target."""
        self.bytes = int(statistics["bytes"])
        # Targets pause while drafts evaluate, too: only the time of the whole run compares with it.
        run_s = (self.now() + self.evaluated_s) * max(self.num_targets, 1)
        self.idle_shares.append((self.now(), min(1.0, float(statistics["paused_s"]) / run_s)))

    def accept(self, mean_length: float, seconds: float) -> None:
        """Record an evaluation that took ``seconds``."""
        self.evaluated_s += seconds
        self.acceptances.append((self.now(), mean_length))

    @property
    def wait_share(self) -> float:
        """The share of the training time in which this rank waited for a batch."""
        return min(1.0, self.waited_s / self.now())

    @property
    def samples_per_s(self) -> float:
        """Samples all draft ranks took per second; data-parallel ranks take equally many."""
        return len(self.losses) * self.num_drafts / self.now()

    @property
    def gigabytes_per_s(self) -> float:
        """Streamed from all targets to all drafts."""
        return self.bytes / self.now() / 1e9

    def line(self) -> str:
        """The live line."""
        acceptance = f"{self.acceptances[-1][1]:.2f}" if self.acceptances else "-"
        idle = f"{self.idle_shares[-1][1]:.0%}" if self.idle_shares else "-"
        return (
            f"step {len(self.losses):4d}/{self.total_steps}  loss {self._smooth or 0.0:.3f}  acceptance {acceptance}  "
            f"{self.samples_per_s:.1f} samples/s  {self.gigabytes_per_s:.3f} GB/s  wait {self.wait_share:.0%}  "
            f"target idle {idle}"
        )

    def due(self) -> bool:
        """Whether the live line is due: about once a second on a terminal, every few seconds elsewhere."""
        return time.monotonic() - self._shown > (1.0 if sys.stdout.isatty() else 5.0)

    def show(self, *, keep: bool = False) -> None:
        """Print the live line; on a terminal the next one overwrites it unless ``keep``."""
        self._shown = time.monotonic()
        terminal = sys.stdout.isatty()
        print(("\r\x1b[K" if terminal else "") + self.line(), end="" if terminal and not keep else "\n", flush=True)


def books(statistics: Mapping[str, Any]) -> str:
    """The run's books, and whether they balance."""
    outcomes = sum(int(statistics[name]) for name in BOOKS[1:])
    verdict = "balanced" if outcomes == int(statistics["put"]) else f"NOT BALANCED: the outcomes sum to {outcomes}"
    right = " + ".join(f"{name} {statistics[name]}" for name in BOOKS[1:])
    return f"put {statistics['put']} = {right}  ({verdict})"


def bottleneck(wait_share: float, idle_share: float | None) -> str:
    """Which side held the other up, and what to change."""
    if idle_share is None:
        return "no target ranks: target and draft share one process, and each waits for the other in turn"
    if wait_share > STARVED and wait_share >= idle_share:
        return (
            f"the targets (draft ranks waited {wait_share:.0%} of the time, targets idled {idle_share:.0%}): add "
            "target ranks, give them more threads or a faster device, or train more on each sample"
        )
    if idle_share > STARVED:
        return (
            f"the drafts (targets idled {idle_share:.0%} of the time, draft ranks waited {wait_share:.0%}): add draft "
            "ranks, give them more threads or a faster device, or run with fewer targets"
        )
    return f"neither side (draft ranks waited {wait_share:.0%}, targets idled {idle_share:.0%}): well balanced"


def summary(progress: Progress, statistics: Mapping[str, Any] | None) -> str:
    """The closing words; ``statistics`` are the run's, or ``None`` for a colocated one."""
    idle = progress.idle_shares[-1][1] if progress.idle_shares else None
    steps, train_s, evaluate_s = len(progress.losses), progress.now(), progress.evaluated_s
    where = f"{progress.num_drafts} draft rank(s)"
    lines = ["", f"{steps} steps on {where}: {train_s:.0f} s of training, {evaluate_s:.0f} s of evaluation"]
    if progress.losses:
        window = max(1, len(progress.losses) // 20)
        first, last = (sum(part) / window for part in (progress.losses[:window], progress.losses[-window:]))
        lines.append(f"  loss        {first:.3f} -> {last:.3f}")
    if progress.acceptances:
        before, after = progress.acceptances[0][1], progress.acceptances[-1][1]
        lines.append(f"  acceptance  {before:.2f} -> {after:.2f} tokens per target forward (1.00 is no speculation)")
    lines.append(f"  throughput  {progress.samples_per_s:.2f} samples/s, {progress.gigabytes_per_s:.3f} GB/s streamed")
    if statistics is not None:
        lines.append(f"  books       {books(statistics)}")
    lines.append(f"  bottleneck  {bottleneck(progress.wait_share, idle)}")
    return "\n".join(lines)


def draw(progress: Progress, path: Path, title: str) -> None:
    """Write the picture: loss, acceptance, throughput and waiting over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    figure.suptitle(title)
    top.plot(progress.seconds, progress.losses, color="tab:blue", linewidth=0.9)
    top.set_ylabel("training loss (nats)")
    if progress.acceptances:
        times, lengths = zip(*progress.acceptances, strict=True)
        middle.plot(times, lengths, marker="o", color="tab:green")
        middle.axhline(lengths[0], color="grey", linestyle=":", label="untrained draft")
        middle.legend(loc="lower right")
    middle.set_ylabel("mean acceptance length\n(tokens per target forward)")
    rates = throughput(progress.seconds, progress.num_drafts)
    bottom.plot([time for time, _ in rates], [rate for _, rate in rates], color="tab:orange", label="samples/s")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("samples/s")
    bottom.set_xlabel("seconds of training")
    shares = bottom.twinx()
    for label, series, style in (
        ("draft wait", progress.wait_shares, "--"),
        ("target idle", progress.idle_shares, ":"),
    ):
        if series:
            shares.plot(*zip(*series, strict=True), color="tab:purple", linestyle=style, label=label)
    shares.set_ylim(0, 1)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylabel("share of time")
    handles = [handle for axis in (bottom, shares) for handle in axis.get_legend_handles_labels()[0]]
    bottom.legend(handles=handles, loc="lower right")
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def throughput(seconds: Sequence[float], num_drafts: int, points: int = 40) -> list[tuple[float, float]]:
    """Samples per second over time, each point over a ``points``-th of the steps."""
    width = max(1, len(seconds) // points)
    return [
        (seconds[index], width * num_drafts / (seconds[index] - seconds[index - width]))
        for index in range(width, len(seconds), width)
        if seconds[index] > seconds[index - width]
    ]
