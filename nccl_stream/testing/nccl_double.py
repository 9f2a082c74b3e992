"""A process group with NCCL's rules and no GPU, so that the NCCL link's own logic runs on any machine.

What it keeps of NCCL: operations of one communicator run strictly in issue order; tags mean nothing; a send does not
finish before its receive; sizes that differ never finish and block everything behind them; an aborted operation
"completes" like a good one, but only when the device lets go of it; an error makes a Work complete while the device
still runs; two threads in one communicator at once are an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from nccl_stream.transport.nccl_group import NcclLink

__all__ = ["DoubleGroup", "DoubleQueue", "DoubleWork", "Fabric", "connected_links"]


class DoubleWork:
    """One operation, like ``WorkNCCL``.

    Attributes:
        buf: what it sends or fills.
        is_send: its direction.
    """

    def __init__(self, fabric: Fabric, buf: torch.Tensor, is_send: bool) -> None:
        self.buf = buf
        self.is_send = is_send
        self._fabric = fabric
        self._on_device = False
        self._error: str | None = None

    def is_completed(self) -> bool:
        """True at its end, good or aborted, and also as soon as an error is known."""
        with self._fabric.lock:
            return self._on_device or self._error is not None

    def device_finished(self) -> bool:
        """What a CUDA event behind the operation would say."""
        with self._fabric.lock:
            return self._on_device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As ``WorkNCCL.wait``: with a timeout it raises the operation's error, without one it never blocks the host.

        Raises:
            RuntimeError: the error, or the deadline passed.
        """
        if timeout <= timedelta(0):
            return True
        with self._fabric.lock:
            finished = self._fabric.changed.wait_for(
                lambda: self._on_device or self._error is not None, timeout.total_seconds()
            )
            if self._error is not None:
                raise RuntimeError(self._error)
            if not finished:
                raise RuntimeError("work timed out in blocking wait")
        return True

    def synchronize(self) -> None:
        """Orders the current stream behind the operation; there is none here."""


@dataclass
class _Side:
    pending: deque[DoubleWork] = field(default_factory=deque)
    aborted: bool = False
    inside: int | None = None


class Fabric:
    """What connects the two ends of one communicator.

    Attributes:
        stall_after: bytes of the next message that arrive before it stops half way; None moves messages whole.
        frozen: while true nothing moves, and aborted operations stay on the device.
        misuse: what a caller did that NCCL would not have survived.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.stall_after: int | None = None
        self.frozen = False
        self.sides = (_Side(), _Side())
        self.misuse: list[str] = []

    def post(self, rank: int, work: DoubleWork) -> None:
        """Takes an operation in."""
        with self.lock:
            if self.sides[rank].aborted:
                raise RuntimeError("NCCL communicator was aborted on rank")
            self.sides[rank].pending.append(work)
            self.advance()

    def advance(self) -> None:
        """Moves what can move now."""
        with self.lock:
            while not self.frozen and self._move_one():
                pass
            for side in self.sides:
                if side.aborted and not self.frozen:
                    for work in side.pending:
                        work._on_device = True
                    side.pending.clear()
            self.changed.notify_all()

    def thaw(self) -> None:
        """Lets the device go on."""
        with self.lock:
            self.frozen = False
            self.stall_after = None
            self.advance()

    def abort(self, rank: int) -> None:
        """One end aborts: its own operations end, the other end's wait for ever."""
        with self.lock:
            self.sides[rank].aborted = True
            self.advance()

    def fail(self, rank: int, error: str = "NCCL remote process exited or there was a network error") -> None:
        """An asynchronous error reaches one end, as when the peer's host dies."""
        with self.lock:
            for work in self.sides[rank].pending:
                work._error = error
            self.changed.notify_all()

    def _move_one(self) -> bool:
        left, right = self.sides
        if left.aborted or right.aborted or not left.pending or not right.pending:
            return False
        a, b = left.pending[0], right.pending[0]
        if a.is_send == b.is_send or a.buf.numel() != b.buf.numel():
            return False  # two sends, two receives, or sizes that differ: hangs, silently
        source, target = (a, b) if a.is_send else (b, a)
        if self.stall_after is not None:
            target.buf[: self.stall_after].copy_(source.buf[: self.stall_after])
            return False
        target.buf.copy_(source.buf)
        a._on_device = b._on_device = True
        left.pending.popleft()
        right.pending.popleft()
        return True


class DoubleGroup:
    """One end, like ``ProcessGroupNCCL``."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self.calls: list[str] = []
        self.slow_issue: threading.Event | None = None

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> DoubleWork:
        """Issues a send; the tag is ignored."""
        return self._issue(tensors, True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> DoubleWork:
        """Issues a receive; the tag is ignored."""
        return self._issue(tensors, False)

    def abort(self) -> None:
        """As ``ncclCommAbort``, from any thread."""
        with self._fabric.lock:
            side = self._fabric.sides[self._rank]
            if side.inside is not None:
                self._fabric.misuse.append(f"rank {self._rank} aborts under the operation of thread {side.inside}")
        self.calls.append("abort")
        self._fabric.abort(self._rank)

    def shutdown(self) -> None:
        """As ``ncclCommFinalize`` and ``ncclCommDestroy``."""
        self.calls.append("shutdown")

    def _issue(self, tensors: list[torch.Tensor], is_send: bool) -> DoubleWork:
        (buf,) = tensors
        with self._alone():
            work = DoubleWork(self._fabric, buf, is_send)
            self._fabric.post(self._rank, work)
        return work

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        side, me = self._fabric.sides[self._rank], threading.get_ident()
        with self._fabric.lock:
            if side.inside is not None:
                self._fabric.misuse.append(f"threads {side.inside} and {me} issue on rank {self._rank} at once")
            side.inside = me
        try:
            if self.slow_issue is not None:
                self.slow_issue.wait(30.0)
            yield
        finally:
            with self._fabric.lock:
                side.inside = None


class DoubleQueue:
    """The device's stream and events: an operation's marker is reached when the device has finished it."""

    stream: torch.cuda.Stream | None = None

    def issuing(self) -> contextlib.AbstractContextManager[object]:
        """There is no stream to make current."""
        return contextlib.nullcontext()

    def marker(self, work: Any) -> _Marker:
        """The end of ``work``."""
        return _Marker(work)


class _Marker:
    def __init__(self, work: DoubleWork) -> None:
        self._work = work

    def query(self) -> bool:
        return self._work.device_finished()


def connected_links(
    *, device: torch.device | str = "cpu", names: tuple[str, str] = ("target", "draft")
) -> tuple[NcclLink, NcclLink, Fabric]:
    """A pair of NCCL links over the double: the sending end, the receiving end, and what lies between them."""
    fabric = Fabric()
    links = [
        NcclLink(
            DoubleGroup(fabric, rank), 1 - rank, device=torch.device(device), peer=names[1 - rank], queue=DoubleQueue()
        )
        for rank in (0, 1)
    ]
    return links[0], links[1], fabric
