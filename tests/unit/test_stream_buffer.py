"""What comes out of a stream buffer: order, chunks, the end, walks, edges, the hint."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch

from nccl_stream import stream_buffer
from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy
from nccl_stream.errors import ClosedError, MisuseError
from nccl_stream.stream_buffer import StreamBuffer, StreamChunk, StreamChunkInfo, StreamingEdge, collate


def make(policy: ChunkPolicy, **kwargs: Any) -> StreamBuffer:
    return StreamBuffer(7, "features", "target", policy, **kwargs)


def feed(buffer: StreamBuffer, start: int, stop: int, walk: str | None = None) -> None:
    """Register and put the handles ``start`` to ``stop``; the handle of item i is i."""
    for index in range(start, stop):
        buffer.pre_read_register(f"t{index}", walk)
        buffer.put(f"t{index}", index)


def drain(buffer: StreamBuffer, limit: int = 1000) -> list[StreamChunk]:
    """Pop for as long as a chunk is ready."""
    chunks: list[StreamChunk] = []
    while buffer.has_chunk_ready():
        assert len(chunks) < limit, "the stream does not end"
        chunks.append(buffer.pop_chunk())
    return chunks


def contents(chunks: list[StreamChunk]) -> list[list[int] | None]:
    return [chunk.data["data"] for chunk in chunks]


# Names and defaults.


def test_stream_buffer_has_the_documented_parameters_and_defaults() -> None:
    parameters = inspect.signature(StreamBuffer).parameters
    documented = {
        "request_id": inspect.Parameter.empty,
        "edge_name": inspect.Parameter.empty,
        "from_partition": inspect.Parameter.empty,
        "policy": inspect.Parameter.empty,
        "join_dim": None,
        "joiner": None,
        "walk_tagged": False,
        "ingested_chunk": None,
        "producer_done": False,
        "maybe_ready": True,
    }
    assert {name: parameters[name].default for name in documented} == documented
    assert list(parameters)[:7] == list(documented)[:7]
    added = [parameter for name, parameter in parameters.items() if name not in documented]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in added)

    buffer = make(FixedChunkPolicy(1))
    values = {name: getattr(buffer, name) for name in list(documented)[4:]}
    assert values == {name: documented[name] for name in list(documented)[4:]}
    assert (buffer.request_id, buffer.edge_name, buffer.from_partition) == (7, "features", "target")
    assert buffer.policy == FixedChunkPolicy(1)


def test_methods_have_the_documented_parameters() -> None:
    def of(function: Any) -> dict[str, Any]:
        return {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "self"
        }

    empty = inspect.Parameter.empty
    assert of(StreamBuffer.has_chunk_ready) == {"consumer_walk": None}
    assert of(StreamBuffer.peek_walk) == {}
    assert of(StreamBuffer.pop_chunk) == {}
    assert of(StreamBuffer.pop_waiting_edge) == {}
    assert of(StreamBuffer.pre_read_register) == {"tensor_id": empty, "walk": None}
    assert of(StreamBuffer.pre_read_register_joined) == {"tensor_ids": empty, "walk": None}
    assert of(StreamBuffer.prime_context) == {"context_items": empty}
    assert of(StreamBuffer.put) == {"tensor_id": empty, "item": empty}
    assert of(StreamBuffer.signal_done) == {"num_items": 0}
    assert of(StreamBuffer.store_uningested_edge) == {"streaming_edge": empty}
    assert of(collate) == {"items": empty}


def test_values_have_the_documented_fields() -> None:
    assert StreamChunkInfo._fields == ("start_offset", "context_items", "num_items", "is_final")
    assert StreamingEdge._fields == ("name", "next_node", "uuids", "chunk")
    chunk = StreamChunk({"data": None}, 3)
    assert (chunk.start_offset, chunk.is_final, chunk.context_items, chunk.num_items) == (0, False, 0, 0)
    assert chunk.released == []
    assert StreamChunk({"data": None}, 3, 4, True, 1, 2, [5]).info == StreamChunkInfo(4, 1, 2, True)
    for name in stream_buffer.__all__:
        assert hasattr(stream_buffer, name)


# Order of items.


def test_index_is_the_registration_order_not_the_arrival_order() -> None:
    buffer = make(FixedChunkPolicy(2))
    for name in "abcd":
        buffer.pre_read_register(name)
    buffer.put("c", "C")
    buffer.put("b", "B")
    buffer.put("d", "D")
    assert not buffer.has_chunk_ready()  # a is missing, so nothing is available
    buffer.put("a", "A")
    assert contents(drain(buffer)) == [["A", "B"], ["C", "D"]]


def test_joined_pieces_become_one_item_in_listed_order() -> None:
    buffer = make(FixedChunkPolicy(1), join_dim=0)
    buffer.pre_read_register_joined(["p0", "p1", "p2"])
    buffer.pre_read_register("q")
    buffer.put("q", torch.tensor([9]))
    buffer.put("p2", torch.tensor([4, 5]))
    buffer.put("p0", torch.tensor([1]))
    assert not buffer.has_chunk_ready()
    buffer.put("p1", torch.tensor([2, 3]))
    first, second = drain(buffer)
    assert first.data["data"].tolist() == [1, 2, 3, 4, 5]
    assert second.data["data"].tolist() == [9]


def test_joiner_takes_precedence_over_join_dim_and_sees_the_listed_order() -> None:
    seen: list[list[Any]] = []

    def join(pieces: list[Any]) -> object:
        seen.append(pieces)
        return tuple(pieces)

    buffer = make(FixedChunkPolicy(1), join_dim=0, joiner=join)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.pre_read_register_joined(["r"])
    for name in "rqp":
        buffer.put(name, name.upper())
    assert contents(drain(buffer)) == [[("P", "Q")], [("R",)]]
    assert sorted(seen) == [["P", "Q"], ["R"]]


def test_single_piece_without_joiner_is_the_item() -> None:
    buffer = make(FixedChunkPolicy(1))
    buffer.pre_read_register_joined(["only"])
    buffer.put("only", 5)
    assert contents(drain(buffer)) == [[5]]


def test_each_piece_counts_towards_the_total() -> None:
    buffer = make(FixedChunkPolicy(1), joiner=sum)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("p", 1)
    buffer.put("q", 2)
    buffer.signal_done(3)
    assert [chunk.is_final for chunk in drain(buffer)] == [False]
    buffer.pre_read_register("r")
    buffer.put("r", 3)
    (last,) = drain(buffer)
    assert last.is_final
    assert last.data == {"data": [3]}


def test_joiner_runs_outside_the_lock() -> None:
    def join(pieces: list[Any]) -> object:
        assert buffer.statistics().available_items == 0  # would deadlock under the lock
        return pieces

    buffer = make(FixedChunkPolicy(1), joiner=join)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("p", 1)
    buffer.put("q", 2)
    assert contents(drain(buffer)) == [[[1, 2]]]


# Chunks and the end.


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13])
@pytest.mark.parametrize(
    "policy",
    [
        FixedChunkPolicy(3),
        FixedChunkPolicy(1),
        SlidingWindowChunkPolicy(6, 3),
        SlidingWindowChunkPolicy(3, 3),
        SlidingWindowChunkPolicy(1, 1),
        LeftContextChunkPolicy(3, 2),
        LeftContextChunkPolicy(3, 0),
        LeftContextChunkPolicy(2, 5),
    ],
    ids=repr,
)
def test_exactly_one_final_chunk_comes_last(policy: ChunkPolicy, total: int, eager: bool) -> None:
    buffer = make(policy)
    chunks: list[StreamChunk] = []
    for index in range(total):
        feed(buffer, index, index + 1)
        if eager:
            chunks += drain(buffer)
    buffer.signal_done(total)
    chunks += drain(buffer)
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.num_items for chunk in chunks[:-1])
    new = [item for chunk in chunks for item in (chunk.data["data"] or [])[chunk.context_items :]]
    assert new == list(range(total))
    assert sorted(item for chunk in chunks for item in chunk.released) == list(range(total))
    assert buffer.statistics().retained_items == 0


def test_sliding_window_short_tail_keeps_the_stride() -> None:
    buffer = make(SlidingWindowChunkPolicy(4, 3))
    feed(buffer, 0, 9)
    buffer.signal_done()
    chunks = drain(buffer)
    assert contents(chunks) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8]]
    assert [chunk.info for chunk in chunks] == [(0, 0, 4, False), (3, 1, 4, False), (6, 1, 3, True)]


def test_left_context_longer_than_the_chunk() -> None:
    buffer = make(LeftContextChunkPolicy(2, 3))
    feed(buffer, 0, 7)
    buffer.signal_done(7)
    chunks = drain(buffer)
    assert contents(chunks) == [[0, 1], [0, 1, 2, 3], [1, 2, 3, 4, 5], [3, 4, 5, 6]]
    assert [chunk.context_items for chunk in chunks] == [0, 2, 3, 3]


def test_empty_final_chunk_sits_at_the_end_of_the_stream() -> None:
    buffer = make(LeftContextChunkPolicy(2, 2))
    feed(buffer, 0, 4)
    drain(buffer)
    buffer.signal_done(4)
    (last,) = drain(buffer)
    assert last.info == StreamChunkInfo(4, 0, 0, True)
    assert last.data == {"data": None}
    assert last.released == [2, 3]


def test_done_before_anything_is_registered_waits_for_the_promised_items() -> None:
    buffer = make(FixedChunkPolicy(2))
    buffer.signal_done(3)
    assert not buffer.has_chunk_ready()
    feed(buffer, 0, 2)
    assert contents(drain(buffer)) == [[0, 1]]
    feed(buffer, 2, 3)
    assert [chunk.is_final for chunk in drain(buffer)] == [True]


def test_done_waits_for_registered_items_to_arrive() -> None:
    buffer = make(FixedChunkPolicy(2))
    feed(buffer, 0, 2)
    buffer.pre_read_register("late")
    buffer.signal_done()
    (only,) = drain(buffer)
    assert not only.is_final
    buffer.put("late", 2)
    (last,) = drain(buffer)
    assert (last.is_final, last.data["data"]) == (True, [2])


def test_producer_done_at_construction_is_an_empty_stream() -> None:
    buffer = make(FixedChunkPolicy(2), producer_done=True)
    (only,) = drain(buffer)
    assert only.is_final
    assert only.num_items == 0


def test_done_can_be_set_as_documented() -> None:
    buffer = make(FixedChunkPolicy(2))
    feed(buffer, 0, 3)
    buffer.producer_done = False
    assert contents(drain(buffer)) == [[0, 1]]
    buffer.producer_done = True
    assert contents(drain(buffer)) == [[2]]
    with pytest.raises(MisuseError, match="one end"):
        buffer.producer_done = False


class ListedChunkPolicy(ChunkPolicy):
    """Knows how long each chunk is, and of none after the last."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
        return delivered, delivered + self.sizes[chunk_index]


