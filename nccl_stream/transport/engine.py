"""The threads that move bytes: one pair for each link that blocks, one for all links that can be polled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from nccl_stream.device_staging import beside_captures
from nccl_stream.errors import ClosedError, MisuseError
from nccl_stream.transport.channel import BlockingChannel, Channel, PolledChannel
from nccl_stream.transport.link import Link

__all__ = ["Channel", "TransferEngine"]

logger = logging.getLogger(__name__)

_MIN_POLL_S, _MAX_POLL_S = 50e-6, 1e-3  # between two looks at unfinished transfers; 4 MiB take 100 us on NVLink
_FLUSH_GRACE_S = 1.0  # for links to give their resources back, once their transfers are over
_ABORT_GRACE_S = 1.0  # kept of close()'s timeout for ending what did not end by itself


class TransferEngine:
    """Serves the channels of one device.

    Links that cannot be polled (gloo) get threads of their own. Pollable ones (NCCL) share one thread, so that all
    NCCL calls of the process come from one place; with ``issue="pump"`` they are served only inside :meth:`pump`, for
    users whose other collectives need that their own thread issues everything.

    Args:
        device: where the links' buffers lie.
        depth: chunk operations in flight per channel.
        issue: ``"thread"`` or ``"pump"``.
        timeout: seconds without progress after which a link has failed.
        name: prefix of the threads' names.
        clock: for tests.

    Raises:
        MisuseError: a bad argument.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        depth: int = 4,
        issue: str = "thread",
        timeout: float,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if depth < 1 or timeout <= 0 or issue not in ("thread", "pump"):
            raise MisuseError(
                f"an engine needs depth >= 1, timeout > 0 and issue 'thread' or 'pump', "
                f"got depth={depth}, timeout={timeout}, issue={issue!r}"
            )
        self.device = torch.device(device)
        self._depth = depth
        self._issue = issue
        self._timeout = timeout
        self._name = name
        self._clock = clock
        self._wake = threading.Condition()
        self._channels: list[Channel] = []
        self._polled: list[PolledChannel] = []
        self._threads: list[tuple[threading.Thread, Channel | None]] = []
        self._poller: threading.Thread | None = None
        self._pump_lock = threading.Lock()
        self._closed = False

    def attach(
        self,
        link: Link,
        *,
        on_done: Callable[[object], None],
        on_failed: Callable[[BaseException, list[object]], None],
    ) -> Channel:
        """Takes over a link.

        Args:
            link: belongs to the channel from now on, which closes it.
            on_done: called with the token of every finished sample, in order.
            on_failed: called once if the link fails or is aborted, with the error and the tokens of all samples that
                did not finish, in order. Their buffers are not touched any more. Not called after a clean close.

        Raises:
            MisuseError: the link is on another device.
            ClosedError: the engine is closed.
        """
        if link.device != self.device:
            raise MisuseError(
                f"engine {self._name!r} serves {self.device}, the link to {link.peer} is on {link.device}"
            )
        common = {"depth": self._depth, "timeout": self._timeout, "on_done": on_done, "on_failed": on_failed}
        with self._wake:
            if self._closed:
                raise ClosedError(f"engine {self._name!r} is closed")
            self._forget_ended()
            if not link.pollable:
                blocking = BlockingChannel(link, wake=threading.Condition(), **common)  # type: ignore[arg-type]
                self._channels.append(blocking)
                self._start(blocking.serve, f"{self._name}-{link.peer}", blocking)
                self._start(blocking.watch, f"{self._name}-{link.peer}-watch")
                return blocking
            polled = PolledChannel(link, wake=self._wake, clock=self._clock, **common)
            self._channels.append(polled)
            self._polled.append(polled)
            if self._issue == "thread" and self._poller is None:
                self._poller = self._start(self._poll, f"{self._name}-poll")
            self._wake.notify_all()
            return polled

    def pump(self) -> bool:
        """Issues and completes what can be, without blocking; for ``issue="pump"``.

        Returns:
            Whether anything moved.

        Raises:
            MisuseError: the engine has a thread for that.
        """
        if self._issue != "pump":
            raise MisuseError(f"engine {self._name!r} has its own thread; pump() is for issue='pump'")
        return self._step_all()

    def close(self, timeout: float) -> list[str]:
        """Closes all channels, aborts those that do not end in time, and joins the threads. Idempotent.

        Args:
            timeout: seconds for everything.

        Returns:
            Names of the threads that did not end; empty when all is well. A thread that its transport keeps in a wait
            on a link that is long over (see ``BlockingChannel``) is not among them: it ends at its own deadline.
        """
        end = time.monotonic() + timeout
        with self._wake:
            self._closed = True
            channels, threads = list(self._channels), list(self._threads)
            self._wake.notify_all()
        for channel in channels:
            channel.close()
        self._await(channels, threads, end - min(_ABORT_GRACE_S, timeout / 2))
        for channel in channels:
            if not channel.has_ended:
                channel.abort()
        self._await(channels, threads, end)
        end = min(end, time.monotonic() + _FLUSH_GRACE_S)
        for channel in channels:
            if channel.has_ended and not channel.wait_closed(max(0.0, end - time.monotonic())):
                logger.warning("the link to %s is still being closed", channel.peer)
        return [thread.name for thread, served in threads if self._must_join(thread, served)]

    def _await(
        self, channels: list[Channel], threads: list[tuple[threading.Thread, Channel | None]], end: float
    ) -> None:
        if self._issue == "pump":
            while any(isinstance(channel, PolledChannel) and not channel.has_ended for channel in channels):
                moved = self._step_all()
                if time.monotonic() >= end:
                    break
                if not moved:
                    time.sleep(_MIN_POLL_S)
        for thread, served in threads:
            while self._must_join(thread, served) and time.monotonic() < end:
                thread.join(min(0.05, max(0.0, end - time.monotonic())))

    @staticmethod
    def _must_join(thread: threading.Thread, served: Channel | None) -> bool:
        if thread is threading.current_thread() or not thread.is_alive():
            return False
        return not (isinstance(served, BlockingChannel) and served.is_abandoned)

    def _start(self, target: Callable[[], None], name: str, served: Channel | None = None) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append((thread, served))
        thread.start()
        return thread

    def _forget_ended(self) -> None:
        """Links come and go for as long as the run lasts; what ended must not pile up. The lock is held."""
        self._channels = [channel for channel in self._channels if not channel._ended]
        self._polled = [channel for channel in self._polled if not channel._ended]
        self._threads = [entry for entry in self._threads if entry[0].is_alive()]

    def _step_all(self) -> bool:
        # Two threads that pump at once would issue on one communicator concurrently.
        with self._pump_lock:
            with self._wake:
                polled = list(self._polled)
            moved = False
            for channel in polled:
                moved |= channel.step()
            return moved

    def _poll(self) -> None:
        if self.device.type != "cuda":
            return self._poll_until_closed()
        torch.cuda.set_device(self.device)  # a thread's own is the first one, on which nothing should be allocated
        with beside_captures():
            self._poll_until_closed()

    def _poll_until_closed(self) -> None:
        pause = _MIN_POLL_S
        while True:
            with self._wake:
                active = [channel for channel in self._polled if not channel._ended]
                if not active and self._closed:
                    return
                if not any(channel._has_work() for channel in active):
                    self._wake.wait()
                    continue
            if self._step_all():
                pause = _MIN_POLL_S
            else:
                time.sleep(pause)
                pause = min(2 * pause, _MAX_POLL_S)
