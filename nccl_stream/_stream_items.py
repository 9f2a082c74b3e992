"""Bookkeeping inside a stream buffer: which items are registered, arrived and released, and which edges wait.

Nothing here is locked; the buffer does that. The cost per item does not depend on the length of the stream.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from nccl_stream.errors import MisuseError

__all__ = ["Arrival", "EdgeQueue", "JoinedItem", "StreamItems", "shorten"]

# Items. Ids of released items are remembered at least this long, so that a repeated message is recognised as such; to
# remember all of them would grow with the stream.
REMEMBERED_ITEMS = 4096
# Edges. This many of those handed out last are recognised when they are given back.
REMEMBERED_EDGES = 16
# How many ids an error spells out.
NAMED_IDS = 8


class Arrival(enum.Enum):
    """What became of an offered item."""

    TAKEN = enum.auto()
    UNKNOWN = enum.auto()
    REPEATED = enum.auto()


# Looked up once: this is on the path of every item, and reading a member of an enum class is slow.
_TAKEN = Arrival.TAKEN


class JoinedItem(NamedTuple):
    """An item of several pieces that has not arrived as a whole."""

    item_index: int
    tensor_ids: tuple[Hashable, ...]
    pieces: dict[Hashable, Any]

    def pieces_in_order(self) -> list[Any]:
        """The pieces as they were listed; all must be there."""
        return [self.pieces[tensor_id] for tensor_id in self.tensor_ids]


class StreamItems:
    """The items of one stream, by registration order.

    Args:
        name: the stream, for messages.
        clock: monotonic seconds.

    Attributes:
        registered: items registered so far; the index of the next one.
        num_pieces: ids registered so far.
        available: everything below this index has arrived.
        released: everything below this index is given up.
        awaited_since: when the wait for the oldest missing item began, or last saw progress.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self.registered = 0
        self.num_pieces = 0
        self.available = 0
        self.released = 0
        self.awaited_since = clock()
        self._index_of: dict[Hashable, int] = {}  # in registration order
        self._forgotten = 0
        self._more_promised = False
        self._joined: dict[int, JoinedItem] = {}
        self._in_line: deque[Any] = deque()  # the items from released to available
        self._early: dict[int, Any] = {}  # those that arrived before an earlier one

    def __len__(self) -> int:
        return len(self._in_line) + len(self._early)

    @property
    def num_known(self) -> int:
        """How many ids are remembered."""
        return len(self._index_of)

    def register(self, tensor_id: Hashable) -> None:
        """Append one item. Raises MisuseError for an id that is known."""
        index = self.registered
        if self._index_of.setdefault(tensor_id, index) != index:
            raise MisuseError(f"{self._name}: id {tensor_id!r} is registered already")
        if self.available == index:
            # Nothing was awaited before: the wait for this item begins now.
            self.awaited_since = self._clock()
        self.registered = index + 1
        self.num_pieces += 1

    def register_joined(self, tensor_ids: tuple[Hashable, ...]) -> None:
        """Append one item of several pieces. Raises MisuseError for an id that is known or listed twice."""
        if len(set(tensor_ids)) != len(tensor_ids):
            raise MisuseError(f"{self._name}: an id is listed twice among the pieces {shorten(tensor_ids)}")
        known = [tensor_id for tensor_id in tensor_ids if tensor_id in self._index_of]
        if known:
            raise MisuseError(f"{self._name}: registered already: {shorten(known)}")
        index = self.registered
        self._index_of.update(dict.fromkeys(tensor_ids, index))
        self._joined[index] = JoinedItem(index, tensor_ids, {})
        if self.available == index:
            self.awaited_since = self._clock()
        self.registered = index + 1
        self.num_pieces += len(tensor_ids)

    def offer(self, tensor_id: Hashable, item: Any) -> Arrival | JoinedItem:
        """Take an item or a piece.

        Returns:
            What became of it; or, for the last missing piece, the item whose pieces :meth:`complete` now waits for.
        """
        index = self._index_of.get(tensor_id)
        if index == self.available and not (self._joined or self._early):
            # _arrive() without what an item that comes in its turn never needs.
            self._in_line.append(item)
            self.available = index = index + 1
            if index < self.registered or self._more_promised:
                self.awaited_since = self._clock()
            return _TAKEN
        if index is None:
            return Arrival.UNKNOWN
        if index < self.available or index in self._early:
            return Arrival.REPEATED
        if self._joined and index in self._joined:
            return self._offer_piece(self._joined[index], tensor_id, item)
        self._arrive(index, item)
        return _TAKEN

    def complete(self, joined: JoinedItem, item: Any) -> None:
        """The pieces of ``joined`` are now ``item``. Without effect after :meth:`clear`."""
        if self._joined.pop(joined.item_index, None) is not None:
            self._arrive(joined.item_index, item)

    def take_back(self, joined: JoinedItem, tensor_id: Hashable) -> None:
        """The piece counts as not arrived."""
        joined.pieces.pop(tensor_id, None)

    def restart_wait(self) -> None:
        """Count the wait for the oldest missing item from now, also for one that is promised but not registered."""
        self._more_promised = True
        self.awaited_since = self._clock()

    def between(self, start: int, stop: int) -> list[Any]:
        """The items ``start`` to ``stop``, all available and not released."""
        # Chunks begin at or near the first item that is kept, so little is skipped.
        return list(islice(self._in_line, start - self.released, stop - self.released))

    def release(self, keep_from: int) -> list[Any]:
        """Give up everything below ``keep_from`` and return it."""
        take = self._in_line.popleft
        released = [take() for _ in range(self.released, keep_from)]
        self.released += len(released)
        forgettable = self.released - REMEMBERED_ITEMS - self._forgotten
        if forgettable > REMEMBERED_ITEMS and forgettable > len(self._index_of) // 2:
            self._forget()
        return released

    def missing_ids(self) -> Iterator[Hashable]:
        """The ids that were registered and did not arrive, in order. Linear; for messages."""
        for tensor_id, index in self._index_of.items():
            if index < self.available or index in self._early:
                continue
            joined = self._joined.get(index)
            if joined is None or tensor_id not in joined.pieces:
                yield tensor_id

    def clear(self) -> list[Any]:
        """Give up everything, pieces too, and return it. Every later id is unknown."""
        held = [*self._in_line, *self._early.values()]
        for joined in self._joined.values():
            held.extend(joined.pieces.values())
        self._in_line.clear()
        self._early.clear()
        self._joined.clear()
        self._index_of.clear()
        return held

    def _offer_piece(self, joined: JoinedItem, tensor_id: Hashable, piece: Any) -> Arrival | JoinedItem:
        if tensor_id in joined.pieces:
            return Arrival.REPEATED
        joined.pieces[tensor_id] = piece
        if len(joined.pieces) == len(joined.tensor_ids):
            return joined
        if joined.item_index == self.available:
            self.awaited_since = self._clock()
        return Arrival.TAKEN

    def _arrive(self, index: int, item: Any) -> None:
        if index != self.available:
            self._early[index] = item
            return
        self._in_line.append(item)
        index += 1
        early = self._early
        while early and index in early:
            self._in_line.append(early.pop(index))
            index += 1
        self.available = index
        if index < self.registered or self._more_promised:
            self.awaited_since = self._clock()

    def _forget(self) -> None:
        # One pass over the table drops a fixed share of it, so that the cost per item is constant.
        self._forgotten = self.released - REMEMBERED_ITEMS
        self._index_of = {tensor_id: index for tensor_id, index in self._index_of.items() if index >= self._forgotten}


