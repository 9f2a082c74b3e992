"""Prompts that a target leaves out are holes in the global order, which nobody waits for."""

from __future__ import annotations

import pytest
import torch

from nccl_stream import AsyncFeaturePipeline, FeatureDataLoader, FeatureProducer
from nccl_stream.prompts import prompt_order
from tests.distributed.harness import Run
from tests.distributed.workers import join
from tests.unit.pipeline_support import FakeTarget

pytestmark = pytest.mark.distributed

PROMPTS, SEED = 20, 3
SKIPPED = {0, 1, 2, 3, 9, 10, 16}  # more in a row than there are ranks


def dataset() -> list[dict[str, torch.Tensor]]:
    """Items by index; those at the skipped places of the global order supervise their first token alone."""
    items = []
    for index in range(PROMPTS):
        loss_mask = torch.ones(6, dtype=torch.long)
        loss_mask[1:] = prompt_order(PROMPTS, 0, SEED).index(index) not in SKIPPED
        items.append({"input_ids": torch.full((6,), index), "loss_mask": loss_mask})
    return items


def target(spec, journal):
    with join(spec, "target", journal) as stream:
        producer = FeatureProducer(FakeTarget(), stream.store, stream.run_id)
        prompts = stream.prompts(dataset(), seed=SEED)
        with AsyncFeaturePipeline(producer, stream.queue, prompts, skip_unsupervised=True) as pipeline:
            pipeline.join()
        journal.say("skipped", count=pipeline.num_skipped)


def draft(spec, journal):
    with join(spec, "draft", journal) as stream, FeatureDataLoader(stream.queue, stream.store) as loader:
        for batch in loader:
            journal.say("got", index=int(batch.input_ids[0, 0]), draft=stream.role_rank)


@pytest.mark.parametrize("end", ["ragged", "drop"])
def test_static_order_goes_on_behind_skipped_prompts(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=2, config={"end": end, "assignment": "static"}) as run:
        targets = [run.start(f"t{rank}", target, rank=rank) for rank in range(2)]
        drafts = [run.start(f"d{rank}", draft, rank=rank) for rank in range(2)]
        run.wait_for("all to end", lambda: not any(worker.alive for worker in targets + drafts))
        assert [worker.error for worker in targets + drafts] == [None] * 4
        assert sum(worker.said("skipped")[0]["count"] for worker in targets) == len(SKIPPED)
        place = {index: at for at, index in enumerate(prompt_order(PROMPTS, 0, SEED))}
        got = [[place[entry["index"]] for entry in worker.said("got")] for worker in drafts]
        shares = [[k for k in range(PROMPTS) if k % 2 == rank and k not in SKIPPED] for rank in range(2)]
        rounds = max(map(len, shares)) if end == "ragged" else min(map(len, shares))
        assert got == [share[:rounds] for share in shares]
