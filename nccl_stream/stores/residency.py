"""The books of a store: what is resident, what may come in, and who still holds what. One copy for all stores.

A :class:`Residency` counts; it moves no bytes. A store reserves room, does its copying without any lock, then commits
or rolls back. Payloads (whatever the store needs to find a sample's tensors) are handed back and dropped outside the
lock as well.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

from nccl_stream.errors import CapacityError, ClosedError, ConfigError, MisuseError, SampleNotFoundError
from nccl_stream.store import StoreHandle, StoreHealth

__all__ = ["Reservation", "Residency"]

logger = logging.getLogger(__name__)

P = TypeVar("P")


@dataclass
class _Entry(Generic[P]):
    nbytes: int
    payload: P | None = None
    committed: bool = False
    # Handle id to the finalizer that reports a handle which was dropped without a release.
    holds: dict[int, weakref.finalize[..., StoreHandle]] = field(default_factory=dict)
    # Ids of such handles: a copy of one of them may still be released.
    abandoned_ids: set[int] = field(default_factory=set)
    # Set by the first release (or a discard): the sample has been consumed and goes with its last hold.
    condemned: bool = False


class Reservation(Generic[P]):
    """Room taken for one sample whose payload is still being made.

    As a context manager it rolls back unless :meth:`commit` was called, so no exception can leak the room.
    """

    def __init__(self, residency: Residency[P], sample_id: str, entry: _Entry[P]) -> None:
        self._residency = residency
        self._sample_id = sample_id
        self._entry = entry

    def commit(self, payload: P) -> None:
        """Make the sample visible.

        Raises:
            ClosedError: the store was closed meanwhile; the room is already gone.
        """
        self._residency._commit(self._sample_id, self._entry, payload)

    def grow(self, nbytes: int) -> None:
        """Take ``nbytes`` more for the sample. Without effect on one that is gone.

        Raises:
            CapacityError: (``MemoryError``) over the byte cap; nothing was taken.
        """
        self._residency._grow(self._sample_id, self._entry, nbytes)

    def rollback(self) -> None:
        """Give the room back. Does nothing after a commit."""
        self._residency._rollback(self._sample_id, self._entry)

    def __enter__(self) -> Reservation[P]:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.rollback()


class Residency(Generic[P]):
    """Thread-safe accounting of samples, bytes, caps, watermarks and handles.

    Args:
        max_samples: cap on samples; None for no cap.
        max_bytes: cap on bytes; None for no cap. At least one of the two is needed.
        high_watermark_bytes: where ``high_watermark_hit`` starts (``>=``); None means ``max_bytes``.
        low_watermark_bytes: where ``low_watermark_hit`` ends (``<=``); None means 0.
        name: what to call the store in messages.
        on_free: called with the payload of every sample that left, whatever the way, on the thread that caused it and
            never under the lock.

    Raises:
        ConfigError: (``ValueError``) no cap, a cap that is not positive, or watermarks that leave no band.
    """

    def __init__(
        self,
        *,
        max_samples: int | None,
        max_bytes: int | None,
        high_watermark_bytes: int | None,
        low_watermark_bytes: int | None,
        name: str = "store",
        on_free: Callable[[P], None] | None = None,
    ) -> None:
        if max_samples is None and max_bytes is None:
            raise ConfigError(f"{name} needs at least one of max_samples / max_bytes; without a cap it grows for ever")
        for what, value in (("max_samples", max_samples), ("max_bytes", max_bytes)):
            if value is not None and (type(value) is not int or value <= 0):
                raise ConfigError(f"{what} must be a positive int or None, got {value!r}")
        for what, value in (
            ("high_watermark_bytes", high_watermark_bytes),
            ("low_watermark_bytes", low_watermark_bytes),
        ):
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"{what} must be a non-negative int or None, got {value!r}")
        if high_watermark_bytes is None:
            high_watermark_bytes = max_bytes
        if low_watermark_bytes is None:
            low_watermark_bytes = 0
        if high_watermark_bytes is not None and low_watermark_bytes >= high_watermark_bytes:
            raise ConfigError(
                "low_watermark_bytes must be strictly less than high_watermark_bytes, "
                f"got low={low_watermark_bytes} high={high_watermark_bytes}"
            )
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._high = high_watermark_bytes
        self._low = low_watermark_bytes
        self._name = name
        self._on_free = on_free
        # Handles that were garbage-collected unreleased. Their finalizer may run anywhere, even while this thread
        # holds the lock, so it only appends here.
        self._abandoned: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._entries: dict[str, _Entry[P]] = {}
        self._resident_bytes = 0
        # Bytes that were refused last; 0 since there was room again.
        self._refused_bytes = 0
        self._closed = False

    def reserve(self, sample_id: str, nbytes: int) -> Reservation[P]:
        """Take room for a new sample. Never blocks.

        Raises:
            MisuseError: (``ValueError``) the id is empty, not a str, or already present.
            CapacityError: (``MemoryError``) over a cap; ``can_wait`` is False when the sample alone is.
            ClosedError: the store is closed.
        """
        if not isinstance(sample_id, str) or not sample_id:
            raise MisuseError(f"sample_id must be a non-empty str, got {sample_id!r}")
        with self._lock:
            self._check_open("put")
            if sample_id in self._entries:
                raise MisuseError(f"sample_id {sample_id!r} is already present in this {self._name}")
            self._check_caps(sample_id, nbytes)
            self._refused_bytes = 0
            entry: _Entry[P] = _Entry(nbytes)
            self._entries[sample_id] = entry
            self._resident_bytes += nbytes
            return Reservation(self, sample_id, entry)

    def payload(self, sample_id: str) -> P:
        """Return the payload of a committed sample.

        Raises:
            SampleNotFoundError: (``KeyError``) it is not here, or not any more.
            ClosedError: the store is closed.
        """
        with self._lock:
            return self._committed(sample_id)

    def attach(self, handle: StoreHandle) -> P:
        """Register ``handle`` as a hold on its sample and return the sample's payload.

        A handle that is garbage-collected without a release stops holding, but does not count as consumption: the
        sample stays for whoever is given its ref next.

        Raises:
            SampleNotFoundError: (``KeyError``) the sample is not here, or not any more.
            ClosedError: the store is closed.
        """
        with self._lock:
            payload = self._committed(handle.sample_id)
            finalizer = weakref.finalize(handle, self._abandoned.append, (handle.sample_id, handle.handle_id))
            finalizer.atexit = False
            self._entries[handle.sample_id].holds[handle.handle_id] = finalizer
            return payload

    def release(self, handle: StoreHandle) -> bool:
        """End a hold; unknown, forged or already released handles change nothing.

        Returns:
            Whether this freed the sample.

        Raises:
            ClosedError: the store is closed.
        """
        freed: list[P] = []
        with self._lock:
            self._check_open("release")
            self._sweep(freed)
            entry = self._entries.get(handle.sample_id)
            if entry is not None and self._end_hold(entry, handle.handle_id):
                entry.condemned = True
                gone = self._free_if_unheld(handle.sample_id, entry, freed)
            else:
                logger.debug("release of unknown handle %s of sample %s ignored", handle.handle_id, handle.sample_id)
                gone = False
        self._report(freed)
        return gone

    def detach(self, handle: StoreHandle) -> None:
        """Undo :meth:`attach` for a get that failed: the hold ends, the sample stays as if never asked for."""
        freed: list[P] = []
        with self._lock:
            entry = self._entries.get(handle.sample_id)
            if entry is not None and self._end_hold(entry, handle.handle_id):
                self._free_if_unheld(handle.sample_id, entry, freed)
        self._report(freed)

    def discard(self, sample_id: str) -> bool:
        """Drop a committed sample now, or with its last hold.

        Returns:
            Whether it was there and not already on its way out.

        Raises:
            ClosedError: the store is closed.
        """
        freed: list[P] = []
        with self._lock:
            self._check_open("discard")
            self._sweep(freed)
            entry = self._entries.get(sample_id)
            found = entry is not None and entry.committed and not entry.condemned
            if entry is not None and found:
                entry.condemned = True
                self._free_if_unheld(sample_id, entry, freed)
        self._report(freed)
        return found

    def contains(self, sample_id: str) -> bool:
        """Whether the sample is committed and not on its way out. Changes nothing."""
        with self._lock:
            entry = self._entries.get(sample_id)
            return entry is not None and entry.committed and not entry.condemned

    def sweep(self) -> int:
        """End the holds of handles that were garbage-collected unreleased; return how many there were.

        Raises:
            ClosedError: the store is closed.
        """
        freed: list[P] = []
        with self._lock:
            self._check_open("gc")
            count = self._sweep(freed)
        self._report(freed)
        return count

    def health(self) -> StoreHealth:
        """Return the current numbers; an empty snapshot after :meth:`close`."""
        with self._lock:
            return StoreHealth(
                resident_bytes=self._resident_bytes,
                capacity_bytes=self._max_bytes or 0,
                sample_count=len(self._entries),
                high_watermark_hit=self._high is not None and self._resident_bytes >= self._high,
                low_watermark_hit=self._resident_bytes <= self._low,
            )

    def room_for(self, nbytes: int) -> bool:
        """Whether a sample of ``nbytes`` would be accepted now."""
        with self._lock:
            return self._fits(nbytes)

    def is_full(self) -> bool:
        """Whether nothing more comes in before something leaves: no put is under way, and there is still no room for
        what was refused last, or for anything.
        """
        with self._lock:
            under_way = any(not entry.committed for entry in self._entries.values())
            return not under_way and not self._fits(max(1, self._refused_bytes))

    def wait_for_room(self, nbytes: int, timeout: float) -> bool:
        """Block until a sample of ``nbytes`` would be accepted, at most ``timeout`` seconds.

        Returns:
            Whether there is room. Another thread may take it first: reserve, and wait again when that fails.

        Raises:
            CapacityError: (``can_wait`` False) it can never fit.
            ClosedError: the store is closed.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                self._check_open("wait_for_room")
                self._check_can_ever_fit("a sample", nbytes)
                if self._fits(nbytes):
                    return True
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._refused_bytes = nbytes
                self._room.wait(min(remaining, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Forget everything. Idempotent."""
        with self._lock:
            self._closed = True
            freed = [entry.payload for entry in self._entries.values() if entry.payload is not None]
            for entry in self._entries.values():
                for finalizer in entry.holds.values():
                    finalizer.detach()
            self._entries.clear()
            self._abandoned.clear()
            self._resident_bytes = 0
            self._room.notify_all()
        self._report(freed)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def _commit(self, sample_id: str, entry: _Entry[P], payload: P) -> None:
        with self._lock:
            self._check_open("put")
            if self._entries.get(sample_id) is not entry or entry.committed:
                raise MisuseError(f"the reservation of sample {sample_id!r} was already committed or rolled back")
            entry.payload = payload
            entry.committed = True

    def _grow(self, sample_id: str, entry: _Entry[P], nbytes: int) -> None:
        with self._lock:
            if self._entries.get(sample_id) is not entry:
                return
            what = f"sample {sample_id!r}, which grows by {nbytes} bytes,"
            self._check_can_ever_fit(what, entry.nbytes + nbytes)
            if self._max_bytes is not None and self._resident_bytes + nbytes > self._max_bytes:
                self._refused_bytes = nbytes
                raise CapacityError(
                    f"{what} would exceed the byte cap: {self._resident_bytes} resident, max_bytes={self._max_bytes}; "
                    "it fits once enough others are released"
                )
            entry.nbytes += nbytes
            self._resident_bytes += nbytes

    def _rollback(self, sample_id: str, entry: _Entry[P]) -> None:
        with self._lock:
            if self._entries.get(sample_id) is entry and not entry.committed:
                self._remove(sample_id, entry)

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: this {self._name} is closed")

    def _committed(self, sample_id: str) -> P:
        self._check_open("get")
        entry = self._entries.get(sample_id)
        if entry is None or not entry.committed:
            raise SampleNotFoundError(f"sample {sample_id!r} is not in this {self._name}: released, or never put")
        return entry.payload  # type: ignore[return-value]

    def _fits(self, nbytes: int) -> bool:
        below_count = self._max_samples is None or len(self._entries) < self._max_samples
        return below_count and (self._max_bytes is None or self._resident_bytes + nbytes <= self._max_bytes)

    def _check_can_ever_fit(self, what: str, nbytes: int) -> None:
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise CapacityError(
                f"{what} has {nbytes} bytes, more than the byte cap of this {self._name}: max_bytes={self._max_bytes}. "
                f"Set max_bytes to at least {nbytes}; to hold a second one while the first is consumed, {2 * nbytes}",
                can_wait=False,
            )

    def _check_caps(self, sample_id: str, nbytes: int) -> None:
        self._check_can_ever_fit(f"sample {sample_id!r}", nbytes)
        if self._fits(nbytes):
            return
        self._refused_bytes = nbytes
        if self._max_samples is not None and len(self._entries) >= self._max_samples:
            raise CapacityError(
                f"{self._name} is at its sample-count cap ({len(self._entries)} of max_samples={self._max_samples}); "
                f"sample {sample_id!r} fits once another one is released"
            )
        raise CapacityError(
            f"sample {sample_id!r} of {nbytes} bytes would exceed the byte cap: {self._resident_bytes} resident, "
            f"max_bytes={self._max_bytes}; it fits once enough others are released"
        )

    def _sweep(self, freed: list[P]) -> int:
        count = 0
        while self._abandoned:
            sample_id, handle_id = self._abandoned.popleft()
            entry = self._entries.get(sample_id)
            if entry is None or entry.holds.pop(handle_id, None) is None:
                continue
            count += 1
            entry.abandoned_ids.add(handle_id)
            self._free_if_unheld(sample_id, entry, freed)
        return count

    def _end_hold(self, entry: _Entry[P], handle_id: int) -> bool:
        finalizer = entry.holds.pop(handle_id, None)
        if finalizer is None:
            known = handle_id in entry.abandoned_ids
            entry.abandoned_ids.discard(handle_id)
            return known
        finalizer.detach()
        return True

    def _free_if_unheld(self, sample_id: str, entry: _Entry[P], freed: list[P]) -> bool:
        if not entry.condemned or entry.holds:
            return False
        self._remove(sample_id, entry)
        if entry.payload is not None:
            freed.append(entry.payload)
        return True

    def _remove(self, sample_id: str, entry: _Entry[P]) -> None:
        del self._entries[sample_id]
        self._resident_bytes -= entry.nbytes
        self._room.notify_all()

    def _report(self, freed: list[P]) -> None:
        if self._on_free is not None:
            for payload in freed:
                self._on_free(payload)