def test_policy_is_not_asked_for_what_follows_the_last_chunk() -> None:
    buffer = make(ListedChunkPolicy(2, 3))
    feed(buffer, 0, 5)
    buffer.signal_done(5)
    chunks = drain(buffer)
    assert contents(chunks) == [[0, 1], [2, 3, 4]]
    assert chunks[-1].is_final


def test_policy_is_not_asked_for_what_follows_the_last_chunk_of_a_walk() -> None:
    buffer = make(ListedChunkPolicy(2, 3), walk_tagged=True)
    feed(buffer, 0, 5, "a")
    feed(buffer, 5, 10, "b")
    buffer.signal_done(10)
    assert contents(drain(buffer)) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_same_done_twice_is_one_done() -> None:
    buffer = make(FixedChunkPolicy(2))
    feed(buffer, 0, 1)
    buffer.signal_done(1)
    buffer.signal_done(1)
    assert buffer.producer_done
    assert len(drain(buffer)) == 1
    buffer.signal_done(1)


@pytest.mark.parametrize("total", [0, 3, 4])
@pytest.mark.parametrize("eager", [True, False])
def test_continue_after_done_never_ends(total: int, eager: bool) -> None:
    buffer = make(FixedChunkPolicy(3, continue_after_done=True))
    chunks: list[StreamChunk] = []
    for index in range(total):
        feed(buffer, index, index + 1)
        if eager:
            chunks += drain(buffer)
    assert not eager or not buffer.has_chunk_ready()
    buffer.signal_done(total)
    for _ in range(6):
        assert buffer.has_chunk_ready()
        assert buffer.has_chunk_ready("any walk")
        assert buffer.maybe_ready
        chunks.append(buffer.pop_chunk())
    assert not any(chunk.is_final for chunk in chunks)
    full = (total + 2) // 3
    assert [item for chunk in chunks[:full] for item in chunk.data["data"]] == list(range(total))
    assert all(chunk.info == (total, 0, 0, False) for chunk in chunks[full:])
    assert len(chunks) > full
    assert sorted(item for chunk in chunks for item in chunk.released) == list(range(total))


