"""Retained pieces that wait in memory from which links cannot send; with the stagers of a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nccl_stream import session
from nccl_stream.errors import CapacityError
from nccl_stream.staging import open_stager
from nccl_stream.stores.staged import SampleMemory
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, check_rest, cut, make_whole, write
from nccl_stream.testing.stream_suite import StreamHarness as LocalHarness
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.link import HostBytes
from tests.unit import test_nccl_streams
from tests.unit.test_nccl_store import MIB, open_pair, target_store

CPU = torch.device("cpu")
NOTHING = {"device": 0, "host": 0}


def make_memory(staging: Any = "pinned", device_bytes: int = 0, device_arena_bytes: int = 0) -> SampleMemory:
    return SampleMemory(
        CPU,
        staging=staging,
        device_arena=Arena(device_arena_bytes) if device_arena_bytes else None,
        host_arena=Arena(72 * MIB),
        device_bytes=device_bytes,
        down=open_stager("cpu"),
        up=open_stager("cpu"),
        chunk_bytes=16 * MIB,
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "make_sample_memory", lambda *_: make_memory(device_arena_bytes=MIB))
        target, draft, server = open_pair(test_nccl_streams.CONFIG)
    yield target, draft, server
    draft.close()
    target.close()


class TestPairThatBounces(test_nccl_streams.TestPair):
    def test_retained_pieces_beyond_the_window_come_from_the_host_byte_exact_and_again(
        self, harness: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory, whole, length = harness.target.store.memory, make_whole(7 * PIECE), 7 * PIECE
        stager, sources = memory._up, []
        copy = stager.copy
        monkeypatch.setattr(
            stager, "copy", lambda to, source, **more: sources.append(source) or copy(to, source, **more)
        )
        writer, reader = harness.begin("s", window=2, retain=True)
        window_bytes = writer.ref.estimated_bytes
        sample = writer._sample
        for start in range(0, length, PIECE):
            writer.append(cut(whole, start, start + PIECE), timeout=60.0)
            reader.next(timeout=60.0).release()
        beyond = [piece for piece in sample.pieces.values() if piece.memory.climbs]
        assert len(beyond) == 4, "the window has room for two, and one that is filled meanwhile"
        assert all(isinstance(message, HostBytes) for message in beyond[0].wire_buffers([beyond[0].memory.buffer]))
        assert memory.used_bytes == {"device": window_bytes, "host": sum(features_of(piece) for piece in beyond)}
        writer.close()
        reader.close()
        reader = harness.consumer.open_reader(harness.give_back(writer.ref))
        check_rest(reader, whole, length)
        assert len(sources) == 2 * len(beyond), "each goes up for each delivery, and no other piece does"
        harness.consume(reader)


def features_of(piece: Any) -> int:
    return sum(spec.nbytes for spec in piece.layout.specs.values())


def append_all(writer: Any, first: int, stop: int) -> None:
    whole = make_whole(stop * PIECE)
    for number in range(first, stop):
        writer.append(cut(whole, number * PIECE, (number + 1) * PIECE))
        writer._sample.stream.freed = number + 1  # as if its draft had read it


def test_pieces_count_where_they_are_until_the_sample_is_over() -> None:
    memory = make_memory("auto", device_bytes=1500, device_arena_bytes=MIB)
    with target_store(memory=memory) as store:
        writer = LocalHarness(store).open("s", window=2, retain=True)
        window_bytes = writer.ref.estimated_bytes
        assert memory.used_bytes == {"device": window_bytes, "host": 0}
        append_all(writer, 0, 8)
        pieces = writer._sample.pieces.values()  # type: ignore[attr-defined]
        outside = sum(features_of(piece) for piece in list(pieces)[3:])
        used = memory.used_bytes
        assert window_bytes < used["device"] <= 1500
        assert used["host"] > 0
        assert sum(used.values()) == window_bytes + outside
        ref = store.put("whole", make_sample(), "run")
        assert store.discard(ref)
        assert memory.used_bytes == used
        assert store.discard(writer.ref)
        assert memory.used_bytes == NOTHING


def test_piece_that_is_not_kept_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory()
    with target_store(memory=memory) as store:
        writer = LocalHarness(store).open("s", window=2, retain=True)
        append_all(writer, 0, 4)
        before = memory.used_bytes
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_reserve", lambda *_: (_ for _ in ()).throw(CapacityError("no memory")))
            with pytest.raises(CapacityError, match="no memory"):
                append_all(writer, 4, 5)
        assert memory.used_bytes == before
        assert store.discard(writer.ref)
        assert memory.used_bytes == NOTHING


def test_window_that_the_preallocated_memory_could_never_hold_gets_memory_of_its_own() -> None:
    memory = make_memory("auto", device_arena_bytes=512)
    with target_store(memory=memory) as store:
        writer = LocalHarness(store).open("s", window=2)
        assert write(writer, make_whole(2 * PIECE), 2 * PIECE) == 2
        assert store.discard(writer.ref)
        assert memory.used_bytes == NOTHING
