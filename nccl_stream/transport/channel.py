"""One link's ordered queue of samples, cut into messages of which a few are in flight at once."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from nccl_stream.errors import ClosedError, LinkError, LinkTimeoutError
from nccl_stream.transport.link import HostBytes, Link, Transfer

__all__ = ["BlockingChannel", "Channel", "PolledChannel"]

logger = logging.getLogger(__name__)

_DEAD_WAIT_S = 0.01  # to ask a transfer of a dead link whether it had finished
_TAKEOVER_S = 0.2  # how long a serving thread may take to notice that its link broke


class _Job:
    """One sample: its token and messages."""

    __slots__ = ("buffers", "finished", "is_send", "issued", "token")

    def __init__(self, token: object, buffers: Sequence[torch.Tensor | HostBytes], is_send: bool) -> None:
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
        wake: threading.Condition,
        on_done: Callable[[object], None],
        on_failed: Callable[[BaseException, list[object]], None],
    ) -> None:
        self._link = link
        self._depth = min(depth, link.max_inflight_ops)
        self._timeout = timeout
        self._wake = wake  # guards the queue and the flags
        self._on_done = on_done
        self._on_failed = on_failed
        self._to_issue: deque[_Job] = deque()
        self._unfinished: deque[_Job] = deque()
        self._inflight: deque[tuple[Transfer, _Job]] = deque()
        self._error: LinkError | None = None
        self._closing = False
        self._ended = False

    @property
    def peer(self) -> str:
        """The other end's name."""
        return self._link.peer

    @property
    def device(self) -> torch.device:
        """Where buffers must lie."""
        return self._link.device

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream behind whose work the transfers are issued: let it wait for what they depend on."""
        return self._link.stream

    @property
    def has_ended(self) -> bool:
        """Whether it is over: closed with nothing left to do, or failed and reported."""
        with self._wake:
            return self._ended

    def send(self, token: object, buffers: Sequence[torch.Tensor | HostBytes]) -> None:
        """Queues the messages of one sample for sending. Never blocks, from any thread.

        Args:
            token: given back by ``on_done`` or ``on_failed``.
            buffers: flat ``uint8`` tensors, or what else the link sends; they belong to the channel until then.

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
        self._fail(LinkError(f"the link to {self.peer} was aborted"))

    def close(self) -> None:
        """Lets what is queued finish and then closes the link. Does not wait; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def wait_closed(self, timeout: float) -> bool:
        """See :meth:`Link.wait_closed`; for a channel that has ended."""
        return self._link.wait_closed(timeout)

    def _enqueue(self, job: _Job) -> None:
        with self._wake:
            if self._closing or self._error is not None or self._ended:
                raise ClosedError(f"the channel to {self.peer} is closed")
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
        while len(self._inflight) < self._depth:
            with self._wake:
                while self._to_issue and self._to_issue[0].issued == len(self._to_issue[0].buffers):
                    self._to_issue.popleft()
                if not self._to_issue or self._error is not None:
                    return
                job = self._to_issue[0]
            buf = job.buffers[job.issued]
            if job.is_send:
                transfer = self._link.send(buf)
            else:
                assert isinstance(buf, torch.Tensor)
                transfer = self._link.recv(buf)
            job.issued += 1
            self._inflight.append((transfer, job))

    def _finish_oldest(self) -> None:
        _, job = self._inflight.popleft()
        job.finished += 1
        self._report_finished()

    def _report_finished(self) -> None:
        while True:
            with self._wake:
                if not self._unfinished or self._unfinished[0].finished < len(self._unfinished[0].buffers):
                    return
                job = self._unfinished.popleft()
            self._call(self._on_done, job.token)

    def _report_failed(self) -> None:
        with self._wake:
            error = self._error
            tokens = [job.token for job in self._unfinished]
            self._unfinished.clear()
            self._to_issue.clear()
            self._inflight.clear()
            self._ended = True
            self._wake.notify_all()
        self._link.close()
        self._call(self._on_failed, error, tokens)

    def _end_if_drained(self) -> bool:
        with self._wake:
            if not self._closing or self._unfinished or self._inflight or self._error is not None:
                return False
            self._ended = True
            self._wake.notify_all()
        self._link.close()
        return True

    def _as_link_error(self, error: Exception) -> LinkError:
        if isinstance(error, LinkError):
            return error
        wrapped = LinkError(f"serving the link to {self.peer} failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("a transfer callback of the link to %s raised", self.peer)


class BlockingChannel(Channel):
    """A channel over a link that cannot be polled, served by a thread that waits for the oldest transfer.

    A second thread watches the link: when a link breaks, the transport may leave the serving thread in its wait, and
    then the watcher reports in its place.
    """

    _in_wait = False
    _taken_over = False
    _broken: str | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the serving thread was left behind in a dead wait. It ends at its deadline and touches nothing."""
        with self._wake:
            return self._taken_over

    def serve(self) -> None:
        """The life of the serving thread."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                broken = self._broken
            if self._error is None and broken is not None and self._unfinished:
                # A peer that closes in good order breaks the link too, and must not cost what had arrived before.
                self._drain_dead()
                with self._wake:
                    if self._unfinished and self._error is None:
                        self._error = LinkError(broken)
            if self._error is not None:
                self._link.abort()  # when this returns, the transport has let go of all buffers
                self._drain_dead()
                self._report_failed()
                return
            if self._end_if_drained():
                return
            if not self._serve_once():
                return

    def watch(self) -> None:
        """The life of the watching thread."""
        reason = self._link.watch()
        with self._wake:
            self._broken = f"the link to {self.peer} broke: {reason}"
            self._wake.notify_all()
            # A serving thread that wakes by itself knows better what happened.
            self._wake.wait_for(lambda: self._ended or not self._in_wait, _TAKEOVER_S)
            if self._ended or not self._in_wait:
                return
            self._taken_over = True
            self._in_wait = False
        self.serve()

    def _serve_once(self) -> bool:
        """Fills the window and waits for its oldest transfer. Returns False if the watcher has taken over meanwhile."""
        failure: LinkError | None = None
        try:
            self._issue()
            self._report_finished()
        except Exception as error:  # noqa: BLE001 - whatever it was, the channel must end and say so
            self._fail(self._as_link_error(error))
            return True
        with self._wake:
            if not self._inflight or self._error is not None or self._broken is not None:
                return True
            transfer = self._inflight[0][0]
            self._in_wait = True
        try:
            transfer.wait(self._timeout)
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._as_link_error(error)
        with self._wake:
            if self._taken_over:
                return False
            self._in_wait = False
            self._wake.notify_all()
            if failure is not None and self._error is None:
                self._error = failure
        if failure is None:
            self._finish_oldest()
        return True

    def _drain_dead(self) -> None:
        """Reports what had finished before the link ended."""
        self._report_finished()
        while self._inflight:
            try:
                self._inflight[0][0].wait(_DEAD_WAIT_S)
            except LinkError:
                return
            self._finish_oldest()


class PolledChannel(Channel):
    """A channel over a link whose transfers can be polled. Whoever serves it calls :meth:`step` again and again."""

    def __init__(self, link: Link, *, clock: Callable[[], float], **kwargs: object) -> None:
        super().__init__(link, **kwargs)  # type: ignore[arg-type]
        self._clock = clock
        self._oldest_since = 0.0
        self._quiescing_since: float | None = None

    def step(self) -> bool:
        """Issues and completes what can be, without blocking. Returns whether anything moved."""
        if self._ended:
            return False
        if self._error is not None:
            return self._finish_dead()
        if self._end_if_drained():
            return True
        try:
            return self._advance()
        except Exception as error:  # noqa: BLE001 - whatever it was, the channel must end and say so
            self._fail(self._as_link_error(error))
            return True

    def _advance(self) -> bool:
        before = len(self._inflight)
        self._issue()
        self._report_finished()
        moved = len(self._inflight) != before
        if before == 0:
            self._oldest_since = self._clock()
        while self._inflight and self._inflight[0][0].done():
            self._finish_oldest()
            self._oldest_since = self._clock()
            moved = True
        if self._inflight and self._clock() - self._oldest_since > self._timeout:
            raise LinkTimeoutError(f"no progress with {self.peer} for {self._timeout:g} s")
        return moved

    def _finish_dead(self) -> bool:
        self._link.abort()
        now = self._clock()
        if self._quiescing_since is None:
            self._quiescing_since = now
        while self._inflight:
            try:
                if not self._inflight[0][0].done():
                    if now - self._quiescing_since > self._timeout:
                        # Reporting the buffers as free now would let them be overwritten.
                        logger.error("the device does not let go of the buffers of the link to %s", self.peer)
                        self._quiescing_since = now
                    return False
            except LinkError:
                pass
            self._inflight.popleft()
        self._report_failed()
        return True
