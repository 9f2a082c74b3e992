"""A draft rank's end of streamed samples: the memory of their windows, the receives of their pieces, their readers."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.coordination.messages import AnnouncePiece, Message, StreamEnd, StreamOpen, Withdraw
from nccl_stream.coordination.stream_intake import IncomingPiece, IncomingStream
from nccl_stream.device_staging import aside
from nccl_stream.errors import (
    ChecksumError,
    ClosedError,
    PeerTimeoutError,
    SlotsHeldError,
    StreamLostError,
    WireFormatError,
)
from nccl_stream.ranks.draft_leases import DraftLeases
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.side import Side
from nccl_stream.refs import SampleRef
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.pieces import PieceCount, require_stream
from nccl_stream.stores.tensors import checksum_of
from nccl_stream.stores.windows import WindowLayout
from nccl_stream.streamed.sample import Piece, PieceReader
from nccl_stream.transport.arena import Arena, Slot
from nccl_stream.wire_header import check_header, make_piece_header

__all__ = ["IncomingStreams"]

logger = logging.getLogger(__name__)

WAIT_S = 0.5


@dataclass(eq=False)
class _Window:
    """The memory of one stream's pieces: a slot of the arena, cut into slots of its own."""

    slot: Slot
    layout: WindowLayout
    ring: Arena
    given_back: list[Slot] = field(default_factory=list)  # their consumer has done with them
    freed: int = 0

    def collect(self) -> int:
        """Count the pieces whose memory came back so far."""
        still_used = [slot for slot in self.given_back if not slot.is_returned]
        self.freed += len(self.given_back) - len(still_used)
        self.given_back = still_used
        return self.freed


