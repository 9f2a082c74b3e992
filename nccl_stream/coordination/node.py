"""The process's seat at the control plane: its threads, its mail, its heartbeat.

Three daemon threads, owned and joined here: the *receiver* pops the inbox, the *steward* sends mail, publishes the
status and watches a few peers, the *watchdog* needs no store and stops the process when the store no longer answers or
the launcher is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from nccl_stream.coordination.kv import ControlStore, dump_json, load_json
from nccl_stream.coordination.mailbox import Mailbox
from nccl_stream.coordination.membership import Gone, Identity, Member, Membership, RunShape, Timing, read_refusal
from nccl_stream.coordination.messages import GoneNotice, Hello, Message, decode_message, encode_message
from nccl_stream.errors import (
    ControlStoreError,
    FencedError,
    LauncherLostError,
    MembershipError,
    NcclStreamError,
    PeerTimeoutError,
    WireFormatError,
)

__all__ = ["Node", "NodeHandler"]

logger = logging.getLogger(__name__)

NUM_WATCHED = 3
LOG_EVERY_S = 10.0
WAIT_ALONE_S = 0.25  # between two looks at who is left


class NodeHandler(Protocol):
    """What a node tells its owner. Called on the node's threads, never under its lock; must not block."""

    def on_message(self, sender: Member, message: Message) -> None: ...

    def on_joined(self, member: Member) -> None: ...

    def on_missed(self, member: Member) -> None:
        """A member that was gone before this process heard of it.

        Told after the living that were found with it; those of one rank in the order of their lives.
        """
        ...

    def on_gone(self, member: Member) -> None: ...

    def on_fatal(self, error: NcclStreamError) -> None: ...

    def on_tick(self, documents: ControlStore) -> None:
        """Steward thread, before any mail goes out, at each heartbeat and soon after :meth:`Node.wake`.

        May use ``documents``; what it writes there precedes the mail.
        """
        ...

    def status(self) -> dict[str, Any]: ...


