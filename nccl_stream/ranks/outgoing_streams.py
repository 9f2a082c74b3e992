"""A target rank's end of its streamed samples: what writers append goes to the drafts that read it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.messages import Admit, Message, PieceReady, PieceSkip, Progress
from nccl_stream.coordination.owned import OwnedSample
from nccl_stream.device_staging import aside
from nccl_stream.errors import PeerLostError
from nccl_stream.ranks.side import Side
from nccl_stream.stores.owned_pieces import OwnedPiece, OwnedPieces, fail_sample
from nccl_stream.wire_header import make_piece_header

__all__ = ["OutgoingStreams", "PieceSending"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PieceSending:
    """A transfer of one piece that is under way."""

    draft: str
    gen: int
    sample: OwnedPieces
    piece: OwnedPiece
    nbytes: int


class OutgoingStreams:
    """Between the writers of streamed samples, the delivery of one target rank, and its links.

    Methods are called with the lock of the side held, except where they say otherwise.

    Args:
        side: this rank's end of the stream.
        delivery: its state machine.
        refused: told of a transfer that no link took.
    """

    def __init__(self, side: Side, delivery: OwnerDelivery, refused: Callable[[str, int, PieceSending], None]) -> None:
        self.cond = side.cond
        self.waited_s = 0.0
        self._side = side
        self._delivery = delivery
        self._refused = refused
        self._samples: dict[str, OwnedPieces] = {}
        self._dropped: deque[OwnedPieces] = deque()
        self._num_lost_told = 0

    # -- Outbound: what writers say ------------------------------------------------------------------------------------

    def opened(self, sample: OwnedPieces) -> None:
        """A streamed sample is in the store."""
        self._samples[sample.ref.sample_id] = sample

    def changed(self, sample: OwnedPieces) -> None:
        """A piece was appended, or the sample was closed or failed."""
        stream = sample.stream
        self._delivery.stream_changed(sample.ref.sample_id, stream)
        if stream.error and not sample.offered and self._samples.get(sample.ref.sample_id) is sample:
            # Nobody has heard of it. Once only: another sample may have its name by now.
            self._forget(sample)
            self._side.store.discard(sample.ref)
        self.cond.notify_all()

    def check(self, sample: OwnedPieces) -> None:
        """Raise when nobody can read the sample any more."""
        self._side.raise_if_fatal()
        if not self._delivery.may_be_read(sample.ref.sample_id):
            raise PeerLostError(f"streamed sample {sample.ref.sample_id!r}: no draft rank is left that could read it")

    def wait(self, seconds: float) -> None:
        """See :meth:`Side.wait`."""
        self._side.wait(seconds)

    def waited(self, seconds: float) -> None:
        """A writer has waited for its reader."""
        self.waited_s += seconds

    def writer_dropped(self, sample: OwnedPieces) -> None:
        """A finalizer's note; the lock is not held."""
        self._dropped.append(sample)

    def _forget(self, sample: OwnedPieces) -> None:
        if self._samples.get(sample.ref.sample_id) is sample:
            del self._samples[sample.ref.sample_id]

    # -- what the side says --------------------------------------------------------------------------------------------

    def offered(self, sample: OwnedPieces) -> None:
        """Its ref is on the queue."""
        sample.offered = True

    def settled(self, sample: OwnedPieces) -> None:
        """It has its outcome, and nothing reads it any more."""
        self._forget(sample)

    def heard(self, inc: str, message: Message) -> None:
        """A draft's word about a streamed sample; others are ignored."""
        if isinstance(message, Admit):
            self._delivery.admitted(inc, message.gen, message.seq, message.serial, message.delivery)
        elif isinstance(message, PieceReady):
            self._delivery.pieces.ready(inc, message)
        elif isinstance(message, PieceSkip):
            self._delivery.pieces.skipped(inc, message)
        elif isinstance(message, Progress):
            self._delivery.pieces.progress(inc, message)

    def fail_open(self, reason: str) -> None:
        """Fail every sample that its writer has not closed: this rank is leaving, and nobody could wait for them."""
        for sample in list(self._samples.values()):
            fail_sample(sample, reason)
            self.changed(sample)

    def tick(self) -> None:
        """Do what must not be done where it is found out; the lock is not held."""
        with self.cond:
            while self._dropped:
                sample = self._dropped.popleft()
                fail_sample(sample, "its writer was dropped without close()")
                self.changed(sample)
            for sample in [s for s in self._samples.values() if s.stream.outcome and not s.offered]:
                self._forget(sample)  # discarded
        self.report_lost()

    def report_lost(self) -> None:
        """Tell the user what was lost since the last time; the lock is not held."""
        with self.cond:
            lost = self._delivery.lost[self._num_lost_told :]
            self._num_lost_told += len(lost)
        for each in lost:
            logger.error("streamed sample %s is lost: %s", each.sample_id, each.reason)
        if lost:
            self._side.lost_reports.report(tuple(each.sample_id for each in lost))

    # -- transfers -----------------------------------------------------------------------------------------------------

    def transmit(self, draft: str, gen: int, turn: int, sample: OwnedSample, index: int) -> None:
        """Send one piece."""
        pieces = self._samples[sample.sample_id]
        owned = pieces.pieces[index]
        header = make_piece_header(
            self._side.node.inc, sample.sample_id, index,
            gen=gen, turn=turn, serial=sample.serial,
            delivery=sample.delivery, checksum=owned.checksum,
        )  # fmt: skip
        assert sample.stream is not None
        buffers = pieces.windows.wire_buffers(index, sample.stream.lengths[index], owned.memory.buffer)
        if owned.num_sends:  # an earlier delivery of it is on its way, under the header of that one
            buffers[0] = _copy(buffers[0])
        owned.layout.write_header(buffers[0], header)
        token = PieceSending(draft, gen, pieces, owned, sum(buffer.numel() for buffer in buffers))
        owned.num_sends += 1
        if owned.memory.slot is not None:
            owned.memory.slot.begin_transfer()
        if not self._side.links.send(draft, gen, token, owned.wire_buffers(buffers)):
            self._refused(draft, gen, token)

    def pieces_gone(self, sample: OwnedSample, count: int) -> None:
        """The first pieces of a sample are not needed any more."""
        owned = self._samples.get(sample.sample_id)
        if owned is not None:
            owned.drop(count)

    def transfer_over(self, sending: PieceSending, *, ok: bool) -> None:
        """A transfer has ended, well or not, and nothing reads its memory any more."""
        sending.piece.num_sends -= 1
        if sending.piece.memory.slot is not None:
            sending.piece.memory.slot.end_transfer()
        sample_id = sending.sample.ref.sample_id
        if ok:
            self._delivery.piece_sent(sample_id, sending.nbytes)
        else:
            self._delivery.transfer_over(sample_id)
        if sending.sample.stream.has_room:  # else its writer waits for its reader, not for this memory
            self.cond.notify_all()


def _copy(message: torch.Tensor) -> torch.Tensor:
    with aside(message.device):
        copy = message.clone()
        if copy.device.type == "cuda":
            torch.cuda.current_stream(copy.device).synchronize()
    return copy
