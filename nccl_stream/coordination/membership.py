"""Who is in the run: epochs, roster, tombstones and the rules by which a process is held to be alive.

All of it is documents in the store, changed by compare-and-set, so that no process is needed to keep it. A newcomer
trusts an epoch only while it sees a heartbeat in it advance (or when it founded the epoch itself): a document that an
earlier life left behind never does.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nccl_stream.coordination.kv import ControlStore
from nccl_stream.errors import ConfigError, MembershipError, WireFormatError

__all__ = ["Gone", "Identity", "Member", "Membership", "RunShape", "Timing", "read_refusal"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05


@dataclass(frozen=True)
class Timing:
    """The control plane's clockwork, in seconds.

    Attributes:
        heartbeat_s: period at which a process publishes its status and looks at a few others.
        death_s: an observer that has seen no advance for this long buries the process.
        fence_s: a process whose last *answered* call was sent longer ago stops itself. Below ``death_s``, so that a
            cut-off process has stopped before anybody hands its samples on.
        connect_s: forming the run, and each wait for a peer during it.
    """

    heartbeat_s: float = 1.0
    death_s: float = 20.0
    fence_s: float = 12.0
    connect_s: float = 300.0


@dataclass(frozen=True)
class RunShape:
    """What all processes of a run must agree on before anything is exchanged.

    Attributes:
        run_id: name of the run; part of every key.
        scope: separates lives of one launch on the same store (torchrun's restart count), else ``"0"``.
        num_targets: target ranks.
        num_drafts: draft ranks.
        one_launch: all ranks start and restart together; nobody joins a run that has begun.
        shared_config: configuration values that must be equal everywhere.
    """

    run_id: str
    scope: str
    num_targets: int
    num_drafts: int
    one_launch: bool
    shared_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return f"nccl_stream/{self.run_id}/{self.scope}"

    def slots(self) -> list[tuple[str, int]]:
        """Every (role, rank) of the run, targets first."""
        return [("target", rank) for rank in range(self.num_targets)] + [
            ("draft", rank) for rank in range(self.num_drafts)
        ]


@dataclass(frozen=True)
class Identity:
    """This process as the others will know it."""

    role: str
    rank: int
    host: str
    pid: int
    device: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Gone:
    """Why an incarnation is no longer a member: ``died``, ``left`` or ``failed``."""

    kind: str
    reason: str
    by: str


@dataclass(frozen=True)
class Member:
    """One incarnation in the roster."""

    inc: str
    role: str
    rank: int
    host: str
    pid: int
    device: str
    versions: dict[str, str]
    gone: Gone | None = None

    @property
    def label(self) -> str:
        """How messages name it to people."""
        return f"{self.role} rank {self.rank} ({self.host} pid {self.pid})"


def _inc_prefix(role: str, rank: int) -> str:
    return f"{role[0]}{rank}-"


def _parse_member(value: Any, role: str, rank: int) -> Member | None:
    """The member in a slot document; None for an empty slot."""
    if isinstance(value, WireFormatError):
        raise value
    if value == {"inc": ""}:
        return None
    names = {"inc", "role", "rank", "host", "pid", "device", "versions"}
    if type(value) is not dict or value.keys() != names:
        raise WireFormatError(f"roster slot {role}/{rank} is not a member document")
    texts = [value["inc"], value["role"], value["host"], value["device"]]
    if any(type(text) is not str or not text or len(text) > 256 for text in texts):
        raise WireFormatError(f"roster slot {role}/{rank} has a bad text field")
    versions = value["versions"]
    if type(versions) is not dict or any(type(v) is not str or len(v) > 128 for v in versions.values()):
        raise WireFormatError(f"roster slot {role}/{rank} has bad versions")
    if (
        [value["role"], value["rank"]] != [role, rank]
        or not value["inc"].startswith(_inc_prefix(role, rank))
        or type(value["rank"]) is not int
        or type(value["pid"]) is not int
    ):
        raise WireFormatError(f"roster slot {role}/{rank} describes somebody else")
    return Member(**value)


def _parse_gone(value: Any) -> Gone | None:
    if type(value) is dict and value == {"kind": ""}:
        return None
    if (
        type(value) is dict
        and value.keys() == {"kind", "reason", "by"}
        and value["kind"] in ("died", "left", "failed")
        and type(value["reason"]) is str
        and type(value["by"]) is str
    ):
        return Gone(value["kind"], value["reason"][:2000], value["by"][:256])
    raise WireFormatError("damaged tombstone")


def read_refusal(documents: ControlStore) -> str | None:
    """Why a rank could not join, when one wrote that down."""
    value = documents.get("refused")
    if type(value) is dict and type(value.get("reason")) is str:
        return str(value["reason"])[:2000]
    return None


class Membership:
    """Joining, the roster and tombstones; called from one thread at a time with that thread's client.

    Args:
        root: client rooted at ``shape.root``.
        shape: what the run looks like.
        identity: this process.
        timing: the clockwork.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        root: ControlStore,
        shape: RunShape,
        identity: Identity,
        timing: Timing,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root = root
        self.shape = shape
        self.identity = identity
        self._timing = timing
        self._clock = clock
        self._sleep = sleep
        self.inc = _inc_prefix(identity.role, identity.rank) + uuid.uuid4().hex[:12]
        self.epoch = ""
        self._seen: dict[str, tuple[int, float]] = {}
        self._last_in_slot: dict[tuple[str, int], Member] = {}
        self._last_gone: dict[str, Gone] = {}

    def use(self, root: ControlStore) -> None:
        """From now on called from another thread, with that thread's client."""
        self._root = root

    # -- joining ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Enter the current epoch, or found one; returns once this incarnation is in the roster.

        Blocks up to ``connect_s``.

        Raises:
            MembershipError: another live process holds this (role, rank), or no epoch could be entered in time.
            ConfigError: this process and the run disagree on the configuration.
        """
        deadline = self._clock() + self._timing.connect_s
        why = "the store held no epoch"
        waits_for = ""
        while self._clock() < deadline:
            document = self._root.get("epoch")
            if document is None:
                if self._found(document):
                    return
                continue
            epoch = self._check_epoch(document)
            over, slots = self._is_over(document), self._slots_of(document)
            there = self._still_there(epoch, slots) if over else []
            if over and not there:
                if self._found(document):
                    return
                continue
            if over:
                # Those who are still in it would be cut off by a new epoch.
                names = ", ".join(there[:8])
                if waits_for != names:
                    waits_for = names
                    logger.info("%s: waits for %s to leave the last run of this id", self.inc, names)
            why = f"its last life is over, and {waits_for} did not leave" if over else f"epoch {epoch} looked dead"
            alive = self._looks_alive(epoch, slots, deadline)
            if not alive:
                # Looking for too short a time proves nothing, and a new epoch would end the run of those who live.
                if alive is not None and self._found(document):
                    return
                continue
            if over:
                self._sleep(_POLL_S)
                continue
            self._check_config(document)
            self.epoch = epoch
            if self._take_slot(deadline):
                return
            why = f"{self.identity.role} rank {self.identity.rank} of epoch {epoch} has been in use"
            self._sleep(_POLL_S)
        raise MembershipError(
            f"{self.identity.role} rank {self.identity.rank} could not join run {self.shape.run_id!r} within "
            f"{self._timing.connect_s:.0f} s: {why}"
        )

    def _epoch_document(self, epoch: str) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "minter": self.inc,
            "num_targets": self.shape.num_targets,
            "num_drafts": self.shape.num_drafts,
            "config": dict(self.shape.shared_config),
        }

    def _found(self, previous: Any) -> bool:
        epoch = uuid.uuid4().hex[:16]
        if not self._root.compare_set("epoch", previous, self._epoch_document(epoch)):
            return False
        self.epoch = epoch
        empty = {f"e/{epoch}/slot/{role}/{rank}": {"inc": ""} for role, rank in self.shape.slots()}
        self._root.set_many({**empty, f"e/{epoch}/rev": self.inc})
        return self._take_slot(self._clock() + self._timing.connect_s)

    def _check_epoch(self, document: Any) -> str:
        if (
            type(document) is not dict
            or document.keys() != self._epoch_document("").keys()
            or type(document["epoch"]) is not str
            or not document["epoch"].isalnum()
            or type(document["minter"]) is not str
            or type(document["config"]) is not dict
        ):
            raise WireFormatError(f"the store's epoch document of run {self.shape.run_id!r} is damaged")
        return str(document["epoch"])

    def _is_over(self, document: Any) -> bool:
        return self._root.get(f"e/{self._check_epoch(document)}/over") is not None

    def _slots_of(self, document: dict[str, Any]) -> list[tuple[str, int]]:
        """The slots of an epoch, which may be that of a run of another size."""
        counts = [document["num_targets"], document["num_drafts"]]
        if any(type(count) is not int or not 0 < count <= 65536 for count in counts):
            return self.shape.slots()
        return replace(self.shape, num_targets=counts[0], num_drafts=counts[1]).slots()

    def _still_there(self, epoch: str, slots: list[tuple[str, int]]) -> list[str]:
        """Members of an epoch that have no tombstone, as people know them."""
        there: list[str] = []
        for role, rank in slots:
            with contextlib.suppress(WireFormatError):  # what is damaged holds nobody up
                holder = _parse_member(self._root.get(f"e/{epoch}/slot/{role}/{rank}") or {"inc": ""}, role, rank)
                if holder is not None and self._root.get(f"e/{epoch}/gone/{holder.inc}") == {"kind": ""}:
                    there.append(holder.label)
        return there

    def _looks_alive(self, epoch: str, slots: list[tuple[str, int]], deadline: float) -> bool | None:
        """Whether some member's heartbeat advances while we look; None: no time left to tell.

        Looks as long as anybody must before it declares a death: a run that only stands still is not dead.
        """
        looked_at = self._clock()
        full = looked_at + self._timing.death_s + self._timing.heartbeat_s
        first: dict[str, Any] = {}
        while True:
            now = self._clock()
            full += self._not_looked(looked_at, now)
            looked_at = now
            if now >= min(deadline, full):
                return False if full <= deadline else None
            for role, rank in slots:
                slot = self._root.get(f"e/{epoch}/slot/{role}/{rank}")
                if type(slot) is not dict or not slot.get("inc"):
                    continue
                status = self._root.get(f"e/{epoch}/status/{slot['inc']}")
                if status is None:
                    continue
                if slot["inc"] in first and first[slot["inc"]] != status:
                    return True
                first.setdefault(slot["inc"], status)
            if self._root.get(f"e/{epoch}/over") is not None and not self._still_there(epoch, slots):
                return False
            self._sleep(_POLL_S)

    def _not_looked(self, looked_at: float, now: float) -> float:
        """Between two looks at most one heartbeat of silence counts: for the rest it was we who stood still."""
        return max(0.0, now - looked_at - self._timing.heartbeat_s)

    def _check_config(self, document: dict[str, Any]) -> None:
        ours = self._epoch_document(document["epoch"])
        differences = [
            f"{name}: {ours[name]} here, {document[name]} in the run"
            for name in ("num_targets", "num_drafts")
            if ours[name] != document[name]
        ]
        here, there = ours["config"], document["config"]
        differences += [
            f"{name}: {here.get(name)!r} here, {there.get(name)!r} in the run"
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]
        if differences:
            message = (
                f"{self.identity.role} rank {self.identity.rank} disagrees with run {self.shape.run_id!r} on "
                f"{'; '.join(differences)}. Pass the same values on every rank."
            )
            who = {"role": self.identity.role, "rank": self.identity.rank}
            self._root.set(f"e/{document['epoch']}/refused", {"reason": message[:2000], **who})
            raise ConfigError(message)

    def _take_slot(self, deadline: float) -> bool:
        """Put this incarnation into its roster slot; False when the slot can never be ours in this epoch."""
        key = f"slot/{self.identity.role}/{self.identity.rank}"
        mine = {"inc": self.inc, **asdict(self.identity)}
        self._set(f"gone/{self.inc}", {"kind": ""})
        self.publish_status({"seq": 0})
        current = self._get(key)
        holder = _parse_member(current, self.identity.role, self.identity.rank)
        if holder is not None:
            if self.shape.one_launch:
                return False
            if self.tombstone(holder.inc) is None and not self._outlive(holder, deadline):
                raise MembershipError(
                    f"{holder.label} is alive and holds {self.identity.role} rank {self.identity.rank} of run "
                    f"{self.shape.run_id!r}; start this process under another rank"
                )
            # Before its rank is ours: whoever comes later learns of it from here alone.
            self._set(f"before/{self.inc}", current)
        if not self.documents.compare_set(key, current, mine):
            return False
        if current is not None and self._get("over") is not None:
            self.documents.compare_set(key, mine, current)  # the last ones left while this one came
            return False
        refused, who = self._get("refused"), (self.identity.role, self.identity.rank)
        if type(refused) is dict and (refused.get("role"), refused.get("rank")) == who:
            self.documents.delete("refused")  # it was this rank that had been mistyped
        self.touch_roster()
        return True

    def _outlive(self, holder: Member, deadline: float) -> bool:
        """Wait until ``holder`` is gone; buries it when its heartbeat stands still for ``death_s``."""
        since = looked_at = self._clock()
        last = self._get(f"status/{holder.inc}")
        advanced = 0
        while (now := self._clock()) < deadline:
            since += self._not_looked(looked_at, now)
            looked_at = now
            if self.tombstone(holder.inc) is not None:
                return True
            status = self._get(f"status/{holder.inc}")
            if status != last:
                since, last, advanced = now, status, advanced + 1
                if advanced > 2 + self._timing.death_s / self._timing.heartbeat_s:
                    return False
            elif now - since > self._timing.death_s:
                self.bury(holder.inc, "died", f"its rank was taken over after {self._timing.death_s:.1f} s of silence")
                return True
            self._sleep(_POLL_S)
        return False

    # -- documents of the epoch --------------------------------------------------------------------------------------

    @property
    def documents(self) -> ControlStore:
        """This thread's client, rooted at the epoch."""
        return self._root.scoped(f"e/{self.epoch}")

    def _get(self, key: str) -> Any:
        return self.documents.get(key)

    def _set(self, key: str, value: Any) -> None:
        self.documents.set(key, value)

    def touch_roster(self) -> None:
        """Tell everybody, at their next heartbeat, to read the roster again."""
        self._set("rev", uuid.uuid4().hex)

    def publish_status(self, status: dict[str, Any]) -> None:
        self._set(f"status/{self.inc}", status)

    def tombstone(self, inc: str) -> Gone | None:
        """Why ``inc`` is no longer a member; None while it is, or when the tombstone is damaged."""
        try:
            value = self._get(f"gone/{inc}")
            return None if value is None else _parse_gone(value)
        except WireFormatError:
            return None

    def bury(self, inc: str, kind: str, reason: str) -> bool:
        """Set the one tombstone of ``inc``; True when this call set it. All obey it, the victim included.

        A damaged one is no tombstone: it is replaced, or nobody could ever bury ``inc``.
        """
        wrote = self.documents.replace(
            f"gone/{inc}",
            {"kind": kind, "reason": reason[:2000], "by": f"{self.inc}/{uuid.uuid4().hex[:6]}"},
            unless=lambda value: _parse_gone(value) is not None,
        )
        if wrote:
            self.touch_roster()
        return wrote

    def read_roster(self) -> dict[str, Member]:
        """Every slot's incarnation with its tombstone, if it has one. What is damaged reads as it did before."""
        shape = self.shape
        values = self._root.get_many([f"e/{self.epoch}/slot/{role}/{rank}" for role, rank in shape.slots()])
        members: list[Member] = []
        for slot, value in zip(shape.slots(), values, strict=True):
            last = self._last_in_slot.get(slot)
            try:
                member = _parse_member(value, *slot)
            except WireFormatError:
                member = last
            # Whoever takes a slot has written where its tombstone shall stand: a slot that names another one is a lie.
            if member is not None and (last is None or member.inc != last.inc) and not self._can_be_buried(member.inc):
                member = last
            if member is not None:
                self._last_in_slot[slot] = member
                members.append(member)
        gones = self._root.get_many([f"e/{self.epoch}/gone/{member.inc}" for member in members])
        roster: dict[str, Member] = {}
        for member, value in zip(members, gones, strict=True):
            try:
                gone = _parse_gone(value)
            except WireFormatError:
                gone = self._last_gone.get(member.inc)  # who is gone does not come back
            if gone is not None:
                self._last_gone[member.inc] = gone
            roster[member.inc] = replace(member, gone=gone)
        return roster

    def _can_be_buried(self, inc: str) -> bool:
        return self.documents.exists([f"gone/{inc}"])

    def predecessors(self, member: Member, known: Container[str]) -> list[Member]:
        """Who held the slot of ``member`` before it, oldest first, back to the last one in ``known``; all are gone."""
        chain: list[Member] = []
        seen = {member.inc}
        while True:
            try:
                before = _parse_member(self._get(f"before/{member.inc}") or {"inc": ""}, member.role, member.rank)
            except WireFormatError as exc:
                logger.error("who was %s %d before %s is not known: %s", member.role, member.rank, member.inc, exc)
                break
            if before is None or before.inc in seen or before.inc in known:
                break
            if not self.documents.exists([f"gone/{before.inc}", f"status/{before.inc}"]):
                logger.error("%s, named as a predecessor of %s, never was a member", before.inc, member.inc)
                break
            member = replace(before, gone=self.tombstone(before.inc) or Gone("died", "its rank was taken over", ""))
            seen.add(member.inc)
            chain.append(member)
        return chain[::-1]

    def declare_over(self) -> None:
        """Nobody may join this epoch any more."""
        self._set("over", {"by": self.inc})

    # -- watching ----------------------------------------------------------------------------------------------------

    def watch_keys(self, watched: list[str]) -> list[str]:
        """Keys of one watch call, relative to the root: the epoch document, the roster's revision, some statuses."""
        epoch = f"e/{self.epoch}"
        return ["epoch", f"{epoch}/rev", f"{epoch}/gone/{self.inc}", *(f"{epoch}/status/{inc}" for inc in watched)]

    def observe(self, inc: str, status: Any, now: float) -> float:
        """Take note of a status that was read at ``now``; returns for how long its heartbeat has stood still, in s."""
        seq = status.get("seq") if type(status) is dict else None
        if type(seq) is not int:
            seq = -1
        last = self._seen.get(inc)
        if last is None or last[0] != seq:
            self._seen[inc] = (seq, now)
            return 0.0
        return now - last[1]

    def excuse(self, seconds: float) -> None:
        """We were not looking for ``seconds`` (we slept): nobody's silence in that time counts."""
        self._seen = {inc: (seq, at + seconds) for inc, (seq, at) in self._seen.items()}

    def last_seq(self, inc: str) -> int | None:
        """Heartbeat number last seen of ``inc``."""
        seen = self._seen.get(inc)
        return None if seen is None else seen[0]
