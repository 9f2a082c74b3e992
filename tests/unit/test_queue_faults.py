"""Faults of other implementations of these contracts, each as the scenario that shows it, and none of them here.

The numbers follow the order in which a stream meets them; every test fails against a queue or store that has the
fault.
"""

import gc
import sys
import threading
import time
from statistics import median

import pytest
import torch

from nccl_stream.errors import CapacityError, ProducerFailedError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.queue import SampleRefQueue, VisibilityTimeout
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.clock import FakeClock
from nccl_stream.testing.store_suite import make_sample
from tests.unit.helpers import make_ref


@pytest.fixture
def store():
    with LocalFeatureStore() as store:
        yield store


def drain(queue, seen):
    """Consume as the loader does: only a drained queue is the end."""
    while True:
        lease = queue.acquire(20)
        if lease is None:
            if queue.is_drained:
                return
            continue
        seen.append(lease.ref.sample_id)
        queue.ack(lease)


def test_fault_1_a_put_between_an_empty_poll_and_the_look_at_closed_is_not_lost(store):
    queue = SampleRefQueue(store)
    assert queue.acquire(0) is None
    # The producer is quicker than the consumer's next line.
    queue.put(make_ref("last"))
    queue.close()
    assert queue.is_closed
    assert not queue.is_drained
    seen = []
    drain(queue, seen)
    assert seen == ["last"]


def test_fault_1_the_last_sample_is_never_lost_in_a_race_of_put_close_and_acquire(store):
    for _ in range(200):
        queue = SampleRefQueue(store)
        seen = []
        consumer = threading.Thread(target=drain, args=(queue, seen), daemon=True)
        consumer.start()
        queue.put(make_ref("last"))
        queue.close()
        consumer.join(20)
        assert not consumer.is_alive()
        assert seen == ["last"]


def test_fault_2_a_ref_failed_after_close_finds_the_other_consumer(store):
    queue = SampleRefQueue(store)
    queue.put(make_ref("a"))
    lease = queue.acquire()
    queue.close()
    seen = []
    other = threading.Thread(target=drain, args=(queue, seen), daemon=True)
    other.start()
    queue.fail(lease)
    other.join(20)
    assert not other.is_alive()
    assert seen == ["a"]


def test_fault_2_the_other_consumer_stops_at_once_when_the_last_lease_is_acked(store):
    queue = SampleRefQueue(store)
    queue.put(make_ref("a"))
    lease = queue.acquire()
    queue.close()
    got = []
    other = threading.Thread(target=lambda: got.append(queue.acquire(1000)), daemon=True)
    other.start()
    queue.ack(lease)
    other.join(20)
    assert got == [None]
    assert queue.is_drained


@pytest.mark.parametrize("event", ["put", "fail", "hand_back", "redrive", "close", "close-error"])
def test_fault_3_everything_that_matters_wakes_a_waiting_acquire(store, event):
    """The poll is a thousand seconds: only a wake-up lets the consumer return."""
    queue = SampleRefQueue(store, max_redeliveries=0 if event == "redrive" else None)
    lease = None
    if event in ("fail", "hand_back", "redrive"):
        queue.put(make_ref("a"))
        lease = queue.acquire()
    if event == "redrive":
        queue.fail(lease)
    got = []

    def consume():
        try:
            got.append(queue.acquire(1000))
        except ProducerFailedError as error:
            got.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    while not queue._num_waiting_consumers:
        time.sleep(0.001)
    action = {
        "put": lambda: queue.put(make_ref("a")),
        "fail": lambda: queue.fail(lease),
        "hand_back": lambda: queue.hand_back(lease),
        "redrive": queue.redrive,
        "close": queue.close,
        "close-error": lambda: queue.close(error=OSError("producer")),
    }[event]
    action()
    consumer.join(20)
    assert not consumer.is_alive()
    expected = {"close": type(None), "close-error": ProducerFailedError}
    assert isinstance(got[0], expected.get(event, object))
    assert (got[0] is None) == (event == "close")


def test_fault_3_an_expiry_wakes_a_waiting_acquire(store):
    queue = SampleRefQueue(store, visibility_timeout=VisibilityTimeout(0.02))
    queue.put(make_ref("a"))
    queue.acquire()
    lease = queue.acquire(1000)
    assert (lease.ref.sample_id, lease.redelivery_count) == ("a", 1)


