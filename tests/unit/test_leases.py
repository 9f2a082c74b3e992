"""What the lease table offers beyond the queue built on it."""

import pytest

from nccl_stream.leases import FailOutcome, LeaseTable, VisibilityTimeout, sample_key
from nccl_stream.testing.clock import FakeClock
from tests.unit.helpers import make_ref


@pytest.fixture
def clock():
    return FakeClock(0.0)


@pytest.fixture
def table(clock):
    return LeaseTable(visibility_timeout=VisibilityTimeout(10), max_redeliveries=1, clock=clock)


def fill(table, names="abc"):
    refs = [make_ref(name) for name in names]
    for ref in refs:
        table.put(ref)
    return refs


def test_outcomes_tell_what_happened(table):
    fill(table, "a")
    lease = table.acquire()
    assert table.fail(lease) is FailOutcome.REQUEUED
    assert table.fail(lease) is FailOutcome.STALE
    assert table.fail(table.acquire()) is FailOutcome.DEAD
    assert len(table.dead_letters()) == 1
    assert table.dead_bytes == make_ref("a").estimated_bytes


def test_acquire_by_key_takes_that_one_only_if_pending(table):
    _, b, _ = fill(table)
    assert table.acquire(key=sample_key(b)).ref == b
    assert table.acquire(key=sample_key(b)) is None
    assert [ref.sample_id for ref in table.pending_refs()] == ["a", "c"]


def test_pop_pending_takes_pending_ones_only(table):
    a, b, _ = fill(table)
    lease = table.acquire()
    assert table.pop_pending(sample_key(a)) is None
    assert table.pop_pending(sample_key(b)) == b
    assert table.pop_pending(sample_key(b)) is None
    assert table.ack(lease)
    assert table.acquire().ref.sample_id == "c"
    assert table.counts.removed == 1


def test_remove_of_a_leased_sample_makes_its_lease_stale(table):
    (a,) = fill(table, "a")
    lease = table.acquire()
    assert table.remove(sample_key(a)) == a
    assert not table.is_live(lease)
    assert not table.ack(lease)
    assert table.next_deadline() is None
    assert table.is_empty
    assert table.remove(sample_key(a)) is None


def test_remove_of_a_dead_letter_moves_it_in_the_books(table):
    (a,) = fill(table, "a")
    table.fail(table.acquire())
    table.fail(table.acquire())
    assert table.counts.dead == 1
    assert table.remove(sample_key(a)) == a
    assert (table.counts.dead, table.counts.removed, table.dead_bytes) == (0, 1, 0)


def test_next_deadline_follows_ends_and_extensions(table, clock):
    fill(table)
    assert table.next_deadline() is None
    first = table.acquire()
    clock.advance(1)
    second = table.acquire()
    assert table.next_deadline() == 10
    table.extend(first, 20)
    assert table.next_deadline() == 11
    table.ack(second)
    assert table.next_deadline() == 21
    table.hand_back(first)
    assert table.next_deadline() is None


def test_expire_ends_those_due_in_order_of_their_deadlines(table, clock):
    fill(table)
    leases = [table.acquire() for _ in range(3)]
    table.extend(leases[0], 12)
    assert table.expire(9.999) == []
    assert table.expire(11) == [leases[1], leases[2]]
    assert table.expire() == []
    clock.advance(12)
    assert table.expire() == [leases[0]]
    assert [ref.sample_id for ref in table.pending_refs()] == ["b", "c", "a"]
    assert table.counts.expired == 3


def test_leases_lists_the_live_ones(table):
    fill(table)
    leases = [table.acquire() for _ in range(3)]
    table.ack(leases[1])
    assert list(table.leases()) == [leases[0], leases[2]]


def test_recent_acks_are_remembered_within_the_limit():
    table = LeaseTable(recent_acks=2)
    for name in "abc":
        table.put(make_ref(name))
        table.ack(table.acquire())
    assert [table.put(make_ref(name)) for name in "abc"] == [True, False, False]


def test_is_live_counts_nothing(table):
    fill(table, "a")
    lease = table.acquire()
    table.ack(lease)
    assert not table.is_live(lease)
    assert table.counts.stale == 0
