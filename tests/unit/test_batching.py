from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nccl_stream.batching import Batcher, BatchRule, concatenate, extent_of
from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.schema import schema_of

EAGLE3 = schema_of(FeatureAlgorithm.EAGLE3)
HIDDEN, VOCAB = 2, 5


def sample(fill: int, seq: int, *, rows: int = 1, documents: list[int] | None = None, width: int = HIDDEN) -> dict:
    ids = torch.full((rows, seq), fill)
    tensors = {
        "aux_hidden_states": torch.full((rows, seq, 3 * width), float(fill), dtype=torch.bfloat16),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones(rows, seq, dtype=torch.bool),
        "logits": torch.full((rows, seq, VOCAB), float(-fill)),
    }
    if documents is not None:
        tensors["position_ids"] = torch.cat([torch.arange(n) for n in documents]).expand(rows, seq).clone()
        tensors["seq_lens"] = torch.tensor([documents]).expand(rows, -1).clone()
        tensors["doc_remaining"] = torch.cat([torch.arange(n - 1, -1, -1) for n in documents]).expand(rows, seq).clone()
    return tensors


def batches_of(rule: BatchRule, lengths: list[int], *, window: int | None = None) -> list[list[int]]:
    """Indices of the samples in each batch, those left at the end included."""
    batcher: Batcher[int] = Batcher(rule, window=window)
    batches = []
    for index, length in enumerate(lengths):
        batcher.add(index, 1, length)
        while (batch := batcher.pop()) is not None:
            batches.append(batch)
    while (batch := batcher.flush()) is not None:
        batches.append(batch)
    assert len(batcher) == 0
    return batches


def test_samples_are_joined_along_rows_and_padded_on_the_right():
    joined = concatenate(EAGLE3, [sample(1, 3), sample(2, 5, rows=2), sample(3, 4)])
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == {
        "aux_hidden_states": (4, 5, 3 * HIDDEN),
        "input_ids": (4, 5),
        "attention_mask": (4, 5),
        "loss_mask": (4, 5),
        "logits": (4, 5, VOCAB),
    }
    assert joined["input_ids"].tolist() == [[1, 1, 1, 0, 0], [2] * 5, [2] * 5, [3, 3, 3, 3, 0]]
    assert joined["attention_mask"].sum(1).tolist() == [3, 5, 5, 4]
    assert joined["loss_mask"].dtype is torch.bool
    assert joined["loss_mask"].sum(1).tolist() == [3, 5, 5, 4]
    assert joined["aux_hidden_states"].dtype is torch.bfloat16
    assert not joined["aux_hidden_states"][0, 3:].any()
    assert not joined["logits"][3, 4:].any()


def test_single_sample_is_passed_on_without_a_copy():
    tensors = sample(1, 3)
    joined = concatenate(EAGLE3, [tensors])
    assert all(joined[name] is tensors[name] for name in tensors)


def test_padding_of_a_packed_row_belongs_to_its_last_document_and_is_never_supervised():
    short, long = sample(1, 5, documents=[2, 3]), sample(2, 8, documents=[8])
    joined = concatenate(EAGLE3, [short, long])
    assert joined["seq_lens"].tolist() == [[2, 6], [8, 0]]
    assert joined["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert joined["doc_remaining"][0].tolist() == [1, 0, 2, 1, 0, 0, 0, 0]
    assert joined["loss_mask"][0].tolist() == [True] * 5 + [False] * 3


def test_packed_rows_with_unused_documents_extend_the_last_used_one():
    short = sample(1, 4, documents=[1, 3])
    short["seq_lens"] = torch.tensor([[1, 3, 0]])
    joined = concatenate(EAGLE3, [sample(2, 6, documents=[6]), short])
    assert joined["seq_lens"].tolist() == [[6, 0, 0], [1, 5, 0]]


def attention(joined: dict) -> torch.Tensor:
    """Causal attention within documents that heeds the attention mask, over the hidden states as they are."""
    mask = joined["attention_mask"].bool()
    length = mask.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, :]
    if "seq_lens" in joined:
        lens = joined["seq_lens"]
        document = torch.stack([torch.arange(lens.shape[1]).repeat_interleave(row) for row in lens])
        allowed = allowed & (document[:, :, None] == document[:, None, :])
    hidden = joined["aux_hidden_states"].float()
    scores = (hidden @ hidden.mT).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ hidden


