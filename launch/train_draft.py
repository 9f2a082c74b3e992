"""Train an EAGLE-3 draft head on features that target ranks stream to it.

Streamed, under torchrun: the first ``--num-targets`` ranks run the target, the others train the draft, data-parallel.

    torchrun --nproc-per-node 4 launch/train_draft.py --num-targets 2

Colocated, for comparison: each rank runs the target and trains the draft in turn, on the same batches in the same order
as a streamed run with ``--assignment static`` and as many draft ranks.

    torchrun --nproc-per-node 2 launch/train_draft.py --colocated
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _decode import acceptance, greedy
from _draft import Eagle3Draft
from _report import Progress, draw, summary
from _target import Target
from _text import ASSETS, Windows, held_out_prompts, load_tokens
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import nccl_stream
from nccl_stream.prompts import prompt_order

ARENA_SAMPLES = 8  # receive memory of a draft rank: one sample in use, the others ready or on their way
RESIDENT_SAMPLES = 8  # per draft rank, how far a target may run ahead
SETTLE_TIMEOUT_S = 60.0
Group = Any  # a torch.distributed process group


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("where things run")
    where.add_argument("--colocated", action="store_true", help="no streaming: target and draft in every process")
    where.add_argument("--num-targets", type=int, default=2, help="ranks that run the target (default 2)")
    where.add_argument("--assignment", choices=("demand", "static"), default="demand", help="who gets which sample")
    where.add_argument("--end", choices=("drop", "pad"), default="drop", help="what happens to leftovers")
    where.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    where.add_argument("--threads", type=int, default=1, help="CPU threads per rank (default 1)")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--target", default="default", help="'default' or hf:NAME_OR_PATH")
    what.add_argument(
        "--aux-layers",
        type=int,
        nargs=3,
        metavar="LAYER",
        help="the target's layers that the draft reads, counted from 0 (default 1, the one before the middle, and the "
        "fourth from the end); needed for a target of fewer than 7 layers",
    )
    what.add_argument(
        "--supervision",
        choices=("last_hidden_states", "logits"),
        default="last_hidden_states",
        help="what a sample carries of the target's distribution (default last_hidden_states)",
    )
    what.add_argument("--text", type=Path, default=ASSETS / "text.txt", help="UTF-8 text to train on")
    what.add_argument("--steps", type=int, default=240, help="optimizer steps (default 240)")
    what.add_argument("--batch", type=int, default=4, help="rows per draft rank and step (default 4)")
    what.add_argument("--seq-len", type=int, default=256, help="tokens per row (default 256)")
    what.add_argument("--ttt-steps", type=int, default=3, help="training-time-test steps (default 3)")
    what.add_argument("--lr", type=float, default=6e-3)
    what.add_argument("--seed", type=int, default=0)
    told = parser.add_argument_group("what is reported")
    told.add_argument("--eval-every", type=int, default=30, help="steps between evaluations; 0 for none (default 30)")
    told.add_argument("--eval-prompts", type=int, default=8)
    told.add_argument("--eval-tokens", type=int, default=32)
    told.add_argument("--draft-width", type=int, default=4, help="tokens drafted per target forward (default 4)")
    told.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture (default out)")
    told.add_argument("--losses", type=Path, help="write every rank's losses as exact hex floats, JSON")
    told.add_argument("--run-id", default="train-draft")
    return parser.parse_args()


def pick_device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def num_drafts(arguments: argparse.Namespace) -> int:
    """How many ranks of this launch train the draft."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    drafts = world if arguments.colocated else world - arguments.num_targets
    if drafts < 1:
        raise SystemExit(
            f"{world} ranks leave none for the draft beside {arguments.num_targets} targets: start "
            f"`torchrun --nproc-per-node {arguments.num_targets + 1}` or more, or pass --colocated"
        )
    return drafts


