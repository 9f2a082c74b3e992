"""A network without threads: what processes report and receive happens one event at a time, in a random order.

A simulation offers its possible events; :func:`run` picks one after the other until none is left. What has not been
reached then never would be: a deadlock shows as a simulation that stands still too early.
"""

from __future__ import annotations

import random
from collections import deque

from nccl_stream.coordination.messages import LinkFailed, LinkOpen


def run(rng: random.Random, offer, *, max_events: int = 50_000) -> int:
    """Pick events until there are none; ``offer()`` lists ``(weight, callable)``. Returns how many were picked."""
    for count in range(max_events):
        events = offer()
        if not events:
            return count
        weights = [weight for weight, _ in events]
        rng.choices([event for _, event in events], weights)[0]()
    raise AssertionError("the simulation does not come to rest")


class Wire:
    """One generation of one link: two ends, each with the transfers posted there.

    ``corrupt`` gets what arrived, as ``(token, buffers)`` of the receiver, and may change it.
    """

    def __init__(self, corrupt=lambda token, buffers: None):
        self.broken = False
        self.corrupt = corrupt
        self.sends, self.recvs = [], []  # (token, buffers)
        self.moved = 0

    def may_move(self):
        return not self.broken and self.moved < min(len(self.sends), len(self.recvs))

    def move(self):
        sent, posted = self.sends[self.moved][1], self.recvs[self.moved][1]
        assert [b.numel() for b in sent] == [b.numel() for b in posted]
        for source, destination in zip(sent, posted, strict=True):
            destination.copy_(source)
        self.corrupt(*self.recvs[self.moved])
        self.moved += 1


class End:
    """One process's side of the link with one peer, through all generations."""

    def __init__(self, peer):
        self.peer = peer
        self.gen = 0
        self.state = "down"
        self.wire = None
        self.gone = False


