"""Rounds: draft ranks that train together hand out the same number of steps.

The draft with the lowest rank leads. Each draft tells it, cumulatively, how many samples it has had in hand; the
leader releases round r once every living draft has a batch for it, and decides the end once nothing more can come and
all whole rounds have been handed out. The decision is a document that is written once (compare-and-set), so it survives
the leader; whatever else a new leader needs, the drafts tell it again. :class:`Rounds` is a pure state machine; the
clock and the store are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.messages import End, Go, Have, Message
from nccl_stream.errors import WireFormatError

__all__ = ["EndDecision", "Rounds", "RoundsPort", "read_end", "settle_end"]

# Rounds released ahead of the slowest draft: enough to hide the leader's answer, few enough that a stop comes soon.
ROUNDS_AHEAD = 2

MAX_ERROR_TEXT = 4000  # half of what a message's text field may hold


@dataclass(frozen=True)
class EndDecision:
    """How a cohort ends: after ``rounds`` rounds; ``error`` when it is not a clean end; ``stopped`` when asked for."""

    rounds: int
    error: str
    stopped: bool

    @classmethod
    def of(cls, message: End) -> EndDecision:
        """What the leader says."""
        return cls(message.rounds, message.error, message.stopped)

    def to_wire(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "error": self.error, "stopped": self.stopped}

    @classmethod
    def from_wire(cls, value: Any) -> EndDecision:
        if (
            type(value) is not dict
            or value.keys() != {"rounds", "error", "stopped"}
            or type(value["rounds"]) is not int
            or not 0 <= value["rounds"] < 2**62
            or type(value["error"]) is not str
            or type(value["stopped"]) is not bool
        ):
            raise WireFormatError(f"damaged end document: {value!r:.120}")
        return cls(**value)


def settle_end(documents: ControlStore, cohort: str, decision: EndDecision) -> EndDecision:
    """Write how a cohort ends, unless that stands in the store already; returns what holds.

    Raises:
        WireFormatError: what stands there is damaged.
    """
    if documents.compare_set(_end_key(cohort), None, decision.to_wire()):
        return decision
    return EndDecision.from_wire(documents.get(_end_key(cohort)))


def read_end(documents: ControlStore, cohort: str) -> EndDecision | None:
    """How a cohort ends; None when that has not been decided.

    Raises:
        WireFormatError: what stands there is damaged.
    """
    document = documents.get(_end_key(cohort))
    return None if document is None else EndDecision.from_wire(document)


def _end_key(cohort: str) -> str:
    return f"cohort/{cohort}/end"


class RoundsPort(Protocol):
    """What the state machine asks for; every method returns at once."""

    def tell(self, draft: str, message: Message) -> None: ...

    def propose_end(self, decision: EndDecision) -> None:
        """Write the end document unless there is one; :meth:`Rounds.ended` brings what stands there."""
        ...

    def find_end(self) -> None:
        """Read the end document: :meth:`Rounds.no_end` says that there is none.

        If there is one, :meth:`Rounds.ended` brings it, and everybody is told: who wrote it may have died before that.
        """
        ...


class Rounds:
    """One draft's view of its cohort, and the leader's part when this draft leads.

    Not thread-safe; its owner calls it under one lock.

    Args:
        port: carries out what is decided.
        me: this incarnation.
        cohort: id of the cohort.
        members: incarnations of the cohort by rank; all start at round 0.
        samples_per_round: samples one draft consumes per round (batch size times accumulation).
        pad: drafts that lack a batch at the end get padding instead of the others dropping theirs.
        apart: each draft has samples of its own (static assignment): one that is drained stays so.
    """

    def __init__(
        self,
        port: RoundsPort,
        me: str,
        cohort: str,
        members: list[str],
        *,
        samples_per_round: int,
        pad: bool,
        apart: bool = False,
    ) -> None:
        self._port = port
        self._me = me
        self._cohort = cohort
        self._members = list(members)
        self._present = list(members)
        self._holding: set[str] = set()
        self._per_round = samples_per_round
        self._pad = pad
        self._apart = apart
        self._mine = Have(cohort, 0, 0, 0, False, False, "")
        self._told: tuple[str, Have] | None = None
        self._heard: dict[str, Have] = {}
        self._told_go: dict[str, int] = {}
        self._proposed = False
        self._left = False
        # A leader before us may have written the end and died before it told anybody.
        self._knows_no_end = members[0] == me
        self.go = 0
        self.end: EndDecision | None = None

    @property
    def members(self) -> list[str]:
        """Incarnations of the cohort, those that are gone included."""
        return list(self._members)

    @property
    def leader(self) -> str:
        """The member with the lowest rank that is present."""
        return self._present[0] if self._present else self._me

    def samples_released(self) -> int:
        """How many samples this draft may have handed out in total."""
        rounds = self.go if self.end is None else self.end.rounds
        return rounds * self._per_round

    def update(self, *, handed: int, pending: int, drained: bool, stop: bool, error: str) -> None:
        """What this draft has handed out so far, padding included, and holds now, in samples."""
        begun = -(-handed // self._per_round)
        self._mine = Have(self._cohort, handed + pending, begun, self.go, drained, stop, error[:MAX_ERROR_TEXT])
        self._report()

    def leave(self) -> None:
        """This draft takes no more part: it reports nothing and decides nothing any more."""
        self._left = True

    def _report(self) -> None:
        if self.end is not None or self._left:
            return
        self._mine = replace(self._mine, go=self.go)
        if self.leader == self._me:
            self._heard[self._me] = self._mine
            self._decide()
            return
        shown = self._shown(self._mine)
        if self._told != (self.leader, shown):
            self._told = (self.leader, shown)
            self._port.tell(self.leader, self._mine)

    def _shown(self, have: Have) -> Have:
        """What of our state matters to the leader: whole rounds while it runs, every sample once drained."""
        samples = have.samples if have.drained else have.samples - have.samples % self._per_round
        return replace(have, samples=samples)

    def heard(self, sender: str, have: Have) -> None:
        """A member reports; a leader that does not know yet that it leads keeps the report."""
        if have.cohort == self._cohort and sender in self._members:
            self._heard[sender] = have
            if self.leader == self._me:
                self._decide()

    def on_go(self, sender: str, message: Go) -> None:
        """Rounds are released. Not by one who is gone for us: his successor has counted with what we reported then."""
        if message.cohort == self._cohort and sender in self._present:
            self.go = max(self.go, message.rounds)

    def member_gone(self, inc: str, *, awaited: bool) -> None:
        """A member died or left. While it is awaited nothing more is released."""
        if inc not in self._present:
            return
        if awaited:
            self._holding.add(inc)
            return
        self._present.remove(inc)
        self._holding.discard(inc)
        self._heard.pop(inc, None)
        if self.leader == self._me and not self._knows_no_end:
            self._port.find_end()
        self._report()

    def no_end(self) -> None:
        """The store holds no end document; whoever could have written one is gone."""
        self._knows_no_end = True
        self._report()

    def ended(self, decision: EndDecision) -> None:
        """The document that stands in the store."""
        if self.end is None:
            self.end = decision

    def _decide(self) -> None:
        haves = [self._heard.get(inc) for inc in self._present]
        if self.end is not None or self._proposed or self._holding or self._left or not self._knows_no_end:
            return
        reports = [have for have in haves if have is not None]
        if len(reports) < len(self._present):
            return  # a new leader decides nothing before it has heard everybody
        whole = min(have.samples // self._per_round for have in reports)
        # A draft that gets nothing more pads; the others cannot wait for the end, having no memory for all their rest.
        takers = [have for have in reports if not (have.drained and self._pad and self._apart)]
        reach = min((have.samples // self._per_round for have in takers), default=whole)
        released = max([self.go, *(have.go for have in reports)])
        go = max(released, min(reach, ROUNDS_AHEAD + min(have.begun for have in reports)))
        errors = [have.error for have in reports if have.error]
        stop = any(have.stop for have in reports)
        drained = all(have.drained for have in reports)
        # A clean end waits until the last whole round has begun everywhere: a draft that dies before it leaves its
        # samples to the others, who need rounds for them.
        begun = all(have.begun >= whole for have in reports)
        # No round can come after the last one of a draft that gets nothing more; the others may have no memory to wait
        # for the rest of theirs.
        last = any(have.drained and have.samples // self._per_round == whole for have in reports)
        cut = last and self._apart and not self._pad
        if errors or stop or ((drained or cut) and begun):
            rounds = max(released, whole)
            if drained and self._pad and not errors and not stop:
                rounds = max(released, *(-(-have.samples // self._per_round) for have in reports))
            if stop and not drained:
                rounds = released
            self._proposed = True
            self._port.propose_end(EndDecision(rounds, errors[0] if errors else "", stop and not drained))
            return
        self.go = go
        for inc, have in zip(self._present, reports, strict=True):
            # Also what a leader before us released: its word may not have reached everybody.
            if inc != self._me and have.go < go and self._told_go.get(inc, 0) < go:
                self._told_go[inc] = go
                self._port.tell(inc, Go(self._cohort, go))
