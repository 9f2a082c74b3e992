"""What a draft rank does about owners that died: it declares its share, and closes their books when it leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.coordination.journal import TOTALS, JournalReading, read_journal
from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import Estate, Obituary
from nccl_stream.coordination.node import Node
from nccl_stream.coordination.obituaries import Obituaries
from nccl_stream.errors import WireFormatError

__all__ = ["Estates"]

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
    """

    def __init__(
        self,
        lock: threading.Condition,
        node: Node,
        intake: DraftIntake,
        *,
        later: Callable[[Callable[[], None]], None],
        on_read: Callable[[], None],
    ) -> None:
        self.on_lost: Callable[[tuple[str, ...]], None] | None = None
        self._obituaries = Obituaries()
        self._lock = lock
        self._node = node
        self._intake = intake
        self._later = later
        self._on_read = on_read

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
            for draft in self._node.alive("draft"):
                if draft.inc != self._node.inc:
                    self._node.send(draft.inc, estate)

    def heard(self, draft: str, estate: Estate) -> None:
        """Another draft has declared its share."""
        self._obituaries.heard(draft, estate)

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
        with self._lock:
            alive = [member.inc for member in self._node.alive("draft")]
            complete = self._obituaries.complete(alive) if alive[:1] == [self._node.inc] else []
        for owner in complete:
            journal = _read_journal(documents, owner)
            with self._lock:
                document = self._obituaries.compose(owner, journal)
            documents.compare_set(f"obituary/{owner}", None, document)
            self.read(documents, owner)
            for member in self._node.members():
                if member.gone is None and member.inc != self._node.inc:
                    self._node.send(member.inc, Obituary(owner))

    def read(self, documents: ControlStore, owner: str) -> None:
        """Take in what stands in the store about a dead owner; what is damaged nobody will write anew."""
        try:
            document = documents.get(f"obituary/{owner}")
        except WireFormatError:
            document = None
        with self._lock:
            lost = self._obituaries.read(owner, document)
        if lost:
            self._report_lost(owner, lost)  # before the stream may end for it
        with self._lock:
            self._on_read()

    def _report_lost(self, owner: str, lost: tuple[str, ...]) -> None:
        logger.error("%s: %d samples died with %s: %s", self._node.inc, len(lost), owner, ", ".join(lost[:10]))
        callback = self.on_lost
        if callback is not None:
            try:
                callback(lost)
            except Exception:
                logger.exception("the on_lost callback raised")

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def any_unread(self) -> bool:
        """Whether the books of some owner that died are still to be closed."""
        return self._obituaries.any_unread

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

    def posthumous(self) -> dict[str, dict[str, int]]:
        """Per dead owner, what became here of the samples held when its estate was declared."""
        return self._obituaries.posthumous()


def _read_journal(documents: ControlStore, owner: str) -> JournalReading:
    """An owner's journal; an empty one when what stands there is damaged."""
    try:
        return read_journal(documents, owner)
    except WireFormatError as exc:
        logger.error("the journal of %s is damaged; what was lost with it is not known: %s", owner, exc)
        return JournalReading(dict.fromkeys(TOTALS, 0), ())
