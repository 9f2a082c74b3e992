"""A streamed sample on its owner: the memory of its pieces, and the writer that fills it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from nccl_stream.coordination.stream_owner import OwnedStream
from nccl_stream.errors import ClosedError, MisuseError, PeerTimeoutError, StreamLostError
from nccl_stream.refs import SampleRef
from nccl_stream.stores.pieces import PieceCount, require_stream
from nccl_stream.stores.tensors import check_finite, checksum_of
from nccl_stream.stores.windows import WindowLayout
from nccl_stream.streamed.sample import StreamWriter
from nccl_stream.transport.arena import Arena, Slot
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.link import HostBytes

__all__ = [
    "Outbound",
    "OwnedPiece",
    "OwnedPieceWriter",
    "OwnedPieces",
    "PieceMemory",
    "PieceRoom",
    "Unconnected",
    "fail_sample",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOG_EVERY_S = 10.0
WAIT_S = 0.5

_WHY = {
    "acked": "its consumer was content with what it had",
    "dropped": "it was left over at the end, or discarded",
    "dead": "its consumers failed it too often",
}


@dataclass(eq=False)
class PieceMemory:
    """Memory of one piece.

    Attributes:
        buffer: its bytes.
        slot: to be settled when the piece is over; None where it is the allocator's.
        climbs: whether it is in host memory while links send from a device.
        uncount: ends its part in the books of its place; more than one call is one.
    """

    buffer: torch.Tensor
    slot: Slot | None
    climbs: bool = False
    uncount: Callable[[], None] = lambda: None

    def settle(self) -> None:
        """The piece is over. Idempotent."""
        self.uncount()
        if self.slot is not None:
            self.slot.settle()


class PieceRoom(Protocol):
    """Memory of a target rank, as far as samples in pieces need it."""

    @property
    def device(self) -> torch.device:
        """Where windows lie."""
        ...

    def take_window(self, num_bytes: int, nbytes: int, label: str) -> tuple[Slot | None, Callable[[], None]]:
        """Count a window with ``num_bytes`` of features, and ``nbytes`` of preallocated memory for it, if there are.

        Returns:
            The slot, and what ends the count; calling that more than once is calling it once.
        """
        ...

    def take_piece(self, num_bytes: int, nbytes: int, label: str) -> PieceMemory:
        """Memory for one piece by which a retained sample outgrows its window, counted like :meth:`take_window`."""
        ...


@dataclass
class OwnedPiece:
    """One piece in wire layout.

    Attributes:
        checksum: CRC-32C of its features; None where nobody verifies it.
        num_sends: transfers that read it now.
    """

    layout: SlotLayout
    memory: PieceMemory
    checksum: int | None = None
    num_sends: int = 0

    def wire_buffers(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor | HostBytes]:
        """What links send for these messages of it."""
        return [HostBytes(message) for message in messages] if self.memory.climbs else list(messages)


class OwnedPieces:
    """The pieces of one streamed sample of this rank that its consumer has not given back.

    Not thread-safe, except :meth:`close`: its users hold the lock of the stream's end.

    Args:
        ref: the sample's ref.
        windows: sizes of its pieces.
        room: where the pieces lie.
        grow: called with the bytes of each piece by which a retained sample outgrows its window; raises
            ``CapacityError``.
    """

    def __init__(
        self,
        ref: SampleRef,
        windows: WindowLayout,
        room: PieceRoom,
        grow: Callable[[int], None],
    ) -> None:
        spec = require_stream(ref)
        self.ref = ref
        self.windows = windows
        self.stream = OwnedStream(spec.window, spec.retain)
        self.count = PieceCount(ref)
        self.pieces: dict[int, OwnedPiece] = {}
        self.offered = False
        self._room = room
        self._grow = grow
        self._room_ahead = 0  # taken for a piece that is not put yet, maybe never
        self._outgrows = False
        self._closed = False
        nbytes = windows.total_bytes + windows.slot_bytes(1)  # one more, which is filled while the window is full
        self._slot, self._uncount = room.take_window(ref.estimated_bytes, nbytes, f"window of sample {ref.sample_id}")
        memory = None if self._slot is None else self._slot.buffer
        try:
            self._ring = Arena(nbytes, room.device, memory=memory, on_free=self._memory_came_back)
        except BaseException:
            self._uncount()
            raise

    @property
    def nbytes(self) -> int:
        """Memory of the window, and of the piece that is filled while that is full."""
        return self._ring.capacity_bytes

    def take(self, index: int, num_bytes: int) -> PieceMemory | None:
        """Memory for one piece of ``num_bytes``; None while transfers still read what there is.

        Raises:
            CapacityError: (``MemoryError``) the store has no room for a retained sample to grow.
        """
        nbytes = self.windows.slot_bytes(index)
        label = f"piece {index} of sample {self.ref.sample_id}"
        slot = self._ring.reserve(nbytes, label)
        self._outgrows = slot is None and self.stream.retain
        if self._outgrows:
            if num_bytes > self._room_ahead:
                self._grow(num_bytes - self._room_ahead)
                self._room_ahead = num_bytes
            return self._room.take_piece(num_bytes, nbytes, label)
        return None if slot is None else PieceMemory(slot.buffer, slot)

    def wait_release(self, memory: PieceMemory, stream: Any) -> None:
        """Make a stream wait for what former owners of the window's memory, and of this, had queued."""
        for taken in (self._slot, memory.slot):
            if taken is not None:
                taken.wait_release(stream)

    def put(self, index: int, piece: OwnedPiece) -> None:
        """Keep a piece, in the memory that was taken last."""
        if self._outgrows:
            self._room_ahead = 0
        self.pieces[index] = piece
        if self._closed:  # in this very moment, by another thread
            self.close()

    def drop(self, count: int) -> None:
        """The first ``count`` pieces are not needed any more."""
        for index in [index for index in self.pieces if index < count]:
            self.pieces.pop(index).memory.settle()

    def close(self) -> None:
        """The sample is gone from the store. Memory returns when nothing reads or writes it. Idempotent."""
        self._closed = True
        if not self.stream.outcome:
            self.stream.outcome = "dropped"
        while self.pieces:
            self.pieces.popitem()[1].memory.settle()
        self._uncount()
        self._memory_came_back()

    def _memory_came_back(self) -> None:
        if self._closed and self._slot is not None and self._ring.free_bytes == self._ring.capacity_bytes:
            self._slot.settle()