class Node:
    """One process of the run on the control plane.

    Args:
        store: the ``TCPStore``; the node clones it per thread.
        shape: what all processes agree on.
        identity: this process.
        timing: the clockwork.
        handler: told about mail, members and the end of this node.
    """

    def __init__(
        self,
        store: Store,
        shape: RunShape,
        identity: Identity,
        timing: Timing,
        handler: NodeHandler,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        self.timing = timing
        self._store = store
        self._handler = handler
        self._clock = clock
        # A store call may take as long as the watchdog allows; it is the watchdog that gives up.
        self._call_timeout = max(timing.death_s, 10.0)
        self._root = ControlStore(store, shape.root, timeout=self._call_timeout)
        self._membership = Membership(self._root, shape, identity, timing, clock=clock)
        self.inc = self._membership.inc
        self._cond = threading.Condition()
        self._mail = Mailbox(self.inc)
        self._members: dict[str, Member] = {}
        self._introduced: set[str] = set()
        self._suspects: set[str] = set()
        self._status_seq = 0
        self._state = "new"
        self._wake = False
        self._hurry_roster = False
        self._answered_at = clock()
        self._fatal: NcclStreamError | None = None
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._parent = os.getppid()
        self._hostile = 0

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        return self._membership.epoch

    @property
    def store(self) -> Store:
        return self._store

    @property
    def prefix(self) -> str:
        """Prefix of this epoch's keys."""
        return f"{self.shape.root}/e/{self.epoch}"

    @property
    def hostile_values(self) -> int:
        """Malformed control values that were dropped."""
        return self._hostile

    def join(self) -> None:
        """Enter the run and start the threads; blocks up to ``connect_s`` (see :meth:`Membership.join`)."""
        self._membership.join()
        # Before the clock starts: opening a connection may wait for a name server, on either side.
        inbox, root = self._root.clone(self.prefix), self._root.clone(self.shape.root)
        self._answered_at = self._clock()
        self._state = "up"
        bodies = (lambda: self._receive(inbox), "receiver"), (lambda: self._steward(root), "steward")
        for body, name in (*bodies, (self._watch, "watchdog")):
            thread = threading.Thread(target=self._guard, args=(body,), name=f"nccl-stream-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait_complete(self, deadline: float, *, is_served: Callable[[], bool] = lambda: True) -> None:
        """Block until every slot has a living member, and the handler has been told of all of them.

        A run that was complete once goes on without those who have gone since, if ``is_served`` says that enough are
        left for this process.

        Raises:
            PeerTimeoutError: names the ranks that are missing at ``deadline`` (monotonic seconds).
            MembershipError: a rank could not join, and wrote down why.
        """
        documents = self.documents()
        while True:
            with self._cond:
                self.raise_if_fatal()
                # Only whom the handler knows: it would miss what it has to wait for next.
                known = {*self._introduced, self.inc}
                members = [m for m in self._members.values() if m.inc in known]
                failed = [m for m in self._members.values() if m.gone is not None and m.gone.kind == "failed"]
            alive = {(m.role, m.rank) for m in members if m.gone is None}
            if failed and self.shape.one_launch:
                raise MembershipError(f"the run cannot be formed: {failed[0].label} failed: {failed[0].gone}")
            missing = [slot for slot in self.shape.slots() if slot not in alive]
            if not missing:
                documents.set("formed", True)
                return
            if documents.get("formed") is True:
                # One launch goes down as a whole when a rank dies.
                kinds = ("left",) if self.shape.one_launch else ("left", "died", "failed")
                gone = {(m.role, m.rank) for m in members if m.gone is not None and m.gone.kind in kinds}
                if gone.issuperset(missing) and is_served():
                    return
            else:
                self._raise_if_refused(documents)
            if self._clock() > deadline:
                names = ", ".join(f"{role} rank {rank}" for role, rank in missing[:16])
                raise PeerTimeoutError(
                    f"run {self.shape.run_id!r} is incomplete after {self.timing.connect_s:.0f} s: waiting for "
                    f"{names}. Start them, or raise connect_timeout."
                )
            with self._cond:
                self._hurry_roster = True
                self._notify()
            self._stop.wait(0.05)

    @staticmethod
    def _raise_if_refused(documents: ControlStore) -> None:
        refusal = read_refusal(documents)
        if refusal is not None:
            raise MembershipError(f"the run cannot be formed: {refusal}")

    def raise_if_fatal(self) -> None:
        """Raise the error that ended this node, if one did."""
        if self._fatal is not None:
            raise self._fatal

    def leave(self, kind: str, reason: str, timeout: float = 2.0) -> bool:
        """Say goodbye: flush the mail, set our own tombstone, tell everybody.

        Blocks up to ``timeout`` seconds for the peers' confirmation of the mail and as long again for the rest.

        Returns:
            Whether every living peer has confirmed all mail before the goodbye.
        """
        deadline = self._clock() + timeout
        with self._cond:
            if self._state != "up" or self._fatal is not None:
                self._state = "closed"
                return not self._mail.unacknowledged()
            self._notify()
            while self._mail.unacknowledged() and self._fatal is None and self._clock() < deadline:
                self._cond.wait(0.05)
            unconfirmed = self._mail.unacknowledged()
            if unconfirmed and kind == "left":
                logger.warning("%s: leaves, and its peers have not confirmed %d messages", self.inc, unconfirmed)
            self._state = "leaving"
            self._leave_as = (kind, reason)
            self._notify()
            while self._state == "leaving" and self._fatal is None and self._clock() < deadline + timeout:
                self._cond.wait(0.05)
        return not unconfirmed

    def wait_alone(self) -> None:
        """After :meth:`leave`: block until all others are gone too, however long; for the process that hosts the store.

        Whoever falls silent meanwhile is buried here: the last one has nobody else to do it.
        """
        if self._fatal is not None or self._state != "left":
            return
        membership, root = self._membership, self._root.clone(self.shape.root)
        membership.use(root)
        looked_at, next_log = self._clock(), self._clock()
        while not self._stop.is_set():
            others = [member for member in membership.read_roster().values() if member.gone is None]
            if not others:
                return
            statuses = root.get_many(membership.watch_keys([member.inc for member in others]))[-len(others) :]
            now = self._clock()
            membership.excuse(max(0.0, now - looked_at - self.timing.heartbeat_s))
            looked_at = now
            for member, status in zip(others, statuses, strict=True):
                silent_s = membership.observe(member.inc, status, now)
                if silent_s > self.timing.death_s:
                    membership.bury(member.inc, "died", f"no heartbeat for {silent_s:.1f} s, seen by {self.inc}")
            if now >= next_log:
                next_log = now + LOG_EVERY_S
                names = ", ".join(member.label for member in others[:8])
                logger.info("%s: keeps the store up for %s", self.inc, names)
            self._stop.wait(min(self.timing.heartbeat_s, WAIT_ALONE_S))

    def close(self, timeout: float = 5.0) -> list[str]:
        """Stop the threads; returns the names of those that could not be joined (a frozen store). Idempotent."""
        self._stop.set()
        with self._cond:
            self._state = "closed"
            self._notify()
        if self._threads and self._fatal_is_not_store():
            self._in_background(self._wake_receiver, timeout)
        deadline = self._clock() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self._clock()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _fatal_is_not_store(self) -> bool:
        return not isinstance(self._fatal, ControlStoreError)

    @staticmethod
    def _in_background(call: Callable[[], None], timeout: float) -> None:
        thread = threading.Thread(target=call, name="nccl-stream-waker", daemon=True)
        thread.start()
        thread.join(timeout)

    def _wake_receiver(self) -> None:
        with contextlib.suppress(NcclStreamError):
            self._root.clone(self.prefix).push(f"inbox/{self.inc}", dump_json({"stop": self.inc}))

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except NcclStreamError as exc:
            self._die(exc)
        except Exception as exc:  # a bug here must surface in the user's thread, not end this thread in silence
            logger.exception("%s: control thread failed", self.inc)
            self._die(ControlStoreError(f"control thread failed: {exc!r}"))

    def _die(self, error: NcclStreamError) -> None:
        with self._cond:
            if self._fatal is not None or self._state == "closed":
                return
            self._fatal = error
            self._cond.notify_all()
        self._stop.set()
        logger.error("%s: %s", self.inc, error)
        self._handler.on_fatal(error)

    # -- members and mail --------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Every incarnation known, gone ones included."""
        with self._cond:
            return list(self._members.values())

    def member(self, inc: str) -> Member | None:
        with self._cond:
            return self._members.get(inc)

    def alive(self, role: str) -> list[Member]:
        """Living members of a role, by rank."""
        with self._cond:
            members = [m for m in self._members.values() if m.role == role and m.gone is None]
        return sorted(members, key=lambda m: m.rank)

    def send(self, inc: str, message: Message) -> None:
        """Queue mail; never blocks. Mail to an incarnation that is gone is dropped."""
        with self._cond:
            self._mail.post(inc, encode_message(message))
            self._notify()

    def documents(self) -> ControlStore:
        """A client of its own for the calling thread, rooted at the epoch."""
        return self._root.clone(self.prefix)

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the end of this node."""
        self._stop.wait(seconds)

    def wake(self) -> None:
        """Have the steward call ``on_tick`` soon."""
        with self._cond:
            self._notify()

    def _notify(self) -> None:
        self._wake = True
        self._cond.notify_all()

    def suspect(self, inc: str) -> int | None:
        """Watch a peer closely (its link failed); returns the heartbeat number it must get past to be trusted again."""
        with self._cond:
            self._suspects.add(inc)
            return self._membership.last_seq(inc)

    def has_advanced(self, inc: str, since: int | None) -> bool:
        """Whether the heartbeat of ``inc`` is past ``since``; stops watching it closely when it is."""
        with self._cond:
            seq = self._membership.last_seq(inc)
            if seq is None or (since is not None and seq <= since):
                return False
            self._suspects.discard(inc)
            return True

    # -- receiver thread ---------------------------------------------------------------------------------------------

    def _receive(self, inbox: ControlStore) -> None:
        while not self._stop.is_set():
            raw = inbox.pop(f"inbox/{self.inc}")
            empty: list[Any] = []
            try:
                packet = load_json(raw)
                if type(packet) is dict and packet.get("stop") == self.inc and self._stop.is_set():
                    return
                with self._cond:
                    claimed = packet.get("from") if type(packet) is dict else None
                    stranger = type(claimed) is str and claimed not in self._introduced
                    if stranger:
                        # Mail can overtake our view of the roster, or the handler's: not taken now, it comes again.
                        self._hurry_roster = True
                        sender, wires = "", empty
                    else:
                        sender, wires = self._mail.receive(packet, self._clock())
                    self._notify()
            except WireFormatError as exc:
                self._drop_hostile(exc)
                continue
            for wire in wires:
                self._deliver(sender, wire)

    def _deliver(self, sender: str, wire: Any) -> None:
        try:
            message = decode_message(wire)
        except WireFormatError as exc:
            self._drop_hostile(exc)
            return
        if isinstance(message, Hello | GoneNotice):
            with self._cond:
                self._hurry_roster = True
                self._notify()
            return
        member = self.member(sender)
        if member is not None and member.gone is None:
            self._handler.on_message(member, message)

    def _drop_hostile(self, error: WireFormatError) -> None:
        self._hostile += 1
        logger.warning("%s: dropped a control value: %s", self.inc, error)

    # -- steward thread ----------------------------------------------------------------------------------------------

    def _steward(self, root: ControlStore) -> None:
        membership = self._membership
        membership.use(root)
        documents = root.scoped(f"e/{self.epoch}")
        self._read_roster(membership, greet=True)
        beat_at = self._clock()
        last_loop = self._clock()
        while not self._stop.is_set():
            now = self._clock()
            if now - last_loop > self.timing.fence_s:
                # We stood still (SIGSTOP, a frozen host): others may have buried us meanwhile.
                membership.excuse(now - last_loop)
                self._answered_at = min(self._answered_at, last_loop)
                self._check_own_tombstone(documents)
            last_loop = now
            if now >= beat_at:
                beat_at = now + self.timing.heartbeat_s
                self._beat(root, membership)
            with self._cond:
                hurry, self._hurry_roster = self._hurry_roster, False
            if hurry:
                self._read_roster(membership)
            with self._cond:
                packets = self._mail.packets(self._clock())
            # Between collecting and sending: what a message refers to is in the store before the message is.
            self._handler.on_tick(documents)
            for peer, text in packets:
                documents.push(f"inbox/{peer}", text)
            with self._cond:
                if self._state == "leaving":
                    break
                self._cond.notify_all()
                due = self._mail.next_due(self._clock())
                until = beat_at if due is None else min(beat_at, due)
                if not self._wake:
                    self._cond.wait(max(0.0, until - self._clock()))
                self._wake = False
        self._depart(membership, documents)

    def _beat(self, root: ControlStore, membership: Membership) -> None:
        sent_at = self._clock()
        self._status_seq += 1
        membership.publish_status({**self._handler.status(), "seq": self._status_seq})
        watched = self._watched()
        epoch_doc, rev, own_gone, *statuses = root.get_many(membership.watch_keys(watched))
        answered_at = self._clock()
        if answered_at - sent_at > self.timing.heartbeat_s:
            # We may have stood still with an old answer in hand: nobody's silence in that time counts.
            membership.excuse(answered_at - sent_at)
        self._answered_at = sent_at
        if type(epoch_doc) is dict and epoch_doc.get("epoch") != self.epoch:
            raise FencedError(
                f"epoch {self.epoch} of run {self.shape.run_id!r} was superseded; this process stood still while "
                "the others started anew"
            )
        if own_gone != {"kind": ""}:
            self._check_own_tombstone(root.scoped(f"e/{self.epoch}"))
        for inc, status in zip(watched, statuses, strict=True):
            with self._cond:
                silent_s = membership.observe(inc, status, answered_at)
            if silent_s > self.timing.death_s and membership.bury(
                inc, "died", f"no heartbeat for {silent_s:.1f} s, seen by {self.inc}"
            ):
                self._read_roster(membership)
                for member in self.members():
                    if member.gone is None and member.inc != self.inc:
                        self.send(member.inc, GoneNotice(inc))
        if rev != self._rev:
            self._rev = rev
            self._read_roster(membership)

    def _check_own_tombstone(self, documents: ControlStore) -> None:
        try:
            gone = documents.get(f"gone/{self.inc}")
        except WireFormatError:
            gone = "damaged"  # what stood there before may have been a tombstone
        if gone is not None and gone != {"kind": ""} and self._state == "up":
            reason = gone.get("reason", "") if type(gone) is dict else "its tombstone in the store is damaged"
            raise FencedError(f"this process was declared dead by its peers ({reason}); restart it to go on")

    def _watched(self) -> list[str]:
        """The next few living members after us in the ring of all, and whoever is under suspicion."""
        with self._cond:
            ring = sorted((m for m in self._members.values() if m.gone is None), key=lambda m: (m.role, m.rank, m.inc))
            incs = [m.inc for m in ring]
            suspects = [inc for inc in self._suspects if inc in incs]
        if self.inc not in incs:
            return suspects
        at = incs.index(self.inc)
        ahead = (incs[at + 1 :] + incs[:at])[:NUM_WATCHED]
        return list(dict.fromkeys([*ahead, *suspects]))

    def _read_roster(self, membership: Membership, *, greet: bool = False) -> None:
        roster = membership.read_roster()
        before = {member.inc: member for member in self.members()}  # changed by this thread alone
        # An incarnation whose slot was taken over no longer shows in a slot: it is gone, and may have left in peace.
        for inc, member in before.items():
            if inc not in roster and member.gone is None:
                gone = membership.tombstone(inc) or Gone("died", "its rank was taken over", "")
                roster[inc] = replace(member, gone=gone)
        missed: dict[str, Member] = {}
        for member in roster.values():
            if member.inc not in before:
                missed |= {old.inc: old for old in membership.predecessors(member, before)}
        roster = {**missed, **roster}
        with self._cond:
            self._members = {**before, **roster}
            joined = [m for inc, m in roster.items() if inc not in before]
            lost = [m for inc, m in roster.items() if m.gone is not None and inc in before and before[inc].gone is None]
            for member in lost:
                self._mail.forget(member.inc)
                self._suspects.discard(member.inc)
            for member in joined:
                if member.gone is not None:
                    self._mail.forget(member.inc)
            self._cond.notify_all()
        if self._state == "up" and any(member.inc == self.inc for member in lost):
            # First of all: what the others did since is for those who still belong to them.
            raise FencedError("this process was declared dead by its peers; restart it to go on")
        for member in sorted(joined, key=lambda member: member.gone is not None):
            if member.inc == self.inc:
                continue
            if greet and member.gone is None:
                self.send(member.inc, Hello())
            logger.info("%s: sees %s%s", self.inc, member.label, "" if member.gone is None else " (gone)")
            if member.gone is None:
                self._handler.on_joined(member)
            else:
                self._handler.on_missed(member)
            with self._cond:
                self._introduced.add(member.inc)
                self._cond.notify_all()
        for member in lost:
            if member.inc == self.inc:
                continue
            level = logging.INFO if member.gone is not None and member.gone.kind == "left" else logging.WARNING
            logger.log(level, "%s: %s is gone: %s", self.inc, member.label, member.gone)
            self._handler.on_gone(member)

    def _depart(self, membership: Membership, documents: ControlStore) -> None:
        with self._cond:
            leaving = self._state == "leaving"
        if not leaving:
            return
        kind, reason = self._leave_as
        membership.publish_status({**self._handler.status(), "seq": self._status_seq + 1})
        membership.bury(self.inc, kind, reason)
        for member in self.members():
            if member.gone is None and member.inc != self.inc:
                self.send(member.inc, GoneNotice(self.inc))
        with self._cond:
            packets = self._mail.packets(self._clock())
        for peer, text in packets:
            documents.push(f"inbox/{peer}", text)
        roster = membership.read_roster()
        if self.shape.one_launch or not any(m.role == "target" and m.gone is None for m in roster.values()):
            membership.declare_over()
        documents.get("rev")  # an answered call: what was pushed before it has reached the server
        with self._cond:
            self._state = "left"
            self._cond.notify_all()

    _rev: Any = None
    _leave_as: tuple[str, str] = ("left", "")

    # -- watchdog thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        period = min(0.25, self.timing.fence_s / 8)
        looked_at = excused_until = self._clock()
        while not self._stop.wait(period):
            if self._state != "up":
                return
            now = self._clock()
            if now - looked_at > self.timing.fence_s / 2:
                # It is we who stood still. What the store has done meanwhile is not known, and whether we were buried
                # is the steward's next question to it.
                excused_until = now + self.timing.fence_s
            looked_at = now
            silent_s = now - self._answered_at
            if silent_s > self.timing.fence_s and now > excused_until:
                raise ControlStoreError(
                    f"the control store has not answered for {silent_s:.1f} s (limit {self.timing.fence_s:.1f} s): its "
                    "host is down, frozen or cut off. This process stops before its peers may take over its samples."
                )
            if launched and os.getppid() != self._parent:
                raise LauncherLostError(
                    f"the launcher (pid {self._parent}) of this rank is gone; stopping instead of living on without it"
                )
