"""Words about pieces that are doubled, stale, or cannot be: each end keeps its head."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_stream.coordination import messages as m
from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.intake import DraftIntake
from nccl_stream.coordination.owned import Phase
from nccl_stream.coordination.stream_owner import OwnedStream
from nccl_stream.refs import StreamSpec
from tests.unit.helpers import make_ref

OWNER, DRAFT, WINDOW, FULL = "t0", "d0", 2, 8
REF = make_ref("s", store_uri=f"nccl://run/{OWNER}", stream=StreamSpec({"input_ids": 1}, FULL, WINDOW))


class IntakePort:
    """A draft with memory for everything; receives end when the test says so."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.received: list[Any] = []
        self.freed: list[Any] = []
        self.closed = 0
        self.intake = DraftIntake(self, rank=0, num_targets=1, num_drafts=1, static=False)
        self.intake.owner_joined(OWNER, 0)
        self.intake.link_opening(OWNER, 1)
        self.intake.link_up(OWNER, 1)
        self.intake.announced(OWNER, m.Announce(1, 0, 7, 0, 0, 0, REF.to_wire()))

    def tell(self, owner: str, message: m.Message) -> None:
        self.said.append(message)

    def check(self, owner: str, ref: Any) -> int:
        return 1

    def reserve(self, nbytes: int, label: str) -> object:
        return object()

    def receive(self, delivery: Any) -> None:
        raise AssertionError("a streamed sample is not received as a whole")

    def yielded(self, delivery: Any) -> None: ...

    def free(self, delivery: Any) -> None:
        self.closed += 1

    def open_window(self, delivery: Any) -> object:
        return object()

    def piece_slot(self, stream: Any) -> object:
        return object()

    def receive_piece(self, piece: Any) -> None:
        self.received.append(piece)

    def free_piece(self, piece: Any) -> None:
        self.freed.append(piece)

    def last(self, kind: type) -> Any:
        return [message for message in self.said if isinstance(message, kind)][-1]

    @property
    def stream(self) -> Any:
        return self.intake.streams.find(OWNER, 7)

    def piece(self, index: int, length: int = FULL, *, gen: int = 1, serial: int = 7, delivery: int = 0) -> None:
        self.intake.piece_announced(OWNER, m.AnnouncePiece(gen, serial, delivery, index, length))


@pytest.fixture
def draft() -> IntakePort:
    port = IntakePort()
    assert port.last(m.Admit) == m.Admit(1, 0, 7, 0)
    port.intake.stream_opened(OWNER, m.StreamOpen(7, 0))
    return port


def test_pieces_are_received_in_turn_and_doubled_words_change_nothing(draft: IntakePort) -> None:
    for _ in range(2):
        draft.intake.stream_opened(OWNER, m.StreamOpen(7, 0))
        draft.piece(0)
        draft.piece(1, 3)
    assert [(piece.index, piece.start, piece.length, piece.turn) for piece in draft.received] == [
        (0, 0, FULL, 0), (1, FULL, 3, 1),
    ]  # fmt: skip
    for _ in range(2):
        draft.intake.stream_ended(OWNER, m.StreamEnd(7, 0, 2, ""))
    assert not draft.stream.broken
    for piece in list(draft.received):
        draft.intake.piece_over(piece, ok=True)
    assert draft.stream.is_whole


@pytest.mark.parametrize(
    "announced",
    [
        [(1, FULL)],
        [(0, FULL + 1)],
        [(0, FULL - 1), (1, FULL)],
        [(0, FULL), (1, FULL), (2, FULL)],
    ],
    ids=["gap", "too long", "after a short one", "without credit"],
)
def test_impossible_piece_breaks_the_stream_and_nothing_is_received(draft: IntakePort, announced: Any) -> None:
    for index, length in announced:
        draft.piece(index, length)
    assert "impossible" in draft.stream.broken
    assert len(draft.received) == len(announced) - 1
    assert draft.last(m.PieceSkip).piece == announced[-1][0]
    for piece in list(draft.received):
        draft.intake.piece_over(piece, ok=True)
    assert not draft.stream.broke_off_at(len(announced) - 2)
    assert draft.stream.broke_off_at(len(announced) - 1)


