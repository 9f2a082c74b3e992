"""Chunks of a streamed sample, and where they lie."""

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy
from nccl_stream.errors import MisuseError, PeerTimeoutError, StreamBrokenError
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.streamed import chunks as sample_chunks
from nccl_stream.streamed.chunks import read_chunks
from nccl_stream.streamed.place import WHOLE, ChunkPlace
from nccl_stream.testing.stream_suite import PIECE, SPECS, StreamHarness, cut, make_whole, write


@pytest.fixture
def harness():
    with LocalFeatureStore() as store:
        yield StreamHarness(store)


def produce(writer, whole, length):
    thread = threading.Thread(target=write, args=(writer, whole, length), daemon=True)
    thread.start()
    return thread


def check_chunk(chunk, whole):
    place = chunk.place
    expected = cut(whole, place.start_position, place.start_position + place.num_positions)
    expected["constant"] = whole["constant"]
    assert list(chunk.tensors) == list(SPECS)
    for name, tensor in expected.items():
        assert torch.equal(chunk.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("policy", "window", "places"),
    [
        # (first piece, pieces, of which context, first position, positions, of which context)
        (FixedChunkPolicy(1), 2, [(0, 1, 0, 0, 4, 0), (1, 1, 0, 4, 4, 0), (2, 1, 0, 8, 4, 0), (3, 1, 0, 12, 2, 0)]),
        (FixedChunkPolicy(2), 3, [(0, 2, 0, 0, 8, 0), (2, 2, 0, 8, 6, 0)]),
        (FixedChunkPolicy(9), 5, [(0, 4, 0, 0, 14, 0)]),
        (LeftContextChunkPolicy(2, 1), 4, [(0, 2, 0, 0, 8, 0), (1, 3, 1, 4, 10, 4)]),
        (LeftContextChunkPolicy(2, 9), 5, [(0, 2, 0, 0, 8, 0), (0, 4, 2, 0, 14, 8)]),
        (SlidingWindowChunkPolicy(3, 2), 4, [(0, 3, 0, 0, 12, 0), (2, 2, 1, 8, 6, 4)]),
    ],
)  # fmt: skip
def test_chunks_lie_where_the_policy_puts_them(harness, policy, window, places):
    whole = make_whole(14)
    writer, reader = harness.begin("s", window=window)
    thread = produce(writer, whole, 14)
    found = []
    for index, chunk in enumerate(read_chunks(reader, policy, timeout=60.0)):
        check_chunk(chunk, whole)
        place = chunk.place
        assert place.chunk_index == index
        assert place.is_final == (index == len(places) - 1)
        found.append(
            (
                place.start_offset,
                place.num_items,
                place.context_items,
                place.start_position,
                place.num_positions,
                place.context_positions,
            )
        )
    assert found == places
    thread.join(60)
    reader.release()
    harness.assert_empty()


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5, 6])
def test_last_chunk_is_final_and_not_empty_even_if_the_end_comes_late(harness, pieces):
    whole = make_whole(pieces * PIECE)
    writer, reader = harness.begin("s", window=8)
    write(writer, whole, pieces * PIECE, close=False)
    chunks = read_chunks(reader, FixedChunkPolicy(2), timeout=0.02)
    found = [next(chunks) for _ in range((pieces - 1) // 2)]
    with pytest.raises(PeerTimeoutError):
        next(chunks)
    writer.close()
    found += chunks  # goes on after the timeout
    assert [chunk.place.is_final for chunk in found] == [False] * ((pieces - 1) // 2) + [True]
    assert sum(chunk.place.num_positions for chunk in found) == pieces * PIECE
    assert list(chunks) == []


def test_window_that_cannot_hold_a_chunk_and_one_more_piece_is_refused_at_once(harness):
    for policy in (FixedChunkPolicy(2), LeftContextChunkPolicy(1, 1), SlidingWindowChunkPolicy(2, 1)):
        writer, reader = harness.begin(f"s-{policy}", window=2)
        write(writer, make_whole(2 * PIECE), 2 * PIECE, close=False)
        with pytest.raises(MisuseError, match="window of 2 pieces"):
            list(read_chunks(reader, policy))
        reader.close()


def test_policy_that_never_ends_is_refused(harness):
    _, reader = harness.begin("s")
    with pytest.raises(MisuseError, match="never ends"):
        read_chunks(reader, FixedChunkPolicy(1, continue_after_done=True))


def test_policy_of_ones_own(harness):
    @dataclass(frozen=True)
    class Growing(ChunkPolicy):
        def next_span(self, delivered, chunk_index):
            return delivered, delivered + 2**chunk_index

    whole = make_whole(40)
    writer, reader = harness.begin("s", window=8)
    thread = produce(writer, whole, 40)
    chunks = list(read_chunks(reader, Growing(), timeout=60.0))
    thread.join(60)
    assert [chunk.place.num_items for chunk in chunks] == [1, 2, 4, 3]


def test_failure_comes_after_the_chunks_that_are_whole(harness):
    whole = make_whole(6 * PIECE)
    writer, reader = harness.begin("s", window=8)
    write(writer, whole, 5 * PIECE, close=False)
    writer.fail("killed")
    chunks = read_chunks(reader, FixedChunkPolicy(2), timeout=60.0)
    assert [next(chunks).place.start_offset for _ in range(2)] == [0, 2]
    for _ in range(2):
        with pytest.raises(StreamBrokenError, match="killed") as info:
            next(chunks)
        assert info.value.num_pieces == 5


def test_chunk_for_which_there_was_no_memory_comes_when_it_is_asked_for_again(harness, monkeypatch):
    whole = make_whole(12)
    writer, reader = harness.begin("s", window=4)
    write(writer, whole, 12)
    chunks = read_chunks(reader, FixedChunkPolicy(1), timeout=0.0)

    def refuse(tensors, dim):
        raise MemoryError("not now")

    found = []
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(sample_chunks, "join_tensors", refuse)
            with pytest.raises(MemoryError):
                next(chunks)
        found.append(next(chunks))
        check_chunk(found[-1], whole)
    assert [chunk.place.start_position for chunk in found] == [0, 4, 8]
    assert next(chunks, None) is None


def test_pieces_go_back_before_their_last_chunk_is_used(harness):
    whole = make_whole(6 * PIECE)
    writer, reader = harness.begin("s", window=4)
    thread = produce(writer, whole, 6 * PIECE)
    kept = []
    for chunk in read_chunks(reader, LeftContextChunkPolicy(2, 1), timeout=60.0):
        kept.append(chunk)  # whoever keeps chunks keeps no memory of the store's
    thread.join(60)
    assert not thread.is_alive()
    for chunk in kept:
        check_chunk(chunk, whole)
    refs = [weakref.ref(tensor) for chunk in kept for name, tensor in chunk.tensors.items() if name != "constant"]
    del kept, chunk
    gc.collect()
    assert not any(ref() is not None for ref in refs)


# -- which positions count --


def test_supervised_is_the_new_part_without_lookahead():
    place = ChunkPlace(start_position=8, num_positions=10, context_positions=4, is_final=False)
    assert place.supervised() == slice(4, 10)


def test_supervised_counts_late_what_needs_a_look_ahead():
    place = ChunkPlace(start_position=8, num_positions=10, context_positions=4, is_final=False)
    assert place.supervised(2) == slice(2, 8)
    final = ChunkPlace(start_position=8, num_positions=10, context_positions=4, is_final=True)
    assert final.supervised(2) == slice(2, 10)


def test_supervised_without_enough_context_is_refused():
    place = ChunkPlace(start_position=8, num_positions=10, context_positions=1, is_final=False)
    with pytest.raises(MisuseError, match="left context"):
        place.supervised(2)
    with pytest.raises(MisuseError):
        place.supervised(-1)


def test_supervised_of_a_whole_sample_is_all():
    assert WHOLE.supervised(3) == slice(0, None)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 13, 16])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_supervised_counts_every_position_once(harness, lookahead, length, chunk):
    policy = LeftContextChunkPolicy(chunk, left_context=2)
    writer, reader = harness.begin("s", window=8)
    thread = produce(writer, make_whole(length), length)
    counted = []
    for part in read_chunks(reader, policy, timeout=60.0):
        own = range(part.place.num_positions)[part.place.supervised(lookahead)]
        counted += [part.place.start_position + position for position in own]
        # What it looks ahead to is there, except at the end of the sample.
        assert part.place.is_final or all(position + lookahead < part.place.num_positions for position in own)
    thread.join(60)
    assert counted == list(range(length))