def test_policy_of_the_user_is_one_class() -> None:
    class Growing(ChunkPolicy):
        def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
            return delivered, delivered + 2**chunk_index

    policy = Growing()
    one, two = make(policy), make(policy)  # one instance may serve many streams
    feed(one, 0, 9)
    feed(two, 0, 3)
    one.signal_done(9)
    two.signal_done(3)
    assert [chunk.num_items for chunk in drain(one)] == [1, 2, 4, 2]
    assert [chunk.num_items for chunk in drain(two)] == [1, 2]


# Context that the producer sends.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FixedChunkPolicy(2), [(0, 3, 5), (5, 0, 2), (7, 0, 1)]),
        (SlidingWindowChunkPolicy(2, 1), [(0, 3, 5), (4, 1, 2), (5, 1, 2), (6, 1, 2)]),
        (LeftContextChunkPolicy(2, 1), [(0, 3, 5), (4, 1, 3), (6, 1, 2)]),
        (LeftContextChunkPolicy(2, 9), [(0, 3, 5), (0, 5, 7), (0, 7, 8)]),
    ],
    ids=repr,
)
def test_primed_context_precedes_the_first_new_items(policy: ChunkPolicy, expected: list[tuple[int, ...]]) -> None:
    buffer = make(policy)
    buffer.prime_context(3)
    feed(buffer, 0, 4)
    assert not buffer.has_chunk_ready()
    feed(buffer, 4, 8)
    buffer.signal_done(8)
    chunks = drain(buffer)
    assert [(chunk.start_offset, chunk.context_items, chunk.num_items) for chunk in chunks] == expected
    assert sorted(item for chunk in chunks for item in chunk.released) == list(range(8))


