"""A draft rank's end of the stream: what arrives, its leases, its rounds, and what it knows of dead owners."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from nccl_stream.config import StreamConfig
from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import (
    Announce,
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
)
from nccl_stream.coordination.node import Node
from nccl_stream.coordination.obituaries import Obituaries
from nccl_stream.coordination.rounds import EndDecision, Rounds
from nccl_stream.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    NcclStreamError,
    PeerLostError,
    ProducerFailedError,
    RefError,
    SampleNotFoundError,
    SamplesLostError,
    SlotsHeldError,
    SpecMismatchError,
    VersionMismatchError,
    WireFormatError,
)
from nccl_stream.leases import FailOutcome, Lease, LeaseTable, VisibilityTimeout
from nccl_stream.links import Links
from nccl_stream.refs import SampleRef
from nccl_stream.stores.nccl import NcclFeatureStore, Received
from nccl_stream.stores.tensors import checksum_of
from nccl_stream.transport.arena import Arena
from nccl_stream.wire_header import check_header, make_header

__all__ = ["DraftSide"]

logger = logging.getLogger(__name__)

FAILED_PREFIX = "failed: "


class DraftSide:
    """Wires intake, leases, rounds, links and arena of one draft rank; every method may be called from any thread.

    One condition guards the state machines. Node, link and janitor threads take it for moments.
    """

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
        self.config = config
        self.cond = threading.Condition()
        self._rank = rank
        self._num_targets = num_targets
        self._num_drafts = num_drafts
        self._restart_timeout = restart_timeout
        self._clock = clock
        self.intake = DraftIntake(
            self, rank=rank, num_targets=num_targets, num_drafts=num_drafts, static=config.assignment == "static"
        )
        self.table = LeaseTable(visibility_timeout=VisibilityTimeout(config.lease), max_redeliveries=None, clock=clock)
        self.rounds: Rounds | None = None
        self.cohort = ""
        self.handed = 0
        self.padded = 0
        self.late_settles = 0
        self.waited_s = 0.0
        self.template: SampleRef | None = None
        self._local_redeliveries: Counter[tuple[str, str]] = Counter()
        self._targets: dict[int, str] = {}
        self._restarts: dict[str, float] = {}
        self._ended_drafts: dict[str, float] = {}
        self._early_haves: list[tuple[str, Have]] = []
        self._left: set[str] = set()
        self._stop_reason = ""
        self._blocked_since: float | None = None
        self._fatal: NcclStreamError | None = None
        self._error_raised: NcclStreamError | None = None
        self._cleaned = False
        self.obituaries = Obituaries()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tasks: list[Callable[[ControlStore], None]] = []
        self.on_lost: Callable[[tuple[str, ...]], None] | None = None
        self._janitor = threading.Thread(target=self._tidy, name="nccl-stream-janitor", daemon=True)
        self.node: Node
        self.links: Links
        self.store: NcclFeatureStore
        self.arena: Arena

    def wire(self, node: Node, links: Links, store: NcclFeatureStore, arena: Arena) -> None:
        """Second half of construction: the parts that need this one."""
        self.node, self.links, self.store, self.arena = node, links, store, arena
        self._janitor.start()

    def memory_freed(self) -> None:
        """The arena's callback; may run inside a finalizer, so it only leaves a note for the janitor."""
        self._jobs.put(self._grant)

    def _tidy(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except NcclStreamError as exc:
                self.on_fatal(exc)

    def _grant(self) -> None:
        self.store.collect_dropped()
        with self.cond:
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
        nbytes = sum(spec.nbytes for spec in ref.feature_specs.values())
        if nbytes != ref.estimated_bytes:
            raise RefError(f"sample {ref.sample_id!r}: estimated_bytes={ref.estimated_bytes}, its specs make {nbytes}")
        layout = self.store.layout_of(ref.feature_specs)
        if layout.total_bytes > self.arena.capacity_bytes or nbytes > self.config.max_sample_bytes:
            raise CapacityError(
                f"sample {ref.sample_id!r} needs {layout.total_bytes} bytes, this rank takes samples of up to "
                f"{self.config.max_sample_bytes} bytes in an arena of {self.arena.capacity_bytes}",
                can_wait=False,
            )
        return layout.total_bytes

    def reserve(self, nbytes: int, label: str) -> Any | None:
        return self.arena.reserve(nbytes, label)

    def receive(self, delivery: Delivery) -> None:
        slot = delivery.slot
        layout = self.store.layout_of(delivery.ref.feature_specs)
        slot.begin_transfer()
        slot.wait_release(self.links.stream(delivery.owner, delivery.gen))
        if not self.links.recv(delivery.owner, delivery.gen, delivery, layout.wire_buffers(slot.buffer)):
            self._jobs.put(lambda: self._receive_failed(delivery))

    def _receive_failed(self, delivery: Delivery) -> None:
        with self.cond:
            self.intake.link_down(delivery.owner, delivery.gen)
            self._transfer_over(delivery, ok=False)

    def yielded(self, delivery: Delivery) -> None:
        self.table.put(delivery.ref)
        if self.template is None:
            self.template = delivery.ref

    def free(self, delivery: Delivery) -> None:
        self._local_redeliveries.pop(delivery.key, None)
        delivery.slot.settle()

    def propose_end(self, decision: EndDecision) -> None:
        self._tasks.append(lambda documents: self._write_end(documents, decision))
        self.node.wake()

    def find_end(self) -> None:
        self._tasks.append(self._find_end)
        self.node.wake()

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
        assert isinstance(token, Delivery)
        layout = self.store.layout_of(token.ref.feature_specs)
        expected = make_header(
            token.owner, token.sample_id, gen=token.gen, seq=token.seq, serial=token.serial, delivery=token.number
        )
        verify, fault = self.config.verify_checksums, ""
        try:
            token.slot.record_ready(self.links.stream(token.owner, token.gen))
            header = layout.read_header(token.slot.buffer)
            checksum = check_header(header, expected, f"sample {token.sample_id!r}", checksummed=verify)
            if checksum is not None:
                self._check_bytes(token, checksum)
        except ChecksumError as exc:
            logger.error("%s: %s", self.node.inc, exc)
            fault = f"ChecksumError: {exc}"
        except (RuntimeError, WireFormatError) as exc:  # not only a LinkError: on a GPU the look may fail itself
            logger.error("%s: %s", self.node.inc, exc)
            self.links.break_link(token.owner, token.gen, str(exc))
            with self.cond:
                self._transfer_over(token, ok=False)
            return
        with self.cond:
            self._transfer_over(token, ok=True, fault=fault)

    def _check_bytes(self, delivery: Delivery, expected: int) -> None:
        views = self.store.layout_of(delivery.ref.feature_specs).views(delivery.slot.buffer)
        found = checksum_of(views.values())
        if found != expected:
            raise ChecksumError(
                f"sample {delivery.sample_id!r} of {delivery.owner}, delivery {delivery.number}: its owner computed "
                f"CRC-32C {expected:08x}, what arrived has {found:08x}. Its bytes were changed in the owner's memory "
                "(a donated tensor that was written to?) or on the way."
            )

    def transfers_failed(self, inc: str, gen: int, tokens: list[object]) -> None:
        with self.cond:
            self.intake.link_down(inc, gen)
            for token in tokens:
                assert isinstance(token, Delivery)
                self._transfer_over(token, ok=False)

    def _transfer_over(self, delivery: Delivery, *, ok: bool, fault: str = "") -> None:
        delivery.slot.end_transfer()
        last = delivery.failures >= self.config.max_failures
        self.intake.transfer_over(delivery, ok=ok, fault=fault, last=last)
        self._changed()

    def link_given_up(self, member: Member, error: Exception) -> None:
        logger.error("%s: no link from %s can be built: %s", self.node.inc, member.label, error)
        if isinstance(error, VersionMismatchError | ConfigError):
            self.on_fatal(error)

    # -- NodeHandler ---------------------------------------------------------------------------------------------------

    def on_joined(self, member: Member) -> None:
        if member.role != "target":
            return
        linked = self._rank in self.config.linked_drafts(member.rank, self._num_drafts)
        with self.cond:
            self._targets[member.rank] = member.inc
            if linked:
                self.intake.owner_joined(member.inc, member.rank)
        if linked:
            self.links.add(member)

    def on_gone(self, member: Member) -> None:
        kind = "" if member.gone is None else member.gone.kind
        if member.role == "target":
            with self.cond:
                self.intake.owner_gone(member.inc, kind)
                if kind != "left":
                    reason = "" if member.gone is None else member.gone.reason
                    heirs = [draft.inc for draft in self.node.alive("draft")]
                    self.obituaries.died(member.inc, member.label, kind, reason, heirs)
            self.links.remove(member.inc)
        with self.cond:
            if member.role == "draft":
                self.intake.draft_gone(member.inc)
                self._ended_drafts[member.inc] = self._clock() + self.config.death_timeout
            if member.role == "draft" and self.rounds is not None:
                awaited = kind != "left" and self._restart_timeout > 0
                if awaited:
                    self._restarts[member.inc] = self._clock() + self._restart_timeout
                self.rounds.member_gone(member.inc, awaited=awaited)
            self._changed()

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
            elif isinstance(message, End):
                self._tasks.append(self._read_end)
            elif isinstance(message, Leaving):
                self._left.add(inc)
                if self.rounds is not None:
                    self.rounds.member_gone(inc, awaited=False)
            elif isinstance(message, StopRequest):
                self._stop_reason = self._stop_reason or message.reason or "asked to stop"
            elif isinstance(message, Estate):
                self.obituaries.heard(inc, message)
            elif isinstance(message, Obituary):
                self._tasks.append(lambda documents: self._read_obituary(documents, message.owner))
            self._changed()
        self.node.wake()

    def on_fatal(self, error: NcclStreamError) -> None:
        with self.cond:
            if self._fatal is None:
                self._fatal = error
            self.cond.notify_all()
        self.links.abort_all()

    def on_tick(self, documents: ControlStore) -> None:
        now = self._clock()
        with self.cond:
            for inc in [inc for inc, until in self._restarts.items() if until <= now]:
                del self._restarts[inc]
                if self.rounds is not None:
                    self.rounds.member_gone(inc, awaited=False)
            for inc in [inc for inc, until in self._ended_drafts.items() if until <= now]:
                del self._ended_drafts[inc]
                self.intake.draft_forgotten(inc)
            self._expire()
            self._decline_hoard()
            self._tell_estates()
            self._changed()
            tasks, self._tasks = self._tasks, []
            leading = self._leads()
            alive = [member.inc for member in self.node.alive("draft")]
        for task in tasks:
            try:
                task(documents)
            except WireFormatError as exc:
                logger.warning("%s: ignored a damaged document: %s", self.node.inc, exc)
        if leading:
            for owner in self.obituaries.complete(alive):
                self._write_obituary(documents, owner)

    def status(self) -> dict[str, Any]:
        with self.cond:
            return {
                "role": "draft",
                "rank": self._rank,
                "handed": self.handed,
                "acked": self.table.counts.acked,
                "bytes": self.intake.statistics.bytes_received,
                "checksum_failures": self.intake.statistics.faulty,
                "waited_s": round(self.waited_s, 6),
                "posthumous": self.obituaries.posthumous(),
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

    def _write_end(self, documents: ControlStore, decision: EndDecision) -> None:
        documents.compare_set(f"cohort/{self.cohort}/end", None, decision.to_wire())
        self._read_end(documents)
        self._tell_end()

    def _tell_end(self) -> None:
        for member in self.node.members():
            if member.gone is None and member.inc != self.node.inc:
                self.node.send(member.inc, End(self.cohort))

    def _find_end(self, documents: ControlStore) -> None:
        if documents.get(f"cohort/{self.cohort}/end") is not None:
            self._read_end(documents)
            self._tell_end()
            return
        with self.cond:
            if self.rounds is not None:
                self.rounds.no_end()
            self._changed()

    def _read_end(self, documents: ControlStore) -> None:
        try:
            decision = EndDecision.from_wire(documents.get(f"cohort/{self.cohort}/end"))
        except WireFormatError as exc:
            logger.warning("ignored a damaged end of cohort %s: %s", self.cohort, exc)
            return
        with self.cond:
            if self.template is None and self.config.end == "pad":
                self.template = self._read_template(documents)
            if self.rounds is not None:
                self.rounds.ended(decision)
                logger.info("%s: the cohort ends after %d rounds%s", self.node.inc, decision.rounds,
                            f" with an error: {decision.error}" if decision.error else "")  # fmt: skip
                self.intake.stop("the agreed end has come")
            self._changed()

    @staticmethod
    def _read_template(documents: ControlStore) -> SampleRef | None:
        """A ref some target has put, for a rank that must pad and never had a sample itself."""
        try:
            return SampleRef.from_wire(documents.get("template"))
        except WireFormatError:
            return None

    # -- everything that follows from a change; the lock is held -------------------------------------------------------

    def _changed(self) -> None:
        if self.rounds is not None and self.rounds.end is None:
            self.rounds.update(
                handed=self.handed,
                pending=self.table.pending_count,
                drained=self._all_targets_known() and self.intake.drained() and not self.obituaries.any_unread,
                stop=bool(self._stop_reason),
                error=self._peer_error(),
            )
        blocked = self.intake.blocked is not None
        self._blocked_since = (self._blocked_since or self._clock()) if blocked else None
        if blocked and self.table.is_empty:
            self.intake.relax_order()
        self.cond.notify_all()

    def _decline_hoard(self) -> None:
        """Leave samples to others when this rank has no memory for them and the next round waits for somebody else.

        Without that a rank whose link was down while the last samples were assigned would wait for ever. At the pace of
        heartbeats: the owner may have nobody else to give them to just now.
        """
        rounds, since = self.rounds, self._blocked_since
        if rounds is None or rounds.end is not None or since is None or self.config.assignment == "static":
            return
        waits = self.handed >= rounds.samples_released() and self.table.pending_count >= self.config.samples_per_round
        if waits and self._clock() - since >= self.config.heartbeat:
            self._blocked_since = None
            self.intake.decline("no memory here, and others wait for samples")

    def _all_targets_known(self) -> bool:
        return len(self._targets) == self._num_targets

    def _peer_error(self) -> str:
        """What went wrong on the target side, once everything that could still be used has arrived; "" if nothing."""
        for inc, error in self.intake.owner_errors():
            return f"{FAILED_PREFIX}{inc}: {error}"
        failed = self.obituaries.failed()
        if failed:
            return f"{FAILED_PREFIX}{failed}"
        unclean = [inc for inc in self.obituaries.died_owners() if not self._died_settled(inc)]
        if not unclean or any(inc not in self.obituaries.documents() for inc in unclean):
            return ""
        nobody_left = self._all_targets_known() and not self.intake.serving_owners() and self.intake.drained()
        return self.obituaries.describe() if nobody_left or self.config.on_loss == "raise" else ""

    def _died_settled(self, inc: str) -> bool:
        """Whether a dead owner had said that it puts nothing more, and nothing of it is lost."""
        document = self.obituaries.documents().get(inc)
        return self.intake.was_closed(inc) and document is not None and document["lost"] == 0

    def _leads(self) -> bool:
        alive = self.node.alive("draft")
        return bool(alive) and alive[0].inc == self.node.inc

    # -- the owners' estates -------------------------------------------------------------------------------------------

    def _tell_estates(self) -> None:
        for owner in self.obituaries.untold():
            if self.intake.in_transfer(owner):
                continue
            estate = self.obituaries.estate(owner, *self.intake.estate(owner))
            self.obituaries.told(owner)
            self.obituaries.heard(self.node.inc, estate)
            for draft in self.node.alive("draft"):
                if draft.inc != self.node.inc:
                    self.node.send(draft.inc, estate)

    def _write_obituary(self, documents: ControlStore, owner: str) -> None:
        with self.cond:
            document = self.obituaries.compose(documents, owner)
        documents.compare_set(f"obituary/{owner}", None, document)
        self._read_obituary(documents, owner)
        for member in self.node.members():
            if member.gone is None and member.inc != self.node.inc:
                self.node.send(member.inc, Obituary(owner))

    def _read_obituary(self, documents: ControlStore, owner: str) -> None:
        with self.cond:
            lost = self.obituaries.read(owner, documents.get(f"obituary/{owner}"))
            self._changed()
        if lost:
            self._report_lost(owner, lost)

    def _report_lost(self, owner: str, lost: tuple[str, ...]) -> None:
        logger.error("%s: %d samples died with %s: %s", self.node.inc, len(lost), owner, ", ".join(lost[:10]))
        callback = self.on_lost
        if callback is not None:
            try:
                callback(lost)
            except Exception:
                logger.exception("the on_lost callback raised")

    def _let_go(self, delivery: Delivery, *, dropped: bool = False) -> None:
        """A sample goes back, or is left over at an agreed end; when its owner is dead, nobody else can have it."""
        of_estate = self.obituaries.outcome(delivery.owner, "dropped" if dropped else "lost")
        if of_estate and not dropped:
            self._jobs.put(lambda: self._report_lost(delivery.owner, (delivery.sample_id,)))

    # -- leases --------------------------------------------------------------------------------------------------------

    def open_sample(self, ref: SampleRef) -> Received:
        """Inbound: hold the slot of a delivered sample."""
        with self.cond:
            delivery = self.intake.held.get((ref.store_uri, ref.sample_id))
            if delivery is None:
                raise SampleNotFoundError(
                    f"sample {ref.sample_id!r} of {ref.store_uri!r} is not here: it was acked, handed back, or never "
                    "leased on this rank"
                )
            if delivery.ref.feature_specs != ref.feature_specs:
                raise SpecMismatchError(
                    f"sample {ref.sample_id!r}: the ref's specs are not those of what was delivered"
                )
            delivery.touched = True
            delivery.slot.hold()
            return Received(delivery.slot, self.store.layout_of(ref.feature_specs))

    def try_acquire(self, owner: str) -> Lease | None:
        """Lease the next sample if its round has been released; the lock is held."""
        self._expire()
        if self.rounds is not None or self.config.end != "ragged":
            released = 0 if self.rounds is None else self.rounds.samples_released()
            if self.handed >= released:
                return None
        lease = self.table.acquire(owner)
        if lease is not None:
            self.handed += 1
            self._changed()
        return lease

    def ack(self, lease: Lease) -> bool:
        """The sample was consumed; False when the lease is not live."""
        with self.cond:
            if not self.table.ack(lease):
                return False
            key = (lease.ref.store_uri, lease.ref.sample_id)
            delivery = self.intake.settle(key, "ack")
            if delivery is not None:
                self.obituaries.outcome(delivery.owner, "acked")
            self._changed()
            return True

    def fail(self, lease: Lease, reason: str) -> FailOutcome:
        """Return a sample: locally while nobody touched its bytes, else to its owner, which delivers it anew."""
        with self.cond:
            outcome = self.table.fail(lease, reason)
            if outcome is not FailOutcome.STALE:
                self._after_fail(lease.ref, reason)
            self._changed()
            return outcome

    def hand_back(self, lease: Lease) -> bool:
        """Give a lease back without counting a delivery; False when it is not live."""
        with self.cond:
            if not self.table.hand_back(lease):
                return False
            delivery = self.intake.held.get((lease.ref.store_uri, lease.ref.sample_id))
            self.handed -= 1
            if delivery is not None and delivery.touched:
                self.handed += 1
                self._return(delivery, "back", 0, "handed back")
            self._changed()
            return True

    def _after_fail(self, ref: SampleRef, reason: str) -> None:
        key = (ref.store_uri, ref.sample_id)
        delivery = self.intake.held.get(key)
        if delivery is None:
            return
        self._local_redeliveries[key] += 1
        failures = self._local_redeliveries[key]
        if delivery.touched or delivery.failures + failures > self.config.max_failures:
            self._return(delivery, "fail", failures, reason)

    def _return(self, delivery: Delivery, outcome: str, failures: int, reason: str) -> None:
        """Give a pending delivery back to its owner; if that is dead, the sample is lost."""
        self.table.remove(delivery.key)
        self.intake.settle(delivery.key, outcome, failures, reason)
        self._let_go(delivery)

    def _expire(self) -> None:
        for lease in self.table.expire():
            logger.warning("the lease of sample %s held by %s expired", lease.ref.sample_id, lease.owner)
            self._after_fail(lease.ref, "lease expired")

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no lease will be handed out any more; the lock is held."""
        if self.config.end == "ragged":
            if self._stop_reason or self._peer_error():
                return self.table.pending_count == 0 or bool(self._stop_reason)
            settled = self._all_targets_known() and self.intake.all_settled() and not self.obituaries.any_unread
            return settled and self.table.pending_count == 0
        if self.rounds is None or self.rounds.end is None:
            return False
        released = self.rounds.samples_released()
        return self.handed + self.padded >= released or (self._short() and self.config.end != "pad")

    def _short(self) -> bool:
        """After the agreed end nothing is here though the round wants more: a sample of the last round was failed."""
        return self.table.is_empty

    @property
    def needs_padding(self) -> bool:
        """Whether the agreed end has this rank take part in rounds it has no samples for; the lock is held."""
        return (
            self.config.end == "pad"
            and self.rounds is not None
            and self.rounds.end is not None
            and not self.rounds.end.error
            and self.table.pending_count == 0
            and self.handed + self.padded < self.rounds.samples_released()
        )

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
        lost = self.obituaries.lost_ids()
        return SamplesLostError(text, lost) if lost else PeerLostError(text)

    def clean_up(self) -> None:
        """After the end: give back what is left over; the lock is held. Idempotent."""
        if self._cleaned:
            return
        self._cleaned = True
        end = None if self.rounds is None else self.rounds.end
        outcome = "drop" if end is not None and not end.error and not end.stopped else "back"
        self.intake.stop("this rank takes nothing more")
        for ref in list(self.table.pending_refs()):
            key = (ref.store_uri, ref.sample_id)
            self.table.remove(key)
            delivery = self.intake.settle(key, outcome, 0, "left over at the end")
            if delivery is not None:
                self._let_go(delivery, dropped=outcome == "drop")

    def leave_rounds(self) -> None:
        """Take nothing more: hand back what is not leased and tell everybody. Idempotent."""
        with self.cond:
            already = self._cleaned
            if self.rounds is not None:
                self.rounds.leave()
            self.clean_up()
            self.cond.notify_all()
        if not already:
            for member in self.node.members():
                if member.gone is None and member.inc != self.node.inc:
                    self.node.send(member.inc, Leaving(self.cohort))

    def return_leases(self) -> None:
        """Hand back what is still leased; the rank is leaving."""
        with self.cond:
            for lease in list(self.table.leases()):
                self.hand_back(lease)
            for key in list(self.intake.held):
                self.table.remove(key)
                delivery = self.intake.settle(key, "back", 0, "the draft left")
                if delivery is not None:
                    self._let_go(delivery)

    def check_held(self) -> None:
        """Raise when user references have kept all memory for longer than ``held_timeout``; the lock is held."""
        since = self._blocked_since
        if since is None or not self.table.is_empty or self._clock() - since < self.config.held_timeout:
            return
        if any(self.intake.in_transfer(inc) for inc in self._targets.values()):
            return
        holders = "; ".join(f"{label}: {nbytes} bytes, {why}" for label, nbytes, why in self.arena.holders()[:20])
        raise SlotsHeldError(
            f"no receive memory for {self.config.held_timeout:.0f} s: all of it is held by tensors of earlier samples "
            f"({holders}). Drop them, clone what you keep, or raise arena_bytes."
        )

    def stop(self, reason: str) -> None:
        """Ask for a stop at the next agreed round; the lock is held."""
        self._stop_reason = self._stop_reason or reason
        self._changed()

    def raise_if_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal
