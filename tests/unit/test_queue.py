"""The queue as users of the documented interface rely on it."""

import copy
import dataclasses
import gc
import pickle
import sys

import pytest

from nccl_stream.errors import ClosedError, MisuseError, ProducerFailedError
from nccl_stream.queue import Lease, SampleRefQueue, VisibilityTimeout
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.clock import FakeClock
from tests.unit.helpers import make_ref


@pytest.fixture
def store():
    with LocalFeatureStore() as store:
        yield store


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def queue(store, clock):
    return SampleRefQueue(store, clock=clock)


def ids(leases):
    return [lease.ref.sample_id for lease in leases]


# -- order and identity --


def test_acquire_is_fifo(queue):
    for name in "abc":
        queue.put(make_ref(name))
    assert ids(queue.acquire() for _ in range(3)) == ["a", "b", "c"]
    assert queue.acquire(0) is None


def test_acquire_open_and_empty_gives_none_after_the_poll(queue):
    assert queue.acquire(0.001) is None
    assert not queue.is_closed
    assert not queue.is_drained


def test_acquire_closed_and_empty_gives_none_and_is_drained(queue):
    queue.close()
    queue.close()
    assert queue.acquire(60) is None
    assert queue.is_closed
    assert queue.is_drained


def test_lease_tells_what_was_granted(queue, clock):
    queue.put(make_ref("a"))
    lease = queue.acquire(owner="me")
    assert lease == Lease(lease.ref, 0.0, VisibilityTimeout(), lease_id=lease.lease_id)
    assert (lease.deadline, lease.redelivery_count, lease.owner) == (clock.now + 30, 0, "me")
    assert lease.visibility_timeout.seconds == 30.0


def test_lease_ids_never_repeat(queue):
    for name in "abc":
        queue.put(make_ref(name))
    assert len({queue.acquire().lease_id for _ in range(3)}) == 3


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "30"])
def test_visibility_timeout_not_positive_is_refused(seconds):
    with pytest.raises(ValueError):
        VisibilityTimeout(seconds)
    assert VisibilityTimeout().seconds == 30.0
    assert VisibilityTimeout(0.001).seconds == 0.001


@pytest.mark.parametrize("operation", ["ack", "fail", "hand_back", "extend"])
@pytest.mark.parametrize("kind", ["acked", "forged", "expired"])
def test_lease_that_is_not_live_changes_nothing(queue, clock, operation, kind):
    queue.put(make_ref("a"))
    lease = queue.acquire()
    if kind == "acked":
        queue.ack(lease)
    elif kind == "forged":
        lease = dataclasses.replace(lease, lease_id=lease.lease_id + 10**9)
    else:
        clock.advance(31)
        assert queue.reclaim_expired() == 1
        assert queue.acquire().redelivery_count == 1
    before = queue.statistics()
    assert not getattr(queue, operation)(lease)
    assert queue.statistics() == dataclasses.replace(before, stale=before.stale + 1)


def test_late_ack_leaves_the_newer_lease_alone(queue, clock):
    queue.put(make_ref("a"))
    late = queue.acquire()
    clock.advance(30)
    queue.reclaim_expired()
    newer = queue.acquire()
    queue.ack(late)
    assert queue.outstanding_count() == 1
    queue.ack(newer)
    assert queue.outstanding_count() == 0
    assert queue.statistics().acked == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda lease: pickle.loads(pickle.dumps(lease))])
@pytest.mark.parametrize("operation", ["ack", "fail", "hand_back", "extend"])
def test_lease_copied_or_unpickled_is_the_same_lease(queue, duplicate, operation):
    queue.put(make_ref("a"))
    lease = queue.acquire()
    twin = duplicate(lease)
    assert twin == lease
    assert hash(twin) == hash(lease)
    getattr(queue, operation)(twin)
    assert queue.statistics().stale == 0


def test_something_that_is_no_lease_or_ref_is_refused(queue):
    for call in (queue.ack, queue.fail, queue.hand_back, queue.extend, queue.put, queue.put_blocks_until_below):
        with pytest.raises(MisuseError):
            call("a")
    queue.put(make_ref("a"))
    lease = queue.acquire()
    with pytest.raises(MisuseError):
        queue.ack_many([lease, None])
    assert queue.outstanding_count() == 1


