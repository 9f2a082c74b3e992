"""Streamed samples on their owner: when one can be delivered anew, and what else it does to the owner's books."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.messages import Announce, AnnouncePiece, Message, PieceReady, Progress
from nccl_stream.coordination.owned import OwnedSample
from nccl_stream.coordination.stream_owner import OwnedStream
from nccl_stream.errors import SpecMismatchError
from nccl_stream.refs import FeatureSpec
from nccl_stream.streamed.sample import StreamWriter
from nccl_stream.wire_header import check_header, make_piece_header
from tests.property.streamed_world import PIECE, SPECS, Streamed, StreamedWorld


class Recorder:
    def __init__(self) -> None:
        self.given: list[str] = []
        self.pieces: list[int] = []
        self.gone = 0

    def tell(self, draft: str, message: Message) -> None:
        if isinstance(message, Announce):
            self.given.append(draft)
        elif isinstance(message, AnnouncePiece):
            self.pieces.append(message.piece)

    def transmit(self, draft: str, gen: int, seq: int, sample: OwnedSample) -> None: ...

    def transmit_piece(self, draft: str, gen: int, turn: int, sample: OwnedSample, piece: int) -> None: ...

    def pieces_gone(self, sample: OwnedSample, count: int) -> None:
        self.gone = count

    def settled(self, sample: OwnedSample) -> None: ...


def make_owner(num_drafts: int = 1) -> tuple[OwnerDelivery, Recorder]:
    port = Recorder()
    owner = OwnerDelivery(port, num_drafts=num_drafts, static=False, window=8, max_failures=3, abreast=1)
    for rank in range(num_drafts):
        owner.draft_joined(f"d{rank}", rank)
        owner.link_up(f"d{rank}", 1)
    return owner, port


def make_target() -> Any:
    world = StreamedWorld(
        1, streamed=1.0, window=2, pieces=1, targets=1, drafts=1, per_target=0, end="ragged", static=False, batch=1,
        breaks=0, mail_faults=0, failures=0, deaths=[],
    )  # fmt: skip
    return world.ranks["t0"]


def open_sample(target: Any, *, retain: bool = False) -> StreamWriter:
    writer: StreamWriter = target.store.open_stream("s", SPECS, "run", piece_length=PIECE, window=2, retain=retain)
    return writer


@pytest.mark.parametrize("retain", [False, True])
def test_reader_that_stopped_before_any_memory_came_back_loses_the_sample_unless_it_is_retained(retain: bool) -> None:
    """Its producer is told that nobody reads, and goes: whoever read the sample again would wait for it for ever."""
    owner, port = make_owner()
    stream = OwnedStream(window=2, retain=retain, lengths=[8])
    owner.offer("s", {}, 1, 0, stream)
    owner.admitted("d0", 1, 0, 0, 0)
    owner.pieces.progress("d0", Progress(0, 0, 0, 1, 0, True))
    owner.settle("d0", [["s", 0, "fail", 1, "no use for it"]])
    assert owner.books.lost == (not retain)
    assert port.given == ["d0"] * (1 + retain)


def test_stream_that_failed_before_it_was_opened_takes_no_place_in_a_round() -> None:
    owner, port = make_owner(num_drafts=2)
    owner.offer("s0", {}, 1, 0)
    owner.ready("d0", 1, 0, 0)
    owner.sent("d0", 1, 0, "s0", 1)
    owner.settle("d0", [["s0", 0, "ack", 0, ""]])
    stream = OwnedStream(window=2)
    owner.offer("s1", {}, 1, 1, stream)
    stream.error = "the forward went wrong"
    owner.stream_changed("s1", stream)
    owner.admitted("d1", 1, 0, 1, 0)
    assert owner.books.lost == 1
    owner.offer("s2", {}, 1, 2)
    assert port.given == ["d0", "d1", "d1"]


def test_piece_that_is_sent_anew_leaves_the_transfer_of_the_earlier_delivery_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reader gave the sample back with pieces on their way, whose headers name that delivery."""
    target = make_target()
    sent: list[tuple[Any, list[torch.Tensor]]] = []
    monkeypatch.setattr(target.links, "send", lambda inc, gen, token, buffers: sent.append((token, buffers)) or True)
    delivery = target.side.delivery
    writer = open_sample(target, retain=True)
    target.side.link_up("d0", 1)
    target.side.offer(writer.ref)
    writer.append(Streamed(0, PIECE).piece(0, PIECE))
    delivery.admitted("d0", 1, 0, 0, 0)
    delivery.pieces.ready("d0", PieceReady(1, 0, 0, 0, 0))
    delivery.settle("d0", [["s", 0, "fail", 1, "not usable"]])
    delivery.admitted("d0", 1, 1, 0, 1)
    delivery.pieces.ready("d0", PieceReady(1, 1, 0, 1, 0))
    for number, (token, buffers) in enumerate(sent):
        expected = make_piece_header("t0", "s", 0, gen=1, turn=number, serial=0, delivery=number)
        whole = torch.cat(buffers)
        check_header(token.piece.layout.read_header(whole), expected, "the piece", checksummed=False)
        assert torch.equal(token.piece.layout.views(whole)["input_ids"], Streamed(0, PIECE)["input_ids"])
    assert len(sent) == 2
    writer.close()
    delivery.settle("d0", [["s", 1, "ack", 0, ""]])
    for token, _ in sent:
        target.side.transfer_done(token)
    arena = target.store.memory.pieces_arena
    assert arena.free_bytes == arena.capacity_bytes


