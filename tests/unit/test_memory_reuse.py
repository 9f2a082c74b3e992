"""Memory of a target rank goes on to its next owner behind what streams still read of it; with imagined streams."""

from __future__ import annotations

import pytest
import torch

from nccl_stream.refs import FeatureSpec
from nccl_stream.stores.staged import SampleMemory
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, StreamHarness, make_whole
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.layout import SlotLayout
from tests.unit.test_arena import FakeEvent, FakeStream
from tests.unit.test_nccl_store import target_store

CPU = torch.device("cpu")


@pytest.fixture
def arena(monkeypatch):
    FakeEvent.log = []
    arena = Arena(1 << 20)
    monkeypatch.setattr(arena, "_new_event", FakeEvent)
    return arena


@pytest.fixture
def stream():
    return FakeStream("current")


@pytest.fixture
def store(arena, stream):
    memory = SampleMemory(CPU, device_arena=arena, current_stream=lambda: stream)
    with target_store(memory=memory) as store:
        yield store


def test_next_sample_is_written_behind_the_reads_of_the_one_that_was_there(store, arena, stream):
    tensors = make_sample()
    found, handle = store.get(store.put("first", tensors, "run"))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert FakeEvent.log == []
    store.release(handle)
    assert arena.free_bytes == arena.capacity_bytes
    assert [event.stream for event in FakeEvent.log] == [stream], "nothing tells when the copies are over"
    store.put("second", tensors, "run")
    assert stream.waits == FakeEvent.log


def test_sample_that_nobody_read_is_not_waited_for(store, stream):
    tensors = make_sample()
    assert store.discard(store.put("first", tensors, "run"))
    store.put("second", tensors, "run")
    assert FakeEvent.log == stream.waits == []


def test_pieces_are_written_behind_the_reads_of_the_sample_that_was_there(store, stream):
    layout = SlotLayout.from_specs({"x": FeatureSpec((100,), torch.int64)}, chunk_bytes=1 << 20)
    owned = store.memory.store("first", layout, {"x": torch.arange(100)}, donate=False)
    store.memory.read(owned)
    store.memory.free(owned)
    writer = StreamHarness(store).open("second", window=2)
    writer.append(make_whole(PIECE))
    sample = writer._sample
    memory = sample.take(1, 1)
    sample.wait_release(memory, stream)
    assert stream.waits == FakeEvent.log != []
    memory.settle()
