"""Reliable, ordered mail over inboxes that may lose, double, delay or reorder what is pushed into them.

One numbered stream per direction and pair of processes, with cumulative acknowledgements: lost messages are sent again,
repeated and reordered ones are put right before anybody sees them. The state machines above therefore see every message
of a peer exactly once and in order. Pure: the caller brings the clock and does the I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nccl_stream.coordination.kv import dump_json
from nccl_stream.errors import WireFormatError

__all__ = ["Mailbox", "MailboxStatistics"]

RESEND_S = 1.0  # several control round trips (0.3 ms to a few ms each) and a scheduling hiccup
RESEND_MAX_S = 8.0
ACK_DELAY_S = 0.1  # most acknowledgements ride on a message that goes the other way anyway
PACKET_BYTES = 512 * 1024
REORDER_WINDOW = 65536


@dataclass
class MailboxStatistics:
    """Counts since the mailbox was made."""

    posted: int = 0
    resent: int = 0
    duplicates: int = 0
    reordered: int = 0
    refused: int = 0


@dataclass
class _Peer:
    next_out: int = 0
    unsent: deque[tuple[int, str]] = field(default_factory=deque)
    unacked: deque[tuple[int, str]] = field(default_factory=deque)
    oldest_sent_at: float = 0.0
    resend_s: float = RESEND_S
    resend_now: bool = False
    next_in: int = 0
    early: dict[int, Any] = field(default_factory=dict)
    ack_due_at: float | None = None


class Mailbox:
    """All streams of one process.

    Not thread-safe; the node calls it under its own lock.

    Args:
        name: the incarnation that sends; written on every packet.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._peers: dict[str, _Peer] = {}
        self._gone: set[str] = set()
        self.statistics = MailboxStatistics()

    def post(self, peer: str, message: dict[str, Any]) -> None:
        """Queue a message; dropped when the peer is gone. Raises :class:`WireFormatError` when it is too large."""
        if peer in self._gone:
            return
        text = dump_json(message)
        state = self._peers.setdefault(peer, _Peer())
        state.unsent.append((state.next_out, text))
        state.next_out += 1
        self.statistics.posted += 1

    def forget(self, peer: str) -> None:
        """The peer is gone for good: drop its streams and refuse what still comes from it."""
        self._peers.pop(peer, None)
        self._gone.add(peer)

    def unacknowledged(self) -> int:
        """Messages that some live peer has not confirmed yet."""
        return sum(len(state.unsent) + len(state.unacked) for state in self._peers.values())

    def receive(self, packet: Any, now: float) -> tuple[str, list[Any]]:
        """Take a packet in; returns the sender and the messages that are now in order (still in wire form).

        Raises:
            WireFormatError: the packet is malformed; no message of it was taken.
        """
        sender, first, messages, ack, gap = self._parse(packet)
        if sender in self._gone:
            self.statistics.refused += 1
            return sender, []
        state = self._peers.setdefault(sender, _Peer())
        self._take_ack(state, ack, gap, now)
        if not messages:
            return sender, []
        if first > state.next_in + REORDER_WINDOW:
            raise WireFormatError(f"packet of {sender!r} starts at {first}, expected about {state.next_in}")
        for number, message in enumerate(messages, start=first):
            if number < state.next_in or number in state.early:
                self.statistics.duplicates += 1
            else:
                state.early[number] = message
        ready = []
        while state.next_in in state.early:
            ready.append(state.early.pop(state.next_in))
            state.next_in += 1
        if state.early:
            self.statistics.reordered += 1
            state.ack_due_at = now  # tell the sender about the gap at once
        elif not ready:
            state.ack_due_at = now  # a repeat: our acknowledgement was lost
        elif state.ack_due_at is None:
            state.ack_due_at = now + ACK_DELAY_S
        return sender, ready

    @staticmethod
    def _parse(packet: Any) -> tuple[str, int, list[Any], int, bool]:
        if type(packet) is not dict or packet.keys() != {"from", "first", "msgs", "ack", "gap"}:
            raise WireFormatError(f"not a packet: {packet!r:.80}")
        sender, first, messages, ack = packet["from"], packet["first"], packet["msgs"], packet["ack"]
        if type(sender) is not str or not 0 < len(sender) <= 256 or type(messages) is not list:
            raise WireFormatError("packet with a bad sender or body")
        if type(first) is not int or type(ack) is not int or first < 0 or ack < 0 or type(packet["gap"]) is not bool:
            raise WireFormatError(f"packet of {sender!r} with bad numbers")
        return sender, first, messages, ack, packet["gap"]

    @staticmethod
    def _take_ack(state: _Peer, ack: int, gap: bool, now: float) -> None:
        if ack > state.next_out:
            raise WireFormatError(f"acknowledgement of {ack} messages, only {state.next_out} were posted")
        progressed = False
        while state.unacked and state.unacked[0][0] < ack:
            state.unacked.popleft()
            progressed = True
        if progressed:
            state.resend_s = RESEND_S
            state.oldest_sent_at = now
        if gap and state.unacked and state.unacked[0][0] == ack:
            state.resend_now = True

    def packets(self, now: float) -> list[tuple[str, str]]:
        """What is due to be pushed: ``(peer, packet text)``, each packet at most about 512 KiB."""
        out: list[tuple[str, str]] = []
        for peer, state in self._peers.items():
            if state.unacked and (state.resend_now or now >= state.oldest_sent_at + state.resend_s):
                self.statistics.resent += len(state.unacked)
                state.resend_s = min(state.resend_s * 2, RESEND_MAX_S)
                state.oldest_sent_at = now
                out.extend(self._pack(peer, state, list(state.unacked)))
            state.resend_now = False
            if state.unsent:
                if not state.unacked:
                    state.oldest_sent_at = now
                batch = list(state.unsent)
                state.unacked.extend(batch)
                state.unsent.clear()
                out.extend(self._pack(peer, state, batch))
            if state.ack_due_at is not None and state.ack_due_at <= now:
                out.extend(self._pack(peer, state, []))
        return out

    def _pack(self, peer: str, state: _Peer, batch: list[tuple[int, str]]) -> list[tuple[str, str]]:
        state.ack_due_at = None
        head = f'{{"from":{dump_json(self._name)},"ack":{state.next_in},"gap":{"true" if state.early else "false"}'
        packets: list[tuple[str, str]] = []
        start = 0
        while start < len(batch) or not packets:
            end, size = start, 0
            while end < len(batch) and (end == start or size + len(batch[end][1]) <= PACKET_BYTES):
                size += len(batch[end][1])
                end += 1
            first = batch[start][0] if batch else 0
            body = ",".join(text for _, text in batch[start:end])
            packets.append((peer, f'{head},"first":{first},"msgs":[{body}]}}'))
            start = end
        return packets

    def next_due(self, now: float) -> float | None:
        """Monotonic time at which :meth:`packets` will have something to send again; None when nothing is planned."""
        due: list[float] = []
        for state in self._peers.values():
            if state.unsent or state.resend_now:
                return now
            if state.unacked:
                due.append(state.oldest_sent_at + state.resend_s)
            if state.ack_due_at is not None:
                due.append(state.ack_due_at)
        return min(due) if due else None
