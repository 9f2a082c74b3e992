"""Sending over a link of a device what waits in the host's memory, by way of a few chunks of the device's."""

from __future__ import annotations

import threading

import torch

from nccl_stream.device_staging import DeviceStager, Stream
from nccl_stream.errors import LinkError
from nccl_stream.staging import Stager
from nccl_stream.transport.link import HostBytes, Link, Transfer

__all__ = ["BounceLink"]

COPY_TIMEOUT_S = 10.0  # for a chunk that takes under a millisecond


class BounceLink(Link):
    """A link that takes :class:`HostBytes` as well, and is the link it is made from in every other way.

    A message from the host is copied into a chunk on the device; the send waits for the copy there, and the host waits
    for neither. With several messages in flight the copy of one runs beside the send of another. Chunks are allocated
    when they are first needed, one for each message in flight, and stay until the link is over.

    Args:
        link: on a device; belongs to this one from now on.
        stager: copies from host to device.
        chunk_bytes: the longest message.
    """

    def __init__(self, link: Link, stager: Stager | DeviceStager, *, chunk_bytes: int) -> None:
        self.device = link.device
        self.peer = link.peer
        self.max_inflight_ops = link.max_inflight_ops
        self.pollable = link.pollable
        self.stream = link.stream
        self._link = link
        self._stager = stager
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def send(self, buf: torch.Tensor | HostBytes) -> Transfer:
        if not isinstance(buf, HostBytes):
            return self._link.send(buf)
        chunk, after = self._take()
        piece = chunk[: buf.data.numel()]
        copy = self._stager.copy(piece, buf.data, after=after, before=self.stream, behind=buf.behind)
        try:
            if self.stream is None:
                copy.wait(COPY_TIMEOUT_S)
            transfer = self._link.send(piece)
        except BaseException as error:
            # The chunk's memory goes back to the allocator with the link: nothing may write to it any more. If the
            # copy does not end, the stager keeps it.
            try:
                copy.wait(COPY_TIMEOUT_S)
            except TimeoutError:
                raise LinkError(f"a copy for the link to {self.peer} does not end") from error
            self._give(chunk)
            raise
        return _BouncedTransfer(self, transfer, chunk)

    def recv(self, buf: torch.Tensor) -> Transfer:
        return self._link.recv(buf)

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()

    def wait_closed(self, timeout: float) -> bool:
        return self._link.wait_closed(timeout)

    def watch(self) -> str:
        return self._link.watch()

    def _take(self) -> tuple[torch.Tensor, Stream | None]:
        """A chunk, and the stream whose queued work may still touch its memory: the allocator's, when it is new."""
        with self._lock:
            if self._free:
                return self._free.pop(), None
        chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8, device=self.device)
        return chunk, torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _give(self, chunk: torch.Tensor) -> None:
        with self._lock:
            self._free.append(chunk)


class _BouncedTransfer(Transfer):
    """The send of a chunk, which is free again when that is over."""

    def __init__(self, link: BounceLink, transfer: Transfer, chunk: torch.Tensor) -> None:
        self._link = link
        self._transfer = transfer
        self._chunk: torch.Tensor | None = chunk

    def wait(self, timeout: float) -> None:
        self._transfer.wait(timeout)
        self._over()

    def done(self) -> bool:
        if not self._transfer.done():
            return False
        self._over()
        return True

    def _over(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._link._give(chunk)
