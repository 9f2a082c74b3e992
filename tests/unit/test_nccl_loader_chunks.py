"""The loader over streamed samples that travel: a target and a draft rank of one stream, both in this process."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from nccl_stream.config import StreamConfig
from nccl_stream.errors import StreamBrokenError, StreamLostError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.testing.clock import FakeClock
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, SPECS, cut, make_whole
from tests.unit.chunk_producers import POLICY, WAIT_S, Producers
from tests.unit.test_nccl_store import MIB, open_pair

CONFIG = StreamConfig(
    max_sample_bytes=MIB,
    arena_bytes=4 * MIB,
    max_bytes=4 * MIB,
    end="ragged",
    device="cpu",
    heartbeat=0.2,
    death_timeout=10.0,
    max_failures=1,
)


class World(Producers):
    def __init__(self, config: StreamConfig = CONFIG) -> None:
        self.target, self.draft, self.server = open_pair(config)
        super().__init__(self.target.store, self.target.queue)
        self.lost: list[str] = []
        self.target.on_lost(self.lost.extend)

    def loader(self, **kwargs):
        return FeatureDataLoader(self.draft.queue, self.draft.store, **{"chunk_policy": POLICY, **kwargs})

    def books(self, **expected):
        """Wait until the target's books say so, and everything is given back."""
        found = {}
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            statistics = self.target.statistics()
            found = {name: statistics[name] for name in ("put", "acked", "dropped", "dead", "lost", "resident")}
            if found == {**dict.fromkeys(found, 0), **expected}:
                break
            time.sleep(0.02)
        assert found == {**dict.fromkeys(found, 0), **expected}
        while self.target.store.health().resident_bytes:
            assert time.monotonic() < deadline, self.target._side.resident_ids()
            time.sleep(0.02)
        arena = self.draft._arena
        while arena.free_bytes != arena.capacity_bytes:
            assert time.monotonic() < deadline, arena.holders()
            time.sleep(0.02)

    def close(self):
        self.draft.close()
        self.target.close()
        self.join()


@pytest.fixture
def make_world():
    worlds = []

    def make(config=CONFIG):
        worlds.append(World(config))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world):
    return make_world()


def check(batch, whole):
    place = batch.place
    expected = cut(whole, place.start_position, place.start_position + place.num_positions)
    for name, tensor in batch.items():
        assert torch.equal(tensor, expected[name]), name


def test_chunks_come_through_and_samples_are_acked_after_their_last(make_world):
    world = make_world(replace(CONFIG, lease=0.5))
    table, clock = world.draft._side.leases.table, FakeClock()
    table._clock = clock
    lengths = {"a": 5 * PIECE + 1, "b": 1, "c": 12 * PIECE}
    # The first sample takes longer than a lease lasts.
    wholes = {"a": world.produce("a", lengths["a"], before=world.pass_time(table, clock))}
    wholes |= {name: world.produce(name, lengths[name]) for name in ("b", "c")}
    world.target.queue.put(world.target.store.put("whole", make_sample(), "run"))
    world.target.queue.close()
    counted = dict.fromkeys(wholes, 0)
    for batch in world.loader():
        (sample_id,) = batch.sample_ids
        if sample_id == "whole":
            assert batch.is_final
            continue
        check(batch, wholes[sample_id])
        assert batch.place.start_position + batch.place.context_positions == counted[sample_id]
        counted[sample_id] += batch.place.num_positions - batch.place.context_positions
    assert counted == lengths
    del batch
    world.books(put=4, acked=4)
    assert world.target.statistics()["redelivered"] == 0


