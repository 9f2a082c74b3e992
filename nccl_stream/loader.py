"""The consuming side: leases refs from a queue, materializes them through a store and yields batches."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from nccl_stream import _compat
from nccl_stream.batch import FeatureBatch, batch_of
from nccl_stream.errors import ConfigError, MisuseError, SchemaError
from nccl_stream.queue import Lease, SampleRefQueue
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.schema import schema_of, validate_ref
from nccl_stream.store import FeatureStore, StoreHandle

__all__ = ["FeatureDataLoader"]

logger = logging.getLogger(__name__)

WAITING_LOG_S = 30.0
"""Seconds without a sample after which a waiting loader says so, and again after as long."""

RENEWALS_PER_TIMEOUT = 3
"""A held lease is renewed this often within its visibility timeout, so two renewals may be late before it expires."""


@dataclass(frozen=True)
class _Held:
    """A delivered sample that is not settled yet. Padding has no handle: no store holds it."""

    lease: Lease
    handle: StoreHandle | None


class FeatureDataLoader:
    """Iterates over the batches of a queue, one sample each.

    A sample is acked, and then its store handle released, on the next pull, so that the trainer can use a batch for a
    whole step. Iteration ends when the queue is closed and nothing is pending or leased any more, by anyone: a lease
    that another consumer fails comes here. A producer that failed is an error, after the samples it had made.

    While a sample is held, a small daemon thread renews its lease, so a long step loses nothing; a process that dies
    stops renewing. Leaving the context because of an exception gives the samples in hand back instead of acking them:
    the last one counts as a failed delivery, the others as never delivered. A trainer that only catches the exception
    around the ``for`` loop should use the loader as a context manager for that reason.

    Args:
        queue: Where leases come from. :meth:`close` closes it.
        store: Where refs are materialized.
        algorithm: The algorithm whose batches are yielded; EAGLE-3 by default.
        acquire_poll_interval: Longest uninterrupted wait for a ref, in seconds. A ref that comes ends the wait at once.
        ack: ``"next"`` acks a sample on the next pull. ``"step"`` keeps all samples until :meth:`step`, called after
            the optimizer's step, so that a death in the middle of gradient accumulation brings them again; iteration
            then also ends while samples are held here, and they are acked by a last :meth:`step`.

    Raises:
        ConfigError: (a ``ValueError``) an ``acquire_poll_interval`` that is not positive, or another ``ack``.
    """

    def __init__(
        self,
        queue: SampleRefQueue,
        store: FeatureStore,
        algorithm: FeatureAlgorithm | None = None,
        acquire_poll_interval: float = 0.05,
        *,
        ack: Literal["next", "step"] = "next",
    ) -> None:
        if not acquire_poll_interval > 0:
            raise ConfigError(
                f"acquire_poll_interval must be a positive number of seconds, got {acquire_poll_interval}"
            )
        if ack not in ("next", "step"):
            raise ConfigError(f"ack must be 'next' or 'step', got {ack!r}")
        self._queue = queue
        self._store = store
        self._algorithm = FeatureAlgorithm.EAGLE3 if algorithm is None else algorithm
        self._poll_interval = acquire_poll_interval
        self._ack_on_next = ack == "next"
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._closed = False
        self._renewer = _LeaseRenewer(getattr(queue, "extend", None))
        # A loader that is dropped without close() must not renew for ever. Only signals: it may run on any thread.
        weakref.finalize(self, self._renewer.signal_stop).atexit = False

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids of the samples in hand, oldest first."""
        with self._lock:
            return tuple(held.lease.ref.sample_id for held in self._held)

    def __iter__(self) -> FeatureDataLoader:
        return self

    def __next__(self) -> FeatureBatch:
        """Return the next batch; with ``ack="next"``, settle the previous one first. Blocks until there is one.

        Returns:
            The algorithm's batch object, with the sample's id and attributes. Its tensors are valid until the sample
            is settled; copy what you keep for longer.

        Raises:
            StopIteration: The queue is drained, or the loader closed.
            ProducerFailedError: The producing side failed, and what it had produced is consumed.
            MisuseError: (a ``ValueError``) the ref is for another algorithm; it stays in the queue.
            SchemaError: (a ``ValueError``) the ref breaks its schema; it and its stored sample are dropped for good.
            Exception: What the store raised; the lease is failed, so the sample comes again.
        """
        if self._ack_on_next:
            self._settle()
        lease = self._next_lease()
        if lease is None:
            if not self.sample_ids:
                self._renewer.close()
            raise StopIteration
        self._renewer.hold(lease)
        try:
            batch, handle = self._materialize(lease)
        except SchemaError:
            self._renewer.drop(lease)
            self._drop_for_good(lease)
            raise
        except BaseException as error:
            self._give_back(lease, error)
            raise
        with self._lock:
            if not self._closed:
                self._held.append(_Held(lease, handle))
                return batch
        # Closed by another thread meanwhile: the batch must not be yielded, so it was never delivered.
        self._give_back(lease, None)
        self._renewer.close()
        raise StopIteration

    def consume_now(self) -> None:
        """Ack the batch yielded last and release its memory now instead of on the next pull. Idempotent."""
        self._settle(last_only=True)

    def step(self) -> None:
        """Ack and release all batches yielded so far: call it after the optimizer's step. Idempotent."""
        self._settle()

    def close(self) -> None:
        """Settle what is in hand, close the queue and end the iteration. Idempotent.

        With ``ack="next"`` the sample in hand is acked. With ``ack="step"`` samples without a :meth:`step` have not
        reached the weights: they go back to the queue.
        """
        try:
            if self._ack_on_next:
                self._settle()
        finally:
            self._end(None)

    def __enter__(self) -> FeatureDataLoader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self._end(exc)

    def _end(self, reason: BaseException | None) -> None:
        """Give back what is held (the last one as failed, if there is a reason) and shut down."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, []
        try:
            # Newest first: each goes to the head of the queue, so together they keep their order. Handles are dropped,
            # not released: releasing frees the sample, and it is needed again.
            while held:
                self._give_back(held.pop().lease, reason)
                reason = None
        finally:
            self._renewer.close()
            self._queue.close()

    def _give_back(self, lease: Lease, reason: BaseException | None) -> None:
        self._renewer.drop(lease)
        # Only an error can be the sample's fault; an interrupt is not, and must not use up its retry budget.
        if isinstance(reason, Exception):
            _compat.fail(self._queue, lease, reason)
        else:
            _compat.hand_back(self._queue, lease)

    def _settle(self, *, last_only: bool = False) -> None:
        """Ack and release what is held, oldest first. After an error, what was not reached is still held."""
        while True:
            with self._lock:
                if not self._held:
                    return
                held = self._held.pop(-1 if last_only else 0)
            self._settle_one(held)
            if last_only:
                return

    def _settle_one(self, held: _Held) -> None:
        self._renewer.drop(held.lease)
        # Ack first. The other way round, a lease that has expired would come again with its sample gone; for the same
        # reason the handle of a lease that was lost is dropped instead of released.
        live = _compat.ack(self._queue, held.lease)
        if held.handle is None:
            return  # Padding: no delivery stands behind it, so there is nothing to be late for.
        if not live:
            logger.warning(
                "the lease of sample %s had expired before its ack; it may be trained on twice",
                held.lease.ref.sample_id,
            )
        else:
            self._store.release(held.handle)

    def _next_lease(self) -> Lease | None:
        """Wait for a lease; None at the end."""
        started = logged = time.monotonic()
        while not self._closed:
            lease = self._queue.acquire(self._poll_interval)
            if lease is not None:
                return lease
            if self._at_end():
                return None
            now = time.monotonic()
            if now - logged >= WAITING_LOG_S:
                logged = now
                logger.info(
                    "waiting for a sample for %.0f s: queue closed=%s, pending %d, leased %d",
                    now - started,
                    self._queue.is_closed,
                    self._queue.pending_count(),
                    self._queue.outstanding_count(),
                )
        return None

    def _at_end(self) -> bool:
        if not self._held:
            return _compat.is_drained(self._queue)
        # What is leased includes our own, which the trainer settles after the iteration.
        return self._queue.is_closed and self._queue.pending_count() == 0

    def _materialize(self, lease: Lease) -> tuple[FeatureBatch, StoreHandle | None]:
        ref = lease.ref
        if ref.algorithm is not self._algorithm:
            raise MisuseError(
                f"this loader serves {self._algorithm.value}, but sample {ref.sample_id!r} is for {ref.algorithm.value}"
            )
        if getattr(lease, "is_padding", False):
            device = getattr(self._store, "device", None)
            tensors = schema_of(ref.algorithm).padding(ref, device)
            return batch_of(ref.algorithm, tensors, attributes=ref.attributes), None
        validate_ref(ref)
        tensors, handle = self._store.get(ref)
        try:
            # A sample may carry more than the batch has fields for; it goes with the sample.
            batch = batch_of(ref.algorithm, tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
        except SchemaError:
            self._store.release(handle)  # The ref is dropped for good: nobody else will need the sample.
            raise
        return batch, handle

    def _drop_for_good(self, lease: Lease) -> None:
        _compat.ack(self._queue, lease)
        try:
            self._store.discard(lease.ref)
        except Exception:
            logger.exception("the sample of the refused ref %s could not be dropped", lease.ref.sample_id)


class _LeaseRenewer:
    """Renews the held leases from a daemon thread, which exists only while there are some.

    Args:
        extend: Renews one lease for another visibility timeout; False when it is lost. None disables everything.
    """

    def __init__(self, extend: Callable[[Lease], bool] | None) -> None:
        self._extend = extend
        # Reentrant, since signal_stop may run in a garbage collection in the middle of one of these methods.
        self._changed = threading.Condition(threading.RLock())
        self._due: dict[int, tuple[float, Lease]] = {}
        self._thread: threading.Thread | None = None
        # Each thread runs for one generation, so that stopping one can never stop or miss its successor.
        self._generation = 0

    def hold(self, lease: Lease) -> None:
        if self._extend is None:
            return
        with self._changed:
            self._due[lease.lease_id] = (time.monotonic() + _renewal_period(lease), lease)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._generation,), name="feature-loader-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drop(self, lease: Lease) -> None:
        with self._changed:
            self._due.pop(lease.lease_id, None)

    def signal_stop(self) -> None:
        with self._changed:
            self._generation += 1
            self._due.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop renewing and join the thread; a later :meth:`hold` starts anew."""
        with self._changed:
            self.signal_stop()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, generation: int) -> None:
        while True:
            with self._changed:
                if self._generation != generation:
                    return
                now = time.monotonic()
                due = [lease for when, lease in self._due.values() if when <= now]
                if not due:
                    next_due = min((when for when, _ in self._due.values()), default=None)
                    self._changed.wait(None if next_due is None else next_due - now)
                    continue
            for lease in due:
                self._renew(lease)

    def _renew(self, lease: Lease) -> None:
        try:
            assert self._extend is not None  # nothing is held otherwise
            live = self._extend(lease)
        except Exception:
            logger.exception("renewing the lease of sample %s failed", lease.ref.sample_id)
            live = True  # It may work the next time, and costs nothing if not.
        with self._changed:
            if lease.lease_id not in self._due:
                return  # Settled meanwhile.
            if live:
                self._due[lease.lease_id] = (time.monotonic() + _renewal_period(lease), lease)
            else:
                del self._due[lease.lease_id]
                logger.warning("the lease of sample %s was lost while it was in use", lease.ref.sample_id)


def _renewal_period(lease: Lease) -> float:
    return lease.visibility_timeout.seconds / RENEWALS_PER_TIMEOUT
