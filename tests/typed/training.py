"""Training code as the README shows it, for the type checker alone: what users write must pass its strict mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nccl_stream
from nccl_stream import (
    AsyncFeaturePipeline,
    FeatureDataLoader,
    FeatureProducer,
    LocalFeatureStore,
    PromptBatch,
    SampleRefQueue,
    StreamConfig,
)
from nccl_stream.target import Eagle3TargetBackend, HFEagle3TargetModel


def one_launch(
    model: nn.Module, net: nn.Module, dataset: list[Tensor], train: Callable[[nn.Module, object], None]
) -> None:
    with nccl_stream.connect(num_targets=2, run_id="eagle3", config=StreamConfig()) as stream:
        if stream.role == "target":
            producer = FeatureProducer(HFEagle3TargetModel(model), stream.store, run_id=stream.run_id)
            with AsyncFeaturePipeline(producer, stream.queue, stream.prompts(dataset)) as pipeline:
                pipeline.join()
        else:
            draft = DistributedDataParallel(net, process_group=stream.process_group())
            for batch in FeatureDataLoader(stream.queue, stream.store):
                train(draft, batch)


def one_process(target: Eagle3TargetBackend, ids: list[Tensor], train: Callable[[object], None]) -> None:
    with LocalFeatureStore() as store:
        queue = SampleRefQueue(store)
        source: Iterator[PromptBatch] = (PromptBatch((x, x, x), sample_id=f"s{n}") for n, x in enumerate(ids))
        with AsyncFeaturePipeline(FeatureProducer(target, store, run_id="run"), queue, source):
            for batch in FeatureDataLoader(queue, store):
                train(batch)


def next_prompt() -> PromptBatch | None:
    return None


def called_source(target: Eagle3TargetBackend, store: LocalFeatureStore, queue: SampleRefQueue) -> AsyncFeaturePipeline:
    return AsyncFeaturePipeline(FeatureProducer(target, store, run_id="run"), queue, next_prompt)
