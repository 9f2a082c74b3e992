"""The owner's journal: which of its samples have no outcome yet, kept in the store for those who outlive it.

Ids are written in chunks before they are announced; a chunk is rewritten when outcomes come in and deleted once all of
its samples have one, so the journal is as large as what is unsettled. Written by the steward, in batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nccl_stream.coordination.kv import ControlStore
from nccl_stream.errors import WireFormatError

__all__ = ["TOTALS", "Journal", "JournalReading", "read_journal"]

CHUNK_IDS = 128
MAX_CHUNKS = 1 << 20  # 128 million open samples: a head that claims more is not believed

_CODES = {"acked": "a", "dropped": "d", "dead": "x", "lost": "l"}
TOTALS = ("put", *_CODES)


@dataclass
class _Chunk:
    ids: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)


class Journal:
    """Not thread-safe; called under its owner's lock, except :meth:`write`."""

    def __init__(self, inc: str) -> None:
        self._inc = inc
        self._chunks: dict[int, _Chunk] = {}
        self._where: dict[str, tuple[int, int]] = {}
        self._next = 0
        self._dirty: set[int] = set()
        self._finished: list[int] = []
        self._totals: Counter[str] = Counter()

    def opened(self, sample_id: str) -> None:
        """A sample was taken in."""
        number = self._next - 1
        chunk = self._chunks.get(number)
        if chunk is None or len(chunk.ids) >= CHUNK_IDS:
            number = self._next
            self._next += 1
            chunk = self._chunks[number] = _Chunk()
        self._where[sample_id] = (number, len(chunk.ids))
        chunk.ids.append(sample_id)
        chunk.outcomes.append(".")
        self._totals["put"] += 1
        self._dirty.add(number)

    def settled(self, sample_id: str, outcome: str) -> None:
        """A sample has its outcome: ``acked``, ``dropped``, ``dead`` or, if streamed, ``lost``."""
        number, at = self._where.pop(sample_id)
        chunk = self._chunks[number]
        chunk.outcomes[at] = _CODES[outcome]
        self._totals[outcome] += 1
        self._dirty.add(number)
        if "." not in chunk.outcomes and (len(chunk.ids) >= CHUNK_IDS):
            del self._chunks[number]
            self._dirty.discard(number)
            self._finished.append(number)

    def take_writes(self) -> tuple[dict[str, Any], list[str]]:
        """Keys to set and keys to delete since the last call; empty when nothing changed."""
        if not self._dirty and not self._finished:
            return {}, []
        writes: dict[str, Any] = {
            f"journal/{self._inc}/{number}": {
                "ids": self._chunks[number].ids,
                "out": "".join(self._chunks[number].outcomes),
            }
            for number in sorted(self._dirty)
        }
        # Emptied first: an owner that dies before the deletion must not leave outcomes behind that look open.
        writes |= {f"journal/{self._inc}/{number}": {"ids": [], "out": ""} for number in self._finished}
        low = min(self._chunks, default=self._next)
        writes[f"journal/{self._inc}/head"] = {"low": low, "high": self._next, "totals": dict(self._totals)}
        deletes = [f"journal/{self._inc}/{number}" for number in self._finished]
        self._dirty.clear()
        self._finished.clear()
        return writes, deletes


@dataclass(frozen=True)
class JournalReading:
    """What a dead owner's journal says.

    Attributes:
        totals: ``put``, ``acked``, ``dropped``, ``dead``, ``lost`` when it was last written.
        open_ids: samples without outcome then.
    """

    totals: dict[str, int]
    open_ids: tuple[str, ...]


def read_journal(documents: ControlStore, inc: str) -> JournalReading:
    """Read the journal of ``inc``; an owner that never wrote one had no samples.

    Raises:
        WireFormatError: it is damaged.
        ControlStoreError: the store does not answer.
    """
    head = documents.get(f"journal/{inc}/head")
    if head is None:
        return JournalReading(dict.fromkeys(TOTALS, 0), ())
    if type(head) is not dict or head.keys() != {"low", "high", "totals"} or type(head["totals"]) is not dict:
        raise WireFormatError(f"journal head of {inc} is damaged")
    totals = {name: head["totals"].get(name, 0) for name in TOTALS}
    numbers = [head["low"], head["high"], *totals.values()]
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise WireFormatError(f"journal head of {inc} is damaged")
    open_ids: list[str] = []
    for number in range(head["low"], min(head["high"], head["low"] + MAX_CHUNKS)):
        chunk = documents.get(f"journal/{inc}/{number}")
        if chunk is None:
            continue
        if type(chunk) is not dict or type(chunk.get("ids")) is not list or type(chunk.get("out")) is not str:
            raise WireFormatError(f"journal chunk {number} of {inc} is damaged")
        if len(chunk["ids"]) != len(chunk["out"]) or any(type(sid) is not str for sid in chunk["ids"]):
            raise WireFormatError(f"journal chunk {number} of {inc} is damaged")
        open_ids += [sid for sid, code in zip(chunk["ids"], chunk["out"], strict=True) if code == "."]
    return JournalReading(totals, tuple(open_ids))