@pytest.mark.parametrize("total", [0, 1, 4, 5])
def test_stream_within_the_primed_context_ends_without_new_items(total: int) -> None:
    buffer = make(LeftContextChunkPolicy(2, 1))
    buffer.prime_context(5)
    feed(buffer, 0, total)
    buffer.signal_done(total)
    (only,) = drain(buffer)
    assert only.is_final
    assert only.info == (0, total, total, True)
    assert sorted(only.released) == list(range(total))


def test_priming_again_before_the_first_pop_replaces() -> None:
    buffer = make(FixedChunkPolicy(1))
    buffer.prime_context(4)
    feed(buffer, 0, 2)
    assert not buffer.has_chunk_ready()
    buffer.prime_context(1)
    assert buffer.maybe_ready
    assert buffer.pop_chunk().info == (0, 1, 2, False)


# Walks.


def test_no_chunk_spans_two_walks() -> None:
    buffer = make(FixedChunkPolicy(2), walk_tagged=True)
    feed(buffer, 0, 3, "prefill")
    assert contents(drain(buffer)) == [[0, 1]]
    feed(buffer, 3, 4, "decode")
    (flushed,) = drain(buffer)
    assert flushed.info == (2, 0, 1, False)
    feed(buffer, 4, 6, "decode")
    buffer.signal_done(6)
    assert contents(drain(buffer)) == [[3, 4], [5]]


