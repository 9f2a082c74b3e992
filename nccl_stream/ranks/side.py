"""What a target's and a draft's end of a stream have in common: one condition, work for the steward, what ends them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from nccl_stream.config import StreamConfig
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.messages import Message
from nccl_stream.coordination.node import Node
from nccl_stream.errors import NcclStreamError, WireFormatError
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.lost_reports import LostReports
from nccl_stream.stores.nccl import NcclFeatureStore

__all__ = ["Side", "take_due"]

logger = logging.getLogger(__name__)

K = TypeVar("K")

PUMP_S = 0.001  # between two looks at unfinished transfers by a thread that waits; see TransferEngine's own


class Side:
    """One process's end of a stream; every method may be called from any thread.

    One condition guards the state machines. Node and link threads take it for moments; nothing blocks under it.

    Args:
        config: of the stream.
        restart_timeout: seconds for which a draft rank that died is awaited.
        clock: monotonic seconds.
    """

    node: Node
    links: Links
    store: NcclFeatureStore
    pump: Callable[[], bool] | None = None  # issues and completes transfers, where no thread of the package does

    def __init__(self, config: StreamConfig, *, restart_timeout: float, clock: Callable[[], float]) -> None:
        self.config = config
        self.cond = threading.Condition()
        self.lost_reports = LostReports()
        self._restart_timeout = restart_timeout
        self._clock = clock
        self._stop_reason = ""
        self._fatal: NcclStreamError | None = None
        self._tasks: list[Callable[[ControlStore], None]] = []

    def is_served(self) -> bool:
        """Whether somebody of the other role is there that this process can work with."""
        raise NotImplementedError

    def _changed(self) -> None:
        """Do what follows from a change, and wake who waits for one; the lock is held."""
        self.cond.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for a change, at most ``seconds``; the lock is held, once, and given up meanwhile.

        Where no thread of the package moves the bytes, the waiting thread does, or it might wait for itself. May return
        early.
        """
        if self.pump is None:
            self.cond.wait(seconds)
            return
        self.cond.release()  # what the pump completes is told under the lock, maybe to another thread that pumps
        try:
            moved = self.pump()
        finally:
            self.cond.acquire()
        if not moved:
            self.cond.wait(min(seconds, PUMP_S))

    def pause(self, seconds: float) -> None:
        """Let some time pass, at most ``seconds``; the lock is not held. As :meth:`wait`."""
        if self.pump is None:
            time.sleep(seconds)
        elif not self.pump():
            time.sleep(min(seconds, PUMP_S))

    def tell_all(self, message: Message) -> None:
        """Send a message to every living process of the run."""
        for member in self.node.members():
            if member.gone is None and member.inc != self.node.inc:
                self.node.send(member.inc, message)

    # -- what ends it ------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """The run was asked to stop; the lock is held. The first reason stays."""
        self._stop_reason = self._stop_reason or reason
        self._changed()

    def on_fatal(self, error: NcclStreamError) -> None:
        """This process cannot go on; the first error stays."""
        with self.cond:
            if self._fatal is None:
                self._fatal = error
            self.cond.notify_all()
        self.links.abort_all()

    def raise_if_fatal(self) -> None:
        """Raise the error that ended this side, if one did."""
        if self._fatal is not None:
            raise self._fatal

    def log_leftovers(self) -> None:
        """Log what did not come to a good end; this rank is about to leave."""

    # -- work that needs the store -----------------------------------------------------------------------------------

    def _defer(self, task: Callable[[ControlStore], None]) -> None:
        """Have the steward run a task soon, without the lock; the lock is held."""
        self._tasks.append(task)
        self.node.wake()

    def _run_tasks(self, documents: ControlStore) -> None:
        """On the steward's thread; the lock is not held."""
        with self.cond:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            try:
                task(documents)
            except WireFormatError as exc:
                logger.warning("%s: ignored a damaged document: %s", self.node.inc, exc)


def take_due(deadlines: dict[K, float], now: float) -> list[K]:
    """Remove and return the keys whose deadline has come."""
    due = [key for key, until in deadlines.items() if until <= now]
    for key in due:
        del deadlines[key]
    return due
