"""What becomes of the samples of an owner that died: who holds or acked some, which are lost, how its books close."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nccl_stream.coordination.journal import JournalReading
from nccl_stream.coordination.messages import Estate

__all__ = ["Obituaries", "is_obituary"]

logger = logging.getLogger(__name__)

MAX_IDS = 50_000
MAX_IDS_CHARS = 1_000_000  # of a document or message of ids; a store value may have four million


def _bounded(ids: list[str]) -> list[str]:
    """As many of the first ids as a document may hold."""
    room = MAX_IDS_CHARS
    for count, sample_id in enumerate(ids[:MAX_IDS]):
        room -= len(json.dumps(sample_id)) + 1
        if room < 0:
            return ids[:count]
    return ids[:MAX_IDS]


COUNTS = ("put", "acked", "dropped", "dead", "held", "lost")


def is_obituary(document: Any) -> bool:
    """Whether a value of the store closes an owner's books."""
    return (
        type(document) is dict
        and document.keys() == {*COUNTS, "lost_ids"}
        and all(type(document[name]) is int and 0 <= document[name] < 2**62 for name in COUNTS)
        and type(document["lost_ids"]) is list
        and all(type(sample_id) is str for sample_id in document["lost_ids"])
    )


@dataclass
class _Dead:
    label: str
    kind: str
    reason: str
    heirs: frozenset[str] | None
    estates: dict[str, Estate] = field(default_factory=dict)
    document: dict[str, Any] | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    counting: bool = False


class Obituaries:
    """Dead owners as one draft knows them, and the leading draft's part in closing their books.

    Not thread-safe; its owner calls it under one lock.
    """

    def __init__(self) -> None:
        self._dead: dict[str, _Dead] = {}
        self._early: list[tuple[str, Estate]] = []

    def died(self, owner: str, label: str, kind: str, reason: str, heirs: list[str] | None) -> None:
        """An owner is gone without having settled everything.

        ``heirs``: the drafts that lived then; None: whoever lives when its books are closed.
        """
        self._dead.setdefault(owner, _Dead(label, kind, reason, None if heirs is None else frozenset(heirs)))
        early, self._early = self._early, []
        for sender, estate in early:
            self.heard(sender, estate)

    def untold(self) -> list[str]:
        """Owners whose estate this draft has not yet declared."""
        return [owner for owner, dead in self._dead.items() if not dead.counting]

    def told(self, owner: str) -> None:
        """From now on what happens to this draft's share counts after the estate."""
        self._dead[owner].counting = True

    @staticmethod
    def estate(owner: str, held: list[str], acked: list[str]) -> Estate:
        """This draft's share of what an owner left behind.

        Of the acked ones the newest are enough: the owner has journaled the outcome of those that are long past.
        """
        return Estate(owner, list(_bounded(held)), list(_bounded(acked[::-1])))

    def heard(self, sender: str, estate: Estate) -> None:
        dead = self._dead.get(estate.owner)
        if dead is None:
            self._early.append((sender, estate))
        else:
            dead.estates.setdefault(sender, estate)

    def complete(self, alive: list[str]) -> list[str]:
        """Owners of whom every living draft has declared its share and whose books are still open."""
        return [
            owner
            for owner, dead in self._dead.items()
            if dead.document is None
            and all(inc in dead.estates for inc in alive if dead.heirs is None or inc in dead.heirs)
        ]

    def knows(self, owner: str) -> bool:
        """Whether this owner has died, as far as this draft has heard."""
        return owner in self._dead

    def is_closed(self, owner: str) -> bool:
        """Whether this owner's books are closed and read."""
        return owner in self._dead and self._dead[owner].document is not None

    def counting(self) -> list[str]:
        """Owners whose estate this draft has declared."""
        return [owner for owner, dead in self._dead.items() if dead.counting]

    def declared(self, draft: str) -> list[Estate]:
        """What this draft has declared, of owners whose books are still open."""
        return [dead.estates[draft] for dead in self._dead.values() if dead.document is None and draft in dead.estates]

    def early(self, owner: str) -> list[str]:
        """Drafts that have declared their share of an owner that is not dead as far as this draft knows."""
        return [sender for sender, estate in self._early if estate.owner == owner]

    def compose(self, owner: str, journal: JournalReading) -> dict[str, Any]:
        """The document that closes the owner's books, from its journal and the estates."""
        dead = self._dead[owner]
        totals, open_ids = journal.totals, set(journal.open_ids)
        acked = {sid for estate in dead.estates.values() for sid in estate.acked} & open_ids
        held = {sid for estate in dead.estates.values() for sid in estate.held} - acked
        lost = sorted(open_ids - acked - held)
        return {
            "put": totals["put"],
            "acked": totals["acked"] + len(acked),
            "dropped": totals["dropped"],
            "dead": totals["dead"],
            "held": len(held),
            "lost": totals["lost"] + len(lost),
            "lost_ids": _bounded(lost),
        }

    def read(self, owner: str, document: Any) -> tuple[str, ...]:
        """Take the closed books in; returns the lost ids the first time."""
        dead = self._dead.get(owner)
        if dead is None or dead.document is not None:
            return ()
        if not is_obituary(document):
            # Nobody will write it anew, and the run must come to its end.
            logger.error("the closed books of %s are damaged; what was lost with it is not known", dead.label)
            document = {**dict.fromkeys(COUNTS, 0), "lost_ids": []}
        dead.document = document
        return tuple(document["lost_ids"])

    def outcome(self, owner: str, outcome: str) -> bool:
        """A sample that this draft held has been acked, dropped, or lost; whether it was of a dead owner's estate."""
        dead = self._dead.get(owner)
        if dead is None or not dead.counting:
            return False
        dead.outcomes[outcome] += 1
        return True

    def posthumous(self) -> dict[str, dict[str, int]]:
        """Per dead owner, what became here of the samples held when its estate was declared."""
        return {owner: dict(dead.outcomes) for owner, dead in self._dead.items() if dead.outcomes}

    def failed(self) -> str:
        """Why an owner left with an error, if one did."""
        return next((f"{dead.label}: {dead.reason}" for dead in self._dead.values() if dead.kind == "failed"), "")

    def died_owners(self) -> list[str]:
        """Owners that died without a word."""
        return [owner for owner, dead in self._dead.items() if dead.kind == "died"]

    @property
    def any_unread(self) -> bool:
        """Whether the books of some owner that died are still to be closed."""
        return any(dead.kind == "died" and dead.document is None for dead in self._dead.values())

    def lost_ids(self) -> tuple[str, ...]:
        """Every id known to be lost."""
        return tuple(
            sid for dead in self._dead.values() if dead.document is not None for sid in dead.document["lost_ids"]
        )

    def documents(self) -> dict[str, dict[str, Any]]:
        """The closed books per owner."""
        return {owner: dead.document for owner, dead in self._dead.items() if dead.document is not None}

    def describe(self) -> str:
        names = ", ".join(dead.label for dead in self._dead.values() if dead.kind == "died")
        return f"{names} died; {len(self.lost_ids())} samples are known to be lost with it"
