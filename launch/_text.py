"""Text for the main job: tokens, training windows and held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ASSETS = Path(__file__).parent / "assets"
HELD_OUT = 0.05  # the share at the end of the corpus that assets/train_target.py held out too
SPREAD = 1_000_003  # keeps the generators of neighbouring seeds apart


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the job uses."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, ids: Any) -> str:
        """Text of token ids."""


class ByteTokenizer:
    """One token per UTF-8 byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Any) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", "replace")


def load_tokens(path: Path, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Training and held-out token ids, both 1-D int64."""
    text = path.read_text(encoding="utf-8")
    split = int(len(text) * (1 - HELD_OUT))
    return torch.tensor(tokenizer.encode(text[:split])), torch.tensor(tokenizer.encode(text[split:]))


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Batches of random windows; item k depends on nothing but the seed and k.

    Args:
        tokens: 1-D int64.
        count: number of items.
        batch: rows per item.
        length: tokens per row.
        seed: of the whole set.
    """

    def __init__(self, tokens: Tensor, count: int, batch: int, length: int, seed: int) -> None:
        if tokens.numel() <= length:
            raise ValueError(f"the text has {tokens.numel()} tokens, too few for rows of {length}")
        self._tokens, self._count, self._batch, self._length, self._seed = tokens, count, batch, length, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self._seed * SPREAD + index)
        starts = torch.randint(0, self._tokens.numel() - self._length, (self._batch, 1), generator=generator)
        ids = self._tokens[starts + torch.arange(self._length)]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}


def held_out_prompts(tokens: Tensor, count: int, length: int) -> list[Tensor]:
    """``count`` prompts of ``length`` tokens, evenly spread over the held-out text."""
    if tokens.numel() < count * length:
        raise ValueError(f"{tokens.numel()} held-out tokens are too few for {count} prompts of {length}")
    stride = tokens.numel() // count
    return [tokens[start : start + length] for start in range(0, count * stride, stride)]
