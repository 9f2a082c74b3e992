"""What the examples share: a small random target, prompts, and a draft that learns from its hidden states."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the examples also run from a checkout

import torch
from torch import Tensor, nn
from torch.nn import functional

from nccl_stream.async_pipeline import AsyncFeaturePipeline
from nccl_stream.producer import FeatureProducer
from nccl_stream.session import Stream

VOCABULARY, HIDDEN = 256, 32


class Prompts:
    """Random token ids of different lengths, as a map-style dataset."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(VOCABULARY, (16 + 4 * (index % 5),), generator=generator)}


class Draft(nn.Module):
    """Predicts the target's next distribution; returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.body = nn.Sequential(nn.Linear(4 * HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, VOCABULARY))

    def forward(
        self,
        aux_hidden_states: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        logits: Tensor,
    ) -> dict[str, Tensor]:
        guess = self.body(torch.cat([aux_hidden_states, self.embedding(input_ids)], dim=-1))
        losses = functional.cross_entropy(guess.mT, logits.softmax(-1).mT, reduction="none")
        # Padding has no loss. A step of nothing but padding must bring zero, and not 0 / 0.
        return {"loss": (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)}


def produce(stream: Stream, num_prompts: int) -> None:
    """A target rank: run the frozen model over its share of the prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from nccl_stream.target import HFEagle3TargetModel

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, **shape)).to(stream.device)
    backend = HFEagle3TargetModel(model, [0, 1, 2])
    producer = FeatureProducer(backend, stream.store, run_id=stream.run_id, donate=True)
    with AsyncFeaturePipeline(producer, stream.queue, stream.prompts(Prompts(num_prompts))) as pipeline:
        pipeline.join()
