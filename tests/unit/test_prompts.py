"""How a dataset of prompts is shared out, and the global order that results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nccl_stream.errors import MisuseError
from nccl_stream.prompts import prompt_order, shard_prompts


def share(dataset: Any, rank: int, world: int, *, epochs: int = 1, seed: int = 0) -> tuple[list[Any], dict[str, int]]:
    orders: dict[str, int] = {}
    prompts = shard_prompts(dataset, epochs=epochs, seed=seed, rank=rank, world_size=world, register=orders.__setitem__)
    return list(prompts), orders


@given(size=st.integers(1, 40), world=st.integers(1, 7), epochs=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_shards_cover_every_epoch_once_in_global_order(size: int, world: int, epochs: int, seed: int) -> None:
    dataset = [torch.full((3,), i) for i in range(size)]
    taken: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        prompts, orders = share(dataset, rank, world, epochs=epochs, seed=seed)
        assert len(prompts) == len(orders)
        assert list(orders.values()) == sorted(orders.values())
        for prompt in prompts:
            k = orders[prompt.sample_id]
            assert k % world == rank
            epoch, index = (int(part[1:]) for part in prompt.sample_id.split("-"))
            assert int(prompt[0][0, 0]) == index
            taken[k] = (epoch, index)
    # The order is that of prompt_order, whatever the number of targets.
    expected = {e * size + p: (e, i) for e in range(epochs) for p, i in enumerate(prompt_order(size, e, seed))}
    assert taken == expected


def test_epochs_are_shuffled_differently() -> None:
    assert prompt_order(64, 0, 1) != prompt_order(64, 1, 1)
    assert prompt_order(64, 0, 1) != prompt_order(64, 0, 2)
    assert sorted(prompt_order(64, 3, 9)) == list(range(64))


@pytest.mark.parametrize(
    "item",
    [
        torch.arange(4),
        torch.arange(4)[None],
        (torch.arange(4),),
        {"input_ids": torch.arange(4)},
        {"input_ids": list(range(4)), "attention_mask": None},
    ],
)
def test_items_without_masks_get_masks_of_ones(item: Any) -> None:
    (prompt,), _ = share([item], 0, 1)
    assert [tuple(tensor.shape) for tensor in prompt] == [(1, 4)] * 3
    assert torch.equal(prompt[0], torch.arange(4)[None])
    assert prompt[1].all()
    assert prompt[2].all()


def test_packed_items_yield_six_tensors() -> None:
    ids = torch.arange(6)
    item = {"input_ids": ids, "position_ids": ids, "seq_lens": torch.tensor([4, 2]), "doc_remaining": ids}
    (prompt,), _ = share([item], 0, 1)
    assert len(prompt) == 6
    assert torch.equal(prompt[4], torch.tensor([[4, 2]]))


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        ([{"ids": torch.arange(3)}], "input_ids"),
        ([torch.zeros(2, 2, 2)], r"\[seq\]"),
        ([torch.zeros(0)], "not empty"),
        ([{"input_ids": torch.arange(3), "position_ids": torch.arange(3)}], "seq_lens is missing"),
        ([tuple(torch.arange(3) for _ in range(7))], "1 to 6"),
        (["text"], "str"),
    ],
)
def test_item_of_another_form_is_named(dataset: Any, complaint: str) -> None:
    with pytest.raises(MisuseError, match=complaint):
        share(dataset, 0, 1)


def test_empty_dataset_and_bad_epochs_are_refused_before_anything_is_yielded() -> None:
    with pytest.raises(MisuseError, match="empty"):
        shard_prompts([], epochs=1, seed=0, rank=0, world_size=1, register=lambda *_: None)
    with pytest.raises(MisuseError, match="epochs"):
        shard_prompts([1], epochs=0, seed=0, rank=0, world_size=1, register=lambda *_: None)
