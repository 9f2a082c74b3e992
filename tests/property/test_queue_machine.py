"""The queue against a model, driven by Hypothesis: every order of operations from two consumers and a clock."""

import copy
import pickle
from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from nccl_stream.errors import ClosedError, MisuseError, ProducerFailedError
from nccl_stream.queue import SampleRefQueue, VisibilityTimeout
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.clock import FakeClock
from tests.unit.helpers import make_ref

TIMEOUT = 10.0
NAMES = st.sampled_from([f"s{i}" for i in range(6)])
DUPLICATES = st.sampled_from([lambda lease: lease, copy.copy, lambda lease: pickle.loads(pickle.dumps(lease))])


class QueueMachine(RuleBasedStateMachine):
    """The model: an ordered list of pending names, leases by id with deadline, and the books."""

    leases = Bundle("leases")

    @initialize(budget=st.sampled_from([None, 0, 1, 2]))
    def start(self, budget):
        self.clock = FakeClock(0.0)
        self.store = LocalFeatureStore()
        self.queue = SampleRefQueue(self.store, VisibilityTimeout(TIMEOUT), max_redeliveries=budget, clock=self.clock)
        self.budget = budget
        self.pending = OrderedDict()  # name -> redelivery count
        self.leased = {}  # lease id -> (name, redelivery count, deadline)
        self.dead = OrderedDict()  # name -> delivery count
        self.gone = set()  # those of the dead whose sample is gone
        self.closed = False
        self.error = None
        self.books = dict.fromkeys(
            ("put", "acked", "failed", "expired", "redelivered", "handed_back", "redriven", "stale", "dead"), 0
        )

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()

    def known(self, name):
        stored = name in self.dead and name not in self.gone
        return name in self.pending or stored or any(name == n for n, _, _ in self.leased.values())

    def requeue(self, name, count, final=False):
        if final or (self.budget is not None and count >= self.budget):
            self.dead[name] = count + 1
            if final:
                self.gone.add(name)
            self.books["dead"] += 1
        else:
            self.pending[name] = count + 1

    def expire(self):
        due = sorted(
            (deadline, lease_id) for lease_id, (_, _, deadline) in self.leased.items() if deadline <= self.clock.now
        )
        for _, lease_id in due:
            name, count, _ = self.leased.pop(lease_id)
            self.books["expired"] += 1
            self.requeue(name, count)
        return len(due)

    def take(self, lease):
        name, (count) = next(iter(self.pending.items()))
        del self.pending[name]
        assert (lease.ref.sample_id, lease.redelivery_count) == (name, count)
        assert lease.lease_id not in self.leased
        assert lease.deadline == self.clock.now + TIMEOUT
        self.leased[lease.lease_id] = (name, count, lease.deadline)
        self.books["redelivered"] += count > 0

    def end(self, lease):
        found = self.leased.pop(lease.lease_id, None)
        if found is None:
            self.books["stale"] += 1
        return found

    @rule(name=NAMES, blocking=st.booleans())
    def put(self, name, blocking):
        put = self.queue.put_blocks_until_below if blocking else self.queue.put
        if self.closed:
            with pytest.raises(ClosedError):
                put(make_ref(name))
        elif self.known(name):
            with pytest.raises(MisuseError):
                put(make_ref(name))
        else:
            put(make_ref(name))
            self.dead.pop(name, None)
            self.gone.discard(name)
            self.pending[name] = 0
            self.books["put"] += 1

    @rule(target=leases, owner=st.sampled_from(["first", "second"]), count=st.integers(1, 3))
    def acquire(self, owner, count):
        self.expire()
        if not self.pending:
            if self.closed and self.error is not None:
                with pytest.raises(ProducerFailedError):
                    self.queue.acquire_many(count, 0, owner=owner)
            else:
                assert self.queue.acquire_many(count, 0, owner=owner) == []
            return multiple()
        got = self.queue.acquire_many(count, 0, owner=owner)
        assert len(got) == min(count, len(self.pending))
        for lease in got:
            assert lease.owner == owner
            self.take(lease)
        return multiple(*got)

    @rule(lease=consumes(leases), duplicate=DUPLICATES)
    def ack_and_forget(self, lease, duplicate):
        self.ack(lease, duplicate)

    @rule(lease=leases, duplicate=DUPLICATES)
    def ack(self, lease, duplicate):
        self.queue.ack(duplicate(lease))
        if self.end(lease) is not None:
            self.books["acked"] += 1

    @rule(lease=leases, duplicate=DUPLICATES, final=st.sampled_from([False, False, True]))
    def fail(self, lease, duplicate, final):
        self.queue.fail(duplicate(lease), final=final)
        found = self.end(lease)
        if found is not None:
            self.books["failed"] += 1
            self.requeue(found[0], found[1], final)

    @rule(lease=leases, duplicate=DUPLICATES)
    def hand_back(self, lease, duplicate):
        live = self.queue.hand_back(duplicate(lease))
        found = self.end(lease)
        assert live == (found is not None)
        if found is not None:
            self.books["handed_back"] += 1
            self.pending[found[0]] = found[1]
            self.pending.move_to_end(found[0], last=False)

    @rule(lease=leases, seconds=st.sampled_from([None, 1.0, 25.0]), duplicate=DUPLICATES)
    def extend(self, lease, seconds, duplicate):
        live = self.queue.extend(duplicate(lease), seconds)
        found = self.leased.get(lease.lease_id)
        assert live == (found is not None)
        if found is None:
            self.books["stale"] += 1
        else:
            deadline = self.clock.now + (TIMEOUT if seconds is None else seconds)
            self.leased[lease.lease_id] = (found[0], found[1], max(found[2], deadline))

    @rule(seconds=st.sampled_from([0.5, 4.0, TIMEOUT, 40.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def reclaim(self):
        expected = self.expire()
        assert self.queue.reclaim_expired() == expected

    @rule(name=st.one_of(st.none(), NAMES))
    def redrive(self, name):
        chosen = [n for n in self.dead if n not in self.gone and name in (None, n)]
        assert self.queue.redrive(None if name is None else make_ref(name)) == len(chosen)
        for each in chosen:
            del self.dead[each]
            self.pending[each] = 0
            self.books["dead"] -= 1
            self.books["redriven"] += 1

    @rule(error=st.sampled_from([None, None, OSError("producer")]))
    def close(self, error):
        self.queue.close(error=error)
        self.closed = True
        if self.error is None:
            self.error = error

    @invariant()
    def books_agree(self):
        if not hasattr(self, "queue"):
            return
        stats = self.queue.statistics()
        for name, value in self.books.items():
            assert getattr(stats, name) == value, name
        assert stats.put == stats.acked + stats.dead + stats.pending + stats.leased
        assert self.queue.pending_count() == stats.pending == len(self.pending)
        assert self.queue.outstanding_count() == stats.leased == len(self.leased)
        letters = self.queue.dead_letters()
        assert [(letter.ref.sample_id, letter.delivery_count) for letter in letters] == list(self.dead.items())
        assert {letter.ref.sample_id for letter in letters if not letter.is_stored} == self.gone
        assert self.queue.is_closed == self.closed
        assert self.queue.is_drained == (self.closed and not self.pending and not self.leased)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