class IncomingStreams:
    """Between the state machine of streamed samples, receive memory, links and readers of one draft rank.

    Methods are called with the lock of the side held, except where they say otherwise.

    Args:
        side: this rank's end of the stream.
        intake: its state machine.
        later: does a job soon, on another thread and without the lock; callable from a finalizer.
    """

    def __init__(self, side: Side, intake: DraftIntake, *, later: Callable[[Callable[[], None]], None]) -> None:
        self.side = side
        self.intake = intake
        self.later = later
        self._closing: list[_Window] = []
        self._is_noted = False
        self.leases: DraftLeases
        self._store: NcclFeatureStore
        self._links: Links

    def wire(self, store: NcclFeatureStore, links: Links, leases: DraftLeases) -> None:
        """Second half of construction."""
        self._store, self._links, self.leases = store, links, leases

    def windows(self, ref: SampleRef) -> WindowLayout:
        """How a window of the sample lies in memory."""
        return WindowLayout(ref, self._store.layout_of)

    # -- memory --------------------------------------------------------------------------------------------------------

    def open_window(self, delivery: Delivery) -> _Window:
        """Cut the slot of an admitted sample into those of its pieces."""
        layout = self.windows(delivery.ref)
        ring = Arena(
            layout.total_bytes,
            self._store.device,
            poison=self.side.config.poison,
            on_free=self._note_memory,
            memory=delivery.slot.buffer,
        )
        if self.side.config.poison and self._store.device.type == "cuda":
            # Pieces that return elsewhere than in the consumer's thread are overwritten on this stream.
            delivery.slot.record_release(torch.cuda.default_stream(self._store.device))
        return _Window(delivery.slot, layout, ring)

    def piece_slot(self, stream: IncomingStream) -> Slot | None:
        """Memory for the next announced piece."""
        window: _Window = stream.window
        index = stream.queue[0].index
        if index == 0 and window.ring.free_bytes < window.ring.capacity_bytes:
            # A lost link still writes. The first piece is larger, and must lie at the head: elsewhere it would cut what
            # is left so that not all others fit.
            return None
        return window.ring.reserve(
            window.layout.slot_bytes(index), f"piece {index} of {stream.delivery.sample_id} of {stream.delivery.owner}"
        )

    def free(self, piece: IncomingPiece) -> None:
        """Nobody wants the piece any more."""
        stream = piece.delivery.stream
        assert stream is not None
        if not piece.void:
            stream.window.given_back.append(piece.slot)
        piece.slot.settle()
        self.count_freed(stream)

    def count_freed(self, stream: IncomingStream) -> None:
        """Tell the owner about memory that came back."""
        self.intake.streams.returned(stream, stream.window.collect())

    def close_window(self, stream: IncomingStream) -> None:
        """The delivery has its outcome: its memory returns once nobody uses any of it."""
        stream.reader = None
        self._closing.append(stream.window)
        self._return_windows()

    def _note_memory(self) -> None:
        """An arena's callback, maybe in a finalizer: leave a note, unless there is one."""
        if not self._is_noted:
            self._is_noted = True
            self.later(self._memory_came_back)

    def _memory_came_back(self) -> None:
        """A job; the lock is not held."""
        self._is_noted = False  # what comes back from now on needs a note of its own
        with self.side.cond:
            self.memory_came_back()
            self.intake.grant()

    def memory_came_back(self) -> None:
        """Some piece's memory may be free by now."""
        for stream in self.intake.streams.all():
            self.count_freed(stream)
        self._return_windows()

    def _return_windows(self) -> None:
        still_used = []
        for window in self._closing:
            if window.ring.free_bytes == window.ring.capacity_bytes:
                window.slot.settle()
            else:
                still_used.append(window)
        self._closing = still_used

    # -- what owners say -----------------------------------------------------------------------------------------------

    def heard(self, inc: str, message: Message) -> None:
        """An owner's word about a streamed sample; others are ignored."""
        if isinstance(message, AnnouncePiece):
            self.intake.piece_announced(inc, message)
        elif isinstance(message, StreamOpen):
            self.intake.stream_opened(inc, message)
        elif isinstance(message, StreamEnd):
            self.intake.stream_ended(inc, message)
        elif isinstance(message, Withdraw):
            self.intake.withdrawn(inc, message)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def receive(self, piece: IncomingPiece) -> None:
        """Post the receive of a piece."""
        delivery, window = piece.delivery, self._window(piece)
        link_stream = self._links.stream(delivery.owner, piece.gen)
        piece.slot.begin_transfer()
        piece.slot.wait_release(link_stream)
        window.slot.wait_release(link_stream)
        buffers = window.layout.wire_buffers(piece.index, piece.length, piece.slot.buffer)
        if not self._links.recv(delivery.owner, piece.gen, piece, buffers):
            self.later(partial(self._refused, piece))

    def _refused(self, piece: IncomingPiece) -> None:
        with self.side.cond:
            self.intake.link_down(piece.delivery.owner, piece.gen)
            self.transfer_over(piece, ok=False)
            self.side.cond.notify_all()

    @staticmethod
    def _window(piece: IncomingPiece) -> _Window:
        assert piece.delivery.stream is not None
        window: _Window = piece.delivery.stream.window
        return window

    def transfer_done(self, piece: IncomingPiece) -> None:
        """A piece has arrived; the lock is not held."""
        delivery = piece.delivery
        layout = self._window(piece).layout.layout(piece.index, piece.length)
        expected = make_piece_header(
            delivery.owner, delivery.sample_id, piece.index,
            gen=piece.gen, turn=piece.turn, serial=delivery.serial, delivery=delivery.number,
        )  # fmt: skip
        ok, verify = True, self.side.config.verify_checksums
        what = f"piece {piece.index} of sample {delivery.sample_id!r}"
        try:
            checksum = check_header(layout.read_header(piece.slot.buffer), expected, what, checksummed=verify)
            with aside(self._store.device):
                found = None if checksum is None else checksum_of(layout.views(piece.slot.buffer).values())
            if found != checksum:
                raise ChecksumError(f"{what} from {delivery.owner} did not arrive as it was sent")
        except (RuntimeError, WireFormatError, ChecksumError) as exc:  # on a GPU the look may fail itself
            logger.error("%s: %s", self.side.node.inc, exc)
            if isinstance(exc, ChecksumError):
                self._count_fault(delivery, f"ChecksumError: {exc}")
            # The piece comes again on the next generation.
            self._links.break_link(delivery.owner, piece.gen, str(exc))
            ok = False
        with self.side.cond:
            if ok:
                self.intake.statistics.bytes_received += sum(spec.nbytes for spec in layout.specs.values())
            self.transfer_over(piece, ok=ok)
            self.side.cond.notify_all()

    def _count_fault(self, delivery: Delivery, fault: str) -> None:
        with self.side.cond:
            self.intake.statistics.faulty += 1
            stream = delivery.stream
            assert stream is not None
            stream.faults += 1
            if stream.faults > self.side.config.max_failures:
                stream.broken, stream.failed_after = stream.broken or fault, 0

    def transfer_over(self, piece: IncomingPiece, *, ok: bool) -> None:
        """A receive has ended, well or not."""
        piece.slot.end_transfer()
        self.intake.piece_over(piece, ok=ok)

    # -- readers -------------------------------------------------------------------------------------------------------

    def open_reader(self, delivery: Delivery) -> IncomingReader:
        """Begin to read a leased sample, in place of an earlier reader."""
        stream = delivery.stream
        assert stream is not None
        if stream.stopped or stream.released:
            raise StreamLostError(
                delivery.sample_id,
                "pieces of it were released to an earlier reader; a retained one comes anew when its lease is failed "
                "or handed back",
            )
        return IncomingReader(self, stream)

    def views(self, piece: IncomingPiece) -> dict[str, torch.Tensor]:
        """The features of a piece, as views of its memory."""
        window = self._window(piece)
        if self._store.device.type == "cuda":
            current = torch.cuda.current_stream(self._store.device)
            piece.slot.record_release(current)
            window.slot.record_release(current)
        return window.layout.layout(piece.index, piece.length).views(piece.slot.export())

    def release(
        self, stream: IncomingStream, token: object, piece: IncomingPiece, views: dict[str, torch.Tensor]
    ) -> None:
        """The consumer has done with a piece; the lock is not held."""
        views.clear()  # whoever keeps the Piece does not keep its memory
        with self.side.cond:
            if stream.reader is not token or stream.over:
                return
            if self._store.device.type == "cuda":
                piece.slot.record_release(torch.cuda.current_stream(self._store.device))
            self.intake.streams.release(piece)
            self.intake.grant()

    def leave(self, stream: IncomingStream, token: object) -> bool:
        """A reader stops; whether the sample can be read again. The lock is not held."""
        with self.side.cond:
            if stream.reader is not token or stream.over:
                return False
            stream.reader = None
            if stream.released == 0 and not stream.broken:
                return True
            self.intake.streams.stop(stream)
            self.intake.grant()
            self.side.cond.notify_all()
            return require_stream(stream.delivery.ref).retain and not stream.broken

    def finish(self, stream: IncomingStream, token: object) -> None:
        """A reader has consumed the sample; the lock is not held."""
        with self.side.cond:
            if stream.reader is token and not stream.over:
                stream.reader = None
                self.intake.streams.stop(stream)
                self.intake.grant()

    @property
    def store_is_closed(self) -> bool:
        return self._store.is_closed


