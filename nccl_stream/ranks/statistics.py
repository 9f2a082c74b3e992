"""Books and rates of a run, read from the statuses that its processes publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_stream.coordination.kv import ControlStore
from nccl_stream.coordination.node import Node
from nccl_stream.ranks.draft_side import DraftSide
from nccl_stream.ranks.estates import left_open
from nccl_stream.ranks.target_side import TargetSide

__all__ = ["StreamStatistics", "read_statistics"]

BOOKS = ("put", "acked", "dropped", "dead", "lost", "resident")


@dataclass(frozen=True)
class StreamStatistics(Mapping[str, Any]):
    """A snapshot. ``put = acked + dropped + dead + lost + resident``, per owner and for the run.

    Also a mapping of its totals: ``statistics["put"]``.

    Attributes:
        totals: the books of the run, and ``redelivered``, ``late``, ``bytes`` (sent by targets), ``paused_s``
            (producers held back), ``waited_s`` (consumers waiting), ``checksum_failures`` (deliveries that did not
            arrive as they were put), all summed over ranks.
        owners: the books per owner incarnation.
        ranks: per incarnation, the status it published last.
        local: this rank's own counters, as of now.
    """

    totals: dict[str, Any]
    owners: dict[str, dict[str, int]]
    ranks: dict[str, dict[str, Any]]
    local: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.totals[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.totals)

    def __len__(self) -> int:
        return len(self.totals)

    @property
    def balanced(self) -> bool:
        """Whether the books add up."""
        return bool(self.totals["put"] == sum(self.totals[name] for name in BOOKS[1:]))


def read_statistics(
    node: Node | None, side: TargetSide | DraftSide, documents: ControlStore | None = None
) -> StreamStatistics:
    """Read the statuses of all ranks; without a node, only this rank's own.

    Args:
        node: this process's seat in the control plane.
        side: this rank's end of the stream.
        documents: a client to read with. Made for this call if None, which may take seconds: torch looks up the names
            of both ends of a connection, and a lost answer of the name server costs five.
    """
    local = side.status()
    own = {side.node.inc: local}
    statuses: dict[str, dict[str, Any]] = {}
    obituaries: dict[str, dict[str, Any]] = {}
    inherited: Counter[str] = Counter()
    if node is not None:
        documents = node.documents() if documents is None else documents
        members = node.members()
        values = documents.get_many([f"status/{member.inc}" for member in members])
        for member, value in zip(members, values, strict=True):
            if type(value) is dict:
                statuses[member.inc] = value
        statuses.update(own)
        for member in members:
            if member.role == "target" and member.gone is not None and member.gone.kind != "left":
                document = documents.get(f"obituary/{member.inc}")
                if type(document) is dict:
                    obituaries[member.inc] = document
        for member in members:
            if member.role == "draft" and member.gone is not None and obituaries:
                held = left_open(documents, member.inc, statuses.get(member.inc), obituaries)
                inherited.update({owner: len(ids) for owner, ids in held.items()})
    return _add_up(statuses or own, obituaries, inherited, local)


def _add_up(
    statuses: dict[str, dict[str, Any]],
    obituaries: dict[str, dict[str, Any]],
    inherited: Counter[str],
    local: dict[str, Any],
) -> StreamStatistics:
    owners: dict[str, dict[str, int]] = {}
    totals: dict[str, Any] = {**dict.fromkeys(BOOKS, 0), "redelivered": 0, "late": 0, "bytes": 0}
    totals.update(checksum_failures=0, paused_s=0.0, waited_s=0.0)
    for inc, status in statuses.items():
        if status.get("role") == "target":
            books = status.get("books", {})
            owners[inc] = {name: int(_number(books, name)) for name in BOOKS}
            totals["redelivered"] += int(_number(books, "redelivered"))
            totals["late"] += int(_number(books, "late"))
            totals["bytes"] += int(_number(books, "bytes_sent"))
            totals["paused_s"] += _number(status, "paused_s")
        else:
            totals["waited_s"] += _number(status, "waited_s")
            totals["checksum_failures"] += int(_number(status, "checksum_failures"))
    for inc, document in obituaries.items():
        owners[inc] = _closed_books(inc, document, statuses, inherited[inc])
    for books in owners.values():
        for name in BOOKS:
            totals[name] += books[name]
    return StreamStatistics(totals, owners, statuses, local)


def _closed_books(
    inc: str, document: dict[str, Any], statuses: dict[str, dict[str, Any]], inherited: int
) -> dict[str, int]:
    """A dead owner's books: its obituary, and what became since of the samples that drafts held.

    ``inherited``: how many of those were held by drafts when they died in turn.
    """
    acked = dropped = 0
    lost = inherited
    for status in statuses.values():
        posthumous = status.get("posthumous")
        outcomes = posthumous.get(inc) if isinstance(posthumous, dict) else None
        acked += int(_number(outcomes, "acked"))
        lost += int(_number(outcomes, "lost"))
        dropped += int(_number(outcomes, "dropped"))
    closed = {name: int(_number(document, name)) for name in ("put", "acked", "dropped", "dead", "lost", "held")}
    return {
        "put": closed["put"],
        "acked": closed["acked"] + acked,
        "dropped": closed["dropped"] + dropped,
        "dead": closed["dead"],
        "lost": closed["lost"] + lost,
        "resident": closed["held"] - acked - lost - dropped,
    }


def _number(document: Any, name: str) -> float:
    """A number in a document that another process wrote; 0 for anything else."""
    value = document.get(name, 0) if isinstance(document, dict) else 0
    return value if type(value) in (int, float) else 0
