"""Configuration of a stream: one frozen, validated value."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from nccl_stream.errors import ConfigError

__all__ = ["APART_CUDA_LINKS", "Assignment", "End", "OnLoss", "Staging", "StreamConfig"]

Assignment = Literal["demand", "static"]
End = Literal["drop", "pad", "ragged"]
OnLoss = Literal["continue", "raise"]
Staging = Literal["device", "pinned", "auto"]

MIB = 1024 * 1024
ALIGN_BYTES = 256  # slots and their features start on such boundaries
LONGEST_S = 30 * 24 * 3600  # longer than any wait makes sense, and well within what torch and the system can count
# kStreamsPerPool of torch's c10/cuda/CUDAStream.cpp is 32: two for each link, two for the trainer's group and copies.
APART_CUDA_LINKS = 15

# Ranks may differ in what is theirs alone: memory sizes, the device index, how they issue transfers.
_OWN_FIELDS = frozenset(
    {"arena_bytes", "max_bytes", "max_samples", "high_watermark_bytes", "low_watermark_bytes", "device", "issue"}
    | {"staging", "device_bytes", "poison", "check_finite", "lease", "held_timeout", "connect_timeout"}
)


@dataclass(frozen=True)
class StreamConfig:
    """How a stream works. Everything in seconds or bytes; everything has a working default.

    Attributes:
        max_sample_bytes: largest sample, as the sum of its features' bytes. Bounds what one put may bring.
        arena_bytes: receive memory of a draft rank, allocated once. See :meth:`smallest_arena`.
        max_bytes: cap on resident bytes of a target rank (samples without outcome).
        max_samples: cap on resident samples of a target rank; None for no cap.
        high_watermark_bytes: residency at which producers pause; None: three quarters of ``max_bytes``.
        low_watermark_bytes: residency at which they resume; None: half of ``max_bytes``.
        assignment: ``"demand"`` gives a sample to the draft with the fewest unacked ones; ``"static"`` gives sample k
            to draft ``k mod num_drafts`` and yields in the order of k, bit-identical from run to run.
        end: what happens when the samples do not fill a last round on every draft: ``"drop"`` them, ``"pad"`` the
            others, or ``"ragged"``: no rounds at all, for drafts that do not train together.
        batch_size: samples per batch of one draft.
        accumulation: batches per optimizer step. A round is ``batch_size * accumulation`` samples per draft.
        device: where receive slots and resident samples lie; None: this rank's GPU if there is one, else the CPU.
        fanout: drafts each target has links to; None: all. Links of one GPU process beyond :data:`APART_CUDA_LINKS`
            share CUDA streams, so that one waits for what another one waits for; ``connect`` warns of it.
        lease: seconds after which a lease without ack or extension returns to the queue.
        max_failures: consumer failures a sample survives before it is a dead letter.
        heartbeat: seconds between two signs of life.
        death_timeout: seconds without a sign of life after which a process is declared dead. It stops itself earlier,
            after 0.6 times this without an answer from the store.
        connect_timeout: seconds that this rank waits for all ranks to appear and its links to come up.
        transfer_timeout: seconds a posted transfer may take before its link is given up.
        held_timeout: seconds a draft waits for memory while user references hold all of it, before it says so.
        draft_restart_timeout: seconds for which a dead draft rank is awaited; None: 0 in one launch (everything
            restarts together), 300 in two.
        announce_window: samples an owner may have announced to one draft and not yet been answered.
        chunk_bytes: largest single transfer operation; a multiple of 256.
        depth: transfer operations in flight per link.
        on_loss: whether samples that died with their owner raise at once (``"raise"``) or only when no owner remains.
        issue: NCCL calls come from a thread of the package (``"thread"``), or from the threads that call
            ``stream.pump()`` or wait in the package for something (``"pump"``).
        check_finite: refuse samples with NaN or infinite values at put; costs a pass over every sample.
        staging: where a target's samples wait for their drafts. ``"device"``: on the GPU; ``"pinned"``: in page-locked
            memory of the host, to which they move at put; ``"auto"``: on the GPU up to ``device_bytes``, then in the
            host's memory, and on the GPU alone where the installation has no CUDA part. On the CPU it is all one.
            The window of a streamed sample is always on the GPU, and counts there; what a retained one holds beyond it
            waits as this says.
        device_bytes: cap of ``staging="auto"``; None: a quarter of ``max_bytes``.
        verify_checksums: send a CRC-32C of every sample along and compare it with what arrived, before anybody sees it;
            costs two passes over every sample. What differs counts as a failed delivery. On a GPU, for debugging: the
            thread that serves the links waits for the pass.
        max_shared_bytes: most that one target may share with the drafts in all (:meth:`Stream.share`), and that a draft
            reads under one name. The process that hosts the control store keeps all of it in memory until the run ends.
        poison: overwrite receive memory when it is freed, to see uses after free. For debugging.
    """

    max_sample_bytes: int = 128 * MIB
    arena_bytes: int = 1024 * MIB
    max_bytes: int = 1024 * MIB
    max_samples: int | None = None
    high_watermark_bytes: int | None = None
    low_watermark_bytes: int | None = None
    assignment: Assignment = "demand"
    end: End = "drop"
    batch_size: int = 1
    accumulation: int = 1
    device: str | None = None
    fanout: int | None = None
    lease: float = 60.0
    max_failures: int = 3
    heartbeat: float = 1.0
    death_timeout: float = 20.0
    connect_timeout: float = 300.0
    transfer_timeout: float = 60.0
    held_timeout: float = 60.0
    draft_restart_timeout: float | None = None
    announce_window: int = 4
    chunk_bytes: int = 16 * MIB
    depth: int = 4
    on_loss: OnLoss = "continue"
    issue: Literal["thread", "pump"] = "thread"
    check_finite: bool = False
    staging: Staging = "auto"
    device_bytes: int | None = None
    verify_checksums: bool = False
    max_shared_bytes: int = 8192 * MIB
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("max_sample_bytes", "arena_bytes", "max_bytes", "batch_size", "accumulation", "announce_window",
                     "chunk_bytes", "depth", "max_shared_bytes"):  # fmt: skip
            self._check_count(name, least=1)
        self._check_count("max_failures", least=0)
        for name, least in (("max_samples", 1), ("fanout", 1), ("device_bytes", 0), ("high_watermark_bytes", 0),
                            ("low_watermark_bytes", 0)):  # fmt: skip
            self._check_count(name, least=least, optional=True)
        for name in ("lease", "heartbeat", "death_timeout", "connect_timeout", "transfer_timeout", "held_timeout"):
            self._check_seconds(name)
        if self.draft_restart_timeout is not None:
            self._check_seconds("draft_restart_timeout", zero=True)
        for name in ("check_finite", "verify_checksums", "poison"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.chunk_bytes % ALIGN_BYTES:
            raise ConfigError(f"chunk_bytes must be a multiple of {ALIGN_BYTES}, got {self.chunk_bytes}")
        for name, choices in (
            ("assignment", ("demand", "static")),
            ("end", ("drop", "pad", "ragged")),
            ("on_loss", ("continue", "raise")),
            ("issue", ("thread", "pump")),
            ("staging", ("device", "pinned", "auto")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.death_timeout < 3 * self.heartbeat:
            raise ConfigError(
                f"death_timeout ({self.death_timeout} s) must be at least three heartbeats ({self.heartbeat} s each): "
                "a slow rank would be declared dead"
            )
        if self.device is not None:
            if not isinstance(self.device, str | torch.device):
                raise ConfigError(f"device must be a name such as 'cpu' or 'cuda:0', got {self.device!r}")
            try:
                torch.device(self.device)
            except RuntimeError as exc:
                raise ConfigError(f"device {self.device!r} is not a device: {exc}") from exc
        if not 0 <= self.low_watermark < self.high_watermark <= self.max_bytes:
            raise ConfigError(
                f"watermarks must satisfy 0 <= low < high <= max_bytes, got low={self.low_watermark}, "
                f"high={self.high_watermark}, max_bytes={self.max_bytes}"
            )

    def _check_count(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if (value is None and optional) or (type(value) is int and value >= least):
            return
        raise ConfigError(f"{name} must be an int of {least} or more{', or None' * optional}; got {value!r:.80}")

    def _check_seconds(self, name: str, *, zero: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 <= value <= LONGEST_S or (value == 0 and not zero):
            least = "0 or more" if zero else "positive"
            raise ConfigError(f"{name} must be {least}, in seconds, and at most {LONGEST_S}; got {value!r:.80}")

    @property
    def high_watermark(self) -> int:
        """Residency in bytes at which producers pause."""
        return self.max_bytes * 3 // 4 if self.high_watermark_bytes is None else self.high_watermark_bytes

    @property
    def low_watermark(self) -> int:
        """Residency in bytes at which producers resume."""
        return self.max_bytes // 2 if self.low_watermark_bytes is None else self.low_watermark_bytes

    @property
    def device_cap(self) -> int:
        """Bytes of samples that wait on the GPU with ``staging="auto"``."""
        return self.max_bytes // 4 if self.device_bytes is None else min(self.device_bytes, self.max_bytes)

    @property
    def samples_per_round(self) -> int:
        """Samples one draft consumes per round."""
        return self.batch_size * self.accumulation

    def resident_cap(self, num_drafts: int) -> int:
        """Most bytes of samples that a target holds: a draft that lacks samples may always be given a round."""
        return self.max_bytes + num_drafts * self.samples_per_round * self.max_sample_bytes

    def slot_bytes(self) -> int:
        """Upper bound of a receive slot for the largest sample: its features, their alignment and the header.

        Every feature wastes up to 256 bytes; one part in 64 and 64 KiB more cover usual samples. A sample of so many
        features that it takes more is refused at put, with the ``max_sample_bytes`` that would do.
        """
        return slot_bound(self.max_sample_bytes)

    def smallest_arena(self) -> int:
        """Least ``arena_bytes`` with which no sequence of sample sizes can get stuck.

        While a draft waits for the last sample of a round of n, up to ``2n - 1`` samples may lie anywhere in the arena:
        the previous round, which the training loop's variables still hold, and the n - 1 that are already here. They
        split the rest into at most ``2n`` pieces, the largest of which must hold one sample more:
        ``(4n - 1) * slot_bytes``.
        """
        return (4 * self.samples_per_round - 1) * self.slot_bytes()

    def check_run(self, *, num_targets: int, num_drafts: int) -> None:
        """Refuse sizes that would get stuck with this many ranks.

        Raises:
            ConfigError: names the value and the least one that would do.
        """
        if self.arena_bytes < self.smallest_arena():
            raise ConfigError(
                f"arena_bytes={self.arena_bytes} is too small for samples of up to {self.max_sample_bytes} bytes and "
                f"{self.samples_per_round} of them per round: it needs at least {self.smallest_arena()}"
            )
        window = num_drafts * self.samples_per_round
        if self.max_bytes < window * self.max_sample_bytes:
            raise ConfigError(
                f"max_bytes={self.max_bytes} cannot hold one optimizer window of {window} samples "
                f"({num_drafts} drafts x {self.batch_size} x {self.accumulation}) of up to {self.max_sample_bytes} "
                f"bytes: it needs at least {window * self.max_sample_bytes}"
            )
        if self.max_samples is not None and self.max_samples < window:
            raise ConfigError(
                f"max_samples={self.max_samples} cannot hold one optimizer window ({num_drafts} drafts x "
                f"{self.batch_size} x {self.accumulation}): it needs at least {window}"
            )
        if self.fanout is not None and self.fanout < num_drafts:
            if self.assignment == "static":
                raise ConfigError("static assignment needs links from every target to every draft: leave fanout unset")
            if self.fanout * num_targets < num_drafts:
                raise ConfigError(
                    f"fanout={self.fanout} with {num_targets} targets leaves drafts without a link: "
                    f"it must be at least {-(-num_drafts // num_targets)}"
                )

    def linked_drafts(self, target_rank: int, num_drafts: int) -> frozenset[int]:
        """Draft ranks that this target has links to."""
        if self.fanout is None or self.fanout >= num_drafts:
            return frozenset(range(num_drafts))
        return frozenset((target_rank * self.fanout + i) % num_drafts for i in range(self.fanout))

    def most_links(self, *, num_targets: int, num_drafts: int) -> int:
        """Links of the rank that has most of them."""
        linked = [self.linked_drafts(target, num_drafts) for target in range(num_targets)]
        of_drafts = Counter(draft for drafts in linked for draft in drafts)
        return max(*(len(drafts) for drafts in linked), *of_drafts.values())

    def shared(self) -> dict[str, Any]:
        """The values that must be equal on all ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OWN_FIELDS}


def slot_bound(max_sample_bytes: int) -> int:
    """See :meth:`StreamConfig.slot_bytes`."""
    return max_sample_bytes + max_sample_bytes // 64 + 64 * 1024


def least_sample_bytes(slot_bytes: int) -> int:
    """The least ``max_sample_bytes`` with which drafts count on slots of so many bytes."""
    least = max(1, (slot_bytes - 64 * 1024) * 64 // 65)
    while slot_bound(least) < slot_bytes:
        least += 1
    return least