class IncomingReader(PieceReader):
    """The consumer's end of a streamed sample whose pieces travel. Made with the lock of the side held.

    Args:
        streams: what it reads from.
        stream: the delivery.
    """

    def __init__(self, streams: IncomingStreams, stream: IncomingStream) -> None:
        self._streams = streams
        self._stream = stream
        self._count = PieceCount(stream.delivery.ref)
        self._token = stream.reader = object()
        self._renewed_at = -math.inf
        self._at_end = False
        self._closed = False
        self._can_be_read = False
        leave = partial(streams.leave, stream, self._token)
        self._finalizer = weakref.finalize(self, streams.later, leave)  # type: ignore[arg-type]
        self._finalizer.atexit = False
        streams.side.cond.notify_all()

    @property
    def ref(self) -> SampleRef:
        """The sample's ref; see :class:`PieceReader`."""
        return self._stream.delivery.ref

    @property
    def at_end(self) -> bool:
        """See :class:`PieceReader`."""
        return self._at_end

    def next(self, timeout: float | None = None) -> Piece | None:
        """Return the next piece; see :meth:`PieceReader.next`.

        Raises:
            SlotsHeldError: (``MemoryError``) tensors of earlier pieces have kept the whole window for too long.
        """
        streams, stream = self._streams, self._stream
        started = time.monotonic()
        with streams.side.cond:
            while True:
                self._check()
                self._renew()
                piece = stream.here.get(self._count.num_pieces)
                if piece is not None:
                    break
                if stream.total == self._count.num_pieces:
                    self._at_end = True
                    return None
                if stream.broke_off_at(self._count.num_pieces):
                    raise self._count.broken(stream.broken)
                waited = time.monotonic() - started
                self._check_waited(waited, timeout)
                rest = math.inf if timeout is None else max(0.0, timeout - waited)
                streams.side.wait(min(WAIT_S, streams.side.config.lease / 4, rest))
            views = streams.views(piece)
            self._count.add(piece.length)
        release = partial(streams.release, stream, self._token, piece, views)
        return Piece(piece.index, piece.start, piece.length, views, release)

    def _renew(self) -> None:
        """Keep the lease alive for as long as somebody reads."""
        now = time.monotonic()
        if now - self._renewed_at >= self._streams.side.config.lease / 8:
            self._renewed_at = now
            self._streams.leases.renew(self._stream.delivery.key)

    def _check(self) -> None:
        stream, sample_id = self._stream, self.ref.sample_id
        if self._closed or self._streams.store_is_closed:
            raise ClosedError(f"the reader of streamed sample {sample_id!r} is closed")
        self._streams.side.raise_if_fatal()
        if stream.over:
            raise StreamLostError(sample_id, "its lease has ended")
        if stream.reader is not self._token:
            raise StreamLostError(sample_id, "another reader took it over")

    def _check_waited(self, waited: float, timeout: float | None) -> None:
        stream, sample_id, index = self._stream, self.ref.sample_id, self._count.num_pieces
        window = require_stream(self.ref).window
        held = stream.have - stream.freed
        if timeout is not None and waited >= timeout:
            raise PeerTimeoutError(f"streamed sample {sample_id!r}: piece {index} did not come within {timeout} s")
        limit = self._streams.side.config.held_timeout
        if held >= window and waited >= limit:
            raise SlotsHeldError(
                f"streamed sample {sample_id!r}: piece {index} has no memory since {limit:.0f} s: all {window} pieces "
                f"of the window are unreleased, or tensors of theirs are alive. Release pieces, clone what you keep, "
                f"or open the sample with a larger window."
            )

    def close(self) -> bool:
        """Stop reading; see :meth:`PieceReader.close`."""
        self._closed = True
        with self._streams.side.cond:  # a second thread that closes has the same answer
            if self._finalizer.detach() is not None:
                self._can_be_read = self._streams.leave(self._stream, self._token)
                self._wake()
            return self._can_be_read

    def release(self) -> None:
        """The sample is consumed; see :meth:`PieceReader.release`. Its outcome is that of its lease."""
        self._closed = True
        if self._finalizer.detach() is not None:
            self._streams.finish(self._stream, self._token)
            self._wake()

    def _wake(self) -> None:
        with self._streams.side.cond:
            self._streams.side.cond.notify_all()
