"""Receive memory and when it returns."""

from __future__ import annotations

import gc
import queue
import threading
from typing import ClassVar

import pytest
import torch

from nccl_stream.errors import CapacityError, ClosedError, MisuseError
from nccl_stream.transport.arena import POISON_BYTE, Arena
from nccl_stream.transport.layout import ALIGN_BYTES


def test_reserve_rounds_up_aligns_and_counts():
    arena = Arena(4096)
    slots = [arena.reserve(n, f"s{n}") for n in (1, 256, 257, 0)]
    assert [slot.nbytes for slot in slots] == [256, 256, 512, 256]
    assert all(slot.buffer.data_ptr() % 256 == 0 for slot in slots)
    assert arena.free_bytes == 4096 - 1280
    assert arena.largest_free_bytes == 2816


def test_reserve_no_room_now_is_none_and_never_room_is_an_error():
    arena = Arena(1024)
    held = arena.reserve(768, "a")
    assert arena.reserve(512, "b") is None
    with pytest.raises(CapacityError, match="2048") as caught:
        arena.reserve(2000, "c")
    assert not caught.value.can_wait
    held.settle()
    assert arena.reserve(1024, "d") is not None


def test_best_fit_takes_the_smallest_hole_then_the_lowest():
    arena = Arena(8 * 256)
    slots = [arena.reserve(256, str(i)) for i in range(8)]
    for i in (1, 2, 4, 6):
        slots[i].settle()
    hole = arena.reserve(256, "x")
    assert hole.buffer.data_ptr() == slots[4].buffer.data_ptr()
    assert arena.reserve(512, "y").buffer.data_ptr() == slots[1].buffer.data_ptr()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_merge_in_any_order(order):
    arena = Arena(768)
    slots = [arena.reserve(256, str(i)) for i in range(3)]
    for i in order:
        slots[i].settle()
    assert arena.largest_free_bytes == 768


def releases():
    def views(slot):
        tensor = slot.export()
        return tensor.__class__ and (lambda box=[tensor]: box.clear())

    return {
        "settle": lambda slot: slot.settle,
        "handle": lambda slot: (slot.hold(), slot.drop)[1],
        "second handle": lambda slot: (slot.hold(), slot.drop)[1],
        "transfer": lambda slot: (slot.begin_transfer(), slot.end_transfer)[1],
        "view": views,
    }


@pytest.mark.parametrize("last", list(releases()))
def test_slot_returns_only_when_the_last_holder_lets_go(last):
    arena = Arena(256)
    slot = arena.reserve(256, "s")
    lets = {name: take(slot) for name, take in releases().items()}
    for name, let_go in lets.items():
        if name != last:
            let_go()
            assert arena.free_bytes == 0, name
            assert not slot.is_returned
    lets[last]()
    assert arena.free_bytes == 256
    assert slot.is_returned


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t[16:32].view(torch.float32),
        lambda t: t.view(torch.int64).view(2, -1)[1],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy())[3:5],
        lambda t: (t.view(torch.float32).requires_grad_() * 2).grad_fn,
        lambda t: torch.from_dlpack(t),
    ],
    ids=["slice", "view", "numpy", "storage", "memoryview", "autograd", "dlpack"],
)
def test_slot_stays_while_anything_derived_from_an_export_lives(derive):
    arena = Arena(256, poison=True)
    slot = arena.reserve(256, "s")
    tensor = slot.export()
    tensor.zero_()
    derived = derive(tensor)
    slot.settle()
    del tensor
    gc.collect()
    assert arena.reserve(256, "next") is None
    assert arena.holders() == [("s", 256, "1 live export")]
    del derived
    gc.collect()
    assert arena.reserve(256, "next") is not None


def test_export_shares_memory_and_remembers():
    arena = Arena(512)
    slot = arena.reserve(300, "s")
    assert not slot.was_exported
    tensor = slot.export()
    assert slot.was_exported
    slot.buffer[7] = 99
    assert tensor[7] == 99
    assert tensor.numel() == 512