class Ends:
    """The links of one process, with the interface of ``nccl_stream.ranks.links.Links``; ``side`` 0 sends.

    Args:
        net: all processes by name, each with a ``links``; shared by the whole simulation.
        name: this process.
        owner: as ``LinkOwner``; what it is told comes as events of its own.
        send: posts a message to a peer.
        corrupt: see :class:`Wire`.
    """

    def __init__(self, net, name, owner, send, *, side, corrupt=lambda token, buffers: None):
        self.net, self.name, self.owner, self.side = net, name, owner, side
        self.corrupt = corrupt
        self.post = send
        self.ends = {}
        self.reports = []  # callables, in any order
        self.channels = []  # [wire, gen, peer, done, aborted]: completions of one channel come in order

    # -- what a side calls -------------------------------------------------------------------------------------------

    def add(self, member):
        self.ends.setdefault(member if isinstance(member, str) else member.inc, End(member))

    def tick(self):
        pass

    def stream(self, inc, gen):
        return None

    def remove(self, inc):
        if inc in self.ends:
            self.ends[inc].gone = True
            self.drop(inc, self.ends[inc].gen, tell=False)

    def opening(self, inc, gen):
        end = self.ends.get(inc)
        if end is None or end.gone or gen <= end.gen:
            return
        if end.wire is not None:
            self.abort(end.wire)
        end.gen, end.state, end.wire = gen, "opening", None

    def peer_failed(self, inc, gen, reason):
        self.drop(inc, gen, tell=False)

    def break_link(self, inc, gen, reason):
        self.drop(inc, gen, tell=True)

    def send(self, inc, gen, token, buffers):
        return self.transfer(inc, gen, "sends", token, buffers)

    def recv(self, inc, gen, token, buffers):
        return self.transfer(inc, gen, "recvs", token, buffers)

    def transfer(self, inc, gen, which, token, buffers):
        end = self.ends.get(inc)
        if end is None or end.gen != gen or end.wire is None:
            return False
        getattr(end.wire, which).append((token, buffers))
        return True

    def missing(self):
        return [end.peer for end in self.ends.values() if not end.gone and end.state != "up"]

    def abort_all(self):
        for channel in self.channels:
            channel[4] = True

    # -- what happens by itself --------------------------------------------------------------------------------------

    def drop(self, inc, gen, *, tell):
        end = self.ends.get(inc)
        if end is None or end.gen != gen or end.state == "down":
            return
        wire, end.wire, end.state = end.wire, None, "down"
        if wire is not None:
            self.abort(wire)
        self.reports.append(lambda: self.owner.link_down(inc, gen, "it broke"))
        if tell and not end.gone:
            self.post(inc, LinkFailed(gen, "it broke"))

    def abort(self, wire):
        wire.broken = True
        for channel in self.channels:
            if channel[0] is wire:
                channel[4] = True

    def open(self, end, inc):
        end.gen += 1
        end.state = "opening"
        self.post(inc, LinkOpen(end.gen))

    def establish(self, end, inc):
        peer_links = self.net[inc]
        other = peer_links.ends[self.name]
        wire = Wire(self.corrupt)
        for links, mine, name in ((self, end, inc), (peer_links, other, self.name)):
            mine.wire, mine.state = wire, "up"
            links.channels.append([wire, mine.gen, name, 0, False])
            links.reports.append(lambda links=links, name=name, gen=mine.gen: links.owner.link_up(name, gen))

    def complete(self, channel):
        wire, _, _, done, _ = channel
        channel[3] += 1
        posted = wire.sends if self.side == 0 else wire.recvs
        if self.side == 0 and done >= wire.moved:
            # Sent into a buffer: from now on the memory is the sender's again.
            token, buffers = wire.sends[done]
            wire.sends[done] = token, [b.clone() for b in buffers]
        self.owner.transfer_done(posted[done][0])

    def come_to_rest(self, channel):
        self.channels.remove(channel)
        wire, gen, inc, done, _ = channel
        posted = wire.sends if self.side == 0 else wire.recvs
        self.owner.transfers_failed(inc, gen, [token for token, _ in posted[done:]])

    def report(self, number):
        self.reports.pop(number)()

    def events(self, faults):
        """``faults``: whether links may break now."""
        events = [(3, lambda n=n: self.report(n)) for n in range(len(self.reports))]
        for channel in self.channels:
            wire, gen, inc, done, aborted = channel
            if aborted:
                events.append((2, lambda c=channel: self.come_to_rest(c)))
                continue
            if done < (len(wire.sends) if self.side == 0 else min(wire.moved, len(wire.recvs))):
                events.append((3, lambda c=channel: self.complete(c)))
            if self.side == 0 and wire.may_move():
                events.append((4, wire.move))
            if wire.broken:
                events.append((2, lambda inc=inc, gen=gen: self.drop(inc, gen, tell=True)))
            elif faults:
                events.append((0.05, lambda wire=wire: setattr(wire, "broken", True)))
        if self.side == 0:
            for inc, end in self.ends.items():
                other = self.net[inc].ends.get(self.name) if inc in self.net else None
                if end.gone:
                    continue
                if end.state == "down":
                    events.append((1, lambda end=end, inc=inc: self.open(end, inc)))
                elif end.state == "opening" and other is not None and (other.gen, other.state) == (end.gen, "opening"):
                    events.append((2, lambda end=end, inc=inc: self.establish(end, inc)))
                elif end.state == "opening" and (inc not in self.net or (other is not None and other.gen > end.gen)):
                    events.append((1, lambda end=end, inc=inc: self.drop(inc, end.gen, tell=True)))
        return events


class Fifo:
    """Mail that arrives once and in order, each pair at its own pace."""

    def __init__(self):
        self.boxes = {}

    def send(self, sender, receiver, message):
        self.boxes.setdefault((sender, receiver), deque()).append(message)

    def events(self, deliver):
        return [
            (3, lambda pair=pair, box=box: deliver(*pair, box.popleft())) for pair, box in self.boxes.items() if box
        ]
