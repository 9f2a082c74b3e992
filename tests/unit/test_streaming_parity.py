"""A streamed batch is bit-equal to what the target returns in the same process."""

from __future__ import annotations

import pytest
import torch

from nccl_stream.async_pipeline import AsyncFeaturePipeline
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import SampleRefQueue
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.target import HFEagle3TargetModel
from tests.unit.pipeline_support import packed_prompt

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def target(request) -> HFEagle3TargetModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return HFEagle3TargetModel(transformers.AutoModelForCausalLM.from_config(config).to(request.param))


def plain_prompts(count: int):
    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        ids = torch.randint(0, 48, (1 + number % 2, 6 + number), generator=generator)
        yield ids, torch.ones_like(ids), torch.randint(0, 2, ids.shape, generator=generator)


SOURCES = {
    "plain": list(plain_prompts(5)),
    "packed": [packed_prompt(lengths) for lengths in ([4, 6], [10], [1, 2, 7])],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_streamed_batches_are_bit_equal_to_colocated_ones(target, kind):
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    producer = FeatureProducer(target, store, run_id="parity")
    num_batches = 0
    with AsyncFeaturePipeline(producer, queue, iter(SOURCES[kind])):
        for prompt, streamed in zip(SOURCES[kind], FeatureDataLoader(queue, store), strict=True):
            colocated = target.generate_batch(*prompt).to_trainer_inputs()
            inputs = streamed.to_trainer_inputs()
            assert list(inputs) == list(colocated)
            for name, tensor in inputs.items():
                assert tensor.dtype == colocated[name].dtype, name
                assert torch.equal(tensor, colocated[name]), name
            num_batches += 1
    assert num_batches == len(SOURCES[kind])


def test_streamed_batch_trains_like_the_colocated_one(target):
    """The same gradients, bit for bit, for a stand-in draft head."""
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    (ids, attention, loss_mask) = SOURCES["plain"][3]
    queue.put(FeatureProducer(target, store, run_id="parity").produce(ids, attention, loss_mask))
    queue.close()

    def gradient(batch) -> torch.Tensor:
        torch.manual_seed(5)
        head = torch.nn.Linear(batch.aux_hidden_states.shape[-1], batch.logits.shape[-1]).to(batch.logits.dtype)
        log_probabilities = head(batch.aux_hidden_states).log_softmax(-1)
        cross_entropy = -(batch.logits.softmax(-1) * log_probabilities).sum(-1)
        (cross_entropy * batch.loss_mask).sum().backward()
        return head.weight.grad

    streamed = next(FeatureDataLoader(queue, store))
    assert torch.equal(gradient(streamed), gradient(target.generate_batch(ids, attention, loss_mask)))
