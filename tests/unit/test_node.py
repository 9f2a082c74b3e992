"""Two real nodes in one process, on a real store."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from nccl_stream.coordination.kv import ControlStore, dump_json, tcp_store
from nccl_stream.coordination.membership import Identity, RunShape, Timing
from nccl_stream.coordination.messages import Go, StopRequest
from nccl_stream.coordination.node import Node
from nccl_stream.errors import ControlStoreError, FencedError, PeerTimeoutError

PATIENCE = 30.0
CALM = Timing(heartbeat_s=0.1, death_s=60.0, fence_s=30.0, connect_s=20.0)  # nobody dies, however busy the machine
DEADLY = Timing(heartbeat_s=0.1, death_s=5.0, fence_s=3.0, connect_s=20.0)


class Handler:
    """Writes down what it is told."""

    def __init__(self):
        self.cond = threading.Condition()
        self.messages, self.joined, self.missed, self.gone, self.fatal = [], [], [], [], []
        self.ticks = 0

    def note(self, where, what):
        with self.cond:
            where.append(what)
            self.cond.notify_all()

    def on_message(self, sender, message):
        assert sender.inc in [member.inc for member in self.joined]  # nobody is heard before he was introduced
        self.note(self.messages, (sender.inc, message))

    def on_joined(self, member):
        self.note(self.joined, member)

    def on_missed(self, member):
        self.note(self.missed, member)

    def on_gone(self, member):
        self.note(self.gone, member)

    def on_fatal(self, error):
        self.note(self.fatal, error)

    def on_tick(self, documents):
        self.ticks += 1

    def status(self):
        return {"ticks": self.ticks}

    def wait_for(self, condition):
        with self.cond:
            assert self.cond.wait_for(condition, PATIENCE), vars(self)


class Pair:
    """A target and a draft that know each other."""

    def __init__(self, raw, timing=CALM, handlers=None):
        self.shape = RunShape("run", "0", 1, 1, False)
        self.raw = raw
        self.handlers = handlers or [Handler(), Handler()]
        self.nodes = [
            Node(raw.clone(), self.shape, Identity(role, 0, "host", 1, "cpu", {}), timing, handler)
            for role, handler in zip(("target", "draft"), self.handlers, strict=True)
        ]

    def join(self):
        for node in self.nodes:
            node.join()
        for node in self.nodes:
            node.wait_complete(time.monotonic() + PATIENCE)
        for handler in self.handlers:
            assert handler.joined

    def close(self):
        left = [node.close(5.0) for node in self.nodes]
        assert left == [[], []]


@pytest.fixture
def pair():
    pair = Pair(tcp_store("127.0.0.1", 0, serve=True, timeout=10.0))
    pair.join()
    yield pair
    pair.close()


def test_nodes_meet_in_one_epoch_and_know_each_other(pair):
    a, b = pair.nodes
    assert a.epoch == b.epoch
    assert [m.inc for m in a.alive("draft")] == [b.inc]
    assert [m.inc for m in b.alive("target")] == [a.inc]
    assert a.member(b.inc).label.startswith("draft rank 0")


def test_messages_arrive_once_and_in_order_both_ways(pair):
    a, b = pair.nodes
    for number in range(300):
        a.send(b.inc, Go("c", number))
        b.send(a.inc, StopRequest(str(number)))
    for handler in pair.handlers:
        handler.wait_for(lambda h=handler: len(h.messages) >= 300)
    assert pair.handlers[1].messages == [(a.inc, Go("c", n)) for n in range(300)]
    assert pair.handlers[0].messages == [(b.inc, StopRequest(str(n))) for n in range(300)]


def test_hostile_mail_is_dropped_and_counted_and_the_rest_goes_on(pair):
    a, b = pair.nodes
    inbox = ControlStore(pair.raw, a.prefix, timeout=10.0)
    bad = [7, "x", [], {"from": a.inc}, {"from": a.inc, "first": 0, "msgs": 3, "ack": 0, "gap": False}]
    for value in bad:
        inbox.push(f"inbox/{b.inc}", dump_json(value))
    pair.raw.queue_push(f"{a.prefix}/inbox/{b.inc}", b"\xff\x00 not json")
    a.send(b.inc, Go("c", 1))
    pair.handlers[1].wait_for(lambda: pair.handlers[1].messages)
    assert pair.handlers[1].messages == [(a.inc, Go("c", 1))]
    assert b.hostile_values >= len(bad)
    assert not pair.handlers[1].fatal


def test_mail_of_a_stranger_is_not_taken(pair):
    a, b = pair.nodes
    packet = {
        "from": "t9-stranger",
        "first": 0,
        "msgs": [{"k": "go", "cohort": "c", "rounds": 9}],
        "ack": 0,
        "gap": False,
    }
    ControlStore(pair.raw, a.prefix, timeout=10.0).push(f"inbox/{b.inc}", dump_json(packet))
    a.send(b.inc, Go("c", 1))
    pair.handlers[1].wait_for(lambda: pair.handlers[1].messages)
    assert pair.handlers[1].messages == [(a.inc, Go("c", 1))]


def test_what_was_sent_before_leaving_arrives_and_the_end_is_known(pair):
    a, b = pair.nodes
    for number in range(20):
        a.send(b.inc, Go("c", number))
    a.leave("left", "done")
    pair.handlers[1].wait_for(lambda: pair.handlers[1].gone)
    assert [message.rounds for _, message in pair.handlers[1].messages] == list(range(20))
    gone = pair.handlers[1].gone[0]
    assert (gone.inc, gone.gone.kind, gone.gone.reason) == (a.inc, "left", "done")
    assert b.alive("target") == []
    b.send(a.inc, Go("c", 1))  # dropped, not kept for ever
    assert not pair.handlers[1].fatal


def test_buried_node_stops_itself_and_the_others_see_it_gone(pair):
    a, b = pair.nodes
    documents = a.documents()
    assert documents.compare_set(f"gone/{b.inc}", {"kind": ""}, {"kind": "died", "reason": "by hand", "by": "x"})
    documents.set("rev", "touched")
    pair.handlers[1].wait_for(lambda: pair.handlers[1].fatal)
    assert isinstance(pair.handlers[1].fatal[0], FencedError)
    with pytest.raises(FencedError):
        b.raise_if_fatal()
    pair.handlers[0].wait_for(lambda: pair.handlers[0].gone)
    assert pair.handlers[0].gone[0].gone.reason == "by hand"
    assert not pair.handlers[0].fatal


def test_silent_node_is_buried_by_its_watcher():
    pair = Pair(tcp_store("127.0.0.1", 0, serve=True, timeout=10.0), DEADLY)
    pair.join()
    b = pair.nodes[1]
    b._stop.set()  # its threads end without a word, as in a process that was killed
    b.wake()
    pair.handlers[0].wait_for(lambda: pair.handlers[0].gone)
    gone = pair.handlers[0].gone[0]
    assert (gone.inc, gone.gone.kind) == (b.inc, "died")
    assert "no heartbeat" in gone.gone.reason
    pair.close()


def test_incomplete_run_names_who_is_missing():
    raw = tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)
    node = Node(raw, RunShape("run", "0", 1, 3, False), Identity("draft", 1, "h", 1, "cpu", {}), CALM, Handler())
    node.join()
    try:
        with pytest.raises(PeerTimeoutError, match="target rank 0, draft rank 0, draft rank 2"):
            node.wait_complete(time.monotonic() + 0.3)
    finally:
        assert node.close(5.0) == []


class Seat(Node):
    """A node of a run of one target and two drafts."""

    def __init__(self, raw, role, rank, *, one_launch=False):
        self.heard = Handler()
        identity = Identity(role, rank, "h", 1, "cpu", {})
        super().__init__(raw.clone(), RunShape("run", "0", 1, 2, one_launch), identity, CALM, self.heard)
        self.join()


@pytest.mark.parametrize(("one_launch", "kind"), [(False, "died"), (False, "left"), (True, "left")])
def test_run_that_was_complete_goes_on_without_who_is_gone(one_launch, kind):
    raw = tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)
    first = [Seat(raw, role, rank, one_launch=one_launch) for role, rank in (("target", 0), ("draft", 0))]
    gone = Seat(raw, "draft", 1, one_launch=one_launch)
    for node in (gone, first[0]):
        node.wait_complete(time.monotonic() + PATIENCE)
    gone.leave(kind, "")
    with pytest.raises(PeerTimeoutError, match="draft rank 1"):
        first[1].wait_complete(time.monotonic() + 0.3, is_served=lambda: False)
    first[1].wait_complete(time.monotonic() + PATIENCE)
    for node in (*first, gone):
        assert node.close(5.0) == []


def test_newcomer_is_told_who_was_gone_before_it_after_those_who_are_there():
    raw = tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)
    target, lives = Seat(raw, "target", 0), []
    for _ in range(3):
        lives.append(Seat(raw, "draft", 0))
        lives[-1].leave("failed", "")
    newcomer = Seat(raw, "draft", 1)
    newcomer.heard.wait_for(lambda: len(newcomer.heard.missed) == 3)
    assert [member.inc for member in newcomer.heard.missed] == [each.inc for each in lives]
    assert [member.inc for member in newcomer.heard.joined] == [target.inc]
    assert newcomer.heard.gone == []
    for node in (target, newcomer, *lives):
        assert node.close(5.0) == []


class Slow(Handler):
    """Takes its time over a newcomer."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def on_joined(self, member):
        assert self.gate.wait(PATIENCE)
        super().on_joined(member)


