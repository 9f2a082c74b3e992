"""The threads that move bytes: per link an ordered queue of samples, cut into chunks of which a few are in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from nccl_stream.errors import ClosedError, LinkError, LinkTimeoutError, MisuseError
from nccl_stream.transport.link import Link, Transfer

__all__ = ["Channel", "TransferEngine"]

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 50e-6  # between two looks at unfinished transfers; a 4 MiB chunk takes about 100 us on NVLink
_ABORT_GRACE_S = 1.0  # kept of close()'s timeout for ending what did not end by itself


class _Job:
    """One sample: its token and messages."""

    __slots__ = ("buffers", "finished", "is_send", "issued", "token")

    def __init__(self, token: object, buffers: Sequence[torch.Tensor], is_send: bool) -> None:
        self.token = token
        self.buffers = list(buffers)
        self.is_send = is_send
        self.issued = 0
        self.finished = 0


class Channel:
    """The ordered stream of samples over one link. Made by :meth:`TransferEngine.attach`.

    Samples finish in the order in which they were queued. Callbacks run on the thread that serves the channel, one at
    a time and under no lock; one that raises is logged and otherwise ignored.
    """

    def __init__(
        self,
        link: Link,
        *,
        depth: int,
        timeout: float,
        clock: Callable[[], float],
        wake: threading.Condition,
        on_done: Callable[[object], None],
        on_failed: Callable[[BaseException, list[object]], None],
    ) -> None:
        self._link = link
        self._depth = min(depth, link.max_inflight_ops)
        self._timeout = timeout
        self._clock = clock
        self._wake = wake  # guards the queue; shared by all channels that one thread serves
        self._on_done = on_done
        self._on_failed = on_failed
        self._to_issue: deque[_Job] = deque()
        self._unfinished: deque[_Job] = deque()
        self._inflight: deque[tuple[Transfer, _Job]] = deque()
        self._oldest_since = 0.0
        self._error: LinkError | None = None
        self._quiesce_from: float | None = None
        self._closing = False
        self._ended = False

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream behind whose work the transfers are issued: let it wait for what they depend on."""
        return self._link.stream

    def send(self, token: object, buffers: Sequence[torch.Tensor]) -> None:
        """Queues the messages of one sample for sending. Never blocks, from any thread.

        Args:
            token: given back by ``on_done`` or ``on_failed``.
            buffers: flat ``uint8`` tensors; they belong to the channel until then.

        Raises:
            ClosedError: the channel was closed, aborted, or has failed.
        """
        self._enqueue(_Job(token, buffers, True))

    def recv(self, token: object, buffers: Sequence[torch.Tensor]) -> None:
        """Queues the messages of one sample for receiving, as :meth:`send`. Call it when the sender is ready.

        Raises:
            ClosedError: the channel was closed, aborted, or has failed.
        """
        self._enqueue(_Job(token, buffers, False))

    def abort(self) -> None:
        """Ends the link now. From any thread, idempotent, returns without waiting for the channel.

        When no buffer can be touched any more, ``on_failed`` is called once, with the tokens that did not finish.
        """
        self._fail(LinkError(f"the link to {self._link.peer} was aborted"))

    def close(self) -> None:
        """Lets what is queued finish and then closes the link. Does not wait; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _enqueue(self, job: _Job) -> None:
        with self._wake:
            if self._closing or self._error is not None or self._ended:
                raise ClosedError(f"the channel to {self._link.peer} is closed")
            self._to_issue.append(job)
            self._unfinished.append(job)
            self._wake.notify_all()

    def _fail(self, error: LinkError) -> None:
        with self._wake:
            if self._error is None and not self._ended:
                self._error = error
        self._link.abort()
        with self._wake:
            self._wake.notify_all()

    # From here on: only on the thread that serves the channel.

    def _has_work(self) -> bool:
        """The lock is held."""
        return bool(self._unfinished or self._inflight or self._error is not None or self._closing)

    def _issue(self) -> None:
        """Posts messages until the window is full."""
        while len(self._inflight) < self._depth and self._error is None:
            with self._wake:
                while self._to_issue and self._to_issue[0].issued == len(self._to_issue[0].buffers):
                    self._to_issue.popleft()
                if not self._to_issue:
                    return
                job = self._to_issue[0]
            buf = job.buffers[job.issued]
            transfer = self._link.send(buf) if job.is_send else self._link.recv(buf)
            job.issued += 1
            if not self._inflight:
                self._oldest_since = self._clock()
            self._inflight.append((transfer, job))

    def _finish_oldest(self) -> None:
        _, job = self._inflight.popleft()
        job.finished += 1
        self._oldest_since = self._clock()
        self._report_finished()

    def _report_finished(self) -> None:
        while True:
            with self._wake:
                if not self._unfinished or self._unfinished[0].finished < len(self._unfinished[0].buffers):
                    return
                job = self._unfinished.popleft()
            self._call(self._on_done, job.token)

    def _serve_blocking(self) -> None:
        """The life of a channel that has a thread of its own."""
        while True:
            with self._wake:
                while not self._has_work():
                    self._wake.wait()
            if self._error is not None:
                self._quiesce_blocking()
                return
            if self._end_if_drained():
                return
            try:
                self._issue()
                self._report_finished()
                if self._inflight:
                    self._inflight[0][0].wait(self._timeout)
                    self._finish_oldest()
            except Exception as error:  # noqa: BLE001 - whatever it was, the channel must end and say so
                self._fail(self._as_link_error(error))

    def _quiesce_blocking(self) -> None:
        self._link.abort()
        while self._inflight:
            try:
                self._inflight[0][0].wait(self._timeout)
            except LinkTimeoutError as error:
                # Until the transport lets go of the buffers, reporting them as free would let them be overwritten.
                logger.error("link to %s does not come to rest: %s", self._link.peer, error)
                continue
            except LinkError:
                pass
            self._inflight.popleft()
        self._report_failed()

    def _step(self) -> bool:
        """One look at a channel over a pollable link. Returns whether anything moved."""
        if self._ended:
            return False
        if self._error is not None:
            return self._quiesce_step()
        if self._end_if_drained():
            return True
        try:
            before = len(self._inflight)
            self._issue()
            self._report_finished()
            moved = len(self._inflight) != before
            while self._inflight and self._inflight[0][0].done():
                self._finish_oldest()
                moved = True
            if self._inflight and self._clock() - self._oldest_since > self._timeout:
                raise LinkTimeoutError(f"no progress with {self._link.peer} for {self._timeout:g} s")
            return moved
        except Exception as error:  # noqa: BLE001 - whatever it was, the channel must end and say so
            self._fail(self._as_link_error(error))
            return True

    def _quiesce_step(self) -> bool:
        self._link.abort()
        now = self._clock()
        if self._quiesce_from is None:
            self._quiesce_from = now
        while self._inflight:
            try:
                if not self._inflight[0][0].done():
                    if now - self._quiesce_from > self._timeout:
                        logger.error("link to %s does not come to rest", self._link.peer)
                        self._quiesce_from = now
                    return False
            except LinkError:
                pass
            self._inflight.popleft()
        self._report_failed()
        return True

    def _as_link_error(self, error: Exception) -> LinkError:
        if isinstance(error, LinkError):
            return error
        wrapped = LinkError(f"serving the link to {self._link.peer} failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped

    def _end_if_drained(self) -> bool:
        with self._wake:
            if not self._closing or self._unfinished or self._inflight or self._error is not None:
                return False
            self._ended = True
        self._link.close()
        return True

    def _report_failed(self) -> None:
        with self._wake:
            error = self._error
            tokens = [job.token for job in self._unfinished]
            self._unfinished.clear()
            self._to_issue.clear()
            self._ended = True
        self._link.close()
        self._call(self._on_failed, error, tokens)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("a transfer callback of the link to %s raised", self._link.peer)


class TransferEngine:
    """Serves the channels of one device.

    Links that cannot be polled (gloo) get a thread each. Pollable ones (NCCL) share one thread, so that all NCCL calls
    of the process come from one place; with ``issue="pump"`` they are served only inside :meth:`pump`, for users whose
    other collectives need that their own thread issues everything.

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
        self._polled: list[Channel] = []
        self._threads: list[threading.Thread] = []
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
        wake = self._wake if link.pollable else threading.Condition()
        channel = Channel(
            link,
            depth=self._depth,
            timeout=self._timeout,
            clock=self._clock,
            wake=wake,
            on_done=on_done,
            on_failed=on_failed,
        )
        with self._wake:
            if self._closed:
                raise ClosedError(f"engine {self._name!r} is closed")
            self._forget_ended()
            self._channels.append(channel)
            if not link.pollable:
                self._start(channel._serve_blocking, f"{self._name}-{link.peer}")
                return channel
            self._polled.append(channel)
            if self._issue == "thread" and self._poller is None:
                self._poller = self._start(self._poll, f"{self._name}-poll")
            self._wake.notify_all()
        return channel

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
            Names of the threads that did not end; empty when all is well.
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
            if not channel._ended:
                channel.abort()
        self._await(channels, threads, end)
        return [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]

    def _await(self, channels: list[Channel], threads: list[threading.Thread], end: float) -> None:
        if self._issue == "pump":
            while any(not channel._ended for channel in channels if channel._link.pollable):
                moved = self._step_all()
                if time.monotonic() >= end:
                    break
                if not moved:
                    time.sleep(_IDLE_POLL_S)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _forget_ended(self) -> None:
        """Links come and go for as long as the run lasts; what ended must not pile up. The lock is held."""
        self._channels = [channel for channel in self._channels if not channel._ended]
        self._polled = [channel for channel in self._polled if not channel._ended]
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _step_all(self) -> bool:
        # Two threads that pump at once would issue on one communicator concurrently.
        with self._pump_lock:
            with self._wake:
                polled = list(self._polled)
            moved = False
            for channel in polled:
                moved |= channel._step()
            return moved

    def _poll(self) -> None:
        while True:
            with self._wake:
                active = [channel for channel in self._polled if not channel._ended]
                if not active and self._closed:
                    return
                if not any(channel._has_work() for channel in active):
                    self._wake.wait()
                    continue
            if not self._step_all():
                time.sleep(_IDLE_POLL_S)