def test_fault_3_an_expiry_wakes_a_consumer_that_waited_before_the_lease_was_taken(store):
    queue = SampleRefQueue(store, VisibilityTimeout(0.1))
    got = []

    def consume():
        got.append(queue.acquire(1000))  # takes the ref, or takes it over from the other one, who is dead by then

    consumers = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    while queue._num_waiting_consumers < 2:
        time.sleep(0.001)
    queue.put(make_ref("a"))
    for consumer in consumers:
        consumer.join(20)
        assert not consumer.is_alive()
    assert sorted(lease.redelivery_count for lease in got) == [0, 1]


def test_fault_3_a_wake_up_takes_a_small_part_of_the_poll(store):
    """Compared with the poll that a queue without wake-ups would wait out, not with a clock on the wall."""
    poll = 2.0
    queue = SampleRefQueue(store)
    waits = []

    def consume():
        for _ in range(50):
            while (lease := queue.acquire(poll)) is None:
                pass  # the producer stood still
            waits.append(time.monotonic() - sent[0])
            queue.ack(lease)
            done.set()

    sent = [0.0]
    done = threading.Event()
    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    for index in range(50):
        while not queue._num_waiting_consumers:
            time.sleep(0.0005)
        done.clear()
        sent[0] = time.monotonic()
        queue.put(make_ref(f"s{index}"))
        assert done.wait(20)
    consumer.join(20)
    assert median(waits) < poll / 20


def test_fault_3_no_wake_up_is_lost_among_many_consumers_and_producers(store):
    queue = SampleRefQueue(store)
    seen = []
    consumers = [threading.Thread(target=drain, args=(queue, seen), daemon=True) for _ in range(4)]
    names = [f"s{i}" for i in range(600)]
    producers = [
        threading.Thread(target=lambda part: [queue.put(make_ref(n)) for n in part], args=(names[i::3],), daemon=True)
        for i in range(3)
    ]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join(30)
    queue.close()
    for thread in consumers:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(seen) == sorted(names)


def test_fault_4_acquire_itself_reclaims_what_a_dead_consumer_held(store):
    clock = FakeClock()
    queue = SampleRefQueue(store, clock=clock)
    queue.put(make_ref("a"))
    queue.acquire(owner="dead")
    assert queue.acquire(0) is None
    clock.advance(30)
    lease = queue.acquire(0)
    assert (lease.ref.sample_id, lease.redelivery_count) == ("a", 1)
    assert queue.statistics().expired == 1


def test_fault_4_a_closed_queue_is_not_drained_before_a_dead_consumers_ref_came_back(store):
    clock = FakeClock()
    queue = SampleRefQueue(store, clock=clock)
    queue.put(make_ref("a"))
    queue.acquire(owner="dead")
    queue.close()
    assert not queue.is_drained
    clock.advance(30)
    queue.ack(queue.acquire(0))
    assert queue.is_drained


def test_fault_6_a_producer_that_fails_is_an_error_for_the_consumer_not_a_normal_end():
    with LocalFeatureStore(max_samples=2) as store:
        queue = SampleRefQueue(store)
        for name in "ab":
            queue.put_blocks_until_below(store.put(name, make_sample(), "run"))
        with pytest.raises(CapacityError) as info:
            store.put("c", make_sample(), "run")
        assert info.value.can_wait
        queue.close(error=info.value)
        seen = []
        with pytest.raises(ProducerFailedError, match="sample-count cap"):
            drain(queue, seen)
        assert seen == ["a", "b"]


def test_fault_6_the_producers_error_does_not_wait_for_another_consumers_lease(store):
    queue = SampleRefQueue(store)
    queue.put(make_ref("a"))
    queue.acquire(owner="another")
    queue.close(error=OSError("producer"))
    errors = []

    def consume():
        try:
            queue.acquire(1000)
        except ProducerFailedError as error:
            errors.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    consumer.join(20)
    assert len(errors) == 1


def test_fault_6_a_producer_can_wait_for_a_count_cap():
    with LocalFeatureStore(max_samples=1) as store:
        ref = store.put("a", make_sample(), "run")
        assert not store.wait_for_room(1, 0)
        got = []
        waiter = threading.Thread(target=lambda: got.append(store.wait_for_room(1, 1000)), daemon=True)
        waiter.start()
        store.discard(ref)
        waiter.join(20)
        assert got == [True]
        store.put("b", make_sample(), "run")


