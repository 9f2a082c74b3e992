"""Loading the target, and a draft head that fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _draft import DraftConfig, Eagle3Draft
from _text import ASSETS, ByteTokenizer, Tokenizer

from nccl_stream.eagle3 import eagle3_sample_bytes
from nccl_stream.errors import ConfigError
from nccl_stream.target import HFEagle3TargetModel
from nccl_stream.target_head import TargetHead

HUB = "hf:"


@dataclass(frozen=True)
class Target:
    """A frozen causal LM and its tokenizer.

    Args:
        model: the causal LM.
        tokenizer: what its ids mean.
        aux_layers: the three decoder layers whose outputs the draft reads; None for EAGLE-3's usual ones.
    """

    model: Any
    tokenizer: Tokenizer
    aux_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        try:
            self.backend("logits")
        except ConfigError as error:
            raise SystemExit(f"--aux-layers: {error}") from error

    @classmethod
    def load(cls, name: str, device: torch.device, aux_layers: Sequence[int] | None = None) -> Target:
        """``"default"`` is the byte-level model in ``assets``; ``"hf:NAME_OR_PATH"`` any Hugging Face causal LM."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if name != "default" and not name.startswith(HUB):
            raise SystemExit(f"--target takes 'default' or 'hf:NAME_OR_PATH', not {name!r}")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        path = name.removeprefix(HUB) if name.startswith(HUB) else str(ASSETS / "target")
        tokenizer = AutoTokenizer.from_pretrained(path) if name.startswith(HUB) else ByteTokenizer()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
        return cls(model, tokenizer, None if aux_layers is None else tuple(aux_layers))

    def backend(self, supervision: str) -> HFEagle3TargetModel:
        """What turns prompts into supervision."""
        return HFEagle3TargetModel(self.model, self.aux_layers, supervision=supervision)

    def head(self) -> TargetHead:
        """What turns last hidden states into the target's logits on the draft side."""
        return TargetHead.from_model(self.model)

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def vocabulary(self) -> int:
        """Number of logits per position."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def sample_bytes(self, batch: int, length: int, supervision: str) -> int:
        """Bytes of one sample of ``batch`` rows of ``length`` tokens."""
        return eagle3_sample_bytes(
            supervision,
            seq=length,
            hidden=self.hidden,
            vocab=self.vocabulary,
            batch=batch,
            dtype=self.model.dtype,
        )

    def new_draft(self, seed: int, ttt_steps: int) -> Eagle3Draft:
        """A draft head for this target; equal for equal seeds, on every rank."""
        text = self.model.config.get_text_config()
        config = DraftConfig(
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            heads=text.num_attention_heads if self.hidden % (2 * text.num_attention_heads) == 0 else 1,
            intermediate=getattr(text, "intermediate_size", None) or 4 * self.hidden,
            ttt_steps=ttt_steps,
        )
        torch.manual_seed(seed)
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        return Eagle3Draft(config, embedding, head.float().cpu()).to(self.model.device)
