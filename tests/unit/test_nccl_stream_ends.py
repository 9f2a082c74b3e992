"""What becomes of samples in pieces when leases run out, tensors are kept, ranks leave, or something is misused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nccl_stream.config import StreamConfig
from nccl_stream.errors import (
    CapacityError,
    ClosedError,
    MisuseError,
    PeerLostError,
    PeerTimeoutError,
    SampleNotFoundError,
    SchemaError,
    SlotsHeldError,
    StreamBrokenError,
    StreamLostError,
)
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.testing.clock import FakeClock
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, StreamHarness, cut, make_whole, next_piece, write
from tests.unit.test_nccl_store import MIB, open_pair, target_store
from tests.unit.test_nccl_streams import PairHarness

SHORT = StreamConfig(
    max_sample_bytes=8 * MIB,
    arena_bytes=48 * MIB,
    max_bytes=64 * MIB,
    end="ragged",
    device="cpu",
    heartbeat=0.1,
    death_timeout=60.0,
    lease=0.6,
    held_timeout=0.5,
    max_failures=0,
    verify_checksums=True,
    check_finite=True,
)


@pytest.fixture
def harness() -> Iterator[Any]:
    target, draft, _server = open_pair(SHORT)
    # Leases run out when a test lets time go on, not because the machine was busy.
    draft._side.leases.table._clock = FakeClock()
    yield PairHarness(target, draft)
    draft.close()
    target.close()
    assert target._side.books().balanced()


def eventually(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, f"did not come true: {what}"
        time.sleep(0.01)


def test_reader_keeps_its_lease_while_it_waits_and_loses_it_when_it_sleeps(harness: Any) -> None:
    whole = make_whole(2 * PIECE)
    writer, reader = harness.begin("s")
    table = harness.draft._side.leases.table
    clock = table._clock

    def append_late() -> None:
        for _ in range(4):  # two of these without a renewal would end the lease
            clock.advance(0.6 * SHORT.lease)
            eventually(lambda: table.next_deadline() >= clock.now + SHORT.lease, "the lease is renewed")
        writer.append(cut(whole, 0, PIECE))

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(append_late)
        next_piece(reader).release()
        late.result(60)
    assert table.counts.expired == 0
    clock.advance(1.1 * SHORT.lease)
    eventually(lambda: table.counts.expired == 1, "nobody reads on: the lease runs out")
    with pytest.raises(StreamLostError, match="lease"):
        reader.next(timeout=30.0)
    eventually(lambda: harness.target._side.books().lost == 1, "pieces of it are gone: it is lost")
    with pytest.raises(StreamLostError, match="lease expired"):
        writer.append(cut(whole, PIECE, 2 * PIECE))


def test_tensors_that_keep_the_whole_window_are_a_named_error(harness: Any) -> None:
    whole = make_whole(3 * PIECE)
    writer, reader = harness.begin("s", window=2)
    write(writer, whole, 2 * PIECE, close=False)
    kept = []
    for _ in range(2):
        piece = next_piece(reader)
        kept.append(piece.tensors["logits"])
        piece.release()
    with pytest.raises(SlotsHeldError, match="larger window"):
        reader.next()
    with pytest.raises(PeerTimeoutError, match="0 of 2 released"):
        writer.append(cut(whole, 2 * PIECE, 3 * PIECE), timeout=0.2)
    assert harness.target.statistics().local["paused_s"] > 0.1
    assert torch.equal(kept[0], cut(whole, 0, PIECE)["logits"])
    kept.clear()
    writer.append(cut(whole, 2 * PIECE, 3 * PIECE), timeout=30.0)
    writer.close()
    next_piece(reader).release()
    assert reader.next() is None
    harness.consume(reader)


def test_lost_stream_is_reported_to_its_target_and_may_be_produced_again(harness: Any) -> None:
    lost: list[tuple[str, ...]] = []
    harness.target.on_lost(lost.append)
    whole = make_whole(2 * PIECE)
    writer, reader = harness.begin("s")
    writer.append(cut(whole, 0, PIECE))
    next_piece(reader).release()
    assert reader.close() is False
    harness.draft.queue.fail(harness.leases.pop("s"), reason="no use for it", final=True)
    eventually(lambda: lost == [("s",)], "the callback is told")
    with pytest.raises(StreamLostError, match="no use for it"):
        writer.close()
    again, reader = harness.begin("s")
    write(again, whole, 2 * PIECE)
    assert [(piece.index, piece.release()) for piece in reader] == [(0, None), (1, None)]
    harness.consume(reader)
    eventually(lambda: harness.target._side.books().acked == 1, "the second one is used")
    assert harness.target._side.books().lost == 1


def test_lost_stream_can_be_produced_anew_by_the_callback_itself(harness: Any) -> None:
    """It waits for the reader of what it produces; meanwhile this rank stays a member and serves its drafts."""
    whole = make_whole(3 * PIECE)
    produced, lost = threading.Event(), []

    def produce_anew(ids: tuple[str, ...]) -> None:
        lost.append(ids)
        if len(lost) == 1:
            writer = harness.open(ids[0], window=1)
            harness.target.queue.put(writer.ref)
            write(writer, whole, 3 * PIECE)
            produced.set()

    harness.target.on_lost(produce_anew)
    writer, reader = harness.begin("s")
    writer.append(cut(whole, 0, PIECE))
    next_piece(reader).release()
    reader.close()
    harness.draft.queue.fail(harness.leases.pop("s"), reason="no use for it", final=True)
    lease = harness.draft.queue.acquire(30.0)
    assert lease is not None, "it does not come again"
    reader = harness.draft.store.open_reader(lease.ref)
    for index in range(3):
        piece = reader.next(timeout=30.0)
        assert piece is not None
        assert torch.equal(piece.tensors["input_ids"], cut(whole, index * PIECE, (index + 1) * PIECE)["input_ids"])
        piece.release()
    assert produced.wait(30.0)
    reader.release()
    harness.draft.queue.ack(lease)
    assert lost == [("s",)]
    harness.target._side.raise_if_fatal()


def test_failed_for_good_is_a_dead_letter_whatever_the_budget(harness: Any) -> None:
    ref = harness.send("whole", make_sample())
    harness.draft.queue.fail(harness.leases.pop(ref.sample_id), reason="nobody can read it", final=True)
    eventually(lambda: len(harness.target.dead_letters()) == 1, "it does not come again")
    again = harness.send("whole", make_sample())  # but it may be produced anew
    assert harness.draft.queue.ack_many([harness.leases.pop(again.sample_id)]) == 1


def test_sample_that_breaks_its_schema_is_a_dead_letter_and_not_acked(harness: Any) -> None:
    sample = make_sample()
    del sample["logits"]
    harness.target.queue.put(harness.put("bad", sample))
    with pytest.raises(SchemaError):
        next(FeatureDataLoader(harness.draft.queue, harness.draft.store))
    eventually(lambda: len(harness.target.dead_letters()) == 1, "it is dead")
    (letter,) = harness.target.dead_letters()
    assert "SchemaError" in letter.reason
    books = harness.target._side.books()
    assert (books.acked, books.dead, books.resident) == (0, 1, 0)


def test_target_that_leaves_fails_what_is_still_open(harness: Any) -> None:
    whole = make_whole(2 * PIECE)
    writer, reader = harness.begin("s")
    writer.append(cut(whole, 0, PIECE))
    closing = threading.Thread(target=harness.target.close)
    closing.start()
    next_piece(reader).release()
    with pytest.raises(StreamBrokenError, match="closed before it") as info:
        reader.next(timeout=30.0)
    assert (info.value.num_pieces, info.value.num_positions) == (1, PIECE)
    with pytest.raises(ClosedError):
        writer.append(cut(whole, PIECE, 2 * PIECE))
    reader.close()
    harness.draft.queue.fail(harness.leases.pop("s"))
    closing.join(60)
    assert not closing.is_alive()
    assert harness.target._side.books().lost == 1


def test_append_with_nobody_left_to_read_raises(harness: Any) -> None:
    writer = harness.open("s")
    harness.target.queue.put(writer.ref)
    whole = make_whole(3 * PIECE)
    write(writer, whole, 2 * PIECE, close=False)
    leaving = threading.Timer(0.3, harness.draft.close)
    leaving.start()
    with pytest.raises(PeerLostError, match="no draft rank"):
        writer.append(cut(whole, 2 * PIECE, 3 * PIECE))
    leaving.join(60)
    writer.fail("nobody wants it")
    assert harness.target._side.books().lost == 1


def test_piece_with_nan_is_refused_and_changes_nothing(harness: Any) -> None:
    whole = make_whole(PIECE)
    writer, reader = harness.begin("s")
    bad = {**whole, "aux_hidden_states": torch.full_like(whole["aux_hidden_states"], float("nan"))}
    with pytest.raises(MisuseError, match="NaN"):
        writer.append(bad)
    assert write(writer, whole, PIECE) == 1
    assert torch.equal(next_piece(reader).tensors["aux_hidden_states"], whole["aux_hidden_states"])
    assert reader.next() is None
    harness.consume(reader)


def test_each_side_is_told_what_is_for_the_other(harness: Any) -> None:
    writer = harness.open("s")
    with pytest.raises(MisuseError, match="target ranks"):
        harness.draft.store.open_stream("t", {}, "run", piece_length=1, window=1)
    with pytest.raises(MisuseError, match="draft ranks"):
        harness.target.store.open_reader(writer.ref)
    with pytest.raises(MisuseError, match="draft ranks"):
        harness.target.store.get(writer.ref)
    with pytest.raises(SampleNotFoundError):
        harness.draft.store.open_reader(writer.ref)
    assert harness.target.store.discard(writer.ref)
    with pytest.raises(StreamLostError, match="discarded"):
        writer.append(make_whole(PIECE))


def test_sample_that_failed_before_it_was_queued_leaves_nothing(harness: Any) -> None:
    writer = harness.open("s")
    writer.append(make_whole(PIECE))
    writer.fail("changed my mind")
    assert harness.target.store.health().sample_count == 0
    with pytest.raises(SampleNotFoundError):
        harness.target.queue.put(writer.ref)


def test_writer_that_failed_long_ago_does_not_harm_a_namesake(harness: Any) -> None:
    first = harness.open("s")
    with harness.target._side.cond:
        harness.target._side.streams.fail_open("not needed")
    second = harness.open("s")
    del first
    gc.collect()
    harness.target._side.streams.tick()
    with pytest.raises(MisuseError, match="already"):
        harness.open("s")
    second.append(make_whole(PIECE))


def test_append_to_a_full_window_that_nobody_queues_is_misuse() -> None:
    with target_store() as store:
        writer = StreamHarness(store).open("s", window=1)
        writer._patience = 0.2  # type: ignore[attr-defined]
        whole = make_whole(2 * PIECE)
        writer.append(cut(whole, 0, PIECE))
        with pytest.raises(MisuseError, match="put it there"):
            writer.append(cut(whole, PIECE, 2 * PIECE))
        assert store.discard(writer.ref)
        assert store.health().resident_bytes == 0
        arena = store.memory.pieces_arena
        assert arena is not None
        assert arena.free_bytes == arena.capacity_bytes


def test_window_of_very_small_pieces_is_refused_for_its_headers() -> None:
    with target_store() as store:
        with pytest.raises(CapacityError, match="headers and alignment") as info:
            StreamHarness(store).open("s", piece_length=1, window=10_000)
        assert not info.value.can_wait
        assert store.health().sample_count == 0