@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_padded_rows_has_no_nan_and_equals_that_of_each_sample_alone(packed):
    torch.manual_seed(0)
    samples = [sample(1, 6, documents=[2, 4] if packed else None), sample(2, 9, documents=[9] if packed else None)]
    for tensors in samples:
        tensors["aux_hidden_states"].normal_()
    out = attention(concatenate(EAGLE3, samples))
    assert not out.isnan().any()
    for row, tensors in enumerate(samples):
        length = tensors["input_ids"].shape[1]
        torch.testing.assert_close(out[row : row + 1, :length], attention(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("logits"), "same features"),
        (lambda t: t.update(logits=t["logits"].double()), "logits"),
        (lambda t: t.update(aux_hidden_states=t["aux_hidden_states"][..., 1:]), "aux_hidden_states"),
        (lambda t: t.update(logits=t["logits"][0]), "logits"),
        (lambda t: t.update(other=t["logits"]), "other"),
    ],
)
def test_samples_that_do_not_go_together_are_refused(change, message):
    other = sample(2, 4)
    change(other)
    with pytest.raises(MisuseError, match=message):
        concatenate(EAGLE3, [sample(1, 3), other])


def test_extent_is_rows_and_length_of_the_ref():
    specs = {name: FeatureSpec.of(tensor) for name, tensor in sample(1, 7, rows=3).items()}
    ref = SampleRef(
        sample_id="s",
        run_id="r",
        algorithm=FeatureAlgorithm.EAGLE3,
        store_uri="local://x",
        feature_keys={name: name for name in specs},
        feature_specs=specs,
        estimated_bytes=1,
        num_tokens=1,
        target_model_version="0",
        draft_weight_version="0",
        schema_version=1,
    )
    assert extent_of(EAGLE3, ref) == (3, 7)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"max_tokens": -1},
        {"length_buckets": (4, 4)},
        {"length_buckets": (0,)},
        {"length_buckets": (1.5,)},
    ],
)
def test_rule_that_cannot_work_is_refused(options):
    with pytest.raises(ConfigError):
        BatchRule(**options)


def test_without_a_rule_every_sample_comes_alone():
    assert batches_of(BatchRule(), [3, 4]) == [[0], [1]]


def test_batches_are_full_in_order_of_arrival_and_the_rest_comes_last():
    assert batches_of(BatchRule(batch_size=2), [5, 5, 5]) == [[0, 1], [2]]


def test_token_budget_counts_padding_and_a_sample_above_it_comes_alone():
    # 4 + 3 would be 7 tokens, padded it is 8; 9 is more than the budget by itself.
    assert batches_of(BatchRule(max_tokens=7), [4, 3, 2, 9, 1]) == [[0], [1, 2], [3], [4]]
    assert batches_of(BatchRule(max_tokens=8), [4, 4, 4]) == [[0, 1], [2]]
    assert batches_of(BatchRule(max_tokens=100, batch_size=2), [4, 4, 4]) == [[0, 1], [2]]


def test_buckets_bring_similar_lengths_together():
    rule = BatchRule(batch_size=2, length_buckets=(4, 8))
    assert batches_of(rule, [3, 9, 4, 5, 20, 8]) == [[0, 2], [1, 4], [3, 5]]


def test_window_with_buckets_sorts_by_length_and_always_makes_the_same_number_of_batches():
    rule = BatchRule(batch_size=2, length_buckets=(4, 8))
    assert batches_of(rule, [9, 3, 5, 4, 1, 1, 1, 7], window=4) == [[1, 3], [2, 0], [4, 5], [6, 7]]


def test_sample_that_fails_uses_up_its_place_in_the_window():
    batcher: Batcher[int] = Batcher(BatchRule(batch_size=2, length_buckets=(8,)), window=2)
    batcher.add(0, 1, 3)
    batcher.skip()
    assert batcher.pop() == [0]


@given(
    lengths=st.lists(st.integers(0, 12), max_size=40),
    batch_size=st.none() | st.integers(1, 5),
    max_tokens=st.none() | st.integers(1, 40),
    buckets=st.sets(st.integers(1, 12), max_size=3),
    window=st.none() | st.integers(1, 7),
)
def test_every_sample_is_in_one_batch_within_the_limits(lengths, batch_size, max_tokens, buckets, window):
    rule = BatchRule(batch_size, max_tokens, tuple(sorted(buckets)))
    batches = batches_of(rule, lengths, window=window)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[index] for index in batch]
        assert rule.most_samples is None or len(batch) <= rule.most_samples
        assert max_tokens is None or len(batch) == 1 or len(batch) * max(sizes) <= max_tokens
        if window is None:
            assert len({rule.bucket_of(size) for size in sizes}) == 1
            assert batch == sorted(batch)
        else:
            assert len({index // window for index in batch}) == 1


@given(
    samples=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_every_row_of_a_batch_starts_with_its_sample(samples):
    tensors = [sample(number + 1, seq, rows=rows) for number, (rows, seq) in enumerate(samples)]
    joined = concatenate(EAGLE3, tensors)
    row = 0
    for (rows, seq), own in zip(samples, tensors, strict=True):
        for name, tensor in joined.items():
            assert torch.equal(tensor[row : row + rows, :seq], own[name])
            assert not tensor[row : row + rows, seq:].any()
        row += rows
    assert row == joined["input_ids"].shape[0]
