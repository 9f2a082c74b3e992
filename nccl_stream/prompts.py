"""Sharding a dataset of prompts over target ranks, with a global order that does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nccl_stream.async_pipeline import PromptBatch
from nccl_stream.errors import MisuseError

__all__ = ["prompt_order", "shard_prompts"]

_PACKING = ("position_ids", "seq_lens", "doc_remaining")


def prompt_order(size: int, epoch: int, seed: int) -> list[int]:
    """The global order of one epoch: dataset indices by position, the same on every rank and in a colocated run."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator).tolist()


def shard_prompts(
    dataset: Any,
    *,
    epochs: int,
    seed: int,
    rank: int,
    world_size: int,
    register: Callable[[str, int], None],
) -> Iterator[PromptBatch]:
    """Yield prompts ``rank, rank + world_size, ...`` of the global order; see ``Stream.prompts``.

    Args:
        register: told each sample id with its place in the global order before it is yielded.
    """
    if type(epochs) is not int or epochs < 1:
        raise MisuseError(f"epochs must be a positive int, got {epochs!r}")
    size = len(dataset)
    if size == 0:
        raise MisuseError("the dataset is empty: nothing would ever be produced")
    return _generate(dataset, size, epochs, seed, rank, world_size, register)


def _generate(
    dataset: Any, size: int, epochs: int, seed: int, rank: int, world_size: int, register: Callable[[str, int], None]
) -> Iterator[PromptBatch]:
    for epoch in range(epochs):
        permutation = prompt_order(size, epoch, seed)
        first = (rank - epoch * size) % world_size
        for position in range(first, size, world_size):
            index = permutation[position]
            sample_id = f"e{epoch}-i{index}"
            register(sample_id, epoch * size + position)
            yield PromptBatch(_tensors_of(dataset[index], index), sample_id)


def _tensors_of(item: Any, index: int) -> tuple[torch.Tensor, ...]:
    if isinstance(item, torch.Tensor):
        item = {"input_ids": item}
    if isinstance(item, tuple | list):
        names = ("input_ids", "attention_mask", "loss_mask", *_PACKING)
        if not 1 <= len(item) <= len(names):
            raise MisuseError(f"dataset[{index}]: a tuple of 1 to {len(names)} tensors was expected, got {len(item)}")
        item = dict(zip(names, item, strict=False))
    if not isinstance(item, Mapping) or "input_ids" not in item:
        raise MisuseError(
            f"dataset[{index}]: an item is a tensor, a tuple, or a mapping with 'input_ids'; got {type(item).__name__}"
        )
    input_ids = _two_dimensional(item["input_ids"], "input_ids", index)
    masks = [
        torch.ones_like(input_ids) if item.get(name) is None else _two_dimensional(item[name], name, index)
        for name in ("attention_mask", "loss_mask")
    ]
    packing = [item.get(name) for name in _PACKING]
    if all(tensor is None for tensor in packing):
        return (input_ids, *masks)
    return (
        input_ids,
        *masks,
        *(_two_dimensional(tensor, name, index) for name, tensor in zip(_PACKING, packing, strict=True)),
    )


def _two_dimensional(value: Any, name: str, index: int) -> torch.Tensor:
    if value is None:
        raise MisuseError(f"dataset[{index}]: packing needs all of {', '.join(_PACKING)}; {name} is missing")
    tensor = torch.as_tensor(value)
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 2 or tensor.numel() == 0:
        raise MisuseError(
            f"dataset[{index}]: {name} must be [seq] or [1, seq] and not empty, got {tuple(tensor.shape)}"
        )
    return tensor