class Outbound(Protocol):
    """The end of the stream on a target rank, as far as writers of streamed samples need it.

    Attributes:
        cond: guards all of it; notified when something changes.
    """

    cond: threading.Condition

    def opened(self, sample: OwnedPieces) -> None:
        """A streamed sample is in the store; the lock is held."""
        ...

    def changed(self, sample: OwnedPieces) -> None:
        """A piece was appended, or the sample was closed or failed; the lock is held."""
        ...

    def check(self, sample: OwnedPieces) -> None:
        """Raise when nobody can read the sample any more; the lock is held."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for a change, at most so long; the lock is held, and given up meanwhile."""
        ...

    def waited(self, seconds: float) -> None:
        """A writer has waited for its reader; the lock is held."""
        ...

    def writer_dropped(self, sample: OwnedPieces) -> None:
        """The writer is gone. Called by a finalizer: must not lock nor block."""
        ...


class Unconnected:
    """An end of which there is no other."""

    def __init__(self) -> None:
        self.cond = threading.Condition()

    def opened(self, sample: OwnedPieces) -> None:
        """Nobody to tell."""

    def changed(self, sample: OwnedPieces) -> None:
        """Nobody to tell."""

    def check(self, sample: OwnedPieces) -> None:
        """Nothing to check."""

    def wait(self, seconds: float) -> None:
        """Only other threads of this process change anything."""
        self.cond.wait(seconds)

    def waited(self, seconds: float) -> None:
        """Nobody to blame."""

    def writer_dropped(self, sample: OwnedPieces) -> None:
        """Nobody waits for it."""