# -- fail, reclaim, extend, hand back --


def test_fail_goes_to_the_tail_and_counts(queue):
    for name in "ab":
        queue.put(make_ref(name))
    queue.fail(queue.acquire())
    leases = [queue.acquire(), queue.acquire()]
    assert [(lease.ref.sample_id, lease.redelivery_count) for lease in leases] == [("b", 0), ("a", 1)]


def test_redelivery_count_goes_with_the_ack(queue):
    queue.put(make_ref("a"))
    queue.fail(queue.acquire())
    queue.ack(queue.acquire())
    queue.put(make_ref("a"))
    assert queue.acquire().redelivery_count == 0


def test_reclaim_takes_expired_leases_only_and_appends_them(queue, clock):
    for name in "abc":
        queue.put(make_ref(name))
    queue.acquire()
    clock.advance(20)
    queue.acquire()
    assert queue.reclaim_expired() == 0
    clock.advance(10)
    assert queue.reclaim_expired() == 1
    assert (queue.pending_count(), queue.outstanding_count()) == (2, 1)
    assert [(lease.ref.sample_id, lease.redelivery_count) for lease in queue.acquire_many(9)] == [("c", 0), ("a", 1)]


def test_ack_of_an_expired_lease_that_nobody_reclaimed_counts(queue, clock):
    queue.put(make_ref("a"))
    lease = queue.acquire()
    clock.advance(1000)
    queue.ack(lease)
    assert queue.statistics().acked == 1
    assert queue.acquire(0) is None


def test_extend_moves_the_deadline_and_never_back(queue, clock):
    queue.put(make_ref("a"))
    lease = queue.acquire()
    clock.advance(25)
    assert queue.extend(lease)
    assert queue.extend(lease, 1)
    clock.advance(29)
    assert queue.reclaim_expired() == 0
    assert queue.extend(lease, 100)
    clock.advance(99)
    assert queue.reclaim_expired() == 0
    clock.advance(1)
    assert queue.reclaim_expired() == 1
    assert not queue.extend(lease)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_extend_by_nothing_is_refused(queue, seconds):
    queue.put(make_ref("a"))
    lease = queue.acquire()
    with pytest.raises(ValueError):
        queue.extend(lease, seconds)


def test_hand_back_returns_to_the_head_without_counting(queue):
    for name in "ab":
        queue.put(make_ref(name))
    lease = queue.acquire()
    assert queue.hand_back(lease)
    again = queue.acquire()
    assert (again.ref.sample_id, again.redelivery_count) == ("a", 0)
    assert queue.statistics().redelivered == 0
    assert queue.statistics().handed_back == 1


# -- duplicates --


@pytest.mark.parametrize("put", ["put", "put_blocks_until_below"])
def test_put_of_a_sample_that_is_pending_or_leased_is_refused(queue, put):
    queue.put(make_ref("a"))
    with pytest.raises(ValueError, match="already present"):
        getattr(queue, put)(make_ref("a"))
    lease = queue.acquire()
    with pytest.raises(ValueError, match="already present"):
        getattr(queue, put)(make_ref("a"))
    queue.ack(lease)
    getattr(queue, put)(make_ref("a"))
    assert queue.pending_count() == 1


def test_put_same_id_from_another_store_is_another_sample(queue):
    queue.put(make_ref("a"))
    queue.put(make_ref("a", store_uri="mem://elsewhere"))
    first, second = queue.acquire_many(2)
    queue.ack(second)
    assert queue.extend(first)
    queue.fail(first)
    assert queue.acquire().ref == first.ref


def test_put_of_a_sample_acked_before_is_counted_and_said(queue, caplog):
    queue.put(make_ref("a"))
    queue.ack(queue.acquire())
    assert queue.statistics().readmitted == 0
    queue.put(make_ref("a"))
    assert queue.statistics().readmitted == 1
    assert "acked before" in caplog.text


# -- retry budget --


@pytest.fixture
def strict_queue(store, clock):
    return SampleRefQueue(store, clock=clock, max_redeliveries=2)