def test_held_tensor_is_never_overwritten_while_slots_are_reused():
    arena = Arena(4 * 1024, poison=True)
    first = arena.reserve(1024, "held")
    held = first.export().view(torch.int64)
    held.copy_(torch.arange(128))
    first.settle()
    for i in range(20):
        slot = arena.reserve(1024, str(i))
        slot.buffer.fill_(i)
        slot.settle()
    assert torch.equal(held, torch.arange(128))


def test_poison_overwrites_a_returned_slot():
    arena = Arena(256, poison=True)
    slot = arena.reserve(256, "s")
    buffer = slot.buffer
    slot.settle()
    assert bool((buffer == POISON_BYTE).all())


def test_holders_name_everything_that_keeps_a_slot():
    arena = Arena(1024)
    slot = arena.reserve(256, "sample 7")
    slot.hold()
    slot.hold()
    slot.begin_transfer()
    tensor = slot.export()
    assert arena.holders() == [("sample 7", 256, "delivery not settled, 2 handles, 1 live export, 1 transfer")]
    del tensor


@pytest.mark.parametrize("operation", ["hold", "begin_transfer", "export"])
def test_use_after_return_is_refused(operation):
    slot = Arena(256).reserve(1, "s")
    slot.settle()
    with pytest.raises(MisuseError, match=operation):
        getattr(slot, operation)()


@pytest.mark.parametrize("operation", ["drop", "end_transfer"])
def test_more_releases_than_takes_are_refused(operation):
    arena = Arena(256)
    slot = arena.reserve(1, "s")
    with pytest.raises(MisuseError):
        getattr(slot, operation)()
    assert arena.free_bytes == 0


def test_settle_twice_returns_once():
    arena = Arena(512)
    slot = arena.reserve(256, "s")
    slot.settle()
    other = arena.reserve(512, "t")
    slot.settle()
    assert arena.free_bytes == 0
    other.settle()
    assert arena.free_bytes == 512


def test_on_free_wakes_a_waiter_from_the_finalizer_alone():
    freed = queue.SimpleQueue()
    arena = Arena(256, on_free=lambda: freed.put(None))
    slot = arena.reserve(256, "s")
    tensor = slot.export()
    slot.settle()
    assert freed.empty()
    got = []

    def waiter():
        freed.get(timeout=20)
        got.append(arena.reserve(256, "next"))

    thread = threading.Thread(target=waiter)
    thread.start()
    del tensor
    thread.join(20)
    assert got[0] is not None


def test_finalizer_inside_the_arenas_own_lock_does_not_deadlock():
    arena = Arena(512)
    slot = arena.reserve(256, "s")
    tensor = slot.export()
    slot.settle()
    with arena._lock:
        del tensor
    assert arena.free_bytes == 512


def test_close_refuses_reservations_and_leaves_views_alone():
    arena = Arena(256)
    slot = arena.reserve(256, "s")
    tensor = slot.export()
    tensor.fill_(3)
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.reserve(1, "t")
    del arena, slot
    gc.collect()
    assert bool((tensor == 3).all())


@pytest.mark.parametrize("capacity", [0, 255, -1])
def test_arena_without_room_for_a_slot_is_refused(capacity):
    with pytest.raises(MisuseError):
        Arena(capacity)


def test_threads_reserving_and_releasing_never_overlap():
    arena = Arena(64 * 256)
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            nbytes = int(torch.randint(1, 8 * 256, (1,), generator=generator))
            slot = arena.reserve(nbytes, str(seed))
            if slot is None:
                continue
            view = slot.export()
            view.fill_(seed)
            slot.settle()
            if not bool((view == seed).all()):
                errors.append(seed)
            del view

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert arena.free_bytes == arena.largest_free_bytes == arena.capacity_bytes


class FakeEvent:
    """Records which stream it was put on and whether it has happened."""

    log: ClassVar[list] = []

    def __init__(self):
        self.stream = None
        self.happened = False

    def record(self, stream):
        self.stream = stream
        FakeEvent.log.append(self)

    def query(self):
        return self.happened


class FakeStream:
    def __init__(self, name):
        self.name = name
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)