def test_run_is_flushed_only_when_all_of_it_has_arrived() -> None:
    buffer = make(FixedChunkPolicy(3), walk_tagged=True)
    buffer.pre_read_register("a", "x")
    buffer.pre_read_register("b", "x")
    buffer.pre_read_register("c", "y")
    buffer.put("c", "C")
    buffer.put("a", "A")
    assert not buffer.has_chunk_ready()
    buffer.put("b", "B")
    assert contents(drain(buffer)) == [["A", "B"]]


def test_last_run_is_final_and_an_earlier_one_is_not() -> None:
    buffer = make(FixedChunkPolicy(3), walk_tagged=True)
    feed(buffer, 0, 2, "x")
    feed(buffer, 2, 4, "y")
    buffer.signal_done(4)
    assert [(chunk.num_items, chunk.is_final) for chunk in drain(buffer)] == [(2, False), (2, True)]


def test_run_that_was_drained_before_it_closed_yields_no_empty_chunk() -> None:
    buffer = make(LeftContextChunkPolicy(2, 2), walk_tagged=True)
    feed(buffer, 0, 2, "x")
    assert contents(drain(buffer)) == [[0, 1]]
    feed(buffer, 2, 3, "y")
    assert not buffer.has_chunk_ready()
    feed(buffer, 3, 4, "y")
    (chunk,) = drain(buffer)
    assert chunk.info == (2, 0, 2, False)  # the context starts anew
    assert chunk.released == [0, 1]  # what the run before had kept
    feed(buffer, 4, 6, "y")
    (chunk,) = drain(buffer)
    assert chunk.info == (2, 2, 4, False)


def test_a_walk_may_return() -> None:
    buffer = make(FixedChunkPolicy(5), walk_tagged=True)
    for index, walk in enumerate(["x", "y", "y", "x"]):
        feed(buffer, index, index + 1, walk)
    buffer.signal_done()
    assert contents(drain(buffer)) == [[0], [1, 2], [3]]


def test_has_chunk_ready_is_false_for_another_walk() -> None:
    buffer = make(FixedChunkPolicy(1), walk_tagged=True)
    feed(buffer, 0, 1, "x")
    feed(buffer, 1, 2, "y")
    assert buffer.has_chunk_ready("x")
    assert not buffer.has_chunk_ready("y")
    assert buffer.maybe_ready  # there is a chunk, only not for y
    assert buffer.has_chunk_ready()
    buffer.pop_chunk()
    assert not buffer.has_chunk_ready("x")
    assert buffer.has_chunk_ready("y")


def test_empty_final_chunk_is_ready_for_every_walk() -> None:
    buffer = make(FixedChunkPolicy(1), walk_tagged=True)
    feed(buffer, 0, 1, "x")
    buffer.pop_chunk()
    buffer.signal_done()
    assert buffer.has_chunk_ready("y")
    assert buffer.pop_chunk().is_final


def test_peek_walk_names_the_walk_at_the_head() -> None:
    buffer = make(FixedChunkPolicy(1), walk_tagged=True)
    assert buffer.peek_walk() is None
    buffer.pre_read_register("a", "x")
    assert buffer.peek_walk() is None  # nothing is there yet
    buffer.put("a", 0)
    feed(buffer, 1, 2, "y")
    assert buffer.peek_walk() == "x"
    assert buffer.peek_walk() == "x"
    buffer.pop_chunk()
    assert buffer.peek_walk() == "y"
    buffer.pop_chunk()
    assert buffer.peek_walk() is None