class OwnedPieceWriter(StreamWriter):
    """The producer's end of a streamed sample whose pieces travel.

    A thread that feeds several samples can wait for a reader that waits for another of them: with more samples open
    than drafts can read at once, give each a thread of its own, or append with a timeout.

    Args:
        sample: the pieces.
        outbound: this rank's end of the stream.
        is_closed: whether the store is closed.
        checksums: compute every piece's CRC-32C, for its draft to verify.
        finite: refuse pieces with NaN or infinite values.
        patience: seconds for which an append waits, with a full window, for the ref to be put on the queue.
    """

    def __init__(
        self,
        sample: OwnedPieces,
        outbound: Outbound,
        is_closed: Callable[[], bool],
        *,
        checksums: bool = False,
        finite: bool = False,
        patience: float = 60.0,
    ) -> None:
        self._sample = sample
        self._outbound = outbound
        self._is_closed = is_closed
        self._checksums = checksums
        self._finite = finite
        self._patience = patience
        self._finalizer = weakref.finalize(self, outbound.writer_dropped, sample)
        self._finalizer.atexit = False

    @property
    def ref(self) -> SampleRef:
        """The sample's ref; see :class:`StreamWriter`."""
        return self._sample.ref

    def append(self, tensors: Mapping[str, torch.Tensor], timeout: float | None = None) -> int:
        """Append one piece; see :meth:`StreamWriter.append`. On a GPU it returns once the copies are in place."""
        sample = self._sample
        with self._outbound.cond:
            self._check()
            length = sample.count.check(tensors)
        if self._finite:
            check_finite(self.ref.sample_id, tensors)
        with self._outbound.cond:
            self._check()
            layout = sample.windows.layout(sample.count.num_pieces, length)
            started = time.monotonic()
            num_bytes = sum(spec.nbytes for spec in layout.specs.values())
            memory: PieceMemory | None = self._wait(lambda: self._take(num_bytes), started, timeout)
        assert memory is not None
        try:
            self._pack(layout, tensors, memory)
            checksum = checksum_of(layout.views(memory.buffer).values()) if self._checksums else None
            with self._outbound.cond:
                self._check()
                self._wait(lambda: sample.stream.has_room or None, started, timeout)
                index, _ = sample.count.add(length)
                sample.put(index, OwnedPiece(layout, memory, checksum))
                memory = None
                sample.stream.lengths.append(length)
                self._outbound.changed(sample)
                return index
        finally:
            if memory is not None:
                memory.settle()

    def _take(self, num_bytes: int) -> PieceMemory | None:
        """Memory for the next piece, one ahead of the window; a retained sample grows only when it must."""
        stream = self._sample.stream
        if stream.retain and not stream.has_room:
            return None
        return self._sample.take(self._sample.count.num_pieces, num_bytes)

    def _wait(self, get: Callable[[], T | None], started: float, timeout: float | None) -> T:
        """Wait until the window has room, or there is memory, for a piece; the lock is held."""
        sample, stream = self._sample, self._sample.stream
        next_log = started + LOG_EVERY_S
        while True:
            found = get()
            if found is not None:
                return found
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                raise PeerTimeoutError(
                    f"streamed sample {self.ref.sample_id!r}: all {stream.window} pieces of the window were still "
                    f"unreleased after {timeout} s ({stream.freed} of {len(stream.lengths)} released)"
                )
            if not sample.offered and waited >= self._patience:
                raise MisuseError(
                    f"streamed sample {self.ref.sample_id!r}: its window of {stream.window} pieces is full and its ref "
                    f"was not put on the queue within {waited:.0f} s: put it there before appending more"
                )
            if time.monotonic() >= next_log:
                next_log += LOG_EVERY_S
                logger.info(
                    "append to streamed sample %s waits for its reader since %.0f s; %d of %d pieces are released",
                    self.ref.sample_id, waited, stream.freed, len(stream.lengths),
                )  # fmt: skip
            self._outbound.wait(WAIT_S if timeout is None else max(0.0, min(WAIT_S, timeout - waited)))
            self._outbound.waited(time.monotonic() - started - waited)
            self._check()

    def _pack(self, layout: SlotLayout, tensors: Mapping[str, torch.Tensor], memory: PieceMemory) -> None:
        buffer = memory.buffer
        if buffer.device.type != "cuda":
            layout.pack(tensors, buffer)
            return
        stream = torch.cuda.current_stream(buffer.device)
        self._sample.wait_release(memory, stream)
        layout.pack(tensors, buffer)
        stream.synchronize()

    def _check(self, *, complete: bool = False) -> None:
        """Raise why nothing can be appended; the lock is held."""
        stream, sample_id = self._sample.stream, self.ref.sample_id
        if self._is_closed():
            raise ClosedError(f"streamed sample {sample_id!r}: its store is closed")
        if stream.error:
            raise ClosedError(f"streamed sample {sample_id!r} was failed: {stream.error}")
        if stream.closed and not complete:
            raise ClosedError(f"streamed sample {sample_id!r} is complete; it takes no more pieces")
        if stream.outcome:
            raise StreamLostError(sample_id, stream.why or _WHY.get(stream.outcome, stream.outcome))
        if stream.stopped and not stream.retain:
            raise StreamLostError(sample_id, "its reader stopped")
        self._outbound.check(self._sample)

    def close(self) -> int:
        """The sample is complete; see :meth:`StreamWriter.close`."""
        sample = self._sample
        with self._outbound.cond:
            if not sample.stream.closed:
                self._check(complete=True)
                if not sample.count.num_pieces:
                    raise MisuseError(
                        f"streamed sample {self.ref.sample_id!r} has no piece: append at least one position, or fail it"
                    )
                sample.stream.closed = True
                self._finalizer.detach()
                self._outbound.changed(sample)
            elif self._is_closed():
                raise ClosedError(f"streamed sample {self.ref.sample_id!r}: its store is closed")
            return sample.count.num_pieces

    def fail(self, error: BaseException | str) -> None:
        """The rest never comes; see :meth:`StreamWriter.fail`."""
        self._finalizer.detach()
        with self._outbound.cond:
            fail_sample(self._sample, error if isinstance(error, str) else f"{type(error).__name__}: {error}")
            self._outbound.changed(self._sample)


def fail_sample(sample: OwnedPieces, reason: str) -> None:
    """Record that the rest of a sample never comes; the lock is held.

    Without effect on one that is complete or has its outcome, or whose reader wants no more.
    """
    stream = sample.stream
    if not (stream.closed or stream.error or stream.outcome or (stream.stopped and not stream.retain)):
        stream.error = reason or "its producer failed"
