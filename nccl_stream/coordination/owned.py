"""What an owner knows of its samples and of the drafts that take them, and what its state machines ask for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

from nccl_stream.coordination.messages import Message
from nccl_stream.coordination.stream_owner import OwnedStream

__all__ = ["Books", "DeadLetter", "LostStream", "OwnedSample", "OwnerDraft", "OwnerPort", "Phase"]


class Phase(enum.Enum):
    """Where a sample is on its way."""

    RESIDENT = "resident"
    ASSIGNED = "assigned"
    IN_FLIGHT = "in_flight"
    DELIVERED = "delivered"


@dataclass
class OwnedSample:
    """One sample of this owner and where it is."""

    sample_id: str
    ref: dict[str, Any]
    nbytes: int
    order: int
    serial: int
    phase: Phase = Phase.RESIDENT
    delivery: int = 0
    failures: int = 0
    draft: str = ""
    seq: int = -1
    sends: int = 0
    outcome: str = ""
    stream: OwnedStream | None = None


@dataclass(frozen=True)
class DeadLetter:
    """A sample that was failed for good or too often. It is not in the store any more."""

    sample_id: str
    reason: str
    failures: int
    draft: str


@dataclass(frozen=True)
class LostStream:
    """A streamed sample that nobody can read as a whole any more, and why."""

    sample_id: str
    reason: str


@dataclass
class Books:
    """``put = acked + dropped + dead + lost + resident`` at every moment, counted per owner."""

    put: int = 0
    acked: int = 0
    dropped: int = 0
    dead: int = 0
    lost: int = 0
    resident: int = 0
    redelivered: int = 0
    late: int = 0
    bytes_sent: int = 0

    def balanced(self) -> bool:
        return self.put == self.acked + self.dropped + self.dead + self.lost + self.resident


class OwnerPort(Protocol):
    """What the state machine asks for; every method returns at once."""

    def tell(self, draft: str, message: Message) -> None: ...

    def transmit(self, draft: str, gen: int, seq: int, sample: OwnedSample) -> None:
        """Send the sample's bytes; :meth:`OwnerDelivery.sent` or a link failure reports how it went."""
        ...

    def transmit_piece(self, draft: str, gen: int, turn: int, sample: OwnedSample, piece: int) -> None:
        """Send one piece of a streamed sample; :meth:`OwnerDelivery.piece_sent` or a link failure says how it went."""
        ...

    def pieces_gone(self, sample: OwnedSample, count: int) -> None:
        """The first ``count`` pieces of a streamed sample are not needed any more."""
        ...

    def settled(self, sample: OwnedSample) -> None:
        """The sample has its outcome and no transfer touches it: free it."""
        ...


@dataclass
class OwnerDraft:
    """What an owner knows of one draft incarnation."""

    inc: str
    rank: int
    gen: int = 0  # newest generation that came up or broke
    linked: bool = False
    ended: bool = False
    next_seq: int = 0
    by_seq: dict[int, str] = field(default_factory=dict)  # announced and not answered
    next_turn: int = 0
    # Receives posted there whose turn has not come: number of the announcement, or of the piece, and the sample.
    turns: dict[int, tuple[int, OwnedSample, bool]] = field(default_factory=dict)
    pieces: dict[tuple[int, int, int], OwnedSample] = field(default_factory=dict)  # announced and not answered
    waiting: int = 0
    coming: int = 0
    held: set[str] = field(default_factory=set)
    given: int = 0  # samples it has or had, less those that came back
    seen: int = 0
    refusals: int = 0  # without fault, since it last took something: it had no memory
    told: tuple[bool, str, bool, bool, int] | None = None
    told_gone: list[str] = field(default_factory=list)
