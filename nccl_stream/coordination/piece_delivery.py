"""Owner-side delivery of the pieces of streamed samples: announced with credit, sent in their turn.

A part of :class:`~nccl_stream.coordination.delivery.OwnerDelivery`, which assigns the samples and keeps their books.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nccl_stream.coordination.messages import AnnouncePiece, PieceReady, PieceSkip, Progress, StreamEnd, Withdraw
from nccl_stream.coordination.owned import Books, OwnedSample, OwnerDraft, OwnerPort, Phase

__all__ = ["PieceDelivery"]


class PieceDelivery:
    """The streamed samples of one owner, from their admission at a draft on.

    Args:
        port: carries out what is decided.
        drafts: the drafts by incarnation, as the owner knows them.
        books: where late words are counted.
        take_turn: called with a draft, a turn and ``(piece, sample, True)`` when the receive of a piece is posted.
        end_send: called when nothing will be, or is any more, sent of an announced piece.
    """

    def __init__(
        self,
        port: OwnerPort,
        drafts: Mapping[str, OwnerDraft],
        books: Books,
        *,
        take_turn: Callable[[OwnerDraft, int, tuple[int, OwnedSample, bool]], None],
        end_send: Callable[[OwnedSample], None],
    ) -> None:
        self._port = port
        self._drafts = drafts
        self._books = books
        self._take_turn = take_turn
        self._end_send = end_send
        self._samples: dict[int, OwnedSample] = {}

    def add(self, sample: OwnedSample) -> None:
        """A streamed sample was offered."""
        self._samples[sample.serial] = sample

    def remove(self, sample: OwnedSample) -> None:
        """It has its outcome, and nothing of it is sent any more."""
        self._samples.pop(sample.serial, None)

    def announce(self, sample: OwnedSample) -> None:
        """Tell its draft about the pieces that it has memory for, and how many there are."""
        draft, stream = self._drafts.get(sample.draft), sample.stream
        if stream is None or draft is None or sample.phase is not Phase.DELIVERED:
            return
        for piece, length in stream.announce(draft.gen if draft.linked else 0):
            sample.sends += 1
            draft.pieces[sample.serial, sample.delivery, piece] = sample
            self._port.tell(draft.inc, AnnouncePiece(draft.gen, sample.serial, sample.delivery, piece, length))
        if (stream.closed or stream.error) and not stream.told_end:
            stream.told_end = True
            end = StreamEnd(sample.serial, sample.delivery, len(stream.lengths), stream.error[:2000])
            self._port.tell(draft.inc, end)

    def withdraw(self, inc: str, serial: int, delivery: int) -> None:
        """A draft believes that it has a delivery which is not the current one."""
        self._books.late += 1
        if inc in self._drafts:
            self._port.tell(inc, Withdraw(serial, delivery))

    def forget(self, draft: OwnerDraft) -> None:
        """Nothing that was announced or granted on the draft's link will be sent on it."""
        pieces = [*draft.pieces.values(), *(sample for _, sample, is_piece in draft.turns.values() if is_piece)]
        draft.pieces.clear()
        draft.turns.clear()
        for sample in pieces:
            self._end_send(sample)

    def ready(self, inc: str, message: PieceReady) -> None:
        """The draft has posted the receive of a piece. Whatever became of the sample, its bytes must follow."""
        draft = self._asked(inc, message)
        if draft is None or message.turn < draft.next_turn or message.turn in draft.turns:
            self._books.late += 1
        else:
            self._take_turn(draft, message.turn, (message.piece, draft.pieces.pop(_key(message)), True))

    def skipped(self, inc: str, message: PieceSkip) -> None:
        """The draft does not want an announced piece any more."""
        draft = self._asked(inc, message)
        if draft is None:
            self._books.late += 1
        else:
            self._end_send(draft.pieces.pop(_key(message)))

    def _asked(self, inc: str, message: PieceReady | PieceSkip) -> OwnerDraft | None:
        """The draft, if it answers an announcement that has no answer yet."""
        draft = self._drafts.get(inc)
        current = draft is not None and draft.linked and draft.gen == message.gen and _key(message) in draft.pieces
        return draft if current else None

    def progress(self, inc: str, message: Progress) -> None:
        """The draft has given memory back, or says from where to go on after the link was lost."""
        sample = self._samples.get(message.serial)
        current = sample is not None and not sample.outcome and sample.phase is Phase.DELIVERED
        if sample is None or not current or (sample.draft, sample.delivery) != (inc, message.delivery):
            self.withdraw(inc, message.serial, message.delivery)
            return
        stream = sample.stream
        assert stream is not None
        stream.go_on(message.gen, message.have)
        freed = min(message.freed, self._first_unsent(inc, sample))
        self._port.pieces_gone(sample, stream.advance(freed, message.stopped))
        self.announce(sample)

    def _first_unsent(self, inc: str, sample: OwnedSample) -> int:
        """Number of the first piece that was announced and not sent: its memory is needed, whatever a draft says."""
        draft, delivery = self._drafts[inc], (sample.serial, sample.delivery)
        asked = [key[2] for key in draft.pieces if key[:2] == delivery]
        asked += [number for number, other, is_piece in draft.turns.values() if is_piece and other is sample]
        return min(asked, default=sample.stream.announced if sample.stream is not None else 0)


def _key(message: PieceReady | PieceSkip) -> tuple[int, int, int]:
    return message.serial, message.delivery, message.piece
