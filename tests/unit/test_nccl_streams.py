"""Streamed samples of the NCCL store: the contract, over a whole stream in one process and on a target alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nccl_stream.config import StreamConfig
from nccl_stream.refs import SampleRef
from nccl_stream.stores.owned_pieces import OwnedPieceWriter
from nccl_stream.streamed.sample import StreamWriter
from nccl_stream.testing import stream_suite
from nccl_stream.testing.stream_suite import PIECE, SampleStreamConformance
from tests.unit.test_nccl_store import MIB, StreamHarness, open_pair, target_store

CONFIG = StreamConfig(
    max_sample_bytes=8 * MIB,
    arena_bytes=48 * MIB,
    max_bytes=64 * MIB,
    end="ragged",
    device="cpu",
    heartbeat=0.2,
    death_timeout=5.0,
)


class PairHarness(StreamHarness, stream_suite.StreamHarness):
    """Writers on the target rank, readers on the draft rank."""

    def __init__(self, target: Any, draft: Any) -> None:
        super().__init__(target, draft)
        self.opened: list[SampleRef] = []

    def open(self, sample_id: str, **kwargs: Any) -> StreamWriter:
        writer = super().open(sample_id, **kwargs)
        self.opened.append(writer.ref)
        return writer

    def give_back(self, ref: SampleRef) -> SampleRef:
        self.draft.queue.fail(self.leases.pop(ref.sample_id), reason="not usable")
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if ref.sample_id not in self.target._side.resident_ids():
                return ref
            lease = self.draft.queue.acquire(0.05)
            if lease is not None:
                self.leases[lease.ref.sample_id] = lease
                return lease.ref
        raise AssertionError("it neither comes again nor is it lost")


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    target, draft, server = open_pair(CONFIG)
    yield target, draft, server
    draft.close()
    target.close()


class TestPair(SampleStreamConformance):
    @pytest.fixture
    def harness(self, pair: Any) -> Iterator[StreamHarness]:
        target, draft, _ = pair
        harness = PairHarness(target, draft)
        yield harness
        for lease in list(harness.leases.values()):
            draft.queue.ack(lease)
        with target._side.cond:
            target._side.streams.fail_open("the test is over")
        for sample in harness.opened:
            target.store.discard(sample)  # what was not put on the queue
        deadline = time.monotonic() + 20.0
        while target._side.resident_ids() or draft._arena.free_bytes != draft._arena.capacity_bytes:
            assert time.monotonic() < deadline, (target._side.resident_ids(), draft._arena.holders())
            time.sleep(0.01)
        assert target._side.books().balanced()


class TestTargetAlone:
    @pytest.fixture
    def capped_store(self) -> Callable[..., Any]:
        return target_store

    def test_caps_count_the_window_when_the_sample_is_opened(self, capped_store: Callable[..., Any]) -> None:
        SampleStreamConformance().test_caps_count_the_window_when_the_sample_is_opened(capped_store)

    def test_appends_that_fail_take_room_for_one_piece_at_most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = stream_suite.make_whole(6 * PIECE)
        with target_store() as store:
            writer = stream_suite.StreamHarness(store).open("s", window=2, retain=True)
            sample = writer._sample  # type: ignore[attr-defined]

            def append(number: int) -> None:
                writer.append(stream_suite.cut(whole, number * PIECE, (number + 1) * PIECE))
                sample.stream.freed = number + 1  # as if its draft had read it

            def refuse(*args: Any) -> None:
                raise MemoryError("no memory")

            for number in range(4):
                append(number)
            before = store.health().resident_bytes
            taken = set()
            with monkeypatch.context() as patch:
                patch.setattr(OwnedPieceWriter, "_pack", refuse)
                for _ in range(3):
                    with pytest.raises(MemoryError, match="no memory"):
                        append(4)
                    taken.add(store.health().resident_bytes)
            assert len(taken) == 1
            append(4)
            assert {store.health().resident_bytes} == taken
            append(5)
            assert store.health().resident_bytes == before + 2 * (taken.pop() - before) > before