class Trainer:
    """The draft rank's loop; the same for streamed and colocated batches.

    Args:
        arguments: the command line.
        target: for the draft's initial embedding and head, and for evaluation.
        group: the draft ranks' process group, or ``None`` for a single process.
    """

    def __init__(self, arguments: argparse.Namespace, target: Target, prompts: list[Tensor], group: Group) -> None:
        self._arguments, self._target, self._prompts, self._group = arguments, target, prompts, group
        self._head = target.head()
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_drafts = dist.get_world_size(group) if group is not None else 1
        self.draft: Eagle3Draft = target.new_draft(arguments.seed, arguments.ttt_steps)
        self._module = DistributedDataParallel(self.draft, process_group=group) if group is not None else self.draft
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: max(0.05, min((step + 1) / 10, 1 - step / max(arguments.steps, 1)))
        )
        num_targets = 0 if arguments.colocated else arguments.num_targets
        self.progress = Progress(arguments.steps, self.num_drafts, num_targets)

    def train(self, batches: Iterable[Any], statistics: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Trains on ``batches`` until they end; ``statistics`` reads what the stream counts."""
        arguments, progress = self._arguments, self.progress
        progress.begin()
        self.evaluate()
        waiting = time.monotonic()
        for batch in batches:
            waited = time.monotonic() - waiting
            loss = self.update(self._head.supervise(batch).to_trainer_inputs())
            del batch  # views of receive memory: give it back before asking for more
            progress.step(loss, waited)
            step = len(progress.losses)
            evaluated = arguments.eval_every and step % arguments.eval_every == 0 and step < arguments.steps
            if evaluated:
                self.evaluate()
            if self.rank == 0 and (evaluated or progress.due()):
                if statistics is not None:
                    progress.observe(statistics())
                progress.show(keep=bool(evaluated))
            waiting = time.monotonic()
        self.evaluate(final=True)
        if self.rank == 0:
            if statistics is not None:
                progress.observe(statistics())
            progress.show(keep=True)

    def update(self, inputs: dict[str, Tensor]) -> float:
        """One optimizer step on this rank's batch; its loss."""
        loss, _ = self._module(**inputs)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(loss.detach())

    def evaluate(self, *, final: bool = False) -> None:
        """Mean acceptance length over the held-out prompts, each draft rank doing its share of them."""
        arguments = self._arguments
        if not arguments.eval_every:
            return
        begin = time.monotonic()
        mine = [prompt.to(self._target.model.device) for prompt in self._prompts[self.rank :: self.num_drafts]]
        model, draft, layers = self._target.model, self.draft, self._target.backend("logits").aux_layer_ids
        result = acceptance(model, draft, layers, mine, arguments.eval_tokens, arguments.draft_width)
        counts = torch.tensor([result.tokens, result.rounds], dtype=torch.float64, device=self._target.model.device)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        self.progress.accept(float(counts[0] / counts[1]), time.monotonic() - begin)
        if final and self.rank == 0 and mine:
            plain = greedy(model, mine[0], arguments.eval_tokens)
            same = plain == result.outputs[0][: arguments.eval_tokens]
            print(f"\nprompt       {self._target.tokenizer.decode(mine[0])!r}")
            print(f"continuation {self._target.tokenizer.decode(result.outputs[0])!r}")
            print(f"draft-and-verify and plain greedy decoding agree: {'yes' if same else 'no'}")

    def gathered_losses(self) -> list[list[float]]:
        """The losses of every draft rank; a collective call."""
        mine = torch.tensor(self.progress.losses, dtype=torch.float64, device=self._target.model.device)
        if self._group is None:
            return [mine.tolist()]
        counts = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(self.num_drafts)]
        dist.all_gather(counts, torch.tensor([mine.numel()], device=mine.device), group=self._group)
        longest = max(int(count) for count in counts)
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        everyone = [torch.zeros_like(padded) for _ in range(self.num_drafts)]
        dist.all_gather(everyone, padded, group=self._group)
        return [losses[: int(count)].tolist() for losses, count in zip(everyone, counts, strict=True)]


def colocated_batches(
    arguments: argparse.Namespace, target: Target, dataset: Windows, rank: int, world: int
) -> Iterator[Any]:
    """The batches that a static streamed run hands to draft ``rank`` of ``world``, made on the spot.

    Static assignment gives sample k of the prompts' order to draft k mod ``world``.
    """
    backend = target.backend(arguments.supervision)
    for index in prompt_order(len(dataset), epoch=0, seed=arguments.seed)[rank::world]:
        yield backend.generate_batch(**dataset[index])


