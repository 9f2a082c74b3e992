"""The control plane's seat over a real store: order of introductions, standing still, where a store listens."""

import socket
import threading
import time

import pytest

from nccl_stream.coordination.kv import tcp_store
from nccl_stream.coordination.membership import Identity, RunShape, Timing
from nccl_stream.coordination.messages import StopRequest
from nccl_stream.coordination.node import Node

TIMING = Timing(heartbeat_s=0.1, death_s=60.0, fence_s=30.0, connect_s=20.0)


class Handler:
    """Notes what it is told, in order; ``slow_joins`` holds every introduction up for that long."""

    def __init__(self, slow_joins=0.0):
        self.slow_joins = slow_joins
        self.told = []
        self.fatal = None
        self.beats = self.ticks = 0
        self.heard = threading.Event()

    def on_joined(self, member):
        time.sleep(self.slow_joins)
        self.told.append(("joined", member.inc))

    def on_message(self, sender, message):
        self.told.append(("message", sender.inc))
        self.heard.set()

    def on_missed(self, member):
        self.told.append(("missed", member.inc))

    def on_gone(self, member):
        self.told.append(("gone", member.inc))

    def on_fatal(self, error):
        self.fatal = error

    def on_tick(self, documents):
        self.ticks += 1

    def status(self):
        self.beats += 1
        return {}


class SkippingClock:
    """Monotonic time that can be made to leap, as it does for a process that was stopped."""

    def __init__(self):
        self.skipped = 0.0

    def __call__(self):
        return time.monotonic() + self.skipped


@pytest.fixture
def store():
    return tcp_store("127.0.0.1", 0, serve=True, timeout=20.0)


@pytest.fixture
def make_node(store):
    nodes = []

    def make(role, handler, timing=TIMING, clock=time.monotonic):
        identity = Identity(role, 0, "here", 1, "cpu", {})
        node = Node(store, RunShape("run", "0", 1, 1, False), identity, timing, handler, clock=clock)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.close(5.0)


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


def test_mail_waits_until_the_handler_knows_the_sender(make_node):
    slow, quick = Handler(slow_joins=1.0), Handler()
    target, draft = make_node("target", slow), make_node("draft", quick)
    target.join()
    draft.join()
    wait_until(lambda: target.member(draft.inc) is not None)
    # The roster of the target shows the draft; its handler is being told, which takes a while.
    draft.send(target.inc, StopRequest("news"))
    assert slow.heard.wait(20.0)
    assert slow.told == [("joined", draft.inc), ("message", draft.inc)]


def test_process_that_stood_still_and_was_not_buried_goes_on(make_node):
    clock = SkippingClock()
    handler = Handler()
    node = make_node("target", handler, timing=Timing(1.2, 100.0, 30.0, 20.0), clock=clock)
    node.join()
    wait_until(lambda: handler.ticks)  # the first beat is over, the next is not due before the watchdog has looked
    beats = handler.beats
    clock.skipped += 1000.0
    wait_until(lambda: handler.beats >= beats + 2 or handler.fatal)
    assert handler.fatal is None
    node.raise_if_fatal()


def test_store_listens_where_it_is_told_and_nowhere_else(store):
    with socket.socket() as probe:
        probe.settimeout(5.0)
        probe.connect(("127.0.0.1", store.port))
    with socket.socket() as probe:
        probe.settimeout(5.0)
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.2", store.port))


def test_port_in_use_is_an_error(store):
    with pytest.raises(OSError, match="in use"):
        tcp_store("127.0.0.1", store.port, serve=True, timeout=5.0)
