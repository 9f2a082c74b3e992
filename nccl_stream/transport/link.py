"""What every link between a target and a draft rank must do, whatever carries its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nccl_stream.errors import MisuseError

__all__ = ["Link", "Transfer"]


class Transfer(ABC):
    """One message on its way. It must be kept until :meth:`wait` has returned or raised, or :meth:`done` was True."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Blocks until the message has left (send) or arrived (receive).

        When it has returned, or has raised after the link was aborted, the transport does not touch the buffer again.
        May be called again after an abort, and then returns or raises promptly.

        Args:
            timeout: seconds. Passing it fails the whole link.

        Raises:
            LinkTimeoutError: the deadline passed; the link is dead.
            LinkError: the link failed or was aborted.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the message has finished, without blocking. Only meaningful if the link is ``pollable``.

        Raises:
            LinkError: the link failed or was aborted.
        """


class Link(ABC):
    """An ordered connection of exactly two ranks.

    The n-th send of one end meets the n-th receive of the other end, and both must have the same number of bytes:
    neither gloo nor NCCL checks that. A send may block until its receive is posted. ``send`` and ``recv`` are called
    from one thread at a time; ``abort`` from any.

    Attributes:
        device: where buffers must lie.
        peer: the other end's name, for messages.
        max_inflight_ops: how many transfers may be unfinished at once.
        pollable: whether :meth:`Transfer.done` tells the truth, so that one thread can serve many links.
        stream: the CUDA stream behind whose queued work transfers are issued; None on the CPU.
    """

    device: torch.device
    peer: str
    max_inflight_ops: int
    pollable: bool
    stream: torch.cuda.Stream | None = None

    @abstractmethod
    def send(self, buf: torch.Tensor) -> Transfer:
        """Starts sending.

        Args:
            buf: ``[n > 0] uint8``, contiguous, on ``device``. Not to be changed until the transfer is over.

        Raises:
            MisuseError: the buffer is not like that; nothing was started.
            LinkError: the link has failed or was aborted.
        """

    @abstractmethod
    def recv(self, buf: torch.Tensor) -> Transfer:
        """Starts receiving into a buffer, as :meth:`send`. To be called only when the sender is ready.

        Raises:
            MisuseError: as for :meth:`send`.
            LinkError: the link has failed or was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends the link at once, whatever the peer does. Idempotent, from any thread, never raises.

        Unfinished transfers stop waiting; later calls of ``send`` and ``recv`` raise :class:`LinkError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends a link that has no unfinished transfers and gives its resources back. Idempotent."""

    def _check(self, buf: torch.Tensor) -> None:
        if (
            buf.dtype != torch.uint8
            or buf.dim() != 1
            or buf.numel() == 0
            or buf.device != self.device
            or not buf.is_contiguous()
        ):
            raise MisuseError(
                f"a link to {self.peer} on {self.device} moves contiguous non-empty 1-D uint8 tensors, "
                f"got {buf.dtype} {tuple(buf.shape)} on {buf.device}"
            )
