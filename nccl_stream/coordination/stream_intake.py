"""Draft-side state of streamed samples: which pieces are announced, on their way, here, and given back.

A pure state machine beside :class:`~nccl_stream.coordination.intake.DraftIntake`, which admits a streamed sample like
any other once memory for its whole window is reserved. From then on each piece has its memory already, so its receive
is posted as soon as it is announced, whatever else waits on the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nccl_stream.coordination.messages import AnnouncePiece, Message, PieceReady, PieceSkip, Progress, StreamEnd
from nccl_stream.streamed.spec import StreamSpec

if TYPE_CHECKING:
    from nccl_stream.coordination.intake import Delivery

__all__ = ["IncomingPiece", "IncomingStream", "StreamIntake", "StreamPort"]


@dataclass(eq=False)
class IncomingPiece:
    """One piece at the draft, from its announcement until its memory is given back.

    ``void``: the link or the delivery ended first; what still arrives is thrown away.
    """

    delivery: Delivery
    index: int
    length: int
    start: int
    gen: int
    turn: int = -1
    slot: Any = None
    void: bool = False


@dataclass(eq=False)
class IncomingStream:
    """One delivery of a streamed sample.

    Attributes:
        delivery: the delivery.
        window: memory of the pieces, as the port made it.
        queue: pieces announced on this link generation that wait for memory or for the link.
        flying: pieces whose receives are posted.
        here: pieces that have arrived and were not given back, by number.
        have: pieces that have arrived.
        released: pieces that the consumer gave back; ``freed`` of them whose memory is no longer in use.
        positions: positions of all pieces that were announced.
        total: how many pieces there are, once that is known.
        broken: why the rest never comes, after ``failed_after`` pieces if those are still to come.
        faults: pieces that arrived otherwise than they were sent.
        stopped: the consumer reads no further.
        over: the delivery has its outcome.
        reader: whoever reads it now.
    """

    delivery: Delivery
    window: Any = None
    queue: deque[IncomingPiece] = field(default_factory=deque)
    flying: list[IncomingPiece] = field(default_factory=list)
    here: dict[int, IncomingPiece] = field(default_factory=dict)
    have: int = 0
    released: int = 0
    freed: int = 0
    positions: int = 0
    total: int | None = None
    broken: str = ""
    failed_after: int = 0
    faults: int = 0
    stopped: bool = False
    over: bool = False
    reader: object = None

    @property
    def is_whole(self) -> bool:
        """Whether everything has arrived."""
        return self.total is not None and self.have == self.total

    def broke_off_at(self, index: int) -> bool:
        """Whether piece ``index`` never comes, though it is not the end."""
        return bool(self.broken) and index >= max(self.expected, self.failed_after)

    @property
    def expected(self) -> int:
        """Number of the piece that is announced next."""
        return self.have + sum(not piece.void for piece in self.flying) + len(self.queue)


def _spec(stream: IncomingStream) -> StreamSpec:
    spec = stream.delivery.ref.stream
    assert spec is not None
    return spec


class StreamPort(Protocol):
    """What the state machine asks for; every method returns at once."""

    def tell(self, owner: str, message: Message) -> None: ...

    def open_window(self, delivery: Delivery) -> Any:
        """Cut the slot of an admitted sample into the memory of its pieces."""
        ...

    def piece_slot(self, stream: IncomingStream) -> Any | None:
        """Memory for one piece; None while earlier ones, or a lost link, still use all of it."""
        ...

    def receive_piece(self, piece: IncomingPiece) -> None:
        """Post the receive into ``piece.slot``; :meth:`StreamIntake.piece_over` reports how it went."""
        ...

    def free_piece(self, piece: IncomingPiece) -> None:
        """Nobody wants the piece any more; its memory returns once nobody uses it."""
        ...


class StreamIntake:
    """The streamed samples that one draft has admitted.

    Args:
        port: carries out what is decided.
        take_turn: number of the next receive on that owner's link.
    """

    def __init__(self, port: StreamPort, *, take_turn: Callable[[str], int]) -> None:
        self._port = port
        self._take_turn = take_turn
        self._streams: dict[tuple[str, int], IncomingStream] = {}
        self._flying: dict[str, int] = {}
        self.pieces_received = 0
        self.stale = 0

    def admit(self, delivery: Delivery) -> None:
        """Memory for a window is reserved in ``delivery.slot``."""
        stream = delivery.stream = IncomingStream(delivery)
        stream.window = self._port.open_window(delivery)
        self._streams[delivery.owner, delivery.serial] = stream

    def find(self, owner: str, serial: int) -> IncomingStream | None:
        """The admitted stream with this serial, unless its delivery has its outcome."""
        return self._streams.get((owner, serial))

    def of(self, owner: str) -> Iterator[IncomingStream]:
        """Those of one owner."""
        return iter([stream for (inc, _), stream in self._streams.items() if inc == owner])

    def all(self) -> Iterator[IncomingStream]:
        """Every stream whose delivery has no outcome yet."""
        return iter(list(self._streams.values()))

    def in_flight(self, owner: str) -> int:
        """Receives posted for pieces of this owner that have not come to rest."""
        return self._flying.get(owner, 0)

    # -- the link ----------------------------------------------------------------------------------------------------

    def link_up(self, owner: str, gen: int) -> None:
        """Tell the owner from which piece to go on."""
        for stream in self.of(owner):
            self.tell_progress(stream, gen)

    def link_lost(self, owner: str) -> None:
        """What was announced or on its way comes again on the next generation."""
        for stream in self.of(owner):
            stream.queue.clear()
            for piece in stream.flying:
                piece.void = True
            # All pieces are full except the last one of the sample, after which none was announced.
            stream.positions = min(stream.positions, stream.have * _spec(stream).piece_length)

    def owner_gone(self, owner: str, reason: str) -> None:
        """What has not arrived in full never will."""
        for stream in self.of(owner):
            if not stream.is_whole:
                stream.broken = stream.broken or reason
                stream.failed_after = 0

    # -- announcements -----------------------------------------------------------------------------------------------

    def announced(self, owner: str, message: AnnouncePiece) -> None:
        """A piece is ready on the owner; the generation is the current one."""
        stream = self.find(owner, message.serial)
        is_current = stream is not None and stream.delivery.number == message.delivery
        if (
            stream is None
            or not is_current
            or stream.stopped
            or (stream.broken and message.piece >= stream.failed_after)
        ):
            self._port.tell(owner, PieceSkip(message.gen, message.serial, message.delivery, message.piece))
            return
        if message.piece < stream.expected:
            self.stale += 1
            return
        spec = _spec(stream)
        full = spec.piece_length
        fits = 1 <= message.length <= full and stream.positions == message.piece * full
        fits = fits and (stream.total is None or message.piece < stream.total)
        if message.piece > stream.expected or message.piece >= stream.freed + spec.window or not fits:
            stream.broken, stream.failed_after = f"its owner announced an impossible piece: {message}", 0
            self._port.tell(owner, PieceSkip(message.gen, message.serial, message.delivery, message.piece))
            return
        stream.queue.append(
            IncomingPiece(stream.delivery, message.piece, message.length, stream.positions, message.gen)
        )
        stream.positions += message.length

    def ended(self, owner: str, message: StreamEnd) -> IncomingStream | None:
        """How many pieces there are, or why the rest never comes; returns the stream it is about."""
        stream = self.find(owner, message.serial)
        if stream is None or stream.delivery.number != message.delivery:
            self.stale += 1
            return None
        if message.error:
            stream.broken, stream.failed_after = stream.broken or message.error, message.pieces
        elif message.pieces < stream.expected or message.pieces == 0:
            stream.broken = f"its owner announced more pieces than the {message.pieces} it says there are"
        else:
            stream.total = message.pieces
        return stream

    def grant(self, owner: str) -> None:
        """Post the receives of announced pieces; the link is up."""
        for stream in self.of(owner):
            while stream.queue:
                slot = self._port.piece_slot(stream)
                if slot is None:
                    break
                piece = stream.queue.popleft()
                piece.slot, piece.turn = slot, self._take_turn(owner)
                stream.flying.append(piece)
                self._flying[owner] = self.in_flight(owner) + 1
                self._port.receive_piece(piece)
                delivery = stream.delivery
                self._port.tell(owner, PieceReady(piece.gen, piece.turn, delivery.serial, delivery.number, piece.index))

    # -- arrival and return ------------------------------------------------------------------------------------------

    def piece_over(self, piece: IncomingPiece, *, ok: bool) -> None:
        """A posted receive has ended and nothing writes to its memory any more."""
        stream = piece.delivery.stream
        assert stream is not None
        stream.flying.remove(piece)
        self._flying[piece.delivery.owner] -= 1
        piece.void |= not ok
        stream.have += not piece.void
        self.pieces_received += not piece.void
        if piece.void or stream.over or stream.stopped:
            self._port.free_piece(piece)
            return
        stream.here[piece.index] = piece

    def release(self, piece: IncomingPiece) -> None:
        """The consumer has done with a piece. Idempotent."""
        stream = piece.delivery.stream
        assert stream is not None
        if stream.here.pop(piece.index, None) is not None:
            stream.released += 1
            self._port.free_piece(piece)

    def returned(self, stream: IncomingStream, freed: int) -> None:
        """The memory of ``freed`` pieces of the delivery has come back so far."""
        if freed > stream.freed:
            stream.freed = freed
            self.tell_progress(stream)

    def stop(self, stream: IncomingStream) -> None:
        """The consumer reads no further: what is here or comes is given back."""
        if stream.stopped or stream.over:
            return
        stream.stopped = True
        self._skip_queue(stream)
        for piece in list(stream.here.values()):
            self.release(piece)
        self.tell_progress(stream)

    def tell_progress(self, stream: IncomingStream, gen: int = 0) -> None:
        """Tell the owner what is here; with a ``gen`` also that it is to go on from there."""
        delivery = stream.delivery
        if stream.over:
            return
        self._port.tell(
            delivery.owner,
            Progress(gen, delivery.serial, delivery.number, stream.have, stream.freed, stream.stopped),
        )

    def over(self, delivery: Delivery) -> None:
        """The delivery has its outcome: forget the stream; what still arrives is thrown away."""
        stream = delivery.stream
        if stream is None or stream.over:
            return
        stream.over = True
        if self._streams.get((delivery.owner, delivery.serial)) is stream:
            del self._streams[delivery.owner, delivery.serial]
        self._skip_queue(stream)
        for piece in list(stream.here.values()):
            self.release(piece)

    def _skip_queue(self, stream: IncomingStream) -> None:
        delivery = stream.delivery
        while stream.queue:
            piece = stream.queue.popleft()
            self._port.tell(delivery.owner, PieceSkip(piece.gen, delivery.serial, delivery.number, piece.index))