def test_budget_spent_makes_a_dead_letter_with_reason_count_and_owner(strict_queue, clock):
    strict_queue.put(make_ref("a"))
    strict_queue.fail(strict_queue.acquire())
    clock.advance(0.1)
    strict_queue.acquire(owner="sleeper")
    clock.advance(30)
    assert strict_queue.reclaim_expired() == 1
    assert strict_queue.dead_letters() == []
    strict_queue.fail(strict_queue.acquire(owner="last"), reason=KeyError("gone"))
    (letter,) = strict_queue.dead_letters()
    assert (letter.ref.sample_id, letter.delivery_count, letter.last_owner) == ("a", 3, "last")
    assert letter.reason == "KeyError: 'gone'"
    assert strict_queue.acquire(0) is None
    stats = strict_queue.statistics()
    assert (stats.dead, stats.pending, stats.leased, stats.failed, stats.expired) == (1, 0, 0, 2, 1)


def test_budget_spent_by_expiry_names_the_holder(store, clock):
    queue = SampleRefQueue(store, clock=clock, max_redeliveries=0)
    queue.put(make_ref("a"))
    queue.acquire(owner="crashed")
    clock.advance(30)
    assert queue.reclaim_expired() == 1
    (letter,) = queue.dead_letters()
    assert letter.last_owner == "crashed"
    assert "expired" in letter.reason
    assert "crashed" in letter.reason


def test_dead_letter_cannot_be_put_but_redriven_with_a_fresh_budget(store, clock):
    queue = SampleRefQueue(store, clock=clock, max_redeliveries=0)
    for name in "ab":
        queue.put(make_ref(name))
        queue.fail(queue.acquire())
    with pytest.raises(ValueError, match="dead letter"):
        queue.put(make_ref("a"))
    assert queue.redrive(make_ref("unknown")) == 0
    assert queue.redrive(make_ref("b")) == 1
    lease = queue.acquire()
    assert (lease.ref.sample_id, lease.redelivery_count) == ("b", 0)
    queue.close()
    queue.ack(lease)
    assert queue.is_drained
    assert queue.redrive() == 1
    assert not queue.is_drained
    queue.ack(queue.acquire())
    stats = queue.statistics()
    assert (stats.put, stats.acked, stats.dead, stats.redriven) == (2, 2, 0, 2)


def test_letter_of_a_sample_that_is_gone_is_not_redriven_but_produced_anew(store):
    queue = SampleRefQueue(store, max_redeliveries=0)
    for name in ("gone", "spent"):
        queue.put(make_ref(name))
        queue.fail(queue.acquire(), reason="why", final=name == "gone")
    letters = {letter.ref.sample_id: (letter.is_stored, letter.reason) for letter in queue.dead_letters()}
    assert letters == {"gone": (False, "why"), "spent": (True, "why")}
    assert queue.redrive(make_ref("gone")) == 0
    assert queue.redrive() == 1
    queue.put(make_ref("gone"))
    assert queue.dead_letters() == []
    queue.ack_many(queue.acquire_many(2))
    stats = queue.statistics()
    assert (stats.put, stats.acked, stats.dead, stats.redriven) == (3, 2, 1, 1)


def test_redrive_of_one_letter_does_not_look_at_the_others(store):
    queue = SampleRefQueue(store, max_redeliveries=0)
    for number in range(500):
        queue.put(make_ref(str(number)))
        queue.fail(queue.acquire())
    ref, calls = make_ref("250"), []
    gc.disable()  # what it finalizes would be counted too
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        count = queue.redrive(ref)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert (count, queue.acquire().ref.sample_id) == (1, "250")
    assert len(calls) < 50


def test_dead_letters_dropped_stay_in_the_books(store):
    queue = SampleRefQueue(store, max_redeliveries=0)
    queue.put(make_ref("a"))
    queue.fail(queue.acquire())
    assert [letter.ref.sample_id for letter in queue.drop_dead_letters()] == ["a"]
    assert queue.dead_letters() == []
    assert queue.statistics().dead == 1
    queue.put(make_ref("a"))


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_budget_that_is_no_count_is_refused(store, budget):
    with pytest.raises(ValueError):
        SampleRefQueue(store, max_redeliveries=budget)


