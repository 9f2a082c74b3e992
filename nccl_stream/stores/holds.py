"""Who holds which file: the handles of a store whose samples live outside the process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nccl_stream.store import StoreHandle

__all__ = ["Holds"]

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass
class _Entry:
    holds: dict[int, weakref.finalize[..., StoreHandle]] = field(default_factory=dict)
    # Handles that were dropped without a release; a copy of one of them may still be released.
    abandoned_ids: set[int] = field(default_factory=set)
    # Set by the first release: what the handles hold has been consumed and goes with the last of them.
    consumed: bool = False


class Holds(Generic[K]):
    """Live handles by what they hold. Thread-safe, and never does anything slow.

    A handle that is garbage-collected without a release stops holding but does not count as consumption. Its finalizer
    may run anywhere, even while this thread holds the lock, so it only notes the fact for the next call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[K, _Entry] = {}
        self._keys: dict[int, tuple[str, K]] = {}
        self._abandoned: deque[int] = deque()

    def add(self, handle: StoreHandle, key: K) -> None:
        """Register ``handle`` as a hold on ``key``."""
        finalizer = weakref.finalize(handle, self._abandoned.append, handle.handle_id)
        finalizer.atexit = False
        with self._lock:
            self._keys[handle.handle_id] = (handle.sample_id, key)
            self._entries.setdefault(key, _Entry()).holds[handle.handle_id] = finalizer

    def release(self, handle: StoreHandle) -> list[K]:
        """End a hold as consumed; unknown, forged and already released handles change nothing.

        Returns:
            What was consumed and is held by nobody any more.
        """
        free: list[K] = []
        with self._lock:
            self._sweep(free)
            sample_id, key = self._keys.get(handle.handle_id, ("", None))
            if key is None or sample_id != handle.sample_id:
                logger.debug("release of unknown handle %s of sample %s ignored", handle.handle_id, handle.sample_id)
            else:
                del self._keys[handle.handle_id]
                self._entries[key].consumed = True
                self._end(key, handle.handle_id, free)
        return free

    def cancel(self, handle: StoreHandle) -> list[K]:
        """Undo :meth:`add` for a get that failed; returns as :meth:`release`."""
        free: list[K] = []
        with self._lock:
            _, key = self._keys.pop(handle.handle_id, ("", None))
            if key is not None:
                self._end(key, handle.handle_id, free)
        return free

    def sweep(self) -> tuple[int, list[K]]:
        """End the holds of handles that were dropped; return their number and what is free now."""
        free: list[K] = []
        with self._lock:
            return self._sweep(free), free

    def clear(self) -> list[K]:
        """Forget everything; return what was consumed but still held."""
        with self._lock:
            consumed = [key for key, entry in self._entries.items() if entry.consumed]
            for entry in self._entries.values():
                for finalizer in entry.holds.values():
                    finalizer.detach()
            self._entries.clear()
            self._keys.clear()
            self._abandoned.clear()
        return consumed

    def _sweep(self, free: list[K]) -> int:
        count = 0
        while self._abandoned:
            handle_id = self._abandoned.popleft()
            _, key = self._keys.get(handle_id, ("", None))
            if key is None:
                continue
            entry = self._entries[key]
            if entry.holds.pop(handle_id, None) is not None:
                count += 1
                entry.abandoned_ids.add(handle_id)
                self._drop_if_free(key, entry, free)
        return count

    def _end(self, key: K, handle_id: int, free: list[K]) -> None:
        entry = self._entries[key]
        finalizer = entry.holds.pop(handle_id, None)
        if finalizer is not None:
            finalizer.detach()
        entry.abandoned_ids.discard(handle_id)
        self._drop_if_free(key, entry, free)

    def _drop_if_free(self, key: K, entry: _Entry, free: list[K]) -> None:
        if entry.holds:
            return
        if entry.consumed:
            free.append(key)
            for handle_id in entry.abandoned_ids:
                self._keys.pop(handle_id, None)
            del self._entries[key]
        elif not entry.abandoned_ids:
            del self._entries[key]