def test_end_before_what_was_announced_breaks_the_stream(draft: IntakePort) -> None:
    draft.piece(0)
    draft.piece(1)
    draft.intake.stream_ended(OWNER, m.StreamEnd(7, 0, 1, ""))
    assert draft.stream.broken


def test_words_about_another_delivery_or_generation_are_refused_or_ignored(draft: IntakePort) -> None:
    draft.piece(0, serial=8)
    assert draft.last(m.PieceSkip) == m.PieceSkip(1, 8, 0, 0)
    draft.piece(0, delivery=1)
    assert draft.last(m.PieceSkip) == m.PieceSkip(1, 7, 1, 0)
    said = len(draft.said)
    draft.piece(0, gen=2)
    draft.intake.stream_ended(OWNER, m.StreamEnd(7, 1, 3, ""))
    draft.intake.withdrawn(OWNER, m.Withdraw(7, 1))
    draft.intake.withdrawn("t9", m.Withdraw(7, 0))
    assert len(draft.said) == said
    assert not draft.received
    assert not draft.stream.broken


def test_withdrawal_before_it_is_opened_gives_the_memory_back() -> None:
    draft = IntakePort()
    draft.intake.withdrawn(OWNER, m.Withdraw(7, 0))
    assert draft.closed == 1
    assert draft.intake.in_transfer(OWNER) == 0
    draft.intake.stream_opened(OWNER, m.StreamOpen(7, 0))
    assert not draft.intake.held


def test_withdrawal_afterwards_is_told_to_the_reader(draft: IntakePort) -> None:
    draft.intake.withdrawn(OWNER, m.Withdraw(7, 0))
    assert draft.stream.broke_off_at(0)
    assert draft.closed == 0