@pytest.mark.parametrize("end", ["pad", "drop"])
def test_rounds_count_samples_and_end_with_final_chunks(make_world, end):
    world = make_world(replace(CONFIG, end=end, accumulation=2, arena_bytes=16 * MIB))
    for number in range(3):
        world.produce(f"s{number}", 4 * PIECE)
    world.target.queue.close()
    loader = world.loader(ack="step")
    finals, seen = 0, []
    for batch in loader:
        finals += batch.is_final
        assert loader.at_round_end == (batch.is_final and finals % 2 == 0)
        seen.append((batch.sample_ids, batch.start_offset, bool(batch.loss_mask.any())))
        if loader.at_round_end:
            loader.step()
    del batch
    two_chunks = [(offset, True) for offset in (0, 1)]
    assert [place for _, *place in seen[:4]] == [list(place) for place in two_chunks * 2]
    if end == "pad":
        # The third sample, and a batch of no effect that is as long as a piece.
        assert [(offset, effect) for _, offset, effect in seen[4:]] == [*two_chunks, (0, False)]
        assert seen[-1][0] == ()
        world.books(put=3, acked=3)
    else:
        assert len(seen) == 4
        world.books(put=3, acked=2, dropped=1)


def test_samples_without_a_policy_come_whole(world):
    whole = world.produce("a", 9 * PIECE)
    world.target.queue.close()
    (batch,) = world.loader(chunk_policy=None)
    assert torch.equal(batch.logits, whole["logits"])
    world.books(put=1, acked=1)


def test_loop_that_stops_early_loses_the_sample_and_returns_its_memory(world):
    world.produce("a", 30 * PIECE)
    with world.loader() as loader:
        for batch in loader:
            if batch.start_offset:
                break
    del batch
    world.books(put=1, lost=1)
    world.close()  # every report has been made by then
    assert world.lost == ["a"]
    world.threads[0].join(WAIT_S)
    assert [type(error) for error in world.errors] == [StreamLostError]


def test_loader_that_is_dropped_loses_the_sample_and_returns_its_memory(world):
    clock = world.draft._side.leases.table._clock = FakeClock()
    world.produce("a", 30 * PIECE)
    loader = world.loader()
    next(loader)
    next(loader)
    del loader
    gc.collect()
    clock.advance(1.1 * CONFIG.lease)
    world.threads[0].join(WAIT_S)
    assert [type(error) for error in world.errors] == [StreamLostError]
    world.books(put=1, lost=1)


@pytest.mark.parametrize("fails", [0, 1])
def test_retained_sample_of_a_failed_step_comes_anew(world, fails):
    whole = world.produce("a", 9 * PIECE, retain=True)
    world.target.queue.close()
    iterator = iter(world.loader(collate_fn=Failing(fails, at=3)))
    with suppress(ArithmeticError):
        list(iterator)
    if fails:
        offsets = []
        for batch in iterator:
            check(batch, whole)
            offsets.append(batch.start_offset)
        assert offsets == [0, 1, 3, 5, 7]
        del batch
    world.books(put=1, acked=1)
    assert not world.errors


class Failing:
    """A collate function that fails so many times, at its n-th batch."""

    def __init__(self, times, at):
        self.times, self.at, self.count = times, at, 0

    def __call__(self, batches):
        self.count += 1
        if self.count == self.at and self.times:
            self.times -= 1
            raise ArithmeticError("not this one")
        return batches[0]


@pytest.mark.parametrize("retain", [False, True])
def test_producer_that_fails_in_mid_sample_is_an_error_and_the_sample_does_not_come_again(world, retain):
    world.produce("bad", 9 * PIECE, fail_after=5, retain=retain)
    loader = world.loader()
    with pytest.raises(StreamBrokenError, match="prefill went wrong") as info:
        list(loader)
    assert (info.value.sample_id, info.value.num_pieces) == ("bad", 5)
    good = world.produce("good", 2 * PIECE)
    world.target.queue.close()
    (batch,) = loader
    check(batch, good)
    del batch
    list(loader)
    world.books(put=2, acked=1, lost=1)


def test_close_from_another_thread_ends_the_wait_for_a_piece(world):
    writer = world.target.store.open_stream("a", SPECS, "run", piece_length=PIECE, window=4)
    world.target.queue.put(writer.ref)
    writer.append(make_whole(PIECE))
    loader = world.loader()
    found = []
    thread = threading.Thread(target=lambda: found.extend(loader))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    loader.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert found == []
    writer.fail("over")
