"""Bringing links up, and up again: one thread per process, one link at a time.

A target opens links one after another and waits for each; a draft opens them in the order in which it is asked. The
draft at the head of its list therefore always faces a target that is waiting for exactly this link, so that no cycle of
processes waits for each other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nccl_stream.coordination.kv import clone_store
from nccl_stream.coordination.membership import Member
from nccl_stream.coordination.messages import LinkFailed, LinkOpen
from nccl_stream.coordination.node import Node
from nccl_stream.errors import ClosedError, ConfigError, NcclStreamError, VersionMismatchError
from nccl_stream.transport.engine import Channel, TransferEngine
from nccl_stream.transport.link import HostBytes, Link
from nccl_stream.transport.process_group import open_link

__all__ = ["LinkOwner", "Links"]

logger = logging.getLogger(__name__)

RETRY_S = 0.2
RETRY_MAX_S = 5.0
MAX_FAILURES_IN_A_ROW = 6


class LinkOwner(Protocol):
    """Who is told about links. Called on the link thread or a channel's thread, under no lock of :class:`Links`."""

    def link_up(self, inc: str, gen: int) -> None: ...

    def link_down(self, inc: str, gen: int, reason: str) -> None:
        """The link is lost; transfers on it are still coming to rest (see ``transfers_failed``)."""
        ...

    def transfer_done(self, token: object) -> None: ...

    def transfers_failed(self, inc: str, gen: int, tokens: list[object]) -> None:
        """The link has come to rest; these transfers did not finish and touch no memory any more."""
        ...

    def link_given_up(self, member: Member, error: Exception) -> None:
        """No link to this peer can be built: several attempts failed, or one failed for good (versions, devices)."""
        ...


@dataclass
class _Entry:
    member: Member
    gen: int = 0
    channel: Channel | None = None
    state: str = "down"  # down, opening, up
    failures: int = 0
    retry_at: float = 0.0
    suspect_since: int | None = None
    suspected: bool = False
    gone: bool = False
    waiting: list[int] = field(default_factory=list)


