"""What a draft rank does about owners that died: it declares its share, and closes their books when it leads.

A draft that dies with samples of a dead owner in hand leaves an estate too: nobody else has them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.coordination.journal import TOTALS, JournalReading, read_journal
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import Estate, Obituary
from nccl_stream.coordination.node import Node
from nccl_stream.coordination.obituaries import Obituaries
from nccl_stream.errors import WireFormatError

__all__ = ["Estates", "left_open"]

logger = logging.getLogger(__name__)


class Estates:
    """The estates of dead owners, between this draft's intake, the other drafts and the control store.

    Methods are called with the lock of the draft's side held, except where they take a client of the store.

    Args:
        lock: of the draft's side.
        node: control plane of this process.
        intake: what this draft has of each owner.
        later: runs a callable soon, on another thread and without the lock.
        on_read: called, with the lock held, when an owner's books have been read.
        report: takes the ids of lost samples, for the user.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        lock: threading.Condition,
        node: Node,
        intake: DraftIntake,
        *,
        later: Callable[[Callable[[], None]], None],
        on_read: Callable[[], None],
        report: Callable[[tuple[str, ...]], None],
        clock: Callable[[], float],
    ) -> None:
        self._obituaries = Obituaries()
        self._unsure: dict[str, str] = {}
        self._closed_before: set[str] = set()
        self._gather_until: dict[str, float] = {}
        self._declarations: dict[str, Any] = {}
        self._lock = lock
        self._node = node
        self._intake = intake
        self._later = later
        self._on_read = on_read
        self._report = report
        self._clock = clock

    def missed(self, member: Member) -> None:
        """A member is gone that may have left samples behind of which this draft knows nothing.

        That is a target that was gone before this draft came, or a draft: it may have held some of a dead target.
        """
        if member.role == "draft" or member.gone is None or member.gone.kind != "left":
            self._unsure[member.inc] = member.label

    def draft_joined(self, draft: str) -> None:
        """Tell a draft that has come what the others have heard before."""
        for estate in self._obituaries.declared(self._node.inc):
            self._node.send(draft, estate)
        for owner in self._obituaries.documents():
            self._node.send(draft, Obituary(owner))

    def owner_gone(self, member: Member) -> None:
        """A target is gone; unless it left in peace, there is an estate."""
        gone = member.gone
        if gone is not None and gone.kind != "left":
            heirs = [draft.inc for draft in self._node.alive("draft")]
            self._obituaries.died(member.inc, member.label, gone.kind, gone.reason, heirs)

    def tell(self) -> None:
        """Declare what this draft has of each dead owner, once nothing of it is in transfer any more."""
        for owner in self._obituaries.untold():
            if self._intake.in_transfer(owner):
                continue
            estate = self._obituaries.estate(owner, *self._intake.estate(owner))
            self._obituaries.told(owner)
            self._obituaries.heard(self._node.inc, estate)
            self._declarations[f"estate/{owner}/{self._node.inc}"] = {"held": estate.held, "acked": estate.acked}
            for draft in self._node.alive("draft"):
                if draft.inc != self._node.inc:
                    self._node.send(draft.inc, estate)

    def heard(self, draft: str, estate: Estate) -> None:
        """Another draft has declared its share."""
        owner = estate.owner
        if owner in self._closed_before or self._obituaries.is_closed(owner):
            self._node.send(draft, Obituary(owner))
            return
        self._obituaries.heard(draft, estate)
        member = self._node.member(owner)
        gone_for_us = member is None or member.gone is not None
        if gone_for_us and not self._obituaries.knows(owner) and not self._intake.knows(owner):
            self._unsure[owner] = owner if member is None else member.label

    def outcome(self, delivery: Delivery, outcome: str) -> None:
        """A held sample was ``"acked"``, ``"dropped"``, or ``"returned"``; when its owner is dead, nobody gets it.

        A streamed sample that broke off was lost already, with its owner.
        """
        if delivery.stream is not None and delivery.stream.broken:
            return
        of_estate = self._obituaries.outcome(delivery.owner, "lost" if outcome == "returned" else outcome)
        if of_estate and outcome == "returned":
            self._later(lambda: self._report_lost(delivery.owner, (delivery.sample_id,)))

    # -- the books in the store; the lock is not held ------------------------------------------------------------------

    def close_books(self, documents: ControlStore) -> None:
        """Write the books of dead owners for which everything is known, when this draft leads."""
        self._look_up(documents)
        with self._lock:
            declarations, self._declarations = self._declarations, {}
            alive = [member.inc for member in self._node.alive("draft")]
            complete = self._obituaries.complete(alive) if alive[:1] == [self._node.inc] else []
            complete = [owner for owner in complete if self._have_gathered(owner)]
        documents.set_many(declarations)  # before the mail that was posted with them goes out
        for owner in complete:
            journal = self._journal_of(documents, owner)
            declared = [
                (member.inc, estate)
                for member in self._node.members()
                if member.role == "draft" and member.gone is not None
                if (estate := _read_estate(documents, owner, member.inc)) is not None
            ]
            with self._lock:
                for draft, estate in declared:
                    self._obituaries.heard(draft, estate)
                document = self._obituaries.compose(owner, journal)
            documents.compare_set(f"obituary/{owner}", None, document)
            self.read(documents, owner)
            for member in self._node.members():
                if member.gone is None and member.inc != self._node.inc:
                    self._node.send(member.inc, Obituary(owner))

    def _look_up(self, documents: ControlStore) -> None:
        """Find out which of the missed ones have left an estate that is still open."""
        with self._lock:
            unsure = dict(self._unsure)
        for inc, label in unsure.items():
            closed = documents.exists([f"obituary/{inc}"])
            is_empty = not closed and self._is_draft(inc) and not self._left_open(documents, inc)
            with self._lock:
                del self._unsure[inc]
                if closed:
                    self._closed_before.add(inc)
                    for draft in self._obituaries.early(inc):
                        self._node.send(draft, Obituary(inc))
                elif not (is_empty and not self._obituaries.early(inc)):
                    patience = 0.0 if self._node.shape.one_launch else self._node.timing.death_s
                    self._gather_until[inc] = self._clock() + patience
                    self._obituaries.died(inc, label, "died", "", None)
                    self._node.wake()
                self._on_read()

    def _have_gathered(self, owner: str) -> bool:
        """Whether the drafts are here that shall hear of this loss: those that restart together come one by one."""
        last = {member.rank: member for member in self._node.members() if member.role == "draft"}
        awaited = any(member.gone is not None and member.gone.kind != "left" for member in last.values())
        return not awaited or self._clock() >= self._gather_until.get(owner, 0.0)

    def _is_draft(self, inc: str) -> bool:
        member = self._node.member(inc)
        return member is not None and member.role == "draft"

    def _left_open(self, documents: ControlStore, draft: str) -> list[str]:
        """Ids that a draft which is gone held of dead owners."""
        dead = [
            member.inc
            for member in self._node.members()
            if member.role == "target" and member.gone is not None and member.gone.kind != "left"
        ]
        try:
            status = documents.get(f"status/{draft}")
        except WireFormatError:
            status = None
        return [sample_id for ids in left_open(documents, draft, status, dead).values() for sample_id in ids]

    def _journal_of(self, documents: ControlStore, owner: str) -> JournalReading:
        if self._is_draft(owner):
            return JournalReading(dict.fromkeys(TOTALS, 0), tuple(self._left_open(documents, owner)))
        return _read_journal(documents, owner)

    def read(self, documents: ControlStore, owner: str) -> None:
        """Take in what stands in the store about a dead owner; what is damaged nobody will write anew."""
        try:
            document = documents.get(f"obituary/{owner}")
        except WireFormatError:
            document = None
        with self._lock:
            lost = self._obituaries.read(owner, document)
        logger.info("%s: the books of %s are closed", self._node.inc, owner)
        if lost:
            self._report_lost(owner, lost)
        with self._lock:
            self._on_read()

    def _report_lost(self, owner: str, lost: tuple[str, ...]) -> None:
        logger.error("%s: %d samples died with %s: %s", self._node.inc, len(lost), owner, ", ".join(lost[:10]))
        self._report(lost)

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def any_unread(self) -> bool:
        """Whether the books of some owner that died are still to be closed."""
        return bool(self._unsure) or self._obituaries.any_unread

    def failed(self) -> str:
        """Why an owner left with an error; "" if none did."""
        return self._obituaries.failed()

    def loss(self) -> str:
        """What died with owners, once all their books are closed; "" when nothing did."""
        closed = self._obituaries.documents()
        unclean = [inc for inc in self._obituaries.died_owners() if not self._had_ended(inc)]
        return self._obituaries.describe() if unclean and all(inc in closed for inc in unclean) else ""

    def _had_ended(self, owner: str) -> bool:
        """Whether a dead owner had said that it puts nothing more, and nothing of it is lost."""
        document = self._obituaries.documents().get(owner)
        return self._intake.was_closed(owner) and document is not None and document["lost"] == 0

    def lost_ids(self) -> tuple[str, ...]:
        """Every id known to be lost."""
        return self._obituaries.lost_ids()

    def posthumous(self) -> dict[str, dict[str, Any]]:
        """Per dead owner, what became here of the samples held when its estate was declared, and which are still."""
        outcomes = self._obituaries.posthumous()
        held = {owner: self._intake.held_of(owner) for owner in self._obituaries.counting()}
        return {
            owner: {**outcomes.get(owner, {}), "open": Obituaries.estate(owner, ids, []).held}
            for owner, ids in held.items()
            if ids or owner in outcomes
        }


