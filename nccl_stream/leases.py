"""Lease bookkeeping without locks, threads or I/O: what is pending, who holds what until when, what has died.

:class:`LeaseTable` is the state machine behind :class:`~nccl_stream.queue.SampleRefQueue` and every other queue of
the package. Its owner serializes the calls and brings the clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from nccl_stream.errors import MisuseError
from nccl_stream.refs import SampleRef

__all__ = ["DeadLetter", "FailOutcome", "Lease", "LeaseCounts", "LeaseTable", "VisibilityTimeout", "sample_key"]

_lease_id_counter = itertools.count(1)

SampleKey = tuple[str, str]


def _next_lease_id() -> int:
    """Return a lease id that no other lease of this process has."""
    return next(_lease_id_counter)


def sample_key(ref: SampleRef) -> SampleKey:
    """Return what identifies a sample in a queue. Two stores may use the same sample id."""
    return (ref.store_uri, ref.sample_id)


@dataclass(frozen=True)
class VisibilityTimeout:
    """How long a lease lives without ack, fail or extension.

    Attributes:
        seconds: any positive number; pick several times the step time of a healthy consumer.
    """

    seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds, "VisibilityTimeout.seconds")


@dataclass(frozen=True)
class Lease:
    """A consumer's time-limited hold on a ref. Identity is by value, so a copied or unpickled lease is the same lease.

    Attributes:
        ref: the leased ref.
        deadline: when the lease expires, in seconds of the queue's monotonic clock, as of the acquire. An extension
            moves the queue's own record, not this number.
        visibility_timeout: what the lease was granted with.
        redelivery_count: how often the ref had been handed out before; 0 the first time.
        lease_id: unique per acquire within the process.
        owner: who acquired it, for diagnosis.
    """

    ref: SampleRef = field(hash=False)
    deadline: float = field(compare=False)
    visibility_timeout: VisibilityTimeout = field(compare=False)
    redelivery_count: int = field(default=0, compare=False)
    lease_id: int = field(default_factory=_next_lease_id)
    owner: str = field(default="", compare=False, kw_only=True)


def _new_lease(entry: _Entry, deadline: float, visibility_timeout: VisibilityTimeout, owner: str) -> Lease:
    """The same as by its constructor, at less than half of the cost: a frozen dataclass sets field by field."""
    lease = object.__new__(Lease)
    lease.__dict__.update(
        ref=entry.ref,
        deadline=deadline,
        visibility_timeout=visibility_timeout,
        redelivery_count=entry.redelivery_count,
        lease_id=next(_lease_id_counter),
        owner=owner,
    )
    return lease


@dataclass(frozen=True)
class DeadLetter:
    """A ref that does not come again by itself: its retry budget is spent, or it was failed for good.

    Attributes:
        ref: the ref.
        reason: why the last delivery ended.
        delivery_count: how often it was handed out.
        last_owner: who held it last.
        is_stored: whether its sample is still in the store. Only then can it be redriven; otherwise it has to be
            produced anew, which takes the letter's place.
    """

    ref: SampleRef
    reason: str
    delivery_count: int
    last_owner: str
    is_stored: bool = True


class FailOutcome(Enum):
    """What :meth:`LeaseTable.fail` did."""

    STALE = "stale"
    REQUEUED = "requeued"
    DEAD = "dead"


@dataclass
class LeaseCounts:
    """Running totals; ``put = acked + removed + dead + pending + leased``, with ``dead`` reduced by a redrive.

    Attributes:
        put: refs accepted.
        acked: refs acknowledged, each once.
        removed: refs taken out of the queue without an ack.
        dead: refs that are, or were until dropped, dead letters.
        redelivered: deliveries after the first of a ref.
        failed: leases ended by fail.
        expired: leases ended by their deadline.
        handed_back: leases given back without counting a delivery.
        redriven: dead letters made pending again.
        stale: acks, fails, extensions and hand-backs of leases that had already ended.
        readmitted: puts of a sample that had been acked not long before.
    """

    put: int = 0
    acked: int = 0
    removed: int = 0
    dead: int = 0
    redelivered: int = 0
    failed: int = 0
    expired: int = 0
    handed_back: int = 0
    redriven: int = 0
    stale: int = 0
    readmitted: int = 0


class _Entry:
    __slots__ = ("deadline", "key", "lease", "redelivery_count", "ref")

    def __init__(self, key: SampleKey, ref: SampleRef) -> None:
        self.key = key
        self.ref = ref
        self.redelivery_count = 0
        self.lease: Lease | None = None
        self.deadline = math.inf


class LeaseTable:
    """Pending refs in order, live leases, dead letters. Every operation is O(1) or O(log n), amortized.

    Not thread-safe: the owner holds its own lock around each call.

    Args:
        visibility_timeout: life of a lease.
        max_redeliveries: how often a ref may be handed out again after a fail or an expiry before it becomes a dead
            letter; None for ever.
        clock: monotonic seconds.
        recent_acks: how many acked samples to remember in order to notice one that is put again.
    """

    def __init__(
        self,
        *,
        visibility_timeout: VisibilityTimeout | None = None,
        max_redeliveries: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        recent_acks: int = 4096,
    ) -> None:
        if max_redeliveries is not None and (type(max_redeliveries) is not int or max_redeliveries < 0):
            raise MisuseError(f"max_redeliveries must be a non-negative int or None, got {max_redeliveries!r}")
        self.visibility_timeout = visibility_timeout or VisibilityTimeout()
        self.max_redeliveries = max_redeliveries
        self.counts = LeaseCounts()
        self._clock = clock
        self._pending: OrderedDict[SampleKey, _Entry] = OrderedDict()
        self._leased: dict[SampleKey, _Entry] = {}
        self._dead: OrderedDict[SampleKey, DeadLetter] = OrderedDict()
        self._dead_samples = 0
        self._dead_bytes = 0
        # (deadline, lease id, key); entries of ended or extended leases are skipped when they come up.
        self._deadlines: list[tuple[float, int, SampleKey]] = []
        self._recent_acks: OrderedDict[SampleKey, None] = OrderedDict()
        self._recent_limit = recent_acks

    @property
    def pending_count(self) -> int:
        """Refs waiting to be acquired."""
        return len(self._pending)

    @property
    def leased_count(self) -> int:
        """Live leases, expired ones that were not reclaimed yet included."""
        return len(self._leased)

    @property
    def dead_samples(self) -> int:
        """Dead letters held whose sample is still in the store."""
        return self._dead_samples

    @property
    def dead_bytes(self) -> int:
        """Bytes of the samples that are still in the store behind the dead letters held."""
        return self._dead_bytes

    @property
    def is_empty(self) -> bool:
        """Nothing is pending and nothing is leased."""
        return not self._pending and not self._leased

    def check_new(self, ref: SampleRef) -> None:
        """Check that ``ref`` may be put.

        Raises:
            MisuseError: (``ValueError``) its sample is pending, leased or a dead letter.
        """
        self._check_new(sample_key(ref))

    def _check_new(self, key: SampleKey) -> None:
        if key in self._pending:
            state = "pending"
        elif key in self._leased:
            state = "leased"
        elif key in self._dead and self._dead[key].is_stored:
            state = "a dead letter"
        else:
            return
        raise MisuseError(f"sample {key[1]!r} is already present in the queue: it is {state}")

    def put(self, ref: SampleRef) -> bool:
        """Append ``ref`` to the pending ones.

        Returns:
            False when the sample was acked not long before and now comes again, which is allowed but worth a word.

        Raises:
            MisuseError: (``ValueError``) its sample is pending, leased or a dead letter.
        """
        key = sample_key(ref)
        if key in self._pending or key in self._leased or key in self._dead:
            self._check_new(key)
            del self._dead[key]  # the sample behind it is gone, and this is the sample anew
        self._pending[key] = _Entry(key, ref)
        self.counts.put += 1
        if key not in self._recent_acks:
            return True
        del self._recent_acks[key]
        self.counts.readmitted += 1
        return False

    def acquire(self, owner: str = "", *, key: SampleKey | None = None) -> Lease | None:
        """Lease the ref at the head, or the pending one with this ``key``.

        Returns:
            None when there is no such ref.
        """
        if key is None:
            if not self._pending:
                return None
            key, entry = self._pending.popitem(last=False)
        else:
            found = self._pending.pop(key, None)
            if found is None:
                return None
            entry = found
        deadline = self._clock() + self.visibility_timeout.seconds
        lease = entry.lease = _new_lease(entry, deadline, self.visibility_timeout, owner)
        self._leased[key] = entry
        self._set_deadline(entry, deadline)
        if entry.redelivery_count:
            self.counts.redelivered += 1
        return lease

    def ack(self, lease: Lease) -> bool:
        """End a lease for good; the redelivery count goes with it.

        Returns:
            False when the lease is not live: acked, failed, expired and reclaimed, or forged. Nothing changes then.
        """
        entry = self._end(lease)
        if entry is None:
            return False
        self.counts.acked += 1
        self._recent_acks[entry.key] = None
        if len(self._recent_acks) > self._recent_limit:
            self._recent_acks.popitem(last=False)
        return True

    def fail(self, lease: Lease, reason: str = "failed by its consumer", *, final: bool = False) -> FailOutcome:
        """End a lease and put its ref at the tail; or among the dead letters, if its budget is spent or ``final``.

        ``final``: its sample is gone, or nobody can read it.
        """
        entry = self._end(lease)
        if entry is None:
            return FailOutcome.STALE
        self.counts.failed += 1
        return FailOutcome.REQUEUED if self._requeue(entry, lease.owner, reason, final=final) else FailOutcome.DEAD

    def hand_back(self, lease: Lease) -> bool:
        """End a lease as if it had never been: the ref returns to the head and no delivery is counted.

        Returns:
            False when the lease is not live.
        """
        entry = self._end(lease)
        if entry is None:
            return False
        self.counts.handed_back += 1
        self._pending[entry.key] = entry
        self._pending.move_to_end(entry.key, last=False)
        return True

    def extend(self, lease: Lease, seconds: float | None = None) -> bool:
        """Move the deadline of a live lease to ``seconds`` from now (default: its visibility timeout). Never earlier.

        Returns:
            False when the lease is not live.
        """
        seconds = self.visibility_timeout.seconds if seconds is None else seconds
        _check_seconds(seconds, "seconds")
        entry = self._find(lease)
        if entry is None:
            self.counts.stale += 1
            return False
        deadline = self._clock() + seconds
        if deadline > entry.deadline:
            self._set_deadline(entry, deadline)
        return True

    def is_live(self, lease: Lease) -> bool:
        """Whether ``lease`` still holds its ref. Counts nothing."""
        return self._find(lease) is not None

    def expire(self, now: float | None = None) -> list[Lease]:
        """End every lease whose deadline is at or before ``now`` (default: the clock), each as by :meth:`fail`.

        Returns:
            The leases that ended, earliest deadline first.
        """
        now = self._clock() if now is None else now
        expired: list[Lease] = []
        while (head := self._head()) is not None and head[0] <= now:
            entry = self._leased.pop(head[2])
            lease = entry.lease
            assert lease is not None  # entries of _leased have one
            expired.append(lease)
            self.counts.expired += 1
            self._requeue(entry, lease.owner, f"lease expired, held by {lease.owner or 'an unnamed consumer'}")
        return expired

    def may_expire(self) -> bool:
        """Whether :meth:`expire` may find something. Cheaper than calling it."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a live lease, or None."""
        head = self._head()
        return None if head is None else head[0]

    def remove(self, key: SampleKey) -> SampleRef | None:
        """Take a sample out, whether pending, leased or dead, without an ack; its lease, if any, becomes stale.

        Returns:
            Its ref, or None when the sample is not here.
        """
        entry = self._pending.pop(key, None) or self._leased.pop(key, None)
        if entry is not None:
            self.counts.removed += 1
            return entry.ref
        letter = self._pop_dead(key)
        if letter is None:
            return None
        self.counts.dead -= 1
        self.counts.removed += 1
        return letter.ref

    def pop_pending(self, key: SampleKey) -> SampleRef | None:
        """Take a pending sample out; None when it is not pending."""
        return self.remove(key) if key in self._pending else None

    def pending_refs(self) -> Iterable[SampleRef]:
        """Iterate over the pending refs in order; the table must not change meanwhile."""
        return (entry.ref for entry in self._pending.values())

    def leases(self) -> Iterable[Lease]:
        """Iterate over the live leases; the table must not change meanwhile."""
        return (entry.lease for entry in self._leased.values() if entry.lease is not None)

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, oldest first."""
        return list(self._dead.values())

    def redrive(self, key: SampleKey) -> bool:
        """Make a dead letter pending again, with a fresh budget.

        Returns:
            False when there is no such dead letter, or its sample is gone.
        """
        letter = self._dead.get(key)
        if letter is None or not letter.is_stored:
            return False
        self._pop_dead(key)
        self._pending[key] = _Entry(key, letter.ref)
        self.counts.dead -= 1
        self.counts.redriven += 1
        return True

    def drop_dead(self) -> list[DeadLetter]:
        """Forget the dead letters and return them; they stay in the totals. Their samples are the caller's now."""
        letters = list(self._dead.values())
        self._dead.clear()
        self._dead_samples = self._dead_bytes = 0
        return letters

    def _find(self, lease: Lease) -> _Entry | None:
        entry = self._leased.get(sample_key(lease.ref))
        if entry is None or entry.lease is None or entry.lease.lease_id != lease.lease_id:
            return None
        return entry

    def _end(self, lease: Lease) -> _Entry | None:
        entry = self._find(lease)
        if entry is None:
            self.counts.stale += 1
            return None
        del self._leased[entry.key]
        entry.lease = None
        return entry

    def _requeue(self, entry: _Entry, owner: str, reason: str, *, final: bool = False) -> bool:
        key = entry.key
        entry.lease = None
        if final or (self.max_redeliveries is not None and entry.redelivery_count >= self.max_redeliveries):
            self._dead[key] = DeadLetter(entry.ref, reason, entry.redelivery_count + 1, owner, is_stored=not final)
            self.counts.dead += 1
            if not final:
                self._dead_samples += 1
                self._dead_bytes += entry.ref.estimated_bytes
            return False
        entry.redelivery_count += 1
        self._pending[key] = entry
        return True

    def _pop_dead(self, key: SampleKey) -> DeadLetter | None:
        letter = self._dead.pop(key, None)
        if letter is not None and letter.is_stored:
            self._dead_samples -= 1
            self._dead_bytes -= letter.ref.estimated_bytes
        return letter

    def _set_deadline(self, entry: _Entry, deadline: float) -> None:
        assert entry.lease is not None
        entry.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, entry.lease.lease_id, entry.key))
        # Ended and extended leases leave their old entry behind; drop those before they outnumber the live ones.
        if len(self._deadlines) > 2 * len(self._leased) + 64:
            self._deadlines = [
                (e.deadline, e.lease.lease_id, k) for k, e in self._leased.items() if e.lease is not None
            ]
            heapq.heapify(self._deadlines)

    def _head(self) -> tuple[float, int, SampleKey] | None:
        while self._deadlines:
            deadline, lease_id, key = self._deadlines[0]
            entry = self._leased.get(key)
            if entry is not None and entry.deadline == deadline and entry.lease and entry.lease.lease_id == lease_id:
                return self._deadlines[0]
            heapq.heappop(self._deadlines)
        return None


def _check_seconds(seconds: float, what: str) -> None:
    # "not >" also refuses NaN.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise MisuseError(f"{what} must be a positive number of seconds, got {seconds!r}")
