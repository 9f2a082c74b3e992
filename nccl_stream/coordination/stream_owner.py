"""Owner-side state of one streamed sample: what was appended, what its draft has, and what may be announced next.

Pure. A piece is announced only with credit: the draft has memory for a window of them, and says how many came back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["OwnedStream"]


@dataclass
class OwnedStream:
    """The pieces of one streamed sample and how far its current delivery got.

    Attributes:
        window: pieces that may be on their way or in use at a time.
        retain: keep all pieces until the outcome, so that the sample can be delivered anew.
        lengths: positions of the pieces appended so far.
        closed: no piece follows.
        error: why the rest never comes.
        outcome: of the sample, once it has one; ``why`` says more.
        gone: pieces that have been freed here; with any of them gone the sample cannot be delivered anew.
        gen: link generation on which the draft has said from which piece to go on.
        announced: pieces announced, or known to be there, in this delivery.
        freed: pieces of this delivery whose memory the draft got back.
        stopped: the consumer reads no further in this delivery.
        told_end: whether the draft knows how many pieces there are.
    """

    window: int
    retain: bool = False
    lengths: list[int] = field(default_factory=list)
    closed: bool = False
    error: str = ""
    outcome: str = ""
    why: str = ""
    gone: int = 0
    gen: int = 0
    announced: int = 0
    freed: int = 0
    stopped: bool = False
    told_end: bool = False

    @property
    def has_room(self) -> bool:
        """Whether a piece may be appended: fewer than a window of them are not given back by the consumer."""
        return len(self.lengths) - self.freed < self.window or (self.stopped and self.retain)

    @property
    def can_restart(self) -> bool:
        """Whether the sample can be delivered from its first piece.

        A reader that has stopped takes its producer along, unless the sample is retained: the rest never comes.
        """
        return self.gone == 0 and not self.error and (self.retain or not self.stopped)

    def restart(self) -> None:
        """The delivery is over without outcome: the next one begins with the first piece."""
        self.gen = self.announced = self.freed = 0
        self.stopped = self.told_end = False

    def go_on(self, gen: int, have: int) -> None:
        """On this link generation, continue after the pieces that the draft has."""
        if gen > self.gen:
            self.gen = gen
            self.announced = min(max(have, self.freed), len(self.lengths))

    def advance(self, freed: int, stopped: bool) -> int:
        """Take in what the draft gave back; returns how many pieces need not be kept any more."""
        self.freed = max(self.freed, min(freed, self.announced))
        self.stopped |= stopped
        if not self.retain:
            self.gone = max(self.gone, self.freed)
        return self.gone

    def announce(self, gen: int) -> Iterator[tuple[int, int]]:
        """Number and length of each piece that may be announced now; they count as announced."""
        while gen == self.gen > 0 and self.announced < min(len(self.lengths), self.freed + self.window):
            if self.stopped:
                return
            self.announced += 1
            yield self.announced - 1, self.lengths[self.announced - 1]
