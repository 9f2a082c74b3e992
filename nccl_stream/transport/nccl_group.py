"""The link over an NCCL communicator of two, made so that its failure is a Python error and never the process's end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from nccl_stream.device_staging import on_stream
from nccl_stream.errors import LinkError, LinkTimeoutError
from nccl_stream.transport.link import HostBytes, Link, Transfer, link_error, warm_up

__all__ = ["DeviceQueue", "NcclLink", "connect_nccl"]

logger = logging.getLogger(__name__)

MAX_CTAS = 4  # SMs a transfer may occupy beside the trainer's kernels
MAX_INFLIGHT_OPS = 200  # groups of 256 operations and more have hung (pytorch#174288)
_GROUP_TIMEOUT = timedelta(days=365)  # torch's own deadline must never fire before ours
_POLL_S = 100e-6
_ERROR_GRACE_S = 5e-3
_ISSUE_S = 1.0  # issuing takes microseconds: a call that takes this long hangs, and an abort is what ends it

# ProcessGroupNCCL reads these when it is constructed. Its watchdog must only watch: in the default modes it ends the
# process when a peer dies, and it spreads a link's error to every group of the run through the shared store.
_QUIET_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no teardown; torchrun sets 1
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NAN_CHECK": "0",  # the payload is bytes
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
_environment_lock = threading.Lock()

T = TypeVar("T")


class Marker(Protocol):
    """A point in a device queue, like a ``torch.cuda.Event``."""

    def query(self) -> bool: ...


class DeviceQueue(Protocol):
    """The few CUDA calls a link needs, apart so that its logic runs without a GPU."""

    stream: torch.cuda.Stream | None

    def issuing(self) -> AbstractContextManager[object]:
        """Makes the link's stream the current one."""

    def marker(self, work: Any) -> Marker:
        """A marker that is reached when the device has finished ``work``, whether well or aborted."""


class _CudaQueue:
    def __init__(self, device: torch.device) -> None:
        # Operations are ordered behind this stream only, not behind whatever the trainer has queued on its own.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def issuing(self) -> AbstractContextManager[object]:
        return on_stream(self.stream)

    def marker(self, work: Any) -> Marker:
        with self.issuing():
            work.synchronize()  # the stream waits for the communicator's; the host does not
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return event


class NcclLink(Link):
    """A link over a process group of two with NCCL's rules: in issue order, no tags, a send waits for its receive.

    Args:
        group: a connected ``ProcessGroupNCCL``, or a double of it.
        other: rank of the other end in the group.
        device: where buffers lie.
        peer: name of the other end, for messages.
        queue: the device's stream and events.
    """

    pollable = True
    max_inflight_ops = MAX_INFLIGHT_OPS

    def __init__(
        self, group: Any, other: int, *, device: torch.device, peer: str, queue: DeviceQueue | None = None
    ) -> None:
        self.device = device
        self.peer = peer
        self._queue = queue if queue is not None else _CudaQueue(device)
        self.stream = self._queue.stream
        self._group = group
        self._other = other
        self._lock = threading.Lock()
        self._issuing = threading.Lock()  # held while an operation is issued
        self._ended: str | None = None
        self._ending: threading.Thread | None = None

    def send(self, buf: torch.Tensor | HostBytes) -> Transfer:
        return self._start("send to", self._check(buf), lambda group: group.send([buf], self._other, 0))

    def recv(self, buf: torch.Tensor) -> Transfer:
        return self._start("receive from", self._check(buf), lambda group: group.recv([buf], self._other, 0))

    def exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Transfer:
        """A send and a receive as one NCCL group, which is the only way for a rank to send to itself.

        Args:
            outgoing: as for :meth:`send`.
            incoming: as for :meth:`recv`.

        Raises:
            MisuseError: as for :meth:`send`.
            LinkError: the link has failed or was aborted.
        """

        def issue(group: Any) -> Any:
            # Works of operations inside a group end before the group is even launched; the group's own Work counts.
            group._start_coalescing()
            group.send([outgoing], self._other, 0)
            group.recv([incoming], self._other, 0)
            return group._end_coalescing()

        self._check(outgoing)
        return self._start("exchange with", self._check(incoming), issue)

    def abort(self) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = "aborted"
            group, self._group = self._group, None
            # ncclCommAbort may take its time, or hang with a broken driver; the caller may be the thread that serves
            # all links. Nobody needs to wait for it: transfers watch the device itself.
            self._aside(group.abort, "abort")

    def close(self) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = "closed"
            group, self._group = self._group, None
            # shutdown flushes what the network may still hold of finished sends, so it can wait for the peer.
            self._aside(group.shutdown, "close")

    def wait_closed(self, timeout: float) -> bool:
        with self._lock:
            ending = self._ending
        if ending is None:
            return True
        ending.join(timeout)
        return not ending.is_alive()

    def _aside(self, end: Callable[[], object], what: str) -> None:
        def work() -> None:
            # It frees the communicator, which an operation that another thread is just issuing still uses. No further
            # one begins.
            if self._issuing.acquire(timeout=_ISSUE_S):
                self._issuing.release()
            _log_failure(end, f"{what} of the link to {self.peer}")

        self._ending = threading.Thread(target=work, name=f"nccl-{what}-{self.peer}", daemon=True)
        self._ending.start()

    def _start(self, operation: str, buf: torch.Tensor, issue: Callable[[Any], Any]) -> Transfer:
        with self._issuing:
            group = self._group
            if group is None:
                raise LinkError(f"{operation} {self.peer}: the link is {self._ended}")
            try:
                with self._queue.issuing():
                    work = issue(group)
                marker = self._queue.marker(work)
            except RuntimeError as error:
                raise link_error(error, operation, self.peer) from error
        return _NcclTransfer(self, work, marker, buf, operation)


