"""Keeps the leases alive that a consumer holds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from nccl_stream.leases import Lease

__all__ = ["LeaseRenewer"]

logger = logging.getLogger(__name__)

RENEWALS_PER_TIMEOUT = 3
"""A held lease is renewed this often within its visibility timeout, so two renewals may be late before it expires."""


class LeaseRenewer:
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
        """Renew ``lease`` from now on."""
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
        """Stop renewing ``lease``."""
        with self._changed:
            self._due.pop(lease.lease_id, None)

    def signal_stop(self) -> None:
        """Let the thread end, and drop everything. Does not wait; may be called from a finalizer."""
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