@pytest.fixture
def device_arena(monkeypatch):
    FakeEvent.log = []
    arena = Arena(1024)
    monkeypatch.setattr(arena, "_new_event", FakeEvent)
    return arena


def test_next_receive_waits_for_every_stream_that_used_the_memory(device_arena):
    consumer, other, link = FakeStream("consumer"), FakeStream("other"), FakeStream("link")
    slot = device_arena.reserve(1024, "s")
    for stream in (consumer, other, consumer):
        slot.record_release(stream)
    before = len(FakeEvent.log)
    slot.settle()
    recorded = FakeEvent.log[before:]
    assert {event.stream for event in recorded} == {consumer, other}
    low, high = device_arena.reserve(256, "low"), device_arena.reserve(512, "high")
    for part in (low, high):
        link.waits.clear()
        part.wait_release(link)
        assert link.waits == recorded, "each part of the memory waits for its former owner"


def test_release_event_covers_work_queued_until_the_last_view_died(device_arena):
    consumer = FakeStream("consumer")
    slot = device_arena.reserve(256, "s")
    slot.record_release(consumer)
    view = slot.export()
    slot.settle()
    assert FakeEvent.log == []
    del view
    assert device_arena.free_bytes == 1024
    assert [event.stream for event in FakeEvent.log] == [consumer]


def test_memory_that_nobody_used_and_events_that_happened_are_not_waited_for(device_arena):
    consumer, link = FakeStream("consumer"), FakeStream("link")
    first, second = device_arena.reserve(256, "a"), device_arena.reserve(256, "b")
    first.record_release(consumer)
    second.record_release(consumer)
    first.settle()
    second.settle()
    FakeEvent.log[0].happened = True
    device_arena.reserve(256, "a2").wait_release(link)
    assert link.waits == []
    device_arena.reserve(256, "b2").wait_release(link)
    assert link.waits == [FakeEvent.log[1]]
    device_arena.reserve(512, "c").wait_release(link)
    assert link.waits == [FakeEvent.log[1]]


def test_streams_are_no_ops_on_the_cpu():
    slot = Arena(256).reserve(1, "s")
    for method in (slot.record_release, slot.wait_release):
        method(None)
    slot.settle()


def test_arena_over_given_memory_cuts_that_and_nothing_else():
    outer = Arena(16 * ALIGN_BYTES)
    slot = outer.reserve(8 * ALIGN_BYTES, "window")
    inner = Arena(8 * ALIGN_BYTES, memory=slot.buffer)
    pieces = [inner.reserve(2 * ALIGN_BYTES, str(number)) for number in range(4)]
    assert inner.reserve(1, "more") is None
    assert [piece.buffer.data_ptr() - slot.buffer.data_ptr() for piece in pieces] == [
        number * 2 * ALIGN_BYTES for number in range(4)
    ]
    slot.buffer.fill_(7)
    view = pieces[1].export()
    pieces[1].settle()
    assert inner.free_bytes == 0, "a view is alive"
    assert view.eq(7).all()
    del view
    assert inner.free_bytes == 2 * ALIGN_BYTES
    assert outer.free_bytes == 8 * ALIGN_BYTES


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(4 * ALIGN_BYTES, dtype=torch.int8),
        torch.zeros(2, 2 * ALIGN_BYTES, dtype=torch.uint8),
        torch.zeros(8 * ALIGN_BYTES, dtype=torch.uint8)[::2],
        torch.zeros(4 * ALIGN_BYTES - 1, dtype=torch.uint8),
        torch.zeros(4 * ALIGN_BYTES, dtype=torch.uint8, device="meta"),
    ],
    ids=["dtype", "shape", "strides", "small", "device"],
)
def test_arena_over_memory_that_will_not_do_is_refused(memory):
    with pytest.raises(MisuseError):
        Arena(4 * ALIGN_BYTES, memory=memory)


def test_arena_over_memory_that_is_not_aligned_is_refused():
    slot = Arena(8 * ALIGN_BYTES).reserve(6 * ALIGN_BYTES, "window")
    with pytest.raises(MisuseError, match="aligned"):
        Arena(4 * ALIGN_BYTES, memory=slot.buffer[16:])