class OwnerPort:
    """A target whose one draft has admitted a stream of which two pieces are there."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.sent: list[tuple[int, int]] = []
        self.gone = 0
        self.settled_: list[str] = []
        self.delivery = OwnerDelivery(self, num_drafts=1, static=False, window=4, max_failures=1)
        self.delivery.draft_joined(DRAFT, 0)
        self.delivery.link_up(DRAFT, 1)
        self.stream = OwnedStream(WINDOW)
        self.delivery.offer("s", {"id": "s"}, 100, 0, self.stream)

    def tell(self, draft: str, message: m.Message) -> None:
        self.said.append(message)

    def transmit(self, draft: str, gen: int, seq: int, sample: Any) -> None: ...

    def transmit_piece(self, draft: str, gen: int, turn: int, sample: Any, piece: int) -> None:
        self.sent.append((turn, piece))

    def pieces_gone(self, sample: Any, count: int) -> None:
        self.gone = max(self.gone, count)

    def settled(self, sample: Any) -> None:
        self.settled_.append(sample.outcome)

    def append(self, *lengths: int) -> None:
        self.stream.lengths += lengths
        self.delivery.stream_changed("s", self.stream)

    def announced(self) -> list[int]:
        return [message.piece for message in self.said if isinstance(message, m.AnnouncePiece)]

    def last(self) -> m.Message:
        return self.said[-1]


@pytest.fixture
def owner() -> OwnerPort:
    port = OwnerPort()
    port.append(FULL, FULL, FULL)
    assert port.announced() == []
    port.delivery.admitted(DRAFT, 1, 0, 0, 0)
    assert port.announced() == [0, 1], "a window, and not more"
    return port


def test_receives_are_served_in_turn_and_once(owner: OwnerPort) -> None:
    pieces = owner.delivery.pieces
    pieces.ready(DRAFT, m.PieceReady(1, 1, 0, 0, 1))
    assert owner.sent == []
    for _ in range(2):
        pieces.ready(DRAFT, m.PieceReady(1, 0, 0, 0, 0))
    assert owner.sent == [(0, 0), (1, 1)]
    late = owner.delivery.books.late
    for stale in (m.PieceReady(2, 2, 0, 0, 1), m.PieceReady(1, 2, 0, 1, 1), m.PieceReady(1, 2, 5, 0, 1)):
        pieces.ready(DRAFT, stale)
        pieces.skipped(DRAFT, m.PieceSkip(stale.gen, stale.serial, stale.delivery, stale.piece))
    assert owner.delivery.books.late == late + 6
    assert owner.sent == [(0, 0), (1, 1)]


def test_progress_brings_credit_once_and_never_more_than_was_announced(owner: OwnerPort) -> None:
    pieces = owner.delivery.pieces
    pieces.ready(DRAFT, m.PieceReady(1, 0, 0, 0, 0))
    for _ in range(2):
        pieces.progress(DRAFT, m.Progress(0, 0, 0, 1, 1, False))
    assert owner.announced() == [0, 1, 2]
    assert owner.gone == 1
    pieces.progress(DRAFT, m.Progress(0, 0, 0, 99, 99, False))
    assert owner.gone == 1, "nothing can come back that was not sent"
    for piece in (1, 2):
        pieces.ready(DRAFT, m.PieceReady(1, piece, 0, 0, piece))
    pieces.progress(DRAFT, m.Progress(0, 0, 0, 99, 99, False))
    assert owner.gone == 3
    owner.append(FULL)
    assert owner.announced() == [0, 1, 2, 3]


def test_words_about_a_delivery_that_is_not_current_are_answered_with_withdrawal(owner: OwnerPort) -> None:
    for serial, delivery in ((0, 1), (5, 0)):
        owner.delivery.pieces.progress(DRAFT, m.Progress(1, serial, delivery, 0, 0, False))
        assert owner.last() == m.Withdraw(serial, delivery)
        owner.delivery.admitted(DRAFT, 1, 0, serial, delivery)
        assert owner.last() == m.Withdraw(serial, delivery)
    owner.delivery.offer("whole", {"id": "whole"}, 100, 1)
    owner.delivery.admitted(DRAFT, 1, 1, 1, 0)
    assert owner.last() == m.Withdraw(1, 0)
    assert owner.delivery.phases()["whole"] is Phase.ASSIGNED


def test_pieces_asked_for_are_sent_though_the_sample_has_its_outcome(owner: OwnerPort) -> None:
    """The draft has posted the receive: without its bytes everything behind it on the link would be out of step."""
    owner.delivery.settle(DRAFT, [["s", 0, "ack", 0, ""]])
    assert owner.settled_ == []
    owner.delivery.pieces.ready(DRAFT, m.PieceReady(1, 0, 0, 0, 0))
    assert owner.sent == [(0, 0)]
    owner.delivery.pieces.skipped(DRAFT, m.PieceSkip(1, 0, 0, 1))
    assert owner.settled_ == []
    owner.delivery.piece_sent("s", 10)
    assert owner.settled_ == ["acked"]


def test_next_generation_goes_on_where_the_draft_says(owner: OwnerPort) -> None:
    owner.delivery.link_down(DRAFT, 1)
    owner.delivery.pieces.progress(DRAFT, m.Progress(2, 0, 0, 1, 0, False))
    assert owner.announced() == [0, 1], "the link is not up on this side"
    owner.delivery.link_up(DRAFT, 2)
    assert owner.announced() == [0, 1, 1]
    assert owner.delivery.phases() == {"s": Phase.DELIVERED}


def test_stream_goes_back_to_its_first_piece_only_while_that_is_here(owner: OwnerPort) -> None:
    owner.delivery.settle(DRAFT, [["s", 0, "back", 0, "no use"]])
    assert owner.delivery.phases() == {"s": Phase.ASSIGNED}
    owner.delivery.admitted(DRAFT, 1, 1, 0, 1)
    owner.delivery.pieces.ready(DRAFT, m.PieceReady(1, 0, 0, 1, 0))
    owner.delivery.pieces.progress(DRAFT, m.Progress(0, 0, 1, 1, 1, False))
    owner.delivery.settle(DRAFT, [["s", 1, "back", 0, "no use"]])
    assert owner.delivery.books.lost == 1
    assert owner.stream.why == "no use"
