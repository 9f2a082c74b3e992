"""One rank of a launch that holds both roles, training with DDP as the README shows it.

Under torchrun: ``torchrun ... -m tests.distributed.one_launch SPEC``; or as a process of ``harness.Run``, see
:func:`rank_of_a_launch`. What a rank does goes to a journal of its own and of this life of the launch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nccl_stream
from tests.distributed.harness import PATIENCE, Journal
from tests.unit.pipeline_support import HIDDEN, SEQ, VOCAB, FakeTarget, fill_of

SETTLING_S = 60.0


class Fills:
    """Prompts of one repeated token each: item k is all ``k % (VOCAB - 1) + 1``."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"input_ids": torch.full((SEQ,), index % (VOCAB - 1) + 1)}


def train(spec, journal):
    """Both roles of one launch.

    ``num_targets``, ``samples``, ``config``; ``late``: the draft rank that takes nothing before a target has paused;
    ``slow``: (draft rank, seconds per step); ``die``: (life, draft rank, steps before it is killed).
    """
    torch.set_num_threads(1)
    config = nccl_stream.StreamConfig(**spec["config"], device="cpu")
    with nccl_stream.connect(num_targets=spec["num_targets"], run_id=spec["run_id"], config=config) as stream:
        journal.say("connected", role=stream.role, rank=stream.role_rank)
        if stream.role == "target":
            producer = nccl_stream.FeatureProducer(FakeTarget(), stream.store, run_id=stream.run_id)
            prompts = stream.prompts(Fills(spec["samples"]), seed=3)
            with nccl_stream.AsyncFeaturePipeline(producer, stream.queue, prompts) as pipeline:
                pipeline.join()
            return
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Linear(3 * HIDDEN, VOCAB), process_group=stream.process_group())
        if stream.role_rank == spec.get("late"):
            deadline = time.monotonic() + PATIENCE
            while not stream.statistics()["paused_s"]:
                assert time.monotonic() < deadline, "no target ever paused"
                time.sleep(0.05)
        consume(spec, journal, stream, net)
        journal.say("weights", values=[value.hex() for value in net.module.weight.flatten().tolist()])
        stream.wait_ended(SETTLING_S)
        statistics = stream.statistics()
        journal.say("books", balanced=statistics.balanced, **dict(statistics))


def consume(spec, journal, stream, net):
    slow_rank, pause = spec.get("slow", (None, 0.0))
    life, dying_rank, last_step = spec.get("die", (None, None, None))
    dies = [life, dying_rank] == [os.environ.get("TORCHELASTIC_RESTART_COUNT"), stream.role_rank]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with nccl_stream.FeatureDataLoader(stream.queue, stream.store) as batches:
        for step, batch in enumerate(batches):
            if dies and step == last_step:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (net(batch.aux_hidden_states) - batch.logits).square().mean()
            optimizer.zero_grad()
            loss.backward()  # waits for the other draft ranks
            optimizer.step()
            fill = fill_of(batch)
            expected = FakeTarget().generate_batch(*(torch.full((1, SEQ), fill) for _ in range(3)))
            assert torch.equal(batch.logits, expected.logits), f"the sample of {fill} holds foreign values"
            journal.say("step", fill=fill, loss=loss.item().hex())
            if stream.role_rank == slow_rank:
                time.sleep(pause)


def rank_of_a_launch(spec, journal):
    """The same for ``harness.Run``, its store for the agent's: ``env_rank`` of ``world``, in this ``life``."""
    os.environ.update(
        RANK=str(spec["env_rank"]),
        WORLD_SIZE=str(spec["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(spec.get("life", 0)),
    )
    train(spec, journal)


def main():
    spec = json.loads(sys.argv[1])
    name = f"rank{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    train(spec, Journal(Path(spec["folder"]) / f"{name}.jsonl"))


if __name__ == "__main__":
    main()