def test_untagged_buffer_ignores_walks() -> None:
    buffer = make(FixedChunkPolicy(2))
    feed(buffer, 0, 1, "x")
    feed(buffer, 1, 2, "y")
    assert buffer.peek_walk() is None
    assert buffer.has_chunk_ready("z")
    assert contents(drain(buffer)) == [[0, 1]]


# The hint.


def test_maybe_ready_is_cleared_by_a_look_and_set_by_every_event() -> None:
    buffer = make(FixedChunkPolicy(2))
    events = [
        lambda: buffer.pre_read_register("t0"),
        lambda: buffer.put("t0", 0),
        lambda: buffer.put("unknown", 0),
        lambda: buffer.pre_read_register_joined(["t1"]),
        lambda: buffer.prime_context(0),
        lambda: buffer.signal_done(5),
        lambda: (buffer.store_uningested_edge("edge"), buffer.pop_waiting_edge()),
    ]
    for position, event in enumerate(events):
        assert not buffer.has_chunk_ready()
        assert not buffer.maybe_ready, position
        event()
        assert buffer.maybe_ready, position
    buffer.put("t1", 1)
    buffer.maybe_ready = False
    buffer.pop_chunk()
    assert buffer.maybe_ready


def test_maybe_ready_stays_true_while_a_chunk_or_an_edge_waits() -> None:
    buffer = make(FixedChunkPolicy(1))
    buffer.store_uningested_edge("edge")
    assert not buffer.has_chunk_ready()
    assert buffer.maybe_ready
    buffer.pop_waiting_edge()
    feed(buffer, 0, 1)
    assert buffer.has_chunk_ready()
    assert buffer.maybe_ready


def test_maybe_ready_can_start_false() -> None:
    assert not make(FixedChunkPolicy(1), maybe_ready=False).maybe_ready


# Edges.


def test_waiting_edges_are_first_in_first_out() -> None:
    buffer = make(FixedChunkPolicy(1))
    assert buffer.pop_waiting_edge() is None
    edges = [StreamingEdge("e", "node", [i], StreamChunkInfo(i, 0, 1, False)) for i in range(3)]
    for edge in edges:
        buffer.store_uningested_edge(edge)
    assert [buffer.pop_waiting_edge() for _ in range(4)] == [*edges, None]