def test_no_budget_redelivers_for_ever(queue):
    queue.put(make_ref("a"))
    for count in range(50):
        lease = queue.acquire()
        assert lease.redelivery_count == count
        queue.fail(lease)


# -- closing --


def test_close_keeps_pending_acquirable_and_leases_intact(queue):
    for name in "ab":
        queue.put(make_ref(name))
    first = queue.acquire()
    queue.close()
    for put in (queue.put, queue.put_blocks_until_below):
        with pytest.raises(RuntimeError, match="closed"):
            put(make_ref("c"))
    second = queue.acquire()
    assert second.ref.sample_id == "b"
    assert queue.outstanding_count() == 2
    assert queue.acquire(0) is None
    assert not queue.is_drained
    queue.fail(first)
    assert queue.acquire().ref.sample_id == "a"


def test_close_with_error_reaches_the_consumer_after_the_pending_refs(queue):
    queue.put(make_ref("a"))
    cause = MemoryError("no room")
    queue.close(error=cause)
    queue.close()
    queue.close(error=ValueError("a later one"))
    assert queue.error is cause
    lease = queue.acquire()
    assert lease is not None
    for _ in range(2):
        with pytest.raises(ProducerFailedError, match="MemoryError: no room") as info:
            queue.acquire()
        assert info.value.__cause__ is cause
    queue.fail(lease)
    assert queue.acquire().ref.sample_id == "a"


def test_close_cleanly_and_then_with_error_raises(queue):
    queue.close()
    queue.close(error=OSError("late"))
    with pytest.raises(ProducerFailedError):
        queue.acquire()


# -- batches and numbers --


def test_acquire_many_takes_what_is_there_and_ack_many_counts_each_once(queue):
    for name in "abc":
        queue.put(make_ref(name))
    leases = queue.acquire_many(2)
    assert ids(leases) == ["a", "b"]
    assert ids(queue.acquire_many(5)) == ["c"]
    assert queue.acquire_many(5, 0) == []
    assert queue.ack_many([*leases, leases[0]]) == 2
    assert queue.statistics().acked == 2
    assert queue.statistics().stale == 1


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_acquire_many_of_no_count_is_refused(queue, count):
    with pytest.raises(ValueError):
        queue.acquire_many(count)


@pytest.mark.parametrize("interval", [-1, float("nan")])
def test_poll_interval_that_is_no_time_is_refused(queue, interval):
    with pytest.raises(ValueError):
        queue.acquire(interval)
    with pytest.raises(ValueError):
        queue.put_blocks_until_below(make_ref("a"), interval)


def test_statistics_changes_nothing_and_is_frozen(queue, clock):
    queue.put(make_ref("a"))
    queue.acquire()
    clock.advance(1000)
    first = queue.statistics()
    assert first == queue.statistics()
    assert (first.put, first.leased, first.expired) == (1, 1, 0)
    assert queue.pending_count() == 0
    assert queue.outstanding_count() == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.put = 7


def test_acquire_sweeps_the_store_now_and_then_and_survives_what_it_raises(store, caplog):
    sweeps = []

    class Store(LocalFeatureStore):
        def gc(self):
            sweeps.append(1)
            raise OSError("disk on fire") if len(sweeps) == 1 else ClosedError("closed")

    clock = FakeClock()
    queue = SampleRefQueue(Store(), clock=clock)
    for name in "ab":
        queue.put(make_ref(name))
        queue.acquire()
        clock.advance(30)
        assert queue.reclaim_expired() == 1
        queue.ack(queue.acquire())
    assert len(sweeps) == 2
    assert "disk on fire" in caplog.text


# -- threads --


def test_exception_in_a_waiting_consumer_passes_its_wake_up_on(queue, monkeypatch):
    """A consumer that is torn out of its wait has perhaps eaten the one notification of a put."""
    notified = []

    def torn(timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(queue._work, "wait", torn)
    monkeypatch.setattr(queue._work, "notify", lambda n=1: notified.append(n))
    with pytest.raises(KeyboardInterrupt):
        queue.acquire(1)
    assert notified == [1]
