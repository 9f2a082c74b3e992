#!/usr/bin/env python3
"""Train a draft with the Hugging Face Trainer on a stream: one target rank, all others drafts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 launch/examples/hf_trainer.py

The Trainer's own data loader would shard the batches once more and pull ahead, so it gets a plain one. It fetches the
batches of a whole step before it trains on the first, hence ``ack="step"``, with the ack from a callback.
"""

from __future__ import annotations

import tempfile
from typing import Any

from _parts import Draft, produce
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import nccl_stream
from nccl_stream.loader import FeatureDataLoader

BATCH, ACCUMULATION, PROMPTS = 4, 2, 64
CONFIG = nccl_stream.StreamConfig(
    batch_size=BATCH, accumulation=ACCUMULATION, max_sample_bytes=1 << 18, assignment="static"
)


class StreamTrainer(Trainer):
    """Takes its batches from a :class:`FeatureDataLoader`."""

    def __init__(self, loader: FeatureDataLoader, **kwargs: Any) -> None:
        super().__init__(train_dataset=loader, callbacks=[AckAfterStep(loader)], **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=None, num_workers=0)


class AckAfterStep(TrainerCallback):
    def __init__(self, loader: FeatureDataLoader) -> None:
        self.loader = loader

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.loader.step()  # The samples have reached the weights.


def train(stream: nccl_stream.Stream, folder: str) -> None:
    # Becomes the process's default group, without the targets. The Trainer takes it as it is.
    stream.process_group()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=stream.device.type == "cpu",
        max_steps=10_000,  # More than there will be: the end of the stream ends the training.
        gradient_accumulation_steps=ACCUMULATION,
        per_device_train_batch_size=BATCH,
        ddp_find_unused_parameters=False,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    with FeatureDataLoader(stream.queue, stream.store, batch_size=BATCH, ack="step") as loader:
        result = StreamTrainer(loader, model=Draft(), args=arguments).train()
    print(f"draft rank {stream.role_rank} of {arguments.world_size}: {result.global_step} steps")


def main() -> None:
    with nccl_stream.connect(num_targets=1, run_id="trainer", config=CONFIG) as stream:
        if stream.role == "target":
            produce(stream, PROMPTS)
        else:
            with tempfile.TemporaryDirectory() as folder:
                train(stream, folder)
            stream.wait_ended(60.0)
            if stream.role_rank == 0:
                print(dict(stream.statistics()))


if __name__ == "__main__":
    main()
