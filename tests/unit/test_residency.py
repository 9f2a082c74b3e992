import threading
import time

import pytest

from nccl_stream.errors import CapacityError, ClosedError, MisuseError
from nccl_stream.store import StoreHandle
from nccl_stream.stores.residency import Residency
from tests.unit.helpers import make_ref


def make(**kwargs):
    defaults = {"max_samples": 3, "max_bytes": 100, "high_watermark_bytes": 80, "low_watermark_bytes": 20}
    return Residency(**{**defaults, **kwargs})


def add(residency, sample_id, nbytes, payload=None):
    with residency.reserve(sample_id, nbytes) as reservation:
        reservation.commit(payload or f"payload of {sample_id}")


def handle(sample_id):
    return StoreHandle(store=None, sample_id=sample_id, ref=make_ref(sample_id))


def test_reservation_counts_at_once_and_shows_after_commit():
    residency = make()
    reservation = residency.reserve("a", 60)
    assert residency.health().resident_bytes == 60
    assert residency.health().sample_count == 1
    with pytest.raises(KeyError):
        residency.payload("a")
    with pytest.raises(CapacityError):
        residency.reserve("b", 60)
    with pytest.raises(MisuseError, match="already present"):
        residency.reserve("a", 1)
    reservation.commit("p")
    assert residency.payload("a") == "p"


def test_reservation_left_uncommitted_is_rolled_back_and_a_committed_one_is_not():
    residency = make()
    with pytest.raises(OSError, match="copy"), residency.reserve("a", 60):
        raise OSError("copy")
    assert residency.health().resident_bytes == 0
    with residency.reserve("a", 60) as reservation:
        reservation.commit("p")
    assert residency.payload("a") == "p"
    with pytest.raises(MisuseError):
        reservation.commit("q")


def test_reservation_rolled_back_late_does_not_touch_its_successor():
    residency = make()
    stale = residency.reserve("a", 10)
    stale.rollback()
    add(residency, "a", 30)
    stale.rollback()
    with pytest.raises(MisuseError):
        stale.commit("p")
    assert residency.health().resident_bytes == 30


def test_uncommitted_sample_cannot_be_discarded():
    residency = make()
    reservation = residency.reserve("a", 10)
    assert not residency.discard("a")
    assert not residency.contains("a")
    reservation.commit("p")
    assert residency.contains("a")
    assert residency.discard("a")
    assert not residency.contains("a")


def test_on_free_gets_every_payload_once_and_outside_the_lock():
    freed = []

    def on_free(payload):
        residency.health()  # would deadlock under the lock
        freed.append(payload)

    residency = make(on_free=on_free)
    for name in "abc":
        add(residency, name, 10)
    held = handle("a")
    assert residency.attach(held) == "payload of a"
    assert residency.release(held)
    assert residency.discard("b")
    assert freed == ["payload of a", "payload of b"]
    residency.close()
    residency.close()
    assert freed == ["payload of a", "payload of b", "payload of c"]


def test_handle_of_another_sample_with_a_known_id_is_ignored():
    residency = make()
    add(residency, "a", 10)
    add(residency, "b", 10)
    held = handle("a")
    residency.attach(held)
    forged = StoreHandle(store=None, sample_id="b", ref=make_ref("b"), handle_id=held.handle_id)
    assert not residency.release(forged)
    assert residency.health().sample_count == 2
    assert residency.release(held)


def test_handle_of_an_earlier_sample_of_the_same_id_is_ignored():
    residency = make()
    add(residency, "a", 10)
    old = handle("a")
    residency.attach(old)
    residency.release(old)
    add(residency, "a", 10)
    assert not residency.release(old)
    assert residency.contains("a")


def test_caps_concurrent_reservations_never_exceed_them():
    residency = make(max_samples=None, max_bytes=1000, high_watermark_bytes=None, low_watermark_bytes=None)
    start = threading.Barrier(8)
    accepted = []

    def reserve(worker):
        start.wait(20)
        for index in range(50):
            try:
                residency.reserve(f"{worker}-{index}", 7)
            except CapacityError:
                return
            accepted.append(7)

    threads = [threading.Thread(target=reserve, args=(worker,), daemon=True) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert residency.health().resident_bytes == sum(accepted) == 994


def test_wait_for_room_wakes_when_room_is_made():
    residency = make(max_samples=1)
    add(residency, "a", 10)
    assert not residency.wait_for_room(1, 0.01)
    got = []
    waiter = threading.Thread(target=lambda: got.append(residency.wait_for_room(1, 1000)), daemon=True)
    waiter.start()
    residency.discard("a")
    waiter.join(20)
    assert got == [True]


def test_closed_residency_refuses_and_reports_empty():
    residency = make()
    add(residency, "a", 10)
    held = handle("a")
    residency.attach(held)
    residency.close()
    assert residency.is_closed
    for call in (
        lambda: residency.reserve("b", 1),
        lambda: residency.payload("a"),
        lambda: residency.attach(handle("a")),
        lambda: residency.release(held),
        lambda: residency.discard("a"),
        residency.sweep,
        lambda: residency.wait_for_room(1, 0),
    ):
        with pytest.raises(ClosedError):
            call()
    health = residency.health()
    assert (health.resident_bytes, health.sample_count, health.high_watermark_hit) == (0, 0, False)


def test_capacity_is_zero_without_a_byte_cap():
    residency = make(max_bytes=None, high_watermark_bytes=None, low_watermark_bytes=None)
    add(residency, "a", 10**12)
    assert residency.health().capacity_bytes == 0
    assert not residency.health().high_watermark_hit


def test_residency_is_full_until_there_is_room_for_what_was_refused():
    residency = make(max_samples=3)
    assert not residency.is_full()
    add(residency, "a", 90)
    assert not residency.is_full()
    with pytest.raises(CapacityError):
        residency.reserve("b", 20)
    assert residency.is_full()
    add(residency, "small", 5)  # the one who was refused tries again, or does not
    assert not residency.is_full()
    assert not residency.wait_for_room(20, 0)
    waiter = threading.Thread(target=residency.wait_for_room, args=(20, 20), daemon=True)
    waiter.start()
    deadline = time.monotonic() + 20
    while not residency.is_full():
        assert time.monotonic() < deadline
    residency.discard("a")
    waiter.join(20)
    assert not residency.is_full()


@pytest.mark.parametrize(
    "caps", [{"max_samples": 1}, {"max_bytes": 10, "high_watermark_bytes": 10, "low_watermark_bytes": 0}]
)
def test_residency_at_a_cap_is_full_whatever_comes_next(caps):
    residency = make(**caps)
    with residency.reserve("a", 10) as reservation:
        assert not residency.is_full()  # its ref is still to come
        reservation.commit("payload")
    assert residency.is_full()