def test_writer_that_fails_twice_leaves_the_next_sample_with_its_id_alone() -> None:
    target = make_target()
    first = open_sample(target)
    first.fail("the forward went wrong")
    second = open_sample(target)
    first.fail("and again on the way out")
    del first  # and once more, if its finalizer says so
    target.side.streams.tick()
    assert target.store.health().sample_count == 1
    second.append(Streamed(0, PIECE).piece(0, PIECE))
    assert second.close() == 1


def test_complete_sample_that_is_discarded_before_it_was_queued_is_forgotten() -> None:
    target = make_target()
    writer = open_sample(target)
    writer.append(Streamed(0, PIECE).piece(0, PIECE))
    writer.close()
    assert target.store.discard(writer.ref)
    target.side.streams.tick()
    assert not target.side.streams._samples


def test_draft_that_gives_back_what_was_not_sent_is_not_believed() -> None:
    """Its receive may be posted, and then the bytes must follow."""
    owner, port = make_owner()
    stream = OwnedStream(window=2, lengths=[8, 8])
    owner.offer("s", {}, 1, 0, stream)
    owner.admitted("d0", 1, 0, 0, 0)
    owner.pieces.ready("d0", PieceReady(1, 0, 0, 0, 0))
    owner.pieces.progress("d0", Progress(0, 0, 0, 2, 2, False))
    assert port.gone == 1
    owner.pieces.ready("d0", PieceReady(1, 2, 0, 0, 1))  # of a turn that has not come
    owner.pieces.progress("d0", Progress(0, 0, 0, 2, 2, False))
    assert port.gone == 1


def test_link_that_comes_back_goes_on_after_what_was_given_back() -> None:
    owner, port = make_owner()
    stream = OwnedStream(window=2, lengths=[8, 8, 8])
    owner.offer("s", {}, 1, 0, stream)
    owner.admitted("d0", 1, 0, 0, 0)
    for piece in range(2):
        owner.pieces.ready("d0", PieceReady(1, piece, 0, 0, piece))
    owner.pieces.progress("d0", Progress(0, 0, 0, 2, 2, False))
    owner.link_down("d0", 1)
    owner.link_up("d0", 2)
    owner.pieces.progress("d0", Progress(2, 0, 0, 0, 0, False))  # what it says it has is impossible
    assert port.pieces == [0, 1, 2, 2]


def test_ref_of_an_earlier_sample_with_that_id_is_refused() -> None:
    """Its reader would wait for other messages than come."""
    target = make_target()
    first = open_sample(target)
    first.fail("the forward went wrong")
    open_sample(target, retain=True)
    with pytest.raises(SpecMismatchError):
        target.side.offer(first.ref)
    assert not target.side.delivery.books.put


def test_ref_of_other_specs_than_were_stored_is_refused() -> None:
    target = make_target()
    ref = target.store.put("s", dict(Streamed(0, PIECE)), "run")
    specs = {**ref.feature_specs, "input_ids": FeatureSpec((1, PIECE + 1), torch.int64)}
    with pytest.raises(SpecMismatchError):
        target.side.offer(replace(ref, feature_specs=specs))
    target.side.offer(ref)