@pytest.mark.parametrize("callback", ["on_pause", "on_resume"])
def test_fault_7_a_callback_may_use_the_queue_it_belongs_to(callback):
    """Run under the queue's lock, the callback would hang here for ever, and close() with it."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
    store = LocalFeatureStore(high_watermark_bytes=2 * size, low_watermark_bytes=size)
    called = threading.Event()
    states = []

    def use_the_queue(_):
        states.append((queue.pending_count(), queue.statistics().put, queue.is_drained, queue.reclaim_expired()))
        if callback == "on_pause":
            queue.close()
        called.set()

    queue = SampleRefQueue(store, **{callback: use_the_queue})
    queue.put(store.put("a", make_sample(), "run"))
    ref = store.put("b", make_sample(), "run")
    errors = []

    def produce():
        try:
            queue.put_blocks_until_below(ref, 0.002)
        except RuntimeError as error:
            errors.append(error)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    if callback == "on_resume":
        while not queue.statistics().pauses:
            time.sleep(0.001)
        lease = queue.acquire(0)
        _, handle = store.get(lease.ref)
        queue.ack(lease)
        store.release(handle)
    producer.join(20)
    assert not producer.is_alive()
    assert called.is_set()
    assert len(states) == 1
    assert len(errors) == (callback == "on_pause")


def test_fault_8_a_poisoned_ref_ends_among_the_dead_letters(store):
    queue = SampleRefQueue(store, max_redeliveries=3)
    ref = store.put("poison", make_sample(), "run")
    store.discard(ref)
    queue.put(ref)
    queue.close()
    attempts = 0
    while not queue.is_drained:
        lease = queue.acquire(20)
        attempts += 1
        try:
            store.get(lease.ref)
        except KeyError as error:
            queue.fail(lease, reason=error)
    assert attempts == 4
    (letter,) = queue.dead_letters()
    assert (letter.ref, letter.delivery_count) == (ref, 4)
    assert "SampleNotFoundError" in letter.reason


def test_fault_8_a_loader_meets_a_poisoned_ref_once_without_any_budget(store):
    refs = [store.put(name, make_sample(), "run") for name in ("poison", "good")]
    store.discard(refs[0])
    queue = SampleRefQueue(store)
    for ref in refs:
        queue.put(ref)
    queue.close()
    loader = FeatureDataLoader(queue, store)
    with pytest.raises(KeyError):
        next(loader)
    assert [batch.sample_ids for batch in loader] == [("good",)]
    assert [letter.ref for letter in queue.dead_letters()] == [refs[0]]


def test_fault_13_a_sample_that_no_cap_can_hold_says_so_with_the_number_that_would():
    with LocalFeatureStore() as store:
        # [1, 2048, 131072] bf16 without the 512 MiB of memory behind it.
        logits = torch.zeros(1, dtype=torch.bfloat16).expand(1, 2048, 131072)
        needed = 2048 * 131072 * 2 + sum(
            t.numel() * t.element_size() for n, t in make_sample().items() if n != "logits"
        )
        with pytest.raises(MemoryError, match=rf"max_bytes to at least {needed}") as info:
            store.put("big", {**make_sample(), "logits": logits}, "run")
        assert not info.value.can_wait
        with pytest.raises(MemoryError):
            store.wait_for_room(needed, 1000)
        assert store.health().sample_count == 0


def test_fault_14_an_operation_takes_the_same_steps_at_any_backlog(store):
    def steps(pending):
        queue = SampleRefQueue(store)
        for index in range(pending):
            queue.put(make_ref(f"s{index}"))
        extra = make_ref("extra")
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += 1

        gc.disable()  # what it finalizes would be counted too
        sys.setprofile(trace)
        try:
            queue.put(extra)
            lease = queue.acquire(0)
            queue.extend(lease)
            queue.fail(lease)
            queue.ack(queue.acquire(0))
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    assert steps(3000) <= steps(30) + 5


def test_fault_14_records_of_past_leases_do_not_pile_up(store):
    queue = SampleRefQueue(store)
    queue.put(make_ref("held"))
    held = queue.acquire()
    for index in range(3000):
        queue.put(make_ref(f"s{index}"))
        queue.ack(queue.acquire(0))
    # The oldest lease is still live, so nothing behind it comes up to be skipped.
    assert len(queue._table._deadlines) < 200
    for index in range(3000):
        queue.extend(held, 1000 + index)
    assert len(queue._table._deadlines) < 200
    assert queue.reclaim_expired() == 0
