"""What every link between a target and a draft rank must do, whatever carries its bytes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from nccl_stream.errors import LinkError, LinkTimeoutError, MisuseError
from nccl_stream.staging import StagedCopy

__all__ = ["RECEIVER", "SENDER", "HostBytes", "Link", "Transfer", "link_error", "warm_up"]

SENDER, RECEIVER = 0, 1  # the two sides of a link, and their ranks in its process group

_SOURCE_LINE = re.compile(r"^\[[^]]*\] ?")  # where in torch's C++ an error was raised
MAX_SHOWN = 200  # longest foreign text that goes into a message


@dataclass(frozen=True)
class HostBytes:
    """A message that lies in host memory while the link sends from a device; see ``BounceLink``.

    Attributes:
        data: ``[n > 0] uint8`` on the CPU, contiguous, page-locked.
        behind: copies that bring the data there and may still be in progress.
    """

    data: torch.Tensor
    behind: tuple[StagedCopy, ...] = ()


class Transfer(ABC):
    """One message on its way. It must be kept until :meth:`wait` has returned or raised, or :meth:`done` was True."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Blocks until the message has left (send) or arrived (receive).

        When it has returned the transport does not touch the buffer again. After an abort it may be asked again, with
        a short timeout, whether the message had finished before.

        Args:
            timeout: seconds. Passing it fails the whole link.

        Raises:
            LinkTimeoutError: the deadline passed; the link is dead.
            LinkError: the link failed or was aborted.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the message has finished, without blocking. Only meaningful if the link is ``pollable``.

        On a GPU: whether the device has, so that work queued on any stream from now on finds the bytes in place.

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
    def send(self, buf: torch.Tensor | HostBytes) -> Transfer:
        """Starts sending.

        Args:
            buf: ``[n > 0] uint8``, contiguous, on ``device``. Not to be changed until the transfer is over. A
                ``BounceLink`` takes :class:`HostBytes` too.

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

        Later calls of ``send`` and ``recv`` raise :class:`LinkError`. When it has returned, a link that is not
        pollable does not touch any buffer again; on a pollable one a transfer lets go when ``done`` raises. A ``wait``
        in another thread need not wake before its timeout.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends a link that has no unfinished transfers and gives its resources back. Idempotent."""

    def wait_closed(self, timeout: float) -> bool:
        """Blocks until what :meth:`abort` or :meth:`close` left to be done in the background is done.

        A process that ends meanwhile may crash in the transport's library.

        Args:
            timeout: seconds.

        Returns:
            Whether it is done; also True for a link that leaves nothing, or that is not over.
        """
        return True

    def watch(self) -> str:
        """Blocks until the link is over, whoever ended it, and returns why. Only for links that are not pollable.

        When it has returned, the transport does not touch any buffer again.
        """
        raise NotImplementedError("pollable links are watched by polling their transfers")

    def _check(self, buf: torch.Tensor | HostBytes) -> torch.Tensor:
        if isinstance(buf, HostBytes):
            raise MisuseError(f"the link to {self.peer} on {self.device} does not send from the host's memory")
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
        return buf


def link_error(error: Exception, operation: str, peer: str) -> LinkError:
    """The package's error for one that torch's transports raised; only its first line is kept.

    torch tells a passed deadline from a broken connection by its text alone.
    """
    text = _SOURCE_LINE.sub("", (str(error).splitlines() or [""])[0])[:MAX_SHOWN] or type(error).__name__
    lowered = text.lower()
    kind = LinkTimeoutError if "timed out" in lowered or "wait timeout" in lowered else LinkError
    return kind(f"{operation} {peer} failed: {text}")


def warm_up(link: Link, side: int, timeout: float) -> None:
    """Moves one byte from the sending to the receiving side.

    The first message builds the connection proper, so a link that carried it works.

    Raises:
        LinkError: it did not.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=link.device)
    transfer = link.send(byte) if side == SENDER else link.recv(byte)
    transfer.wait(timeout)