class _NcclTransfer(Transfer):
    def __init__(self, link: NcclLink, work: Any, marker: Marker, buf: torch.Tensor, operation: str) -> None:
        self._link = link
        self._work = work
        self._marker = marker
        self._buf = buf
        self._operation = operation
        self._complete_since: float | None = None

    def done(self) -> bool:
        link = self._link
        what = f"{self._operation} {link.peer}"
        try:
            if link._ended is not None:
                # An aborted operation also "completes". Only the device tells when it has let go of the buffer.
                if not self._marker.query():
                    return False
                raise LinkError(f"{what}: the link is {link._ended}")
            if self._marker.query():
                # Read again: had the abort come before the marker, this would be an aborted operation.
                if link._ended is not None:
                    raise LinkError(f"{what}: the link is {link._ended}")
                self._raise_async_error()
                return True
            if self._work.is_completed():
                self._suspect_error(what)
            return False
        except RuntimeError as error:
            if isinstance(error, LinkError):
                raise
            raise link_error(error, self._operation, link.peer) from error

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= end:
                self._link.abort()
                raise LinkTimeoutError(f"{self._operation} {self._link.peer}: not finished within {timeout:g} s")
            time.sleep(_POLL_S)

    def _suspect_error(self, what: str) -> None:
        """Complete although its end is not reached: either the marker lags a little, or NCCL has reported an error."""
        now = time.monotonic()
        if self._complete_since is None:
            self._complete_since = now
        elif now - self._complete_since > _ERROR_GRACE_S:
            # Abort before anything else: torch's watchdog looks every 100 ms, and if it finds the error first it asks
            # every process of the run to dump its state and, minutes later, to exit.
            self._link.abort()
            raise LinkError(f"{what}: NCCL reported an error; the peer may be gone")

    def _raise_async_error(self) -> None:
        # With a timeout, wait() on a completed Work looks at its error and raises it; without one it would not.
        with self._link._queue.issuing():
            self._work.wait(timedelta(milliseconds=1))


def connect_nccl(store: PrefixStore, side: int, device: torch.device, timeout: float, *, peer: str) -> NcclLink:
    """Builds the communicator. Blocks, at most for the timeout.

    Args:
        store: prefixed with the link's own keys.
        side: rank in the pair.
        device: ``cuda:N``.
        timeout: seconds.
        peer: name of the other end, for messages.

    Raises:
        LinkTimeoutError: the communicator did not come up in time. What NCCL still does about it goes on in a thread
            of its own and is aborted when it returns.
        LinkError: NCCL refused.
    """

    unfinished: list[NcclLink] = []

    def build() -> NcclLink:
        torch.cuda.set_device(device)
        group = _construct(store, side)
        group.eager_connect_single_device(device)
        link = NcclLink(group, 1 - side, device=device, peer=peer)
        unfinished.append(link)
        try:
            warm_up(link, side, timeout)
        except BaseException:
            link.abort()
            raise
        return link

    try:
        return within(timeout, build, NcclLink.abort, name=f"nccl-connect-{peer}")
    except BaseException as error:
        for link in unfinished:
            link.abort()
        if isinstance(error, TimeoutError):
            raise LinkTimeoutError(f"the communicator with {peer} did not come up within {timeout:g} s") from error
        if isinstance(error, RuntimeError) and not isinstance(error, LinkError):
            raise link_error(error, "building the communicator with", peer) from error
        raise


def _construct(store: PrefixStore, side: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # exists only in builds with NCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    options._timeout = _GROUP_TIMEOUT
    with quiet_watchdog():
        return ProcessGroupNCCL(store, side, 2, options)


@contextlib.contextmanager
def quiet_watchdog() -> Iterator[None]:
    """Sets the environment under which a link's process group is constructed, and puts back what was there.

    Process groups that other threads construct meanwhile would read it too; links are built at connect time.
    """
    with _environment_lock:
        before = {key: os.environ.get(key) for key in _QUIET_WATCHDOG}
        os.environ.update(_QUIET_WATCHDOG)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


def within(timeout: float, work: Callable[[], T], discard: Callable[[T], None], *, name: str) -> T:
    """Runs a call that has no deadline of its own in a thread, and gives up on it after ``timeout`` seconds.

    Args:
        timeout: seconds.
        work: the call.
        discard: gets the result if it comes too late.
        name: of the thread.

    Raises:
        TimeoutError: it did not return in time; the thread is left behind.
        BaseException: whatever the call raised.
    """
    lock = threading.Lock()
    finished = threading.Event()
    outcome: list[T] = []
    failure: list[BaseException] = []
    abandoned = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failure.append(error)
            finished.set()
            return
        with lock:
            late = abandoned
            outcome.append(result)
        finished.set()
        if late:
            _log_failure(lambda: discard(result), f"discarding the late result of {name}")

    threading.Thread(target=run, name=name, daemon=True).start()
    finished.wait(timeout)
    with lock:
        if not outcome and not failure:
            abandoned = True
    if abandoned:
        raise TimeoutError(f"{name}: no result within {timeout:g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def _log_failure(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except RuntimeError as error:
        logger.warning("%s: %s", what, error)
