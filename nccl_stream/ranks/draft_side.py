"""A draft rank's end of the stream: what arrives, its leases and its rounds."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from nccl_stream.config import StreamConfig
from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import (
    Announce,
    AnnouncePiece,
    End,
    Estate,
    Go,
    Have,
    Leaving,
    LinkFailed,
    LinkOpen,
    Message,
    Obituary,
    OwnerState,
    StopRequest,
    has_left,
)
from nccl_stream.coordination.node import Node
from nccl_stream.coordination.rounds import EndDecision, Rounds, read_end, settle_end
from nccl_stream.coordination.stream_intake import IncomingPiece, IncomingStream
from nccl_stream.errors import (
    CapacityError,
    ConfigError,
    ControlStoreError,
    NcclStreamError,
    PeerLostError,
    ProducerFailedError,
    RefError,
    SamplesLostError,
    SlotsHeldError,
    VersionMismatchError,
    WireFormatError,
)
from nccl_stream.leases import FailOutcome, Lease
from nccl_stream.ranks.draft_leases import DraftLeases
from nccl_stream.ranks.estates import Estates
from nccl_stream.ranks.incoming_samples import IncomingSamples
from nccl_stream.ranks.incoming_streams import IncomingStreams
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.side import Side, take_due
from nccl_stream.refs import SampleRef
from nccl_stream.stores.nccl import NcclFeatureStore, Received
from nccl_stream.stores.pieces import window_bytes
from nccl_stream.streamed.sample import PieceReader
from nccl_stream.transport.arena import Arena

__all__ = ["DraftSide"]

logger = logging.getLogger(__name__)

FAILED_PREFIX = "failed: "


class DraftSide(Side):
    """Wires intake, leases, rounds, links and arena of one draft rank; see :class:`Side` for locks and threads."""

    arena: Arena
    leases: DraftLeases
    estates: Estates

    def __init__(
        self,
        config: StreamConfig,
        rank: int,
        num_targets: int,
        num_drafts: int,
        *,
        restart_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, restart_timeout=restart_timeout, clock=clock)
        self._rank = rank
        self._num_targets = num_targets
        self._num_drafts = num_drafts
        self.intake = DraftIntake(
            self, rank=rank, num_targets=num_targets, num_drafts=num_drafts, static=config.assignment == "static"
        )
        self.samples = IncomingSamples(self, self.intake, later=self._later, on_over=self._changed)
        self.streams = IncomingStreams(self, self.intake, later=self._later)
        self.rounds: Rounds | None = None
        self.cohort = ""
        self.padded = 0
        self.waited_s = 0.0
        self.template: SampleRef | None = None
        self._targets: dict[int, str] = {}
        self._deserted = False
        self._restarts: dict[str, float] = {}
        self._ended_drafts: dict[str, float] = {}
        self._early_haves: list[tuple[str, Have]] = []
        self._left: set[str] = set()
        self._blocked_since: float | None = None
        self._cleaned = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._janitor = threading.Thread(target=self._tidy, name="nccl-stream-janitor", daemon=True)

    def wire(self, node: Node, links: Links, store: NcclFeatureStore, arena: Arena) -> None:
        """Second half of construction: the parts that need this one."""
        self.node, self.links, self.store, self.arena = node, links, store, arena
        self.estates = Estates(
            self.cond,
            node,
            self.intake,
            later=self._later,
            on_read=self._changed,
            report=self.lost_reports.report,
            clock=self._clock,
        )
        self.leases = DraftLeases(
            self.intake,
            lease=self.config.lease,
            max_failures=self.config.max_failures,
            on_outcome=self.estates.outcome,
            clock=self._clock,
        )
        self.samples.wire(store, links)
        self.streams.wire(store, links, self.leases)
        self._janitor.start()

    # -- the janitor: what may not be done where it is found out -------------------------------------------------------

    def _later(self, job: Callable[[], None]) -> None:
        """Have the janitor do a job; from anywhere, even a finalizer."""
        self._jobs.put(job)

    def memory_freed(self) -> None:
        """The arena's callback; may run inside a finalizer, so it only leaves a note for the janitor."""
        self._jobs.put(self._grant)

    def _tidy(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except NcclStreamError as exc:
                self.on_fatal(exc)
            except Exception as exc:  # a bug here must surface in the user's thread, not end this one in silence
                logger.exception("%s: the janitor failed", self.node.inc)
                self.on_fatal(ControlStoreError(f"the janitor failed: {exc!r}"))

    def _grant(self) -> None:
        self.store.collect_dropped()
        with self.cond:
            self.streams.memory_came_back()
            self.intake.grant()
            self._changed()

    def close_janitor(self, timeout: float) -> list[str]:
        self._jobs.put(None)
        if self._janitor.is_alive():
            self._janitor.join(timeout)
        return [self._janitor.name] if self._janitor.is_alive() else []

    # -- IntakePort and RoundsPort: called under the lock, must not block ----------------------------------------------

    def tell(self, owner: str, message: Message) -> None:
        self.node.send(owner, message)

    def check(self, owner: str, ref: SampleRef) -> int:
        if not ref.store_uri.endswith(f"/{owner}"):
            raise RefError(f"sample {ref.sample_id!r} is announced by {owner} but belongs to {ref.store_uri!r}")
        if ref.stream is None:
            nbytes = sum(spec.nbytes for spec in ref.feature_specs.values())
            slot_bytes = self.store.layout_of(ref.feature_specs).total_bytes
        else:
            nbytes = window_bytes(ref.feature_specs, ref.stream)
            slot_bytes = self.streams.windows(ref).total_bytes
        if nbytes != ref.estimated_bytes:
            raise RefError(f"sample {ref.sample_id!r}: estimated_bytes={ref.estimated_bytes}, its specs make {nbytes}")
        if slot_bytes > self.config.slot_bytes() or nbytes > self.config.max_sample_bytes:
            raise CapacityError(
                f"sample {ref.sample_id!r} of {nbytes} bytes needs a slot of {slot_bytes}, this rank takes samples of "
                f"up to {self.config.max_sample_bytes} in slots of up to {self.config.slot_bytes()}",
                can_wait=False,
            )
        return slot_bytes

    def reserve(self, nbytes: int, label: str) -> Any | None:
        return self.arena.reserve(nbytes, label)

    def receive(self, delivery: Delivery) -> None:
        self.samples.receive(delivery)

    def yielded(self, delivery: Delivery) -> None:
        self.leases.put(delivery)
        if self.template is None:
            self.template = delivery.ref

    def free(self, delivery: Delivery) -> None:
        self.leases.forget(delivery)
        if delivery.stream is None:
            delivery.slot.settle()
        else:
            self.streams.close_window(delivery.stream)

    def open_window(self, delivery: Delivery) -> Any:
        return self.streams.open_window(delivery)

    def piece_slot(self, stream: IncomingStream) -> Any | None:
        return self.streams.piece_slot(stream)

    def receive_piece(self, piece: IncomingPiece) -> None:
        self.streams.receive(piece)

    def free_piece(self, piece: IncomingPiece) -> None:
        self.streams.free(piece)

    def propose_end(self, decision: EndDecision) -> None:
        self._defer(lambda documents: self._settle_end(documents, decision))

    def find_end(self) -> None:
        self._defer(self._find_end)

    # -- LinkOwner -----------------------------------------------------------------------------------------------------

    def link_up(self, inc: str, gen: int) -> None:
        with self.cond:
            self.intake.link_up(inc, gen)
            self._changed()

    def link_down(self, inc: str, gen: int, reason: str) -> None:
        with self.cond:
            self.intake.link_down(inc, gen)
            self._changed()

    def transfer_done(self, token: object) -> None:
        if isinstance(token, IncomingPiece):
            self.streams.transfer_done(token)
        else:
            assert isinstance(token, Delivery)
            self.samples.transfer_done(token)

    def transfers_failed(self, inc: str, gen: int, tokens: list[object]) -> None:
        with self.cond:
            self.intake.link_down(inc, gen)
            for token in tokens:
                if isinstance(token, IncomingPiece):
                    self.streams.transfer_over(token, ok=False)
                else:
                    assert isinstance(token, Delivery)
                    self.samples.transfer_over(token, ok=False)
            self._changed()

    def link_given_up(self, member: Member, error: Exception) -> None:
        logger.error("%s: no link from %s can be built: %s", self.node.inc, member.label, error)
        if isinstance(error, VersionMismatchError | ConfigError):
            self.on_fatal(error)

    # -- NodeHandler ---------------------------------------------------------------------------------------------------

    def on_joined(self, member: Member) -> None:
        if member.role != "target":
            with self.cond:
                self.estates.draft_joined(member.inc)
            return
        linked = self._rank in self.config.linked_drafts(member.rank, self._num_drafts)
        with self.cond:
            self._targets[member.rank] = member.inc
            if linked:
                self.intake.owner_joined(member.inc, member.rank)
            self._deserted = self._deserted and not self._serving()
        if linked:
            self.links.add(member)

    def on_missed(self, member: Member) -> None:
        with self.cond:
            if member.role == "target":
                self._targets.setdefault(member.rank, member.inc)
                self._note_desertion(member)
            else:
                self._draft_ended(member.inc, member.rank)
            self.estates.missed(member)
            self._changed()

    def on_gone(self, member: Member) -> None:
        kind = "" if member.gone is None else member.gone.kind
        if member.role == "target":
            with self.cond:
                self.intake.owner_gone(member.inc, kind)
                self.estates.owner_gone(member)
                self._note_desertion(member)
            self.links.remove(member.inc)
        with self.cond:
            if member.role == "draft":
                self._draft_ended(member.inc, member.rank)
                self.estates.missed(member)
            if member.role == "draft" and self.rounds is not None:
                awaited = kind != "left" and self._restart_timeout > 0
                if awaited:
                    self._restarts[member.inc] = self._clock() + self._restart_timeout
                self.rounds.member_gone(member.inc, awaited=awaited)
            self._changed()

    def _note_desertion(self, target: Member) -> None:
        """Whether nobody serves this rank any more because a target died: when the last one leaves, all is well."""
        died = target.gone is not None and target.gone.kind != "left"
        self._deserted = self._deserted or (died and not self._serving())

    def _serving(self) -> bool:
        """Whether a living target may have samples for this rank.

        With padding, a rank that nobody serves any more takes part in the rounds of the others.
        """
        return bool(self.node.alive("target") if self.config.end == "pad" else self.intake.serving_owners())

    def is_served(self) -> bool:
        with self.cond:
            return self._serving()

    def _draft_ended(self, what: str, rank: int) -> None:
        """No owner is idle before it says that it knows this; an owner that never knew the draft says nothing."""
        self.intake.draft_gone(what, rank)
        self._ended_drafts[what] = self._clock() + self.config.death_timeout
        self._changed()  # before the rounds go on without it: this rank is not drained now

    def on_message(self, sender: Member, message: Message) -> None:
        inc = sender.inc
        if isinstance(message, LinkFailed):
            self.links.peer_failed(inc, message.gen, message.reason)
            return
        if isinstance(message, LinkOpen):
            with self.cond:
                self.intake.link_opening(inc, message.gen)
            self.links.opening(inc, message.gen)
            return
        if isinstance(message, AnnouncePiece):
            with self.cond:  # its reader waits for the piece itself, and nobody else for anything
                self.streams.heard(inc, message)
            return
        with self.cond:
            if isinstance(message, Announce):
                self.intake.announced(inc, message)
            elif isinstance(message, OwnerState):
                self.intake.owner_state(inc, message)
            elif isinstance(message, Have) and self.rounds is not None:
                self.rounds.heard(inc, message)
            elif isinstance(message, Have):
                self._early_haves.append((inc, message))
            elif isinstance(message, Go) and self.rounds is not None:
                self.rounds.on_go(inc, message)
            elif isinstance(message, End) and message.cohort == self.cohort:
                # In turn with the books of the dead that it follows: they say what was lost.
                self._defer(lambda _: self._take_end_now(EndDecision.of(message)))
            elif isinstance(message, Leaving):
                self._left.add(inc)
                self._draft_ended(has_left(inc), sender.rank)
                if self.rounds is not None:
                    self.rounds.member_gone(inc, awaited=False)
            elif isinstance(message, StopRequest):
                self.stop(message.reason or "asked to stop")
            elif isinstance(message, Estate):
                self.estates.heard(inc, message)
            elif isinstance(message, Obituary):
                self._defer(lambda documents: self.estates.read(documents, message.owner))
            else:
                self.streams.heard(inc, message)
            self._changed()
        self.node.wake()

    def on_tick(self, documents: ControlStore) -> None:
        now = self._clock()
        with self.cond:
            for inc in take_due(self._restarts, now):
                if self.rounds is not None:
                    self.rounds.member_gone(inc, awaited=False)
            for inc in take_due(self._ended_drafts, now):
                self.intake.draft_forgotten(inc)
            self.leases.expire()
            self._decline_hoard()
            self.estates.tell()
            if self.template is None and self.needs_padding:
                self._defer(self._read_template)
            self._changed()
        self._run_tasks(documents)
        self.estates.close_books(documents)

    def status(self) -> dict[str, Any]:
        with self.cond:
            return {
                "role": "draft",
                "rank": self._rank,
                "handed": self.leases.handed,
                "acked": self.leases.table.counts.acked,
                "bytes": self.intake.statistics.bytes_received,
                "checksum_failures": self.intake.statistics.faulty,
                "waited_s": round(self.waited_s, 6),
                "posthumous": self.estates.posthumous(),
            }

    # -- rounds --------------------------------------------------------------------------------------------------------

    def start_rounds(self, cohort: str, members: list[str]) -> None:
        """The cohort is formed: from now on rounds decide what may be handed out."""
        with self.cond:
            self.cohort = cohort
            self.rounds = Rounds(
                self,
                self.node.inc,
                cohort,
                members,
                samples_per_round=self.config.samples_per_round,
                pad=self.config.end == "pad",
                apart=self.config.assignment == "static",
            )
            for inc, have in self._early_haves:
                self.rounds.heard(inc, have)
            self._early_haves.clear()
            alive = {member.inc for member in self.node.alive("draft")} - self._left
            for inc in members:
                if inc not in alive:
                    self.rounds.member_gone(inc, awaited=False)
            self._changed()

    def _settle_end(self, documents: ControlStore, decision: EndDecision) -> None:
        """This rank leads: write the end, and tell everybody what stands there."""
        try:
            self._tell_end(settle_end(documents, self.cohort, decision))
        except WireFormatError as exc:
            self.on_fatal(exc)  # nobody will write it anew

    def _find_end(self, documents: ControlStore) -> None:
        """This rank leads from now on: tell everybody what its predecessor has written, if it has."""
        with self.cond:
            told = None if self.rounds is None else self.rounds.end
        try:
            decision = told or read_end(
                documents, self.cohort
            )  # who was told it needs no document, which may be spoilt
        except WireFormatError as exc:
            self.on_fatal(exc)
            return
        if decision is not None:
            self._tell_end(decision)
            return
        with self.cond:
            if self.rounds is not None:
                self.rounds.no_end()
            self._changed()

    def _tell_end(self, decision: EndDecision) -> None:
        with self.cond:
            self._take_end(decision)
            members = [] if self.rounds is None else self.rounds.members
        self.tell_all(End(self.cohort, members, decision.rounds, decision.error, decision.stopped))

    def _take_end_now(self, decision: EndDecision) -> None:
        with self.cond:
            self._take_end(decision)

    def _take_end(self, decision: EndDecision) -> None:
        if self.rounds is None or self.rounds.end is not None:
            return
        self.rounds.ended(decision)
        logger.info("%s: the cohort ends after %d rounds%s", self.node.inc, decision.rounds,
                    f" with an error: {decision.error}" if decision.error else "")  # fmt: skip
        self.intake.stop("the agreed end has come")
        self._changed()

    def _read_template(self, documents: ControlStore) -> None:
        """A ref some target has put, for a rank that must pad and never had a sample itself."""
        try:
            template = SampleRef.from_wire(documents.get("template"))
        except WireFormatError as exc:
            self.on_fatal(exc)
            return
        with self.cond:
            self.template = template
            self._changed()

    # -- everything that follows from a change; the lock is held -------------------------------------------------------

    def _changed(self) -> None:
        if self.rounds is not None and self.rounds.end is None:
            self.rounds.update(
                handed=self.leases.handed + self.padded,
                pending=self.leases.table.pending_count,
                drained=self._drained(),
                stop=bool(self._stop_reason),
                error=self._peer_error(),
            )
        blocked = self.intake.blocked is not None
        self._blocked_since = (self._blocked_since or self._clock()) if blocked else None
        if blocked and self.leases.table.is_empty:
            self.intake.relax_order()
        self.cond.notify_all()

    def _drained(self) -> bool:
        """Whether nothing comes here any more, unless somebody fails."""
        return self._all_targets_known() and self.intake.drained() and not self.estates.any_unread

    def _decline_hoard(self) -> None:
        """Leave samples to others when this rank has no memory for them and the next round waits for somebody else.

        Without that a rank whose link was down while the last samples were assigned would wait for ever. At the pace of
        heartbeats: the owner may have nobody else to give them to just now.
        """
        rounds, since = self.rounds, self._blocked_since
        if rounds is None or rounds.end is not None or since is None or self.config.assignment == "static":
            return
        waiting = self.leases.table.pending_count
        waits = self.leases.handed >= rounds.samples_released() and waiting >= self.config.samples_per_round
        if waits and self._clock() - since >= self.config.heartbeat:
            self._blocked_since = None
            self.intake.decline("no memory here, and others wait for samples")

    def _all_targets_known(self) -> bool:
        return len(self._targets) == self._num_targets

    def _peer_error(self) -> str:
        """What went wrong on the target side, once everything that could still be used has arrived; "" if nothing."""
        for inc, error in self.intake.owner_errors():
            return f"{FAILED_PREFIX}{inc}: {error}"
        failed = self.estates.failed()
        if failed:
            return f"{FAILED_PREFIX}{failed}"
        loss = self.estates.loss()
        nobody_left = self._deserted and self._all_targets_known() and not self._serving() and self.intake.drained()
        return loss if nobody_left or self.config.on_loss == "raise" else ""

    # -- leases --------------------------------------------------------------------------------------------------------

    def open_sample(self, ref: SampleRef) -> Received:
        """Inbound: hold the slot of a delivered sample."""
        with self.cond:
            delivery = self.leases.open(ref)
            delivery.slot.hold()
            return Received(delivery.slot, self.store.layout_of(ref.feature_specs))

    def open_reader(self, ref: SampleRef) -> PieceReader:
        """Inbound: begin to read a leased streamed sample."""
        with self.cond:
            return self.streams.open_reader(self.leases.open(ref))

    def try_acquire(self, owner: str) -> Lease | None:
        """Lease the next sample if its round has been released; the lock is held."""
        self.leases.expire()
        if self.config.end != "ragged" and self.leases.handed + self.padded >= self._samples_released():
            return None
        lease = self.leases.acquire(owner)
        if lease is not None:
            self._changed()
        return lease

    def ack(self, lease: Lease) -> bool:
        """The sample was consumed; False when the lease is not live."""
        with self.cond:
            was_live = self.leases.ack(lease)
            self._changed()
            return was_live

    def fail(self, lease: Lease, reason: str, *, final: bool = False) -> FailOutcome:
        """Return a sample: locally while nobody touched its bytes, else to its owner, which delivers it anew."""
        with self.cond:
            outcome = self.leases.fail(lease, reason, final=final)
            self._changed()
            return outcome

    def hand_back(self, lease: Lease) -> bool:
        """Give a lease back without counting a delivery; False when it is not live."""
        with self.cond:
            was_live = self.leases.hand_back(lease)
            self._changed()
            return was_live

    def reclaim_expired(self) -> int:
        """Take the samples of expired leases back; returns how many there were."""
        with self.cond:
            count = self.leases.expire()
            self._changed()
            return count

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no lease will be handed out any more; the lock is held."""
        if self.config.end == "ragged":
            nothing_waits = self.leases.table.pending_count == 0
            if self._stop_reason or self._peer_error():
                return nothing_waits or bool(self._stop_reason)
            return (
                nothing_waits
                and self._all_targets_known()
                and self.intake.all_settled()
                and not self.estates.any_unread
            )
        if self.rounds is None or self.rounds.end is None:
            return False
        # After the agreed end nothing may be here though the round wants more: a sample of the last round was failed.
        short = self.leases.table.is_empty and self.config.end != "pad"
        return short or self.leases.handed + self.padded >= self._samples_released()

    def _samples_released(self) -> int:
        return 0 if self.rounds is None else self.rounds.samples_released()

    @property
    def needs_padding(self) -> bool:
        """Whether this rank is to take part in a round that it has no samples for; the lock is held.

        After the agreed end; with static assignment also before it, when the others have more than this rank will get.
        """
        if self.config.end != "pad" or self.rounds is None or self.leases.table.pending_count:
            return False
        if self.leases.handed + self.padded >= self._samples_released():
            return False
        end = self.rounds.end
        return not end.error if end is not None else self.config.assignment == "static" and self._drained()

    def pad(self) -> SampleRef | None:
        """Take part in a round with padding of this form; None while it is not known. The lock is held."""
        if self.template is not None:
            self.padded += 1
            self._changed()
        return self.template

    def end_error(self) -> NcclStreamError | None:
        """The error that this stream ends with, None for a clean end; the lock is held."""
        if self.config.end == "ragged":
            text = self._peer_error()
        else:
            text = "" if self.rounds is None or self.rounds.end is None else self.rounds.end.error
        if not text:
            return None
        if text.startswith(FAILED_PREFIX):
            return ProducerFailedError(f"the target side failed: {text[len(FAILED_PREFIX) :]}")
        lost = self.estates.lost_ids()
        return SamplesLostError(text, lost) if lost else PeerLostError(text)

    def clean_up(self) -> None:
        """Take nothing more and give back what is left over; the lock is held. Idempotent.

        Unless everybody hears of an agreed end, or nothing is left, this rank says so: its owners would offer what it
        refuses again and again.
        """
        if self._cleaned:
            return
        self._cleaned = True
        end = None if self.rounds is None else self.rounds.end
        self.intake.stop("this rank takes nothing more")
        self.leases.clear_pending(drop=end is not None and not end.error and not end.stopped)
        if end is None and (self.rounds is not None or not self.intake.all_settled()):
            self.tell_all(Leaving(self.cohort))

    def leave_rounds(self) -> None:
        """Take nothing more: hand back what is not leased and tell everybody. Idempotent."""
        with self.cond:
            if self.rounds is not None:
                self.rounds.leave()
            self.clean_up()
            self.cond.notify_all()

    def return_leases(self) -> None:
        """Hand back what is still leased; the rank is leaving."""
        with self.cond:
            self.leases.return_all()
            self._changed()

    def log_leftovers(self) -> None:
        with self.cond:
            unserved = self.finished and self.end_error() is None and not self.leases.handed and not self._stop_reason
        if unserved:
            logger.warning("%s: the stream ended, and no sample of it came to this rank", self.node.inc)

    def check_held(self) -> None:
        """Raise when user references have kept all memory for longer than ``held_timeout``; the lock is held."""
        since = self._blocked_since
        if since is None or not self.leases.table.is_empty or self._clock() - since < self.config.held_timeout:
            return
        if any(self.intake.in_transfer(inc) for inc in self._targets.values()):
            return
        holders = "; ".join(f"{label}: {nbytes} bytes, {why}" for label, nbytes, why in self.arena.holders()[:20])
        raise SlotsHeldError(
            f"no receive memory for {self.config.held_timeout:.0f} s: all of it is held by tensors of earlier samples "
            f"({holders}). Drop them, clone what you keep, or raise arena_bytes."
        )
