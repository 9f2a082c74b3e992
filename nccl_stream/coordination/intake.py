"""Draft-side intake: what is announced, for what memory is granted, what has arrived and in which order it is yielded.

A pure state machine. Memory is granted in the order in which samples will be yielded, and only to the head of each
link, so that later samples never fill the arena while an earlier one waits, and receives are posted in the order in
which the owner sends.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from nccl_stream.coordination.messages import (
    Admit,
    Adopt,
    Announce,
    AnnouncePiece,
    OwnerState,
    Ready,
    Refuse,
    Settle,
    StreamEnd,
    StreamOpen,
    Withdraw,
)
from nccl_stream.coordination.stream_intake import IncomingPiece, IncomingStream, StreamIntake, StreamPort
from nccl_stream.errors import NcclStreamError
from nccl_stream.refs import SampleRef

__all__ = ["Delivery", "DraftIntake", "IntakePort", "IntakeStatistics"]

# Acked serials remembered per owner: an ack can be in flight while the owner delivers anew after a link failure, or
# while it dies. Far above what is ever outstanding per pair.
REMEMBERED_ACKS = 65536


@dataclass
class Delivery:
    """One delivery at this draft, from its announcement to its outcome.

    ``touched`` is set once tensors were handed to the user: the bytes may have been written to since. ``stream``: the
    pieces of a streamed sample, from its admission on.
    """

    owner: str
    gen: int
    seq: int
    serial: int
    number: int
    order: int
    failures: int
    ref: SampleRef
    nbytes: int
    arrival: int
    slot: Any = None
    void: bool = False
    touched: bool = False
    stream: IncomingStream | None = None

    @property
    def sample_id(self) -> str:
        return self.ref.sample_id

    @property
    def key(self) -> tuple[str, str]:
        """``(store_uri, sample_id)``: two owners may use the same id."""
        return self.ref.store_uri, self.ref.sample_id


class IntakePort(StreamPort, Protocol):
    """What the state machine asks for; every method returns at once."""

    def check(self, owner: str, ref: SampleRef) -> int:
        """Bytes of the slot the sample needs; raises an :class:`NcclStreamError` when it cannot be taken."""
        ...

    def reserve(self, nbytes: int, label: str) -> Any | None: ...

    def receive(self, delivery: Delivery) -> None:
        """Post the receive into ``delivery.slot``; :meth:`DraftIntake.transfer_over` reports how it went."""
        ...

    def yielded(self, delivery: Delivery) -> None:
        """The sample is here and it is its turn."""
        ...

    def free(self, delivery: Delivery) -> None:
        """The delivery has its outcome; its slot may return once nobody uses it any more."""
        ...


@dataclass
class IntakeStatistics:
    """Counts since the intake was made."""

    received: int = 0
    bytes_received: int = 0
    stale: int = 0
    refused: int = 0
    adopted: int = 0
    voided: int = 0
    faulty: int = 0
    order_relaxed: int = 0


@dataclass
class _Owner:
    inc: str
    rank: int
    gen: int = 0
    broken: int = 0  # newest generation that broke
    up: bool = False
    next_turn: int = 0
    queue: deque[Delivery] = field(default_factory=deque)
    transfers: dict[tuple[int, int], Delivery] = field(default_factory=dict)
    acked: OrderedDict[int, str] = field(default_factory=OrderedDict)
    missing: set[int] = field(default_factory=set)
    frontier: int = 0
    returns: int = 0
    state: OwnerState = field(default_factory=lambda: OwnerState(False, "", False, False, 0))
    gone: str = ""
    unheard: set[str] = field(default_factory=set)  # drafts that ended, which the owner has not said it knows


class DraftIntake:
    """All owners as one draft rank sees them.

    Not thread-safe; its owner calls it under one lock.

    Args:
        port: carries out what is decided.
        rank: this draft's rank.
        num_targets: target ranks of the run.
        num_drafts: draft ranks of the run.
        static: yield in the global order instead of in the order of arrival.
    """

    def __init__(self, port: IntakePort, *, rank: int, num_targets: int, num_drafts: int, static: bool) -> None:
        self._port = port
        self._rank = rank
        self._num_targets = num_targets
        self._num_drafts = num_drafts
        self._static = static
        self._owners: dict[str, _Owner] = {}
        self._arrivals = 0
        self._waiting: list[Delivery] = []
        self._yield_floor = 0
        self._orphaned: set[int] = set()  # ranks of drafts that ended
        self._stopped = ""
        self.held: dict[tuple[str, str], Delivery] = {}
        self.blocked: Delivery | None = None
        self.statistics = IntakeStatistics()
        self.streams = StreamIntake(port, take_turn=lambda inc: self._take_turn(self._owners[inc]))

    # -- owners and links --------------------------------------------------------------------------------------------

    def owner_joined(self, inc: str, rank: int) -> None:
        self._owners.setdefault(inc, _Owner(inc, rank))

    def owner_gone(self, inc: str, kind: str) -> None:
        """Nothing more comes from this owner. What has arrived stays; what is in transfer ends with the link."""
        owner = self._owners.get(inc)
        if owner is not None and not owner.gone:
            owner.gone = kind
            self._reset_link(owner)
            self.streams.owner_gone(inc, f"its producer is gone ({kind})")
            self._discard_all(owner)
            self.grant()

    def link_opening(self, inc: str, gen: int) -> None:
        """The owner minted generation ``gen``; announcements of it may come from now on."""
        owner = self._owners.get(inc)
        if owner is not None and gen > owner.gen:
            self._reset_link(owner)
            owner.gen, owner.next_turn = gen, 0

    def link_up(self, inc: str, gen: int) -> None:
        owner = self._owners[inc]
        if gen == owner.gen > owner.broken and not owner.gone:
            owner.up = True
            self.streams.link_up(inc, gen)
            self.grant()

    def link_down(self, inc: str, gen: int) -> None:
        owner = self._owners[inc]
        owner.broken = max(owner.broken, gen)
        if owner.gen == gen:
            self._reset_link(owner)
            self.grant()

    def _reset_link(self, owner: _Owner) -> None:
        owner.up = False
        orders = [delivery.order for delivery in owner.queue]
        owner.queue.clear()
        self.streams.link_lost(owner.inc)
        for delivery in owner.transfers.values():
            if delivery.void or delivery.stream is not None:
                continue  # an admitted stream keeps its memory, and goes on over the next link
            delivery.void = True
            orders.append(delivery.order)
            # The owner may believe that it arrived: it can announce later ones before it learns better.
            owner.missing.add(delivery.order)
        owner.frontier = min([owner.frontier, *(order for order in orders if order >= self._yield_floor)])

    def draft_gone(self, inc: str, rank: int) -> None:
        """Another draft has ended: what it held may come here, and no owner is idle before it says that it knows."""
        self._orphaned.add(rank)
        for owner in self._owners.values():
            if not owner.gone and inc not in owner.state.gone:
                owner.unheard.add(inc)

    def draft_forgotten(self, inc: str) -> None:
        """By now every owner has taken the end of that draft into account, or never knew it."""
        for owner in self._owners.values():
            owner.unheard.discard(inc)

    # -- announcements -----------------------------------------------------------------------------------------------

    def announced(self, inc: str, message: Announce) -> None:
        """Take an announcement; answers at once when it is refused or already here, else when memory is granted."""
        owner = self._owners.get(inc)
        if owner is None or owner.gone or message.gen != owner.gen or message.gen <= owner.broken:
            self.statistics.stale += 1  # what was announced on a broken link comes again on the next
            return
        owner.missing.discard(message.order)
        try:
            ref = SampleRef.from_wire(message.ref)
            nbytes = self._port.check(inc, ref)
        except NcclStreamError as exc:
            self._refuse(inc, message.gen, message.seq, str(exc), fault=True)
            return
        if self._already_here(owner, message, ref):
            return
        if self._stopped:
            self._refuse(inc, message.gen, message.seq, self._stopped, fault=False)
            return
        self._arrivals += 1
        owner.queue.append(
            Delivery(
                inc, message.gen, message.seq, message.serial, message.delivery, message.order, message.failures, ref,
                nbytes, self._arrivals,
            )
        )  # fmt: skip
        self.grant()

    def _refuse(self, owner: str, gen: int, seq: int, reason: str, *, fault: bool) -> None:
        self.statistics.refused += 1
        self._port.tell(owner, Refuse(gen, seq, fault, reason[:2000]))

    def _already_here(self, owner: _Owner, message: Announce, ref: SampleRef) -> bool:
        """A delivery that the owner took for failed did arrive: keep it, under its new number, instead of fetching it.

        Returns whether the announcement has been answered.
        """
        held = self.held.get((ref.store_uri, ref.sample_id))
        if held is not None and held.serial != message.serial:
            self._refuse(owner.inc, message.gen, message.seq, "its id is still in use by an earlier put", fault=True)
            return True
        if held is not None:
            held.number = message.delivery
            self.statistics.adopted += 1
            self._port.tell(owner.inc, Adopt(message.gen, message.seq))
            return True
        admitted = self.streams.find(owner.inc, message.serial)
        if admitted is not None:
            self._discard(owner, admitted.delivery, again=False)  # the owner never learnt of that admission
        if message.serial in owner.acked:
            self.statistics.adopted += 1
            self._port.tell(owner.inc, Adopt(message.gen, message.seq))
            self._port.tell(owner.inc, Settle([[ref.sample_id, message.delivery, "ack", 0, ""]]))
            return True
        return False

    # -- memory ------------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Give memory to whoever is next, as long as there is any; then yield what has its turn."""
        for owner in self._owners.values():
            if owner.up:
                self.streams.grant(owner.inc)
        while True:
            self.blocked = None
            delivery = self._next()
            if delivery is None:
                break
            slot = self._port.reserve(delivery.nbytes, f"{delivery.sample_id} of {delivery.owner}")
            if slot is None:
                self.blocked = delivery
                break
            owner = self._owners[delivery.owner]
            owner.queue.popleft()
            owner.frontier = max(owner.frontier, delivery.order + 1)
            owner.transfers[delivery.gen, delivery.seq] = delivery
            delivery.slot = slot
            if delivery.ref.stream is not None:
                self.streams.admit(delivery)
                self._port.tell(delivery.owner, Admit(delivery.gen, delivery.seq, delivery.serial, delivery.number))
                continue
            self._port.receive(delivery)
            self._port.tell(delivery.owner, Ready(delivery.gen, delivery.seq, self._take_turn(owner)))
        self._yield_in_order()

    @staticmethod
    def _take_turn(owner: _Owner) -> int:
        """Number of the receive just posted on this owner's link; the owner sends in that order."""
        turn, owner.next_turn = owner.next_turn, owner.next_turn + 1
        return turn

    def _next(self) -> Delivery | None:
        heads = [owner.queue[0] for owner in self._owners.values() if owner.queue and owner.up]
        if not self._static:
            return min(heads, key=lambda delivery: delivery.arrival, default=None)
        late = [head for head in heads if head.order < self._yield_floor]
        if late:
            return late[0]
        first = min(((order, inc) for inc, order in self._expected().items()), default=None)
        return next((head for head in heads if first is not None and head.owner == first[1]), None)

    def _expected(self) -> dict[str, int]:
        """Per owner, the smallest order it can still bring for the first time; owners that bring none are left out."""
        expected: dict[str, int] = {}
        for inc, owner in self._owners.items():
            if owner.gone or (self._is_idle(owner) and not any(d.void for d in owner.transfers.values())):
                continue
            orders = [d.order for d in owner.queue if d.order >= self._yield_floor]
            if not orders and (order := self._next_in_class(owner.rank, owner.frontier)) is not None:
                orders.append(order)
            orders += (order for order in owner.missing if order >= self._yield_floor)
            if orders:
                expected[inc] = min(orders)
        return expected

    def _next_in_class(self, target_rank: int, floor: int) -> int | None:
        """Smallest k >= floor with ``k mod T == target_rank`` and ``k mod D == rank``; None when there is no such k."""
        if (target_rank - self._rank) % math.gcd(self._num_targets, self._num_drafts):
            return None
        order = floor + (self._rank - floor) % self._num_drafts
        while order % self._num_targets != target_rank:
            order += self._num_drafts
        return order

    # -- arrival -----------------------------------------------------------------------------------------------------

    def transfer_over(self, delivery: Delivery, *, ok: bool, fault: str = "", last: bool = False) -> None:
        """A posted receive has ended and nothing writes to its slot any more.

        Args:
            delivery: as given to the port's ``receive``.
            ok: the transfer finished; False when its link failed.
            fault: what is wrong with the bytes that came; counts as one failed delivery. "" when they are good.
            last: with a fault, that the sample's retry budget is spent: it will not come again.
        """
        owner = self._owners[delivery.owner]
        owner.transfers.pop((delivery.gen, delivery.seq), None)
        if not ok or delivery.void:
            self.statistics.voided += 1
            self._settle(delivery, "back", 0, "the link failed")
        elif fault:
            self.statistics.faulty += 1
            if not last:
                owner.missing.add(delivery.order)  # later ones wait for their turn until it has come again
            self._settle(delivery, "corrupt", 1, fault)
        elif self._stopped:
            self._settle(delivery, "back", 0, self._stopped)
        else:
            self.statistics.received += 1
            self.statistics.bytes_received += delivery.nbytes
            self.held[delivery.key] = delivery
            self._waiting.append(delivery)
        self.grant()

    # -- streamed samples --------------------------------------------------------------------------------------------

    def piece_announced(self, inc: str, message: AnnouncePiece) -> None:
        """A piece of an admitted sample is ready on its owner: its receive is posted at once."""
        owner = self._owners.get(inc)
        if owner is None or owner.gone or message.gen != owner.gen or message.gen <= owner.broken:
            self.statistics.stale += 1  # it comes again on the next generation
            return
        self.streams.announced(inc, message)
        self.grant()

    def piece_over(self, piece: IncomingPiece, *, ok: bool) -> None:
        """A posted receive of a piece has ended and nothing writes to its memory any more."""
        if not ok:
            # From now on, not only once the link is known to be down: later pieces that are still announced on it would
            # seem to leave a gap.
            self.link_down(piece.delivery.owner, piece.gen)
        self.streams.piece_over(piece, ok=ok)
        self.grant()

    def stream_opened(self, inc: str, message: StreamOpen) -> None:
        """The owner knows that the sample was admitted: from now on it is one that this draft holds."""
        stream = self.streams.find(inc, message.serial)
        delivery = None if stream is None else stream.delivery
        if delivery is None or delivery.number != message.delivery or delivery.key in self.held:
            self.statistics.stale += 1
            return
        self._owners[inc].transfers.pop((delivery.gen, delivery.seq), None)
        self.statistics.received += 1
        self.held[delivery.key] = delivery
        self._waiting.append(delivery)
        self.grant()

    def stream_ended(self, inc: str, message: StreamEnd) -> None:
        """The owner says how many pieces there are, or why the rest never comes."""
        stream = self.streams.ended(inc, message)
        if stream is not None and stream.broken and stream.delivery.key not in self.held:
            self._discard(self._owners[inc], stream.delivery, again=False)
            self.grant()

    def withdrawn(self, inc: str, message: Withdraw) -> None:
        """The owner gave this delivery up, or never knew that it was admitted."""
        stream = self.streams.find(inc, message.serial)
        if stream is None or stream.delivery.number != message.delivery:
            self.statistics.stale += 1
        elif stream.delivery.key in self.held:
            stream.broken = stream.broken or "its owner delivers it to another draft"
        else:
            self._discard(self._owners[inc], stream.delivery, again=True)
            self.grant()

    def _discard_all(self, owner: _Owner) -> None:
        for delivery in [d for d in owner.transfers.values() if d.stream is not None]:
            self._discard(owner, delivery, again=True)

    def _discard(self, owner: _Owner, delivery: Delivery, *, again: bool) -> None:
        """An admitted sample that its owner has not opened goes back; ``again``: it will be announced once more."""
        if owner.transfers.pop((delivery.gen, delivery.seq), None) is None:
            return
        self.statistics.voided += 1
        if again and delivery.order >= self._yield_floor:
            owner.missing.add(delivery.order)
            owner.frontier = min(owner.frontier, delivery.order)
        self._settle(delivery, "back", 0, self._stopped or "it was withdrawn")

    def _yield_in_order(self) -> None:
        if not self._static:
            for delivery in self._waiting:
                self._port.yielded(delivery)
            self._waiting.clear()
            return
        self._waiting.sort(key=lambda delivery: delivery.order)
        while self._waiting and self._has_its_turn(self._waiting[0]):
            self._yield_first()

    def _yield_first(self) -> None:
        delivery = self._waiting.pop(0)
        self._yield_floor = max(self._yield_floor, delivery.order + 1)
        self._port.yielded(delivery)

    def _has_its_turn(self, delivery: Delivery) -> bool:
        if delivery.order < self._yield_floor:
            return True
        coming = [d.order for owner in self._owners.values() for d in owner.transfers.values() if not d.void]
        earliest = min([*coming, *self._expected().values()], default=delivery.order)
        return earliest >= delivery.order

    def relax_order(self) -> bool:
        """Yield the earliest arrival out of turn; for when a failed link's samples find no memory. True if it did."""
        if not self._waiting or self.blocked is None or any(owner.transfers for owner in self._owners.values()):
            return False
        self.statistics.order_relaxed += 1
        self._yield_first()
        return True

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def settle(self, key: tuple[str, str], outcome: str, failures: int = 0, reason: str = "") -> Delivery | None:
        """Give a held delivery its outcome and tell its owner; None when it is not held."""
        delivery = self.held.pop(key, None)
        if delivery is None:
            return None
        if delivery in self._waiting:
            self._waiting.remove(delivery)
        self._settle(delivery, outcome, failures, reason)
        return delivery

    def _settle(self, delivery: Delivery, outcome: str, failures: int, reason: str) -> None:
        owner = self._owners[delivery.owner]
        if outcome == "ack":
            owner.acked[delivery.serial] = delivery.sample_id
            if len(owner.acked) > REMEMBERED_ACKS:
                owner.acked.popitem(last=False)
        elif not owner.gone:
            owner.returns += 1
        if not owner.gone:
            item = [delivery.sample_id, delivery.number, outcome, failures, reason[:2000]]
            self._port.tell(delivery.owner, Settle([item]))
        self.streams.over(delivery)
        self._port.free(delivery)

    def decline(self, reason: str) -> None:
        """Refuse without fault what has no memory yet; the owners assign it anew, to whoever has least."""
        for owner in self._owners.values():
            for delivery in owner.queue:
                self._refuse(delivery.owner, delivery.gen, delivery.seq, reason, fault=False)
            owner.queue.clear()
        self.blocked = None

    def stop(self, reason: str) -> None:
        """Take nothing more: what is announced is refused without fault, what still arrives is handed back."""
        if self._stopped:
            return
        self._stopped = reason
        self.decline(reason)
        for owner in self._owners.values():
            self._discard_all(owner)

    # -- looking in --------------------------------------------------------------------------------------------------

    def owner_state(self, inc: str, state: OwnerState) -> None:
        owner = self._owners.get(inc)
        if owner is not None:
            owner.state = state
            owner.unheard.difference_update(str(gone) for gone in state.gone)
            self.grant()

    def drained(self) -> bool:
        """Whether nothing can come any more from the owners seen so far, unless a held sample is failed."""
        return all(not owner.transfers and (owner.gone or self._is_idle(owner)) for owner in self._owners.values())

    def _may_serve(self, owner: _Owner) -> bool:
        """Whether this owner may have samples for this rank: with static assignment not all have.

        Those of a rank that ended go to whoever has least.
        """
        if not self._static:
            return True
        step = math.gcd(self._num_targets, self._num_drafts)
        return any((owner.rank - rank) % step == 0 for rank in (self._rank, *self._orphaned))

    def all_settled(self) -> bool:
        """Whether every sample of every living owner has its outcome."""
        return all(owner.gone or (owner.state.closed and owner.state.settled) for owner in self._owners.values())

    def _is_idle(self, owner: _Owner) -> bool:
        state = owner.state
        if not self._may_serve(owner):
            return not owner.queue
        return state.closed and state.idle and not owner.queue and not owner.unheard and state.seen >= owner.returns

    def owner_errors(self) -> list[tuple[str, str]]:
        """``(owner, error)`` of every owner that said it failed."""
        return [(owner.inc, owner.state.error) for owner in self._owners.values() if owner.state.error]

    def serving_owners(self) -> list[str]:
        """Living owners that may have samples for this rank."""
        return [owner.inc for owner in self._owners.values() if not owner.gone and self._may_serve(owner)]

    def was_closed(self, inc: str) -> bool:
        """Whether this owner said that it will put nothing more."""
        return inc in self._owners and self._owners[inc].state.closed

    def in_transfer(self, inc: str) -> int:
        """Samples of this owner that are on their way, and pieces of others."""
        return len(self._owners[inc].transfers) + self.streams.in_flight(inc) if inc in self._owners else 0

    def estate(self, inc: str) -> tuple[list[str], list[str]]:
        """Ids held and ids acked of an owner that is gone."""
        owner = self._owners.get(inc)
        return self.held_of(inc), [] if owner is None else list(owner.acked.values())

    def held_of(self, inc: str) -> list[str]:
        """Ids held of an owner. A streamed sample that broke off is not held but lost."""
        return [
            delivery.sample_id
            for delivery in self.held.values()
            if delivery.owner == inc and not (delivery.stream is not None and delivery.stream.broken)
        ]

    def knows(self, inc: str) -> bool:
        """Whether this owner was there, and may have delivered here."""
        return inc in self._owners
