"""Batches of real streams: a rank that dies in the middle of gradient accumulation, and a padded end."""

from __future__ import annotations

import pytest
import torch

from nccl_stream.loader import FeatureDataLoader
from tests.distributed.harness import Run
from tests.distributed.workers import join, sample, say_books, wait_gate

pytestmark = pytest.mark.distributed

BATCH, ACCUMULATION = 2, 2
CONFIG = {"batch_size": BATCH, "accumulation": ACCUMULATION, "max_sample_bytes": 1 << 18}


def train(spec, journal):
    """Pull batches, step after every second one; ``stall_at``: (batch, gate) wait with that one in hand."""
    with (
        join(spec, "draft", journal) as stream,
        FeatureDataLoader(stream.queue, stream.store, batch_size=BATCH, ack="step") as loader,
    ):
        for index, batch in enumerate(loader):
            numbers = check(batch, spec["width"])
            journal.say("got", numbers=numbers)
            if index == spec.get("stall_at", (None, ""))[0]:
                wait_gate(spec, spec["stall_at"][1])
            if index % ACCUMULATION == ACCUMULATION - 1:
                step(loader, journal)
        step(loader, journal)
        say_books(stream, journal)


def check(batch, width):
    """The numbers of a batch's samples, each of which must be in its row, padded without loss or attention."""
    numbers = [int(sample_id.removeprefix("s")) for sample_id in batch.sample_ids]
    for row, number in enumerate(numbers):
        for name, tensor in sample(number, width).items():
            length = tensor.shape[1]
            assert torch.equal(batch[name][row : row + 1, :length], tensor), (name, number)
            assert not batch[name][row, length:].any(), (name, number)
    return numbers


def step(loader, journal):
    numbers = [int(sample_id.removeprefix("s")) for sample_id in loader.sample_ids]
    loader.step()
    journal.say("stepped", numbers=numbers)


def numbers(worker, kind):
    return [number for entry in worker.said(kind) for number in entry["numbers"]]


@pytest.mark.parametrize("end", ["ragged", "drop"])
def test_samples_of_an_unfinished_step_come_again(tmp_path, end):
    samples = 40
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={**CONFIG, "end": end}, samples=samples) as run:
        target = run.target(0)
        # The first batch of its second step; however slow the victim is, the other one leaves it so many.
        victim = run.start("d0", train, rank=0, stall_at=(ACCUMULATION, "never"))
        other = run.start("d1", train, rank=1, stall_at=(2 * ACCUMULATION, "killed"))
        run.wait_for("the victim to be within a step", lambda: len(victim.said("got")) > ACCUMULATION)
        stepped = numbers(victim, "stepped")
        unfinished = set(numbers(victim, "got")) - set(stepped)
        assert len(stepped) == BATCH * ACCUMULATION
        assert len(unfinished) == BATCH
        victim.kill()
        run.open_gate("killed")
        run.wait_ended(target, other)
        assert (target.error, other.error) == (None, None)
        books = other.books
        assert books["balanced"]
        assert books["lost"] == books["dead"] == books["resident"] == 0
        again = numbers(other, "stepped")
        assert len(again) == len(set(again))
        # What the victim had stepped on may or may not have been heard of, also in part; nothing else comes twice, and
        # nothing misses but what makes no whole round.
        heard = books["acked"] - len(again)
        assert 0 <= heard <= len(stepped)
        assert books["dropped"] == (samples - heard) % (BATCH * ACCUMULATION) * (end == "drop")
        assert len(set(range(samples)) - set(again) - set(stepped)) <= books["dropped"]


def test_padded_end_gives_every_rank_as_many_batches(tmp_path):
    """11 samples and rounds of 4 per rank: in the last round somebody has batches of padding, whole or in part."""
    with Run(tmp_path, targets=1, drafts=2, config={**CONFIG, "end": "pad"}, samples=11) as run:
        workers = [run.target(0), run.start("d0", train, rank=0), run.start("d1", train, rank=1)]
        run.wait_ended(*workers)
        assert [worker.error for worker in workers] == [None] * 3
        drafts = workers[1:]
        assert sorted(number for worker in drafts for number in numbers(worker, "got")) == list(range(11))
        counts = [len(worker.said("got")) for worker in drafts]
        assert counts[0] == counts[1]
        assert counts[0] % ACCUMULATION == 0


def test_static_shares_that_differ_by_more_than_memory_are_padded(tmp_path):
    """All of a target's samples are for one draft here, and its arena holds six of them."""
    config = {"end": "pad", "assignment": "static", "max_sample_bytes": 80 << 10, "arena_bytes": 440 << 10}
    with Run(tmp_path, targets=2, drafts=2, config=config, width=512) as run:
        workers = [run.target(0, samples=40), run.target(1, samples=4), run.draft(0), run.draft(1)]
        run.wait_ended(*workers)
        assert [worker.error for worker in workers] == [None] * 4
        first, second = workers[2:]
        assert (first.got, second.got) == (list(range(0, 80, 2)), [1, 3, 5, 7])
        assert (len(first.said("padding")), len(second.said("padding"))) == (0, 36)
        assert first.books["acked"] == first.books["put"] == 44