def test_edge_given_back_goes_to_the_head() -> None:
    buffer = make(FixedChunkPolicy(1))
    a, b, c = object(), object(), object()
    for edge in (a, b, c):
        buffer.store_uningested_edge(edge)
    assert buffer.pop_waiting_edge() is a
    buffer.store_uningested_edge(a)
    assert buffer.pop_waiting_edge() is a
    buffer.store_uningested_edge(a)
    assert [buffer.pop_waiting_edge() for _ in range(3)] == [a, b, c]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_edges_given_back_keep_their_order_whichever_comes_back_first(order: str) -> None:
    buffer = make(FixedChunkPolicy(1))
    edges = {name: [name] for name in "abc"}
    for name in "abc":
        buffer.store_uningested_edge(edges[name])
    assert buffer.pop_waiting_edge() is edges["a"]
    assert buffer.pop_waiting_edge() is edges["b"]
    for name in order:
        buffer.store_uningested_edge(edges[name])
    assert [buffer.pop_waiting_edge() for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_edges_are_never_compared() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    buffer = make(FixedChunkPolicy(1))
    one, two = Incomparable(), Incomparable()
    buffer.store_uningested_edge(one)
    buffer.store_uningested_edge(two)
    assert buffer.pop_waiting_edge() is one
    buffer.store_uningested_edge(one)
    assert buffer.pop_waiting_edge() is one
    assert buffer.pop_waiting_edge() is two


def test_ingested_edges_are_not_kept_for_ever() -> None:
    class Edge:
        pass

    buffer = make(FixedChunkPolicy(1))
    kept = []
    for _ in range(500):
        edge = Edge()
        kept.append(weakref.ref(edge))
        buffer.store_uningested_edge(edge)
        buffer.pop_waiting_edge()
    del edge
    gc.collect()
    assert sum(reference() is not None for reference in kept) <= 32


# Tensors, and what the buffer holds.


def test_collate_hands_out_one_item_as_it_is_and_stacks_several() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert collate([one]) is one
    assert torch.equal(collate([one, two]), torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="at least one"):
        collate([])


def test_tensor_chunks_are_collated_and_items_stay_untouched() -> None:
    buffer = make(LeftContextChunkPolicy(2, 1))
    items = [torch.full((2,), float(index)) for index in range(3)]
    for index, item in enumerate(items):
        buffer.pre_read_register(f"t{index}")
        buffer.put(f"t{index}", item)
    buffer.signal_done(3)
    first, second = drain(buffer)
    assert torch.equal(first.data["data"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(second.data["data"], torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert first.released[0] is items[0]
    assert [released is item for released, item in zip(second.released, items[1:], strict=True)] == [True, True]


def test_popped_items_are_not_kept() -> None:
    class Handle:
        pass

    buffer = make(SlidingWindowChunkPolicy(4, 2))
    alive = []
    for index in range(200):
        handle = Handle()
        alive.append(weakref.ref(handle))
        buffer.pre_read_register(index)
        buffer.put(index, handle)
        del handle
        while buffer.has_chunk_ready():
            buffer.pop_chunk()
        assert sum(reference() is not None for reference in alive) <= 4


def test_table_of_ids_is_bounded_over_a_long_stream() -> None:
    buffer = make(FixedChunkPolicy(4))
    sizes = []
    for index in range(40_000):
        feed(buffer, index, index + 1)
        if buffer.has_chunk_ready():
            buffer.pop_chunk()
        sizes.append(buffer.statistics().known_ids)
    assert max(sizes) < 10_000


def test_repeated_id_is_recognised_long_after_its_release() -> None:
    buffer = make(FixedChunkPolicy(1))
    for index in range(3000):
        feed(buffer, index, index + 1)
        buffer.pop_chunk()
    with pytest.raises(ValueError, match="t0"):
        buffer.pre_read_register("t0")
    buffer.put("t0", 0)
    assert buffer.statistics().dropped_repeated == 1


def test_close_gives_everything_back_once() -> None:
    buffer = make(FixedChunkPolicy(2), joiner=tuple)
    feed(buffer, 0, 3)
    buffer.pop_chunk()
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("q", "Q")
    buffer.pre_read_register("out of order")
    buffer.put("out of order", 5)
    buffer.store_uningested_edge("edge")
    assert sorted(map(str, buffer.close())) == ["2", "5", "Q"]
    assert buffer.close() == []
    assert not buffer.has_chunk_ready()
    assert buffer.pop_waiting_edge() is None
    buffer.put("p", "P")
    assert buffer.statistics().dropped_late == 1
    assert buffer.statistics().retained_items == 0
    with pytest.raises(ClosedError, match="closed"):
        buffer.pop_chunk()


def test_statistics_count_what_happened() -> None:
    buffer = make(FixedChunkPolicy(2), joiner=tuple)
    feed(buffer, 0, 3)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.pre_read_register("r")
    buffer.put("r", 4)
    buffer.pop_chunk()
    statistics = buffer.statistics()
    assert (statistics.registered_items, statistics.registered_pieces) == (5, 6)
    assert (statistics.available_items, statistics.delivered_items) == (3, 2)
    assert (statistics.retained_items, statistics.chunks) == (2, 1)
