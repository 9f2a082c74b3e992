"""The policies alone: pure rules with checked sizes."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy

POLICIES = [
    FixedChunkPolicy(3),
    FixedChunkPolicy(3, continue_after_done=True),
    SlidingWindowChunkPolicy(5, 2),
    LeftContextChunkPolicy(2, 7),
]


def spans(policy: ChunkPolicy, count: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    delivered = 0
    for chunk_index in range(count):
        found.append(tuple(policy.next_span(delivered, chunk_index)))
        delivered = found[-1][1]
    return found


def test_fixed_spans_do_not_overlap() -> None:
    assert spans(FixedChunkPolicy(3), 3) == [(0, 3), (3, 6), (6, 9)]


def test_sliding_window_spans_advance_by_the_stride() -> None:
    assert spans(SlidingWindowChunkPolicy(5, 2), 4) == [(0, 5), (2, 7), (4, 9), (6, 11)]


def test_sliding_window_with_stride_equal_to_window_is_fixed() -> None:
    assert spans(SlidingWindowChunkPolicy(4, 4), 5) == spans(FixedChunkPolicy(4), 5)


@pytest.mark.parametrize(
    ("left_context", "expected"),
    [
        (0, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (1, [(0, 2), (1, 4), (3, 6), (5, 8)]),
        (2, [(0, 2), (0, 4), (2, 6), (4, 8)]),
        (5, [(0, 2), (0, 4), (0, 6), (1, 8)]),
        (100, [(0, 2), (0, 4), (0, 6), (0, 8)]),
    ],
)
def test_left_context_reaches_back_as_far_as_there_is_something(left_context: int, expected: object) -> None:
    assert spans(LeftContextChunkPolicy(2, left_context), 4) == expected


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_is_pure(policy: ChunkPolicy) -> None:
    before = pickle.dumps(policy)
    assert spans(policy, 20) == spans(policy, 20)
    assert pickle.dumps(policy) == before
    assert pickle.loads(before) == policy
    with pytest.raises(FrozenInstanceError):
        policy.continue_after_done = True


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "3"])
def test_size_that_is_no_positive_whole_number_is_refused(size: int) -> None:
    for make in (
        lambda: FixedChunkPolicy(size),
        lambda: SlidingWindowChunkPolicy(size, 1),
        lambda: SlidingWindowChunkPolicy(3, size),
        lambda: LeftContextChunkPolicy(size, 1),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            make()


@pytest.mark.parametrize("left_context", [-1, 0.0, False, None])
def test_left_context_below_zero_or_no_number_is_refused(left_context: int) -> None:
    with pytest.raises(ValueError, match="left_context"):
        LeftContextChunkPolicy(1, left_context)


def test_left_context_of_zero_is_allowed() -> None:
    assert LeftContextChunkPolicy(1, 0).next_span(4, 4) == (4, 5)


def test_stride_above_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        SlidingWindowChunkPolicy(3, 4)


def test_documented_defaults() -> None:
    assert FixedChunkPolicy(chunk_size=2).continue_after_done is False
    assert SlidingWindowChunkPolicy(window=2, stride=1).continue_after_done is False
    assert LeftContextChunkPolicy(chunk=2, left_context=1).continue_after_done is False
    assert all(isinstance(policy, ChunkPolicy) for policy in POLICIES)