def _read_journal(documents: ControlStore, owner: str) -> JournalReading:
    """An owner's journal; an empty one when what stands there is damaged."""
    try:
        return read_journal(documents, owner)
    except WireFormatError as exc:
        logger.error("the journal of %s is damaged; what was lost with it is not known: %s", owner, exc)
        return JournalReading(dict.fromkeys(TOTALS, 0), ())


def _read_estate(documents: ControlStore, owner: str, draft: str) -> Estate | None:
    """What a draft declared of a dead owner; None when it did not, or when it is damaged."""
    try:
        declared = documents.get(f"estate/{owner}/{draft}")
    except WireFormatError:
        return None
    if type(declared) is not dict or declared.keys() != {"held", "acked"}:
        return None
    if any(type(ids) is not list or any(type(each) is not str for each in ids) for ids in declared.values()):
        return None
    return Estate(owner, declared["held"], declared["acked"])


def left_open(documents: ControlStore, draft: str, status: Any, owners: Iterable[str]) -> dict[str, list[str]]:
    """Per dead owner, the ids that a draft which is gone held of it, as its last status says.

    Args:
        documents: rooted at the epoch.
        draft: the incarnation.
        status: its last status.
        owners: dead owners to look for beyond those of the status, which may be older than what the draft declared.
    """
    posthumous = status.get("posthumous") if type(status) is dict else None
    found: dict[str, list[str]] = {}
    if type(posthumous) is dict:
        for owner, outcomes in posthumous.items():
            ids = outcomes.get("open") if type(outcomes) is dict else None
            found[owner] = [each for each in ids if type(each) is str] if type(ids) is list else []
    for owner in owners:
        if owner not in found:
            estate = _read_estate(documents, owner, draft)
            found[owner] = [] if estate is None else list(estate.held)
    return found
