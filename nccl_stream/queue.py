"""Lease / ack / fail queue over refs, between the producers and the consumers of one process.

The queue carries refs only; tensors stay in the :class:`~nccl_stream.store.FeatureStore`, whose health drives the
backpressure on producers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nccl_stream.errors import ClosedError, MisuseError, ProducerFailedError
from nccl_stream.leases import (
    DeadLetter,
    FailOutcome,
    Lease,
    LeaseTable,
    SampleKey,
    VisibilityTimeout,
    sample_key,
)
from nccl_stream.refs import SampleRef
from nccl_stream.store import FeatureStore
from nccl_stream.watermarks import HealthCallback, WatermarkGate

__all__ = [
    "DeadLetter",
    "FailOutcome",
    "Lease",
    "LeaseTable",
    "QueueStatistics",
    "SampleRefQueue",
    "VisibilityTimeout",
]

logger = logging.getLogger(__name__)

GC_INTERVAL_S = 1.0
"""Least time between two sweeps of the store that ``acquire`` starts on its own."""


class _ThisThread(threading.local):
    """The name of the thread that asks, as of its first time: looking it up is a tenth of an acquire's cost."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


_this_thread = _ThisThread()


@dataclass(frozen=True)
class QueueStatistics:
    """Snapshot of a queue's books: ``put = acked + removed + dead + pending + leased``.

    Attributes:
        put: refs accepted.
        acked: refs acknowledged, each once.
        removed: refs taken out without an ack.
        dead: refs that were failed for good or too often, less those redriven.
        pending: refs waiting now.
        leased: refs held now.
        redelivered: deliveries after the first of a ref.
        failed: leases ended by ``fail``.
        expired: leases ended by their deadline.
        handed_back: leases given back without counting a delivery.
        redriven: dead letters made pending again.
        stale: acks, fails, extensions and hand-backs that came too late and changed nothing.
        readmitted: puts of a sample that had been acked not long before.
        pauses: transitions into backpressure.
        paused_s: seconds that producers have spent blocked, all together.
        starved_s: seconds that consumers have spent waiting in ``acquire``, all together.
    """

    put: int
    acked: int
    removed: int
    dead: int
    pending: int
    leased: int
    redelivered: int
    failed: int
    expired: int
    handed_back: int
    redriven: int
    stale: int
    readmitted: int
    pauses: int
    paused_s: float
    starved_s: float