class Links:
    """The links of one process.

    Args:
        node: control plane of this process.
        engine: what serves the channels.
        owner: told about everything.
        side: 0 on a target (mints generations, sends), 1 on a draft.
        device: where the buffers lie.
        open_timeout: seconds one attempt may take.
        wrap: what becomes of a link before it is served.
    """

    def __init__(
        self,
        node: Node,
        engine: TransferEngine,
        owner: LinkOwner,
        *,
        side: int,
        device: torch.device,
        open_timeout: float,
        wrap: Callable[[Link], Link] = lambda link: link,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wrap = wrap
        self._node = node
        self._engine = engine
        self._owner = owner
        self._side = side
        self._device = device
        self._open_timeout = open_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._jobs: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="nccl-stream-links", daemon=True)
        self._thread.start()

    # -- asking ------------------------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Know a peer; a target starts linking to it."""
        with self._lock:
            self._entries.setdefault(member.inc, _Entry(member))
        self.tick()

    def remove(self, inc: str) -> None:
        """The peer is gone: end its link."""
        with self._lock:
            entry = self._entries.get(inc)
            if entry is None:
                return
            entry.gone = True
        self._drop(inc, entry.gen, "the peer is gone", tell=False)

    def opening(self, inc: str, gen: int) -> None:
        """Draft side: the target asked for generation ``gen``."""
        with self._lock:
            entry = self._entries.get(inc)
            if entry is None or entry.gone or gen <= entry.gen:
                return
            old, entry.channel = entry.channel, None
            entry.gen, entry.state = gen, "opening"
        if old is not None:
            old.abort()
        self._jobs.put((inc, gen))

    def peer_failed(self, inc: str, gen: int, reason: str) -> None:
        """The peer says that this generation is broken."""
        self._drop(inc, gen, f"the peer reports: {reason}", tell=False)

    def break_link(self, inc: str, gen: int, reason: str) -> None:
        """Give a link up from this side."""
        self._drop(inc, gen, reason, tell=True)

    def send(self, inc: str, gen: int, token: object, buffers: Sequence[torch.Tensor | HostBytes]) -> bool:
        """Queue a transfer to the peer; False when that link is no longer there."""
        return self._queue(inc, gen, lambda channel: channel.send(token, buffers))

    def recv(self, inc: str, gen: int, token: object, buffers: list[torch.Tensor]) -> bool:
        """Queue a transfer from the peer; False when that link is no longer there."""
        return self._queue(inc, gen, lambda channel: channel.recv(token, buffers))

    def _queue(self, inc: str, gen: int, transfer: Callable[[Channel], object]) -> bool:
        channel = self._channel(inc, gen)
        if channel is None:
            return False
        try:
            transfer(channel)
        except ClosedError:
            return False
        return True

    def stream(self, inc: str, gen: int) -> torch.cuda.Stream | None:
        """CUDA stream behind whose work the link's transfers are issued; None on the CPU."""
        channel = self._channel(inc, gen)
        return None if channel is None else channel.stream

    def _channel(self, inc: str, gen: int) -> Channel | None:
        with self._lock:
            entry = self._entries.get(inc)
            return entry.channel if entry is not None and entry.gen == gen else None

    def missing(self) -> list[Member]:
        """Peers without a link now, gone ones left out."""
        with self._lock:
            return [e.member for e in self._entries.values() if not e.gone and e.state != "up"]

    def tick(self) -> None:
        """Target side: start what is due. Called at every heartbeat and on changes."""
        if self._side != 0:
            return
        now = self._clock()
        with self._lock:
            due = [
                entry
                for entry in self._entries.values()
                if not self._closed and not entry.gone and entry.state == "down" and entry.retry_at <= now
            ]
            for entry in due:
                if entry.suspected and not self._node.has_advanced(entry.member.inc, entry.suspect_since):
                    continue
                entry.suspected = False
                entry.gen += 1
                entry.state = "opening"
                self._jobs.put((entry.member.inc, entry.gen))

    # -- the link thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            inc, gen = job
            entry = self._entries[inc]
            if self._is_opening(entry, gen):
                self._open(entry, gen)

    def _is_opening(self, entry: _Entry, gen: int) -> bool:
        with self._lock:
            return self._is_wanted(entry, gen)

    def _is_wanted(self, entry: _Entry, gen: int) -> bool:
        """Whether generation ``gen`` is still to be opened; the lock is held."""
        return entry.gen == gen and entry.state == "opening" and not entry.gone and not self._closed

    def _open(self, entry: _Entry, gen: int) -> None:
        me, peer = self._node.inc, entry.member
        pair = f"{me}-{peer.inc}" if self._side == 0 else f"{peer.inc}-{me}"
        if self._side == 0:
            self._node.send(peer.inc, LinkOpen(gen))
        try:
            link = open_link(
                clone_store(self._node.store),
                f"{self._node.prefix}/link/{pair}/{gen}",
                self._side,
                self._device,
                self._open_timeout,
                peer=peer.label,
                cancelled=lambda: not self._is_opening(entry, gen),
            )
            channel = self._engine.attach(
                self._wrap(link),
                on_done=self._owner.transfer_done,
                on_failed=lambda error, tokens: self._failed(peer.inc, gen, error, tokens),
            )
        except (NcclStreamError, RuntimeError) as exc:
            if not self._is_opening(entry, gen):
                return  # the peer is gone, or has called this attempt off
            with self._lock:
                entry.failures += 1
                failures = entry.failures
            logger.warning("link %s generation %d could not be opened: %s", pair, gen, exc)
            self._drop(peer.inc, gen, str(exc), tell=True)
            if failures >= MAX_FAILURES_IN_A_ROW or isinstance(exc, VersionMismatchError | ConfigError):
                self._owner.link_given_up(peer, exc)
            return
        with self._lock:
            current = self._is_wanted(entry, gen)
            if current:
                entry.channel, entry.state, entry.failures = channel, "up", 0
        if not current:
            channel.abort()
            return
        logger.info("link %s generation %d is up", pair, gen)
        self._owner.link_up(peer.inc, gen)

    def _failed(self, inc: str, gen: int, error: BaseException, tokens: list[object]) -> None:
        self._drop(inc, gen, str(error), tell=True)
        self._owner.transfers_failed(inc, gen, tokens)

    def _drop(self, inc: str, gen: int, reason: str, *, tell: bool) -> None:
        with self._lock:
            entry = self._entries.get(inc)
            if entry is None or entry.gen != gen or entry.state == "down":
                return
            channel, entry.channel, entry.state = entry.channel, None, "down"
            entry.retry_at = self._clock() + min(RETRY_S * 2**entry.failures, RETRY_MAX_S)
            entry.suspected = not entry.gone
            gone, closed = entry.gone, self._closed
        if not gone and not closed:
            logger.warning("link with %s generation %d is lost: %s", entry.member.label, gen, reason)
            since = self._node.suspect(inc)
            with self._lock:
                entry.suspect_since = since
        if channel is not None:
            channel.abort()
        self._owner.link_down(inc, gen, reason)
        if tell and not gone and not closed:
            self._node.send(inc, LinkFailed(gen, reason[:2000]))

    def abort_all(self) -> None:
        """End every link now; from any thread."""
        with self._lock:
            self._closed = True
            channels = [entry.channel for entry in self._entries.values() if entry.channel is not None]
        for channel in channels:
            channel.abort()

    def close(self, timeout: float) -> list[str]:
        """End the link thread and the engine; returns names of threads that could not be joined. Idempotent."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        left = self._engine.close(timeout)
        self._thread.join(min(timeout, 1.0))
        return [*left, *([self._thread.name] if self._thread.is_alive() else [])]
