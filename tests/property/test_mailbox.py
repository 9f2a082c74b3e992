"""Mailboxes over inboxes that lose, double, delay and reorder: every message once, in order, and healing ends."""

import itertools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_stream.coordination.mailbox import PACKET_BYTES, RESEND_MAX_S, RESEND_S, Mailbox
from nccl_stream.errors import WireFormatError

MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class Post:
    """Two or three mailboxes, their inboxes, one clock."""

    def __init__(self, seed, size, loss, double, disorder):
        self.rng = random.Random(seed)
        self.loss, self.double, self.disorder = loss, double, disorder
        self.names = ["a", "b", "c"][:size]
        self.boxes = {name: Mailbox(name) for name in self.names}
        self.inboxes = {name: [] for name in self.names}
        self.posted, self.received = {}, {}
        self.now = 50.0
        self.packets = 0

    def post(self):
        sender, receiver = self.rng.sample(self.names, 2)
        number = len(self.posted.setdefault((sender, receiver), []))
        message = {"k": "x", "n": number, "body": "y" * self.rng.choice([0, 5, 300])}
        self.posted[sender, receiver].append(message)
        self.boxes[sender].post(receiver, message)

    def flush(self, name):
        for peer, text in self.boxes[name].packets(self.now):
            self.packets += 1
            assert len(text) <= PACKET_BYTES + 1024
            copies = 0 if self.rng.random() < self.loss else 2 if self.rng.random() < self.double else 1
            self.inboxes[peer] += [text] * copies

    def pop(self, name):
        inbox = self.inboxes[name]
        if not inbox:
            return
        at = self.rng.randrange(len(inbox)) if self.rng.random() < self.disorder else 0
        sender, ready = self.boxes[name].receive(json.loads(inbox.pop(at)), self.now)
        mine = self.received.setdefault((sender, name), [])
        mine += ready
        assert mine == self.posted.get((sender, name), [])[: len(mine)]  # once, in order, nothing made up

    def step(self):
        action = self.rng.choice([self.post, self.flush, self.flush, self.pop, self.pop, self.pop, self.wait])
        action() if action in (self.post, self.wait) else action(self.rng.choice(self.names))

    def wait(self):
        self.now += self.rng.choice([0.001, 0.05, 0.3, 2.0])

    def heal(self):
        """No more faults, no more posts: how many seconds until all is confirmed?"""
        self.loss = self.double = 0.0
        started = self.now
        for _ in range(1000):
            for name in self.names:
                self.flush(name)
                while self.inboxes[name]:
                    self.pop(name)
            due = [at for at in (box.next_due(self.now) for box in self.boxes.values()) if at is not None]
            if not due and not any(self.inboxes.values()):
                return self.now - started
            self.now = max(self.now, min(due, default=self.now))
        raise AssertionError("the mailboxes never come to rest")


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 3),
    loss=st.sampled_from([0.0, 0.2, 0.6]),
    double=st.sampled_from([0.0, 0.3]),
    disorder=st.sampled_from([0.0, 0.5, 1.0]),
    steps=st.integers(0, 300),
)
@MANY
def test_every_message_arrives_once_and_in_order_and_healing_ends(seed, size, loss, double, disorder, steps):
    post = Post(seed, size, loss, double, disorder)
    for _ in range(steps):
        post.step()
    healed_after = post.heal()
    assert healed_after <= 2 * RESEND_MAX_S + RESEND_S
    assert {pair: got for pair, got in post.received.items() if got} == post.posted
    for box in post.boxes.values():
        assert box.unacknowledged() == 0
        assert box.next_due(post.now) is None
        assert not box.packets(post.now + 1000)  # at rest nothing is sent, ever


def test_a_silent_peer_is_resent_to_ever_more_slowly_and_nothing_piles_up():
    box, now = Mailbox("a"), 0.0
    for number in range(20):
        box.post("b", {"k": "x", "n": number})
    sent_at = []
    while now < 120:
        packets = box.packets(now)
        if packets:
            sent_at.append(now)
            assert len(packets) == 1  # one packet carries all of it
        now = box.next_due(now) or now + 1
    gaps = [b - a for a, b in itertools.pairwise(sent_at)]
    assert gaps == sorted(gaps)
    assert gaps[0] == RESEND_S
    assert gaps[-1] == RESEND_MAX_S
    assert box.unacknowledged() == 20


def test_large_mail_is_cut_into_packets_that_fit():
    sender, receiver = Mailbox("a"), Mailbox("b")
    bodies = ["z" * (PACKET_BYTES // 3) for _ in range(10)]
    for body in bodies:
        sender.post("b", {"k": "x", "body": body})
    packets = sender.packets(0.0)
    assert len(packets) == 5
    got = []
    for _, text in reversed(packets):
        got += receiver.receive(json.loads(text), 0.0)[1]
    assert [message["body"] for message in got] == bodies


def test_forgotten_peer_gets_nothing_and_is_not_heard():
    a, b = Mailbox("a"), Mailbox("b")
    a.post("b", {"k": "x"})
    b.post("a", {"k": "y"})
    a.forget("b")
    a.post("b", {"k": "late"})
    assert a.unacknowledged() == 0
    assert a.packets(0.0) == []
    assert a.receive(json.loads(b.packets(0.0)[0][1]), 0.0) == ("b", [])
    assert a.statistics.refused == 1
    assert a.next_due(0.0) is None


GOOD = {"from": "b", "first": 0, "msgs": [{"k": "x"}], "ack": 0, "gap": False}


@pytest.mark.parametrize(
    "packet",
    [
        None,
        [],
        {},
        {**GOOD, "extra": 1},
        {name: value for name, value in GOOD.items() if name != "gap"},
        {**GOOD, "from": ""},
        {**GOOD, "from": 7},
        {**GOOD, "from": "b" * 300},
        {**GOOD, "first": -1},
        {**GOOD, "first": True},
        {**GOOD, "first": 10**9},
        {**GOOD, "ack": 1},
        {**GOOD, "ack": "0"},
        {**GOOD, "gap": 0},
        {**GOOD, "msgs": {}},
    ],
)
def test_malformed_packet_is_refused_and_leaves_the_stream_intact(packet):
    box = Mailbox("a")
    with pytest.raises(WireFormatError):
        box.receive(packet, 0.0)
    assert box.receive(GOOD, 0.0) == ("b", [{"k": "x"}])