class SampleRefQueue:
    """Leases refs to consumers, takes acks and fails, and holds producers back while the store is full.

    Every method may be called from any thread. ``acquire`` also returns expired leases to the pending refs, so a
    consumer that died cannot strand them; the queue has no thread of its own.

    Args:
        store: whose health decides about backpressure.
        visibility_timeout: life of a lease without ack or extension; 30 s by default.
        high_watermark_bytes: resident bytes at which producers pause; None means the store's own flag.
        low_watermark_bytes: resident bytes at which they resume; None means the store's own flag.
        on_pause: called once per transition into backpressure with the health that caused it. Never under a lock; it
            may call the queue. An exception is logged.
        on_resume: the same for the way back.
        max_redeliveries: how often a ref may be handed out again after a fail or an expiry before it becomes a dead
            letter; None for ever.
        clock: monotonic seconds for deadlines of leases. Waiting always takes real time.

    Raises:
        ConfigError: (``ValueError``) a watermark out of range, or no band between low and high.
    """

    def __init__(
        self,
        store: FeatureStore,
        visibility_timeout: VisibilityTimeout | None = None,
        high_watermark_bytes: int | None = None,
        low_watermark_bytes: int | None = None,
        on_pause: HealthCallback | None = None,
        on_resume: HealthCallback | None = None,
        *,
        max_redeliveries: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._gate = WatermarkGate(
            high_watermark_bytes=high_watermark_bytes,
            low_watermark_bytes=low_watermark_bytes,
            on_pause=on_pause,
            on_resume=on_resume,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # consumers wait here
        self._room = threading.Condition(self._lock)  # producers wait here
        self._table = LeaseTable(visibility_timeout=visibility_timeout, max_redeliveries=max_redeliveries, clock=clock)
        self._closed = False
        self._error: BaseException | None = None
        self._num_waiting_consumers = 0
        # Samples whose put is blocked: resident, but nobody can consume them yet.
        self._blocked: dict[SampleKey, int] = {}
        self._blocked_bytes = 0
        self._paused_s = 0.0
        self._starved_s = 0.0
        self._next_gc = time.monotonic() + GC_INTERVAL_S

    # -- producing --

    def put(self, ref: SampleRef) -> None:
        """Enqueue ``ref``. Does not block, whatever the store's health.

        Raises:
            MisuseError: (``ValueError``) not a ref, or its sample is pending, leased or a dead letter.
            ClosedError: (``RuntimeError``) the queue is closed.
        """
        _check_ref(ref)
        with self._lock:
            self._check_open()
            if self._blocked:
                self._check_not_blocked(ref)
            self._enqueue(ref)

    def put_blocks_until_below(
        self,
        ref: SampleRef,
        poll_interval: float = 0.05,
        abort_when: Callable[[], bool] | None = None,
    ) -> None:
        """Enqueue ``ref`` once the store's residency allows it.

        Pauses at the high watermark and resumes at the low one; between the two, the state stays what it was, for all
        producers of the queue together. Never pauses for what waiting cannot change: the bytes of samples whose own
        put is blocked here, and of dead letters. Nor while a consumer waits and nothing is pending.

        Args:
            ref: the ref; its sample is already in the store.
            poll_interval: seconds between two looks at the store's health while paused.
            abort_when: asked before each look; True ends the wait. Called without a lock.

        Raises:
            MisuseError: (``ValueError``) not a ref, or its sample is pending, leased, blocked or a dead letter.
            ClosedError: (``RuntimeError``) the queue was closed, before or meanwhile, or ``abort_when`` returned True.
        """
        _check_ref(ref)
        _check_interval(poll_interval)
        with self._blocking(ref):
            while True:
                if abort_when is not None and abort_when():
                    raise ClosedError(f"put of sample {ref.sample_id!r} was aborted: abort_when() returned True")
                health = self._store.health()
                with self._lock:
                    self._check_open()
                    is_open = self._gate.judge(
                        health,
                        stuck_bytes=self._blocked_bytes + self._table.dead_bytes,
                        stuck_samples=len(self._blocked) + self._table.dead_samples,
                    )
                    admitted = is_open or self._is_starving()
                    if admitted:
                        self._enqueue(ref)
                self._gate.call_back()
                if admitted:
                    return
                with self._lock:
                    # A close or a starving consumer since the lock was last held must not be slept through.
                    if not self._closed and not self._is_starving():
                        started = time.monotonic()
                        self._room.wait(min(poll_interval, threading.TIMEOUT_MAX))
                        self._paused_s += time.monotonic() - started

    # -- consuming --

    def acquire(self, poll_interval: float = 0.05, *, owner: str | None = None) -> Lease | None:
        """Lease the next ref, waiting up to ``poll_interval`` seconds for one.

        Returns as soon as a ref is put, failed or reclaimed, or the queue is closed and drained. None means that
        nothing came: stop if :attr:`is_drained`, otherwise call again. (:attr:`is_closed` alone does not say that
        nothing more comes: a leased ref may still be failed.)

        Args:
            poll_interval: longest wait in seconds; 0 does not wait.
            owner: who is asking, for diagnosis; the thread's name by default.

        Raises:
            ProducerFailedError: the queue was closed with an error, and nothing is pending.
        """
        _check_interval(poll_interval)
        self._gc_store()
        with self._lock:
            if self._table.may_expire():
                self._expire()
            if not self._table.pending_count:
                self._wait_for_work(poll_interval)
            lease = self._table.acquire(_this_thread.name if owner is None else owner)
            if lease is not None or not self._closed or self._error is None:
                return lease
            error = self._error
        raise ProducerFailedError(f"the producing side failed: {type(error).__name__}: {error}") from error

    def acquire_many(self, count: int, poll_interval: float = 0.05, *, owner: str | None = None) -> list[Lease]:
        """Lease up to ``count`` refs; waits, as :meth:`acquire` does, until there is at least one.

        Raises:
            MisuseError: (``ValueError``) ``count`` is not positive.
            ProducerFailedError: the queue was closed with an error, and nothing is pending.
        """
        if type(count) is not int or count <= 0:
            raise MisuseError(f"count must be a positive int, got {count!r}")
        first = self.acquire(poll_interval, owner=owner)
        if first is None:
            return []
        leases = [first]
        with self._lock:
            while len(leases) < count and (lease := self._table.acquire(first.owner)) is not None:
                leases.append(lease)
        return leases

    def ack(self, lease: Lease) -> None:
        """Mark a leased ref as consumed. A lease that is not live changes nothing. Does not touch the store."""
        _check_lease(lease)
        with self._lock:
            self._table.ack(lease)
            self._after_leases_ended()

    def ack_many(self, leases: Iterable[Lease]) -> int:
        """Ack several leases at once; return how many were live.

        Raises:
            MisuseError: (``ValueError``) one of them is not a lease; none is acked then.
        """
        leases = list(leases)
        for lease in leases:
            _check_lease(lease)
        with self._lock:
            count = sum(self._table.ack(lease) for lease in leases)
            self._after_leases_ended()
        return count

    def fail(self, lease: Lease, *, reason: str | BaseException | None = None, final: bool = False) -> None:
        """Put a leased ref back at the tail, or among the dead letters once its budget is spent.

        A lease that is not live changes nothing. The stored sample stays.

        Args:
            lease: the lease.
            reason: kept with a dead letter.
            final: whatever the budget, the ref must not come again: its sample is gone, or nobody can read it. A sample
                that is there all the same is the caller's to discard.
        """
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else reason
        text = text or "failed by its consumer"
        _check_lease(lease)
        with self._lock:
            outcome = self._table.fail(lease, text, final=final)
            if outcome is FailOutcome.REQUEUED:
                self._work.notify()
            self._after_leases_ended()
        if outcome is FailOutcome.DEAD:
            logger.warning("sample %s is dead, it does not come again: %s", lease.ref.sample_id, text)

    def hand_back(self, lease: Lease) -> bool:
        """Return a leased ref to the head of the queue as if it had never been acquired; no delivery is counted.

        Returns:
            Whether the lease was live.
        """
        _check_lease(lease)
        with self._lock:
            live = self._table.hand_back(lease)
            if live:
                self._work.notify()
        return live

    def extend(self, lease: Lease, seconds: float | None = None) -> bool:
        """Let a lease live for ``seconds`` from now (default: the visibility timeout), never shorter than before.

        Returns:
            Whether the lease was live; False means that somebody else may have the ref.
        """
        _check_lease(lease)
        with self._lock:
            return self._table.extend(lease, seconds)

    def reclaim_expired(self) -> int:
        """Return the refs of expired leases to the pending ones and say how many there were.

        ``acquire`` does the same by itself.
        """
        with self._lock:
            count = self._expire()
        if count:
            self._gc_store(force=True)
        return count

    # -- dead letters --

    def dead_letters(self) -> list[DeadLetter]:
        """Return the refs that were failed for good or too often, oldest first; the latter are still in the store."""
        with self._lock:
            return self._table.dead_letters()

    def redrive(self, ref: SampleRef | None = None) -> int:
        """Make the dead letter of ``ref``, or all of them, pending again with a fresh budget; return how many.

        Those whose sample is gone stay. Works on a closed queue too: what was accepted before the close can still be
        consumed.
        """
        with self._lock:
            refs = [letter.ref for letter in self._table.dead_letters()] if ref is None else [ref]
            keys = [sample_key(each) for each in refs]
            count = sum(self._table.redrive(key) for key in keys)
            self._work.notify(count)
        return count

    def drop_dead_letters(self) -> list[DeadLetter]:
        """Forget the dead letters and return them; discarding their samples from the store is up to the caller."""
        with self._lock:
            return self._table.drop_dead()

    # -- state --

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called. Refs may still be pending or leased."""
        return self._closed

    @property
    def is_drained(self) -> bool:
        """Whether the queue is closed and nothing is pending or leased, all judged at one instant."""
        with self._lock:
            return self._closed and self._table.is_empty

    @property
    def producers_wait(self) -> bool:
        """Whether nothing is pending, and nothing comes before the store has room again (``store.is_full()``).

        Puts that are blocked here do not count: they go through as soon as a consumer waits.
        """
        if self.pending_count():
            return False
        is_full = getattr(self._store, "is_full", None)
        return bool(self._store.health().high_watermark_hit if is_full is None else is_full())

    @property
    def error(self) -> BaseException | None:
        """What :meth:`close` was given, or None."""
        return self._error

    def pending_count(self) -> int:
        """Return the number of refs waiting to be acquired."""
        with self._lock:
            return self._table.pending_count

    def outstanding_count(self) -> int:
        """Return the number of leased refs, those whose lease has expired but was not reclaimed included."""
        with self._lock:
            return self._table.leased_count

    def statistics(self) -> QueueStatistics:
        """Return a snapshot of the books. Changes nothing; in particular it reclaims nothing."""
        with self._lock:
            return QueueStatistics(
                **vars(self._table.counts),
                pending=self._table.pending_count,
                leased=self._table.leased_count,
                pauses=self._gate.num_pauses,
                paused_s=self._paused_s,
                starved_s=self._starved_s,
            )

    def close(self, *, error: BaseException | None = None) -> None:
        """Accept no more refs. Pending ones stay acquirable, leases stay valid. Idempotent.

        Args:
            error: why the producing side ended, when it failed. Once nothing is pending, ``acquire`` raises
                ``ProducerFailedError`` from it instead of returning None. The first error given stays.
        """
        with self._lock:
            self._closed = True
            if self._error is None:
                self._error = error
            self._work.notify_all()
            self._room.notify_all()

    # -- internals; "locked" means: call with the lock held --

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the queue is closed; it accepts no more refs")

    def _check_not_blocked(self, ref: SampleRef) -> None:
        if sample_key(ref) in self._blocked:
            raise MisuseError(f"sample {ref.sample_id!r} is already present in the queue: its put is blocked")

    def _enqueue(self, ref: SampleRef) -> None:
        if not self._table.put(ref):
            logger.warning("sample %s was acked before and is put again", ref.sample_id)
        if self._num_waiting_consumers:
            self._work.notify()

    def _expire(self) -> int:
        expired = self._table.expire()
        if expired:
            logger.warning(
                "%d leases expired and were reclaimed, first: sample %s held by %s",
                len(expired),
                expired[0].ref.sample_id,
                expired[0].owner,
            )
            self._work.notify(len(expired))
            self._after_leases_ended()
        return len(expired)

    def _after_leases_ended(self) -> None:
        if self._blocked:
            self._room.notify_all()
        if self._closed and self._table.is_empty:
            self._work.notify_all()

    def _wait_for_work(self, timeout: float) -> None:
        """Wait, locked, until something is pending or nothing can come any more, at most ``timeout`` seconds."""
        started = now = time.monotonic()
        deadline = started + timeout
        self._num_waiting_consumers += 1
        try:
            while not self._table.pending_count and now < deadline:
                if self._closed and (self._table.is_empty or self._error is not None):
                    return
                if self._blocked:
                    self._room.notify_all()
                next_expiry = self._table.next_deadline()
                # A lease that somebody else takes meanwhile expires after a whole visibility timeout at the earliest.
                wait = min(deadline - now, self._table.visibility_timeout.seconds, threading.TIMEOUT_MAX)
                if next_expiry is not None:
                    wait = min(wait, max(0.0, next_expiry - self._clock()))
                self._work.wait(wait)
                self._expire()
                now = time.monotonic()
        except BaseException:
            # The wake-up that this consumer may have taken belongs to another one.
            self._work.notify()
            raise
        finally:
            self._num_waiting_consumers -= 1
            self._starved_s += time.monotonic() - started

    @contextlib.contextmanager
    def _blocking(self, ref: SampleRef) -> Iterator[None]:
        """Count ``ref`` among the blocked ones for the duration."""
        key = sample_key(ref)
        with self._lock:
            self._check_open()
            self._check_not_blocked(ref)
            self._table.check_new(ref)
            self._blocked[key] = ref.estimated_bytes
            self._blocked_bytes += ref.estimated_bytes
        try:
            yield
        finally:
            with self._lock:
                self._blocked_bytes -= self._blocked.pop(key)
                # One blocked sample less may leave nothing but blocked ones.
                self._room.notify_all()

    def _is_starving(self) -> bool:
        return self._num_waiting_consumers > 0 and self._table.pending_count == 0

    def _gc_store(self, *, force: bool = False) -> None:
        """Let the store sweep, at most every GC_INTERVAL_S seconds unless forced."""
        now = time.monotonic()
        if not force and now < self._next_gc:
            return
        self._next_gc = now + GC_INTERVAL_S
        try:
            self._store.gc()
        except ClosedError:
            logger.debug("the store was closed before the queue; nothing to sweep")
        except Exception:
            logger.exception("the store's sweep raised; the queue goes on")


def _check_ref(ref: object) -> None:
    if not isinstance(ref, SampleRef):
        raise MisuseError(f"the queue takes SampleRefs, got {type(ref).__name__}")


def _check_lease(lease: object) -> None:
    if not isinstance(lease, Lease):
        raise MisuseError(f"expected a Lease, got {type(lease).__name__}")


def _check_interval(poll_interval: float) -> None:
    if not poll_interval >= 0:
        raise MisuseError(f"poll_interval must be a non-negative number of seconds, got {poll_interval!r}")