class EdgeQueue:
    """Edges that wait for their consumer, first in first out, each with its turn.

    An edge that was handed out keeps its turn for when it is given back. It is known by identity, because an edge is
    the caller's object and need not compare.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Any]] = deque()
        self._handed_out: deque[tuple[int, Any]] = deque(maxlen=REMEMBERED_EDGES)
        self._num_stored = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def store(self, edge: Any) -> None:
        """Append a new edge; put one that was handed out ahead of all that came after it."""
        for position, (turn, known) in enumerate(self._handed_out):
            if known is edge:
                del self._handed_out[position]
                behind = sum(1 for waiting_turn, _ in self._waiting if waiting_turn < turn)
                self._waiting.insert(behind, (turn, edge))
                return
        self._waiting.append((self._num_stored, edge))
        self._num_stored += 1

    def pop(self) -> Any:
        """Hand out the edge at the head, or None."""
        if not self._waiting:
            return None
        turn_and_edge = self._waiting.popleft()
        self._handed_out.append(turn_and_edge)
        return turn_and_edge[1]

    def clear(self) -> None:
        """Forget all edges."""
        self._waiting.clear()
        self._handed_out.clear()


def shorten(ids: Sequence[Hashable] | Iterator[Hashable]) -> str:
    """The first few ids, for a message."""
    named: list[str] = []
    for tensor_id in ids:
        if len(named) == NAMED_IDS:
            named.append("...")
            break
        named.append(repr(tensor_id))
    return ", ".join(named)
