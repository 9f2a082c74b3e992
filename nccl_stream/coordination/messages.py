"""What processes say to each other: frozen messages with one strict codec.

A message is a flat dataclass; the codec checks every field against its annotation on the way in, so that a hostile or
damaged value becomes a :class:`WireFormatError` and never an attribute of the wrong type.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from nccl_stream.errors import WireFormatError

__all__ = [
    "Admit",
    "Adopt",
    "Announce",
    "AnnouncePiece",
    "End",
    "Estate",
    "Go",
    "GoneNotice",
    "Have",
    "Hello",
    "Leaving",
    "LinkFailed",
    "LinkOpen",
    "Message",
    "Obituary",
    "OwnerState",
    "PieceReady",
    "PieceSkip",
    "Progress",
    "Ready",
    "Refuse",
    "Settle",
    "StopRequest",
    "StreamEnd",
    "StreamOpen",
    "Withdraw",
    "decode_message",
    "encode_message",
    "has_left",
]

MAX_TEXT = 8192
MAX_ITEMS = 65536
MAX_INT = 2**62


@dataclass(frozen=True)
class Message:
    """Base of all control messages."""

    KIND: ClassVar[str] = ""


@dataclass(frozen=True)
class Hello(Message):
    """A new incarnation is in the roster: read it again."""

    KIND: ClassVar[str] = "hello"


@dataclass(frozen=True)
class GoneNotice(Message):
    """An incarnation died, left or failed; the roster has the details."""

    KIND: ClassVar[str] = "gone"
    inc: str


@dataclass(frozen=True)
class LinkOpen(Message):
    """Target to draft: open your side of link generation ``gen`` now."""

    KIND: ClassVar[str] = "open"
    gen: int


@dataclass(frozen=True)
class LinkFailed(Message):
    """Either way: link generation ``gen`` is broken and will not be used again."""

    KIND: ClassVar[str] = "linkfail"
    gen: int
    reason: str


@dataclass(frozen=True)
class Announce(Message):
    """Target to draft: delivery ``delivery`` of a sample is ready to be sent as number ``seq`` of link ``gen``.

    ``serial`` numbers the owner's puts (an id may be used again, a serial never), ``order`` is the sample's place in
    the global order of static assignment, ``failures`` how often consumers have already failed it, ``ref`` the
    reference in its wire form.
    """

    KIND: ClassVar[str] = "announce"
    gen: int
    seq: int
    serial: int
    delivery: int
    order: int
    failures: int
    ref: dict[str, Any]


@dataclass(frozen=True)
class Ready(Message):
    """Draft to target: a slot is reserved and the receive is posted for ``(gen, seq)``; send.

    ``turn`` counts the receives posted on this generation: sends go out in that order.
    """

    KIND: ClassVar[str] = "ready"
    gen: int
    seq: int
    turn: int


@dataclass(frozen=True)
class Refuse(Message):
    """Draft to target: ``(gen, seq)`` will not be received, and why. The seq is consumed.

    ``fault``: the announcement itself is bad (counts as a failure of the sample); otherwise the draft takes no more.
    """

    KIND: ClassVar[str] = "refuse"
    gen: int
    seq: int
    fault: bool
    reason: str


@dataclass(frozen=True)
class Adopt(Message):
    """Draft to target: ``(gen, seq)`` needs no transfer, an earlier delivery of the sample arrived here in full."""

    KIND: ClassVar[str] = "adopt"
    gen: int
    seq: int


@dataclass(frozen=True)
class Admit(Message):
    """Draft to target: memory for a whole window of the streamed sample announced as ``(gen, seq)`` is reserved.

    Its pieces may be announced from now on, the first ones on this generation. The answer is :class:`StreamOpen`, or
    :class:`Withdraw` when the announcement is not current any more.
    """

    KIND: ClassVar[str] = "admit"
    gen: int
    seq: int
    serial: int
    delivery: int


@dataclass(frozen=True)
class StreamOpen(Message):
    """Target to draft: it knows that the streamed sample was admitted there, which may be handed to its consumer."""

    KIND: ClassVar[str] = "popen"
    serial: int
    delivery: int


@dataclass(frozen=True)
class AnnouncePiece(Message):
    """Target to draft: piece ``piece`` of a streamed sample, ``length`` positions, is ready to be sent on ``gen``."""

    KIND: ClassVar[str] = "piece"
    gen: int
    serial: int
    delivery: int
    piece: int
    length: int


@dataclass(frozen=True)
class PieceReady(Message):
    """Draft to target: the receive of that piece is posted, as number ``turn`` of the generation; send."""

    KIND: ClassVar[str] = "pready"
    gen: int
    turn: int
    serial: int
    delivery: int
    piece: int


@dataclass(frozen=True)
class PieceSkip(Message):
    """Draft to target: that piece is not wanted any more; no receive was posted for it."""

    KIND: ClassVar[str] = "pskip"
    gen: int
    serial: int
    delivery: int
    piece: int


@dataclass(frozen=True)
class Progress(Message):
    """Draft to target, cumulative: pieces of this delivery that it has, and those whose memory came back.

    The first one of a generation says where to go on after the link was lost. ``stopped``: the consumer reads no
    further.
    """

    KIND: ClassVar[str] = "progress"
    gen: int
    serial: int
    delivery: int
    have: int
    freed: int
    stopped: bool


@dataclass(frozen=True)
class StreamEnd(Message):
    """Target to draft: the streamed sample has ``pieces`` pieces in all; with an ``error``, the rest never comes."""

    KIND: ClassVar[str] = "pend"
    serial: int
    delivery: int
    pieces: int
    error: str


@dataclass(frozen=True)
class Withdraw(Message):
    """Target to draft: this delivery of a streamed sample is not the current one; nothing comes on it any more."""

    KIND: ClassVar[str] = "withdraw"
    serial: int
    delivery: int


@dataclass(frozen=True)
class Settle(Message):
    """Draft to target: outcomes, each ``[sample_id, delivery, outcome, failures, reason]``.

    Outcomes: ``ack`` (consumed), ``fail`` (consumer failures used up here; counts ``failures`` on the retry budget),
    ``corrupt`` (did not arrive as it was put; counts likewise, and nobody was handed it), ``back`` (handed back, counts
    nothing), ``drop`` (left over by an agreed end).
    """

    KIND: ClassVar[str] = "settle"
    items: list[Any]


@dataclass(frozen=True)
class OwnerState(Message):
    """Target to draft, once closed and at every change: whether more can come.

    ``idle``: nothing waits to be delivered to this draft. ``settled``: every sample of this owner has its outcome.
    ``seen``: how many failed or handed-back items of this draft the owner has taken into account. ``gone``: the drafts
    whose end it has taken into account, the last few of them; see also :func:`has_left`.
    """

    KIND: ClassVar[str] = "owner"
    closed: bool
    error: str
    idle: bool
    settled: bool
    seen: int
    gone: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Have(Message):
    """Draft to the round leader, cumulative: ``samples`` handed out or pending, ``begun`` rounds begun, ``go`` seen."""

    KIND: ClassVar[str] = "have"
    cohort: str
    samples: int
    begun: int
    go: int
    drained: bool
    stop: bool
    error: str


@dataclass(frozen=True)
class Go(Message):
    """Round leader to drafts: rounds below ``rounds`` may be handed out."""

    KIND: ClassVar[str] = "go"
    cohort: str
    rounds: int


@dataclass(frozen=True)
class End(Message):
    """Round leader to everybody: how the cohort, the drafts ``members``, ends; as it stands in the store.

    See :class:`~nccl_stream.coordination.rounds.EndDecision` for the rest.
    """

    KIND: ClassVar[str] = "end"
    cohort: str
    members: list[Any]
    rounds: int
    error: str
    stopped: bool


@dataclass(frozen=True)
class Leaving(Message):
    """Draft to everybody: it takes no more samples and no more part in rounds."""

    KIND: ClassVar[str] = "leaving"
    cohort: str


@dataclass(frozen=True)
class StopRequest(Message):
    """Anybody to drafts: stop at the next agreed round."""

    KIND: ClassVar[str] = "stop"
    reason: str


@dataclass(frozen=True)
class Estate(Message):
    """Draft to all drafts: which samples of a dead owner it holds, and which it has acked.

    To all, because the draft that closes the owner's books may do so after this one, or another leader, has left.
    """

    KIND: ClassVar[str] = "estate"
    owner: str
    held: list[Any]
    acked: list[Any]


@dataclass(frozen=True)
class Obituary(Message):
    """Leading draft to everybody: the books of a dead owner are closed; the store holds the document."""

    KIND: ClassVar[str] = "obituary"
    owner: str


def has_left(inc: str) -> str:
    """How ``OwnerState.gone`` names a draft that takes nothing more but is still there."""
    return f"{inc}/left"


_KINDS: dict[str, type[Message]] = {
    cls.KIND: cls
    for cls in (
        Hello, GoneNotice, LinkOpen, LinkFailed, Announce, Ready, Refuse, Adopt, Admit, AnnouncePiece, PieceReady,
        PieceSkip, Progress, StreamOpen, StreamEnd, Withdraw, Settle, OwnerState, Have, Go, End, Leaving, StopRequest,
        Estate, Obituary,
    )
}  # fmt: skip


_FIELDS = {cls: tuple((each.name, str(each.type)) for each in fields(cls)) for cls in _KINDS.values()}


def encode_message(message: Message) -> dict[str, Any]:
    """The wire form: ``{"k": kind, field: value, ...}``."""
    wire: dict[str, Any] = {"k": message.KIND}
    for name, _ in _FIELDS[type(message)]:
        wire[name] = getattr(message, name)
    return wire


def _check_field(kind: str, name: str, annotation: str, value: Any) -> None:
    ok = False
    if annotation == "int":
        ok = type(value) is int and 0 <= value < MAX_INT
    elif annotation == "bool":
        ok = type(value) is bool
    elif annotation == "str":
        ok = type(value) is str and len(value) <= MAX_TEXT
    elif annotation == "list[Any]":
        ok = type(value) is list and len(value) <= MAX_ITEMS
    elif annotation == "dict[str, Any]":
        ok = type(value) is dict
    if not ok:
        raise WireFormatError(f"message {kind!r}: field {name!r} must be a bounded {annotation}, got {value!r:.80}")


def decode_message(wire: Any) -> Message:
    """Build a message from its wire form.

    Raises:
        WireFormatError: unknown kind, missing or unknown field, wrong type, value out of bounds.
    """
    if type(wire) is not dict or type(wire.get("k")) is not str:
        raise WireFormatError(f"not a message: {wire!r:.80}")
    kind = wire["k"]
    cls = _KINDS.get(kind)
    if cls is None:
        raise WireFormatError(f"unknown message kind {kind!r:.40}")
    values = {name: value for name, value in wire.items() if name != "k"}
    names = {name for name, _ in _FIELDS[cls]}
    if values.keys() != names:
        raise WireFormatError(f"message {kind!r}: fields {sorted(values)} instead of {sorted(names)}")
    for name, annotation in _FIELDS[cls]:
        _check_field(kind, name, annotation, values[name])
    if cls is Settle:
        for item in values["items"]:
            _check_settle_item(item)
    if cls is Estate:
        for item in (*values["held"], *values["acked"]):
            if type(item) is not str or len(item) > MAX_TEXT:
                raise WireFormatError(f"message 'estate': sample ids must be text, got {item!r:.80}")
    return cls(**values)


def _check_settle_item(item: Any) -> None:
    if not (
        type(item) is list
        and len(item) == 5
        and [type(part) for part in item] == [str, int, str, int, str]
        and item[2] in ("ack", "fail", "corrupt", "back", "drop")
        and 0 <= item[1] < MAX_INT
        and 0 <= item[3] < MAX_INT
        and len(item[0]) <= MAX_TEXT
        and len(item[4]) <= MAX_TEXT
    ):
        raise WireFormatError(f"message 'settle': bad item {item!r:.120}")