def report(
    trainer: Trainer,
    arguments: argparse.Namespace,
    losses: list[list[float]],
    statistics: Mapping[str, Any] | None,
) -> None:
    """Draft rank 0's closing report: losses of all draft ranks, statistics of the run (colocated: none)."""
    if arguments.losses is not None:
        write_losses(arguments.losses, losses)
    print(summary(trainer.progress, statistics), flush=True)
    mode = "colocated" if arguments.colocated else f"streamed from {arguments.num_targets} target rank(s)"
    picture = arguments.out / "train_draft.png"
    draw(trainer.progress, picture, f"EAGLE-3 draft on {trainer.num_drafts} rank(s), {mode}")
    print(f"  picture     {picture.resolve()}", flush=True)


def write_losses(path: Path, losses: list[list[float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"losses": [[loss.hex() for loss in rank] for rank in losses]}, indent=1) + "\n")


def run_colocated(arguments: argparse.Namespace, target: Target, dataset: Windows, prompts: list[Tensor]) -> None:
    grouped = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if grouped:
        dist.init_process_group("nccl" if target.model.device.type == "cuda" else "gloo")
    trainer = Trainer(arguments, target, prompts, dist.group.WORLD if grouped else None)
    trainer.train(colocated_batches(arguments, target, dataset, trainer.rank, trainer.num_drafts))
    losses = trainer.gathered_losses()
    if trainer.rank == 0:
        report(trainer, arguments, losses, None)
    if grouped:
        # Waiting lets go of the GIL. gloo's thread needs it to drop the tensors of the last collective, and the group,
        # which goes with the draft, waits for that thread without letting go.
        dist.barrier()
        dist.destroy_process_group()


def run_streamed(arguments: argparse.Namespace, target: Target, dataset: Windows, prompts: list[Tensor]) -> None:
    sample_bytes = target.sample_bytes(arguments.batch, arguments.seq_len, arguments.supervision)
    sizes = nccl_stream.StreamConfig(max_sample_bytes=sample_bytes)
    config = nccl_stream.StreamConfig(
        max_sample_bytes=sample_bytes,
        arena_bytes=ARENA_SAMPLES * sizes.slot_bytes(),
        max_bytes=RESIDENT_SAMPLES * num_drafts(arguments) * sample_bytes,
        assignment=arguments.assignment,
        end=arguments.end,
        device=str(target.model.device),
    )
    with nccl_stream.connect(num_targets=arguments.num_targets, run_id=arguments.run_id, config=config) as stream:
        if stream.role == "target":
            producer = nccl_stream.FeatureProducer(
                target.backend(arguments.supervision), stream.store, run_id=stream.run_id, donate=True
            )
            shard = stream.prompts(dataset, epochs=1, seed=arguments.seed)
            with nccl_stream.AsyncFeaturePipeline(producer, stream.queue, shard) as pipeline:
                pipeline.join()
            return
        trainer = Trainer(arguments, target, prompts, stream.process_group())
        with nccl_stream.FeatureDataLoader(stream.queue, stream.store) as batches:
            trainer.train(batches, stream.statistics)
        losses = trainer.gathered_losses()
        if trainer.rank == 0:
            if not stream.wait_ended(SETTLE_TIMEOUT_S):
                print(f"some target has not left after {SETTLE_TIMEOUT_S:.0f} s: the books are not final")
            report(trainer, arguments, losses, stream.statistics())


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    device = pick_device(arguments.device)
    target = Target.load(arguments.target, device, arguments.aux_layers)
    train_tokens, held_out = load_tokens(arguments.text, target.tokenizer)
    prompts = held_out_prompts(held_out, arguments.eval_prompts, length=min(64, arguments.seq_len))
    samples = arguments.steps * num_drafts(arguments)
    dataset = Windows(train_tokens, samples, arguments.batch, arguments.seq_len, arguments.seed)
    run = run_colocated if arguments.colocated else run_streamed
    run(arguments, target, dataset, prompts)


if __name__ == "__main__":
    main()