def test_run_is_not_complete_before_the_handler_knows_everybody():
    pair = Pair(tcp_store("127.0.0.1", 0, serve=True, timeout=10.0), handlers=[Slow(), Handler()])
    slow, node = pair.handlers[0], pair.nodes[0]
    for each in pair.nodes:
        each.join()
    pair.nodes[1].wait_complete(time.monotonic() + PATIENCE)
    for _ in range(600):
        if node.alive("draft"):
            break
        time.sleep(0.05)
    with pytest.raises(PeerTimeoutError, match="draft rank 0"):
        node.wait_complete(time.monotonic() + 0.2)
    slow.gate.set()
    node.wait_complete(time.monotonic() + PATIENCE)
    assert [member.role for member in slow.joined] == ["draft"]
    pair.close()


SERVER = """
import sys, time
from nccl_stream.coordination.kv import tcp_store
store = tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_frozen_store_stops_every_node_within_its_deadline():
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            raw = tcp_store("127.0.0.1", int(server.stdout.readline()), serve=False, timeout=10.0)
            pair = Pair(raw, DEADLY)
            pair.join()
            server.send_signal(signal.SIGSTOP)
            for node, handler in zip(pair.nodes, pair.handlers, strict=True):
                handler.wait_for(lambda h=handler: h.fatal)
                assert isinstance(handler.fatal[0], ControlStoreError)
                assert "has not answered" in str(handler.fatal[0])
                with pytest.raises(ControlStoreError):
                    node.raise_if_fatal()
        finally:
            server.kill()
    for node in pair.nodes:
        assert node.close(10.0) == []
