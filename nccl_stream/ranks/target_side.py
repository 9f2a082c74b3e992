"""A target rank's end of the stream: its queue, the delivery of its samples, its books."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nccl_stream.config import StreamConfig
from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.journal import Journal
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import (
    Adopt,
    End,
    Leaving,
    LinkFailed,
    Message,
    PieceReady,
    PieceSkip,
    Ready,
    Refuse,
    Settle,
    StopRequest,
)
from nccl_stream.coordination.node import Node
from nccl_stream.coordination.owned import Books, DeadLetter, OwnedSample
from nccl_stream.coordination.rounds import EndDecision
from nccl_stream.errors import (
    ClosedError,
    ConfigError,
    MisuseError,
    PeerLostError,
    VersionMismatchError,
)
from nccl_stream.leases import Lease
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.outgoing_streams import OutgoingStreams, PieceSending
from nccl_stream.ranks.side import Side, take_due
from nccl_stream.refs import SampleRef
from nccl_stream.store import StoreHandle, StoreHealth
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.owned_pieces import OwnedPieces
from nccl_stream.stores.staged import OwnedBytes
from nccl_stream.watermarks import WatermarkGate
from nccl_stream.wire_header import make_header

__all__ = ["TargetQueue", "TargetSide"]

logger = logging.getLogger(__name__)

# Ids of settled samples that are remembered, to say so when one is put again.
REMEMBERED_IDS = 65536
SHOWN_LEFTOVERS = 10


@dataclass(frozen=True)
class _Sending:
    """A transfer that is under way."""

    draft: str
    gen: int
    seq: int
    sample_id: str
    nbytes: int


class TargetSide(Side):
    """Wires delivery, journal, links and store of one target rank; see :class:`Side` for locks and threads."""

    def __init__(
        self,
        config: StreamConfig,
        target_rank: int,
        num_targets: int,
        num_drafts: int,
        *,
        restart_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, restart_timeout=restart_timeout, clock=clock)
        self._linked = config.linked_drafts(target_rank, num_drafts)
        self.delivery = OwnerDelivery(
            self,
            ranks=self._linked,
            round_samples=1 if config.end == "ragged" else config.samples_per_round,
            num_drafts=num_drafts,
            static=config.assignment == "static",
            window=config.announce_window,
            max_failures=config.max_failures,
            abreast=None if config.end == "ragged" else config.samples_per_round,
            prefer=target_rank,
        )
        self.streams = OutgoingStreams(self, self.delivery, self._transfer_refused)
        self._rank = target_rank
        self._num_targets = num_targets
        self._pinned: dict[str, tuple[OwnedBytes | OwnedPieces, StoreHandle]] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._orders: dict[str, int] = {}
        self._num_offered = 0
        self._restarts: dict[int, float] = {}
        self.end: EndDecision | None = None
        self.paused_s = 0.0
        self._journal: Journal

    def wire(self, node: Node, links: Links, store: NcclFeatureStore) -> None:
        """Second half of construction: the parts that need this one."""
        self.node, self.links, self.store = node, links, store
        self._journal = Journal(node.inc)

    # -- what the queue does -----------------------------------------------------------------------------------------

    def register_order(self, sample_id: str, order: int) -> None:
        """The sample that will be put under this id has this place in the global order."""
        with self.cond:
            self._orders[sample_id] = order

    def offer(self, ref: SampleRef) -> None:
        """Take a resident sample in for delivery.

        Raises:
            MisuseError: (``ValueError``) foreign ref, or its id is or was in use.
            SampleNotFoundError: (``KeyError``) the store does not hold it.
            SpecMismatchError: (``RuntimeError``) the ref describes something else than what the store holds.
            ClosedError: (``RuntimeError``) the queue is closed, or no draft is left.
        """
        if not isinstance(ref, SampleRef):
            raise MisuseError(f"the queue takes SampleRefs, got {type(ref).__name__}")
        with self.cond:
            self.check_open()
            if ref.sample_id in self._pinned:
                raise MisuseError(f"sample {ref.sample_id!r} is already present in the queue")
            if ref.sample_id in self._recent:
                logger.warning("sample id %s had its outcome before and is put again", ref.sample_id)
            owned, handle = self.store.pin(ref)
            if self._num_offered == 0 and self.config.end == "pad":
                template = ref.to_wire()
                self._defer(lambda documents: documents.set("template", template))
            self._pinned[ref.sample_id] = (owned, handle)
            order = self._orders.pop(ref.sample_id, self._num_offered * self._num_targets + self._rank)
            self._num_offered += 1
            self._journal.opened(ref.sample_id)
            if isinstance(owned, OwnedPieces):
                self.streams.offered(owned)
                self.delivery.offer(ref.sample_id, ref.to_wire(), owned.nbytes, order, owned.stream)
            else:
                self.delivery.offer(ref.sample_id, ref.to_wire(), owned.layout.total_bytes, order)
            self._changed()
        self.node.wake()

    def close_queue(self, error: BaseException | None = None) -> None:
        with self.cond:
            if not self.delivery.closed or error is not None:
                self.delivery.close("" if error is None else f"{type(error).__name__}: {error}"[:4000])
            self._changed()

    def check_open(self) -> None:
        """Raise why nothing may be put any more; the lock is held."""
        self.raise_if_fatal()
        if self.delivery.closed:
            raise ClosedError("the queue is closed; it accepts no more refs")
        if self._stop_reason:
            raise ClosedError(f"the stream was asked to stop: {self._stop_reason}")
        if self.end is not None or not self.delivery.anybody_left:
            raise ClosedError("no draft rank is left to take samples")

    @property
    def consumers_gone(self) -> bool:
        """Whether no draft will take anything more."""
        with self.cond:
            return self.end is not None or bool(self._stop_reason) or not self.delivery.anybody_left

    def starving(self) -> bool:
        with self.cond:
            return self.delivery.starving()

    # -- OwnerPort: called under the lock, must not block --------------------------------------------------------------

    def tell(self, draft: str, message: Message) -> None:
        self.node.send(draft, message)

    def transmit(self, draft: str, gen: int, seq: int, sample: OwnedSample) -> None:
        owned, _ = self._pinned[sample.sample_id]
        assert isinstance(owned, OwnedBytes)
        header = make_header(
            self.node.inc,
            sample.sample_id,
            gen=gen,
            seq=seq,
            serial=sample.serial,
            delivery=sample.delivery,
            checksum=owned.checksum,
        )
        owned.layout.write_header(owned.buffer, header)
        token = _Sending(draft, gen, seq, sample.sample_id, sample.nbytes)
        if not self.links.send(draft, gen, token, owned.wire_buffers()):
            self._transfer_refused(draft, gen, token)

    def _transfer_refused(self, draft: str, gen: int, token: object) -> None:
        self._defer(lambda _: self.transfers_failed(draft, gen, [token]))

    def transmit_piece(self, draft: str, gen: int, turn: int, sample: OwnedSample, piece: int) -> None:
        self.streams.transmit(draft, gen, turn, sample, piece)

    def pieces_gone(self, sample: OwnedSample, count: int) -> None:
        self.streams.pieces_gone(sample, count)

    def settled(self, sample: OwnedSample) -> None:
        owned, handle = self._pinned.pop(sample.sample_id)
        if isinstance(owned, OwnedPieces):
            self.streams.settled(owned)
        self._recent[sample.sample_id] = None
        if len(self._recent) > REMEMBERED_IDS:
            self._recent.popitem(last=False)
        self._journal.settled(sample.sample_id, sample.outcome)
        self.store.unpin(handle)
        self._changed()

    # -- LinkOwner -----------------------------------------------------------------------------------------------------

    def link_up(self, inc: str, gen: int) -> None:
        with self.cond:
            self.delivery.link_up(inc, gen)
            self._changed()

    def link_down(self, inc: str, gen: int, reason: str) -> None:
        with self.cond:
            self.delivery.link_down(inc, gen)
            self._changed()

    def transfer_done(self, token: object) -> None:
        with self.cond:
            if isinstance(token, PieceSending):
                self.streams.transfer_over(token, ok=True)
                return
            assert isinstance(token, _Sending)
            self.delivery.sent(token.draft, token.gen, token.seq, token.sample_id, token.nbytes)
            self._changed()

    def transfers_failed(self, inc: str, gen: int, tokens: list[object]) -> None:
        with self.cond:
            for token in tokens:
                if isinstance(token, PieceSending):
                    self.streams.transfer_over(token, ok=False)
                else:
                    assert isinstance(token, _Sending)
                    self.delivery.transfer_over(token.sample_id)
            self.delivery.link_down(inc, gen)
            self._changed()

    def link_given_up(self, member: Member, error: Exception) -> None:
        if isinstance(error, VersionMismatchError | ConfigError):
            self.on_fatal(error)
        else:
            self.on_fatal(PeerLostError(f"no link to {member.label} can be built any more: {error}"))

    # -- NodeHandler ---------------------------------------------------------------------------------------------------

    def on_joined(self, member: Member) -> None:
        if member.role != "draft" or member.rank not in self._linked:
            return
        with self.cond:
            self._restarts.pop(member.rank, None)
            self.delivery.draft_joined(member.inc, member.rank)
        self.links.add(member)

    def is_served(self) -> bool:
        return any(draft.rank in self._linked for draft in self.node.alive("draft"))

    def on_missed(self, member: Member) -> None:
        if member.role != "draft" or member.rank not in self._linked:
            return
        succeeded = any(draft.rank == member.rank for draft in self.node.alive("draft"))
        with self.cond:
            awaited = self._restart_timeout > 0 and member.gone is not None and member.gone.kind != "left"
            self._restarts.pop(member.rank, None)
            if awaited and not succeeded:
                self._restarts[member.rank] = self._clock() + self._restart_timeout
            self.delivery.draft_missed(member.inc, member.rank, awaited=awaited)
            self._changed()

    def on_gone(self, member: Member) -> None:
        if member.role != "draft" or member.rank not in self._linked:
            return
        succeeded = any(draft.rank == member.rank for draft in self.node.alive("draft"))
        with self.cond:
            awaited = self._restart_timeout > 0 and member.gone is not None and member.gone.kind != "left"
            if awaited and not succeeded:
                self._restarts[member.rank] = self._clock() + self._restart_timeout
            self.delivery.draft_gone(member.inc, awaited=awaited)
            self._changed()
        self.links.remove(member.inc)

    def on_message(self, sender: Member, message: Message) -> None:
        inc = sender.inc
        if isinstance(message, LinkFailed):
            self.links.peer_failed(inc, message.gen, message.reason)
            return
        if isinstance(message, PieceReady | PieceSkip):
            with self.cond:  # nobody waits for that: waking them for every piece would cost more than the piece
                self.streams.heard(inc, message)
            return
        with self.cond:
            if isinstance(message, Ready):
                self.delivery.ready(inc, message.gen, message.seq, message.turn)
            elif isinstance(message, Refuse):
                self.delivery.refused(inc, message.gen, message.seq, message.reason, fault=message.fault)
            elif isinstance(message, Adopt):
                self.delivery.adopted(inc, message.gen, message.seq)
            elif isinstance(message, Settle):
                self.delivery.settle(inc, message.items)
            elif isinstance(message, Leaving):
                self.delivery.draft_left(inc)
            elif isinstance(message, StopRequest):
                self.stop(message.reason or "asked to stop")
            elif isinstance(message, End):
                self._take_end(EndDecision.of(message), [str(inc) for inc in message.members])
            else:
                self.streams.heard(inc, message)
            self._changed()

    def on_tick(self, documents: ControlStore) -> None:
        now = self._clock()
        with self.cond:
            for rank in take_due(self._restarts, now):
                logger.warning("draft rank %d did not come back within %.0f s", rank, self._restart_timeout)
                self.delivery.stop_awaiting(rank)
                self._changed()
        self._run_tasks(documents)
        self.streams.tick()
        self.store.memory.sweep()
        with self.cond:
            writes, deletes = self._journal.take_writes()
        documents.set_many(writes)
        for key in deletes:
            documents.delete(key)
        self.links.tick()

    def _take_end(self, decision: EndDecision, members: list[str]) -> None:
        self.end = decision
        for inc in members:
            self.delivery.draft_ended(inc)
        if decision.error or decision.stopped:
            self.delivery.end()
        else:
            self.delivery.drop_rest()

    def status(self) -> dict[str, Any]:
        with self.cond:
            return {
                "role": "target",
                "rank": self._rank,
                "closed": self.delivery.closed,
                "error": self.delivery.error[:1000],
                "books": dict(vars(self.delivery.books)),
                "waiting_bytes": dict(self.store.memory.used_bytes),
                "paused_s": round(self.paused_s + self.store.room_waited_s + self.streams.waited_s, 6),
            }

    # -- the end -------------------------------------------------------------------------------------------------------

    def wait_settled(self, log_every: float = 10.0) -> None:
        """Block until every sample has its outcome, or nobody is left who could bring one.

        Streamed samples that are still open fail: their producers are not waited for.
        """
        next_log = self._clock() + log_every
        with self.cond:
            self.streams.fail_open("the stream was closed before it")
            while not self.delivery.all_settled and (
                self.delivery.anybody_left or any(self.delivery.unacked().values())
            ):
                self.raise_if_fatal()
                if self._clock() > next_log:
                    next_log = self._clock() + log_every
                    logger.info("waiting for outcomes: %s", dict(self.delivery.unacked()))
                self.wait(0.5)

    def log_leftovers(self) -> None:
        self.streams.report_lost()  # what the steward has not seen any more
        with self.cond:
            put, letters, stayed = (
                self.delivery.books.put,
                list(self.delivery.dead_letters),
                self.delivery.resident_ids(),
            )
        if letters:
            first = ", ".join(f"{letter.sample_id} ({letter.reason[:200]})" for letter in letters[:SHOWN_LEFTOVERS])
            logger.warning("%s: %d of %d samples are dead letters: %s", self.node.inc, len(letters), put, first)
        if stayed:
            first = ", ".join(stayed[:SHOWN_LEFTOVERS])
            logger.warning("%s: leaves with %d of %d samples untaken: %s", self.node.inc, len(stayed), put, first)

    def books(self) -> Books:
        with self.cond:
            return Books(**vars(self.delivery.books))

    def dead_letters(self) -> list[DeadLetter]:
        with self.cond:
            return list(self.delivery.dead_letters)

    def resident_ids(self) -> list[str]:
        with self.cond:
            return self.delivery.resident_ids()


class TargetQueue:
    """The documented queue interface on a target rank: puts here, leases on the draft ranks.

    Args:
        side: the target's end of the stream.
    """

    def __init__(self, side: TargetSide) -> None:
        self._side = side
        self._gate = WatermarkGate()

    def put(self, ref: SampleRef) -> None:
        """Queue a resident sample for delivery; does not block. Raises as :meth:`TargetSide.offer`."""
        self._side.offer(ref)

    def put_blocks_until_below(
        self, ref: SampleRef, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None
    ) -> None:
        """Queue a resident sample, waiting while the store is over its high watermark.

        Never waits while a live draft has nothing, or for what waiting cannot change: the sample's own bytes.

        Raises:
            ClosedError: (``RuntimeError``) the queue was closed, no draft is left, or ``abort_when`` returned True.
        """
        side = self._side
        if not isinstance(ref, SampleRef):
            raise MisuseError(f"the queue takes SampleRefs, got {type(ref).__name__}")
        while True:
            if abort_when is not None and abort_when():
                raise ClosedError(f"put of sample {ref.sample_id!r} was aborted: abort_when() returned True")
            health: StoreHealth = side.store.health()
            with side.cond:
                side.check_open()
                is_open = self._gate.judge(health, stuck_bytes=ref.estimated_bytes, stuck_samples=1)
                admitted = is_open or side.delivery.starving()
            self._gate.call_back()
            if admitted:
                side.offer(ref)
                return
            started = time.monotonic()
            with side.cond:
                side.wait(poll_interval)
                side.paused_s += time.monotonic() - started

    def close(self, *, error: BaseException | None = None) -> None:
        """No more puts; what was put is still delivered. ``error`` reaches the draft ranks as a failure."""
        self._side.close_queue(error)

    @property
    def is_closed(self) -> bool:
        """Whether the queue takes no more puts: closed here, or no draft is left.

        Raises:
            NcclStreamError: what ended this process's part of the stream; who waits for something else learns it here.
        """
        self._side.raise_if_fatal()
        return self._side.delivery.closed or self._side.consumers_gone

    @property
    def consumers_gone(self) -> bool:
        """Whether the draft ranks have ended or left: a producer has nothing left to do, and nothing went wrong."""
        return self._side.consumers_gone

    @property
    def is_drained(self) -> bool:
        """Whether the queue is closed and every sample has its outcome."""
        with self._side.cond:
            return self._side.delivery.closed and self._side.delivery.all_settled

    def pending_count(self) -> int:
        """Samples of this rank that no draft has yet."""
        with self._side.cond:
            return self._side.delivery.undelivered

    def outstanding_count(self) -> int:
        """Samples of this rank that a draft has and has not settled."""
        with self._side.cond:
            return self._side.delivery.books.resident - self._side.delivery.undelivered

    def dead_letters(self) -> list[DeadLetter]:
        """Samples of this rank that were failed for good or too often; see :meth:`Stream.dead_letters`."""
        return self._side.dead_letters()

    def acquire(self, poll_interval: float = 0.05) -> Lease | None:
        """Refused: samples are leased on draft ranks."""
        raise MisuseError("acquire is for draft ranks; this is a target rank, which puts")

    def ack(self, lease: Lease) -> None:
        """Refused, as :meth:`acquire`."""
        raise MisuseError("ack is for draft ranks; this is a target rank, which puts")

    def fail(self, lease: Lease) -> None:
        """Refused, as :meth:`acquire`."""
        raise MisuseError("fail is for draft ranks; this is a target rank, which puts")

    def reclaim_expired(self) -> int:
        """Leases are the draft ranks' own affair: always 0."""
        return 0
