"""Tells the user what is lost, on a thread that nothing else waits for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["LostReports"]

logger = logging.getLogger(__name__)


class LostReports:
    """Calls the user back with the ids of lost samples, one report after another.

    The callback may block, as one does that produces the samples anew: it runs on a thread of its own, which exists
    once there is something to tell. What is reported before there is a callback waits for it. Methods may be called
    from any thread, and under any lock.
    """

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._reports: deque[tuple[str, ...]] = deque()
        self._callback: Callable[[tuple[str, ...]], None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """From now on call ``callback``, in place of an earlier one."""
        with self._cond:
            self._callback = callback
            self._go_on()

    def report(self, lost: tuple[str, ...]) -> None:
        """These samples are lost. Does not wait for the callback."""
        with self._cond:
            self._reports.append(lost)
            self._go_on()

    def close(self, timeout: float) -> list[str]:
        """End the thread once everything is told; returns its name if it could not be joined in time. Idempotent."""
        with self._cond:
            self._closed = True
            thread = self._thread
            self._cond.notify_all()
        if thread is None or thread is threading.current_thread():
            return []
        thread.join(timeout)
        return [thread.name] if thread.is_alive() else []

    def _go_on(self) -> None:
        """The lock is held."""
        if self._thread is None and self._callback is not None and self._reports and not self._closed:
            self._thread = threading.Thread(target=self._run, name="nccl-stream-lost", daemon=True)
            self._thread.start()
        self._cond.notify_all()

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._reports or self._closed)
                if not self._reports:
                    return
                lost, callback = self._reports.popleft(), self._callback
            assert callback is not None
            try:
                callback(lost)
            except BaseException:  # not even sys.exit() of the user's may silence the reports to come
                logger.exception("the on_lost callback raised")
