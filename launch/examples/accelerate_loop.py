#!/usr/bin/env python3
"""Train a draft with Accelerate on a stream: one target rank, all others drafts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 launch/examples/accelerate_loop.py

Accelerate prepares the model and the optimizer, not the loader: every rank has samples of its own already, so there is
nothing to shard, and a prepared loader pulls one batch ahead of the training loop.
"""

from __future__ import annotations

import torch
from _parts import Draft, produce
from accelerate import Accelerator

import nccl_stream
from nccl_stream.loader import FeatureDataLoader

BATCH, ACCUMULATION, PROMPTS = 4, 2, 64
CONFIG = nccl_stream.StreamConfig(
    batch_size=BATCH, accumulation=ACCUMULATION, max_sample_bytes=1 << 18, assignment="static"
)


def train(stream: nccl_stream.Stream) -> None:
    # Becomes the process's default group, without the targets. Accelerate takes it as it is.
    stream.process_group()
    accelerator = Accelerator(cpu=stream.device.type == "cpu", gradient_accumulation_steps=ACCUMULATION)
    torch.manual_seed(0)
    draft = Draft()
    draft, optimizer = accelerator.prepare(draft, torch.optim.AdamW(draft.parameters(), lr=1e-2))
    steps = 0
    with FeatureDataLoader(stream.queue, stream.store, batch_size=BATCH, ack="step") as loader:
        for batch in loader:
            with accelerator.accumulate(draft):
                loss = draft(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                loader.step()  # The samples have reached the weights.
                steps += 1
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                if accelerator.is_main_process:
                    print(f"step {steps}: loss {mean.item():.4f}, {accelerator.num_processes} draft ranks", flush=True)


def main() -> None:
    with nccl_stream.connect(num_targets=1, run_id="accelerate", config=CONFIG) as stream:
        if stream.role == "target":
            produce(stream, PROMPTS)
        else:
            train(stream)
            stream.wait_ended(60.0)
            if stream.role_rank == 0:
                print(dict(stream.statistics()))


if __name__ == "__main__":
    main()
