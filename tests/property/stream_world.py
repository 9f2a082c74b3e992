"""Whole ranks without threads: the real target and draft sides on a simulated network, store and clock."""

import json
import random
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

import torch

from nccl_stream.config import LONGEST_S, StreamConfig
from nccl_stream.coordination.kv import dump_json, load_json
from nccl_stream.coordination.mailbox import Mailbox
from nccl_stream.coordination.membership import Gone, Member
from nccl_stream.coordination.messages import decode_message, encode_message
from nccl_stream.errors import ClosedError, NcclStreamError, WireFormatError
from nccl_stream.ranks.draft_queue import DraftQueue, PaddingLease
from nccl_stream.ranks.draft_side import DraftSide
from nccl_stream.ranks.target_side import TargetSide
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.preallocated import make_sample_memory
from nccl_stream.stores.residency import Residency
from nccl_stream.testing.clock import FakeClock
from nccl_stream.transport.arena import Arena
from tests.property.simulation import Ends

CPU = torch.device("cpu")
CHUNK = 1024


class Documents:
    """The control store's documents, as one process's call sees them: each call happens at once.

    Args:
        damaged: how the keys end of which somebody makes garbage as soon as they are written.
    """

    def __init__(self, damaged=()):
        self.values = {}
        self.damaged = tuple(damaged)

    def get(self, key):
        if key in self.values and key.endswith(self.damaged):
            raise WireFormatError(f"{key} holds garbage")
        return load_json(self.values[key]) if key in self.values else None

    def set(self, key, value):
        self.values[key] = dump_json(value)

    def set_many(self, values):
        for key, value in values.items():
            self.set(key, value)

    def compare_set(self, key, expected, desired):
        if (key in self.values) != (expected is not None) or (expected is not None and self.get(key) != expected):
            return False
        self.set(key, desired)
        return True

    def exists(self, keys):
        return all(key in self.values for key in keys)

    def delete(self, key):
        self.values.pop(key, None)


class Rank:
    """One process: the node's part of the work, and what both kinds of side share."""

    def __init__(self, world, role, rank):
        self.world, self.role, self.rank = world, role, rank
        self.inc = f"{role[0]}{rank}"
        self.mail = Mailbox(self.inc)
        self.inbox = deque()
        self.view = {}
        self.woken = True
        self.state = "up"  # up, leaving, left, dead
        self.kind = ("left", "")
        self.shape = SimpleNamespace(one_launch=True)

    # -- what a side asks of its node --------------------------------------------------------------------------------

    def send(self, inc, message):
        self.mail.post(inc, json.loads(dump_json(encode_message(message))))
        self.woken = True

    def wake(self):
        self.woken = True

    def member(self, inc):
        return self.view.get(inc)

    def members(self):
        return list(self.view.values())

    def alive(self, role):
        return sorted((m for m in self.view.values() if m.role == role and m.gone is None), key=lambda m: m.rank)

    # -- what a node does --------------------------------------------------------------------------------------------

    def tick(self):
        self.woken = False
        packets = self.mail.packets(self.world.clock.now)
        self.side.on_tick(self.world.documents)
        for peer, text in packets:
            self.world.push(peer, text)

    def publish_status(self):
        self.world.documents.set(f"status/{self.inc}", self.side.status())

    def pop(self):
        packet = load_json(self.world.take(self.inbox))
        sender, wires = self.mail.receive(packet, self.world.clock.now)
        self.woken = True
        for wire in wires:
            member = self.view[sender]
            if member.gone is None:
                self.side.on_message(member, decode_message(wire))

    def see_gone(self, inc, gone):
        if self.state not in ("up", "leaving") or self.view[inc].gone is not None:
            return
        self.view[inc] = replace(self.view[inc], gone=gone)
        self.mail.forget(inc)
        self.side.on_gone(self.view[inc])
        self.woken = True

    def leave(self, kind="left", reason=""):
        self.state, self.kind = "leaving", (kind, reason)

    def depart(self):
        self.tick()  # what that posts is pushed before it goes, as the node does
        self.tick()
        self.publish_status()
        self.state = "left"
        self.world.goes(self, Gone(*self.kind, self.inc))

    def events(self):
        if self.state not in ("up", "leaving"):
            return []
        events = []
        due = self.mail.next_due(self.world.clock.now)
        if self.woken or (due is not None and due <= self.world.clock.now):
            events.append((3, self.tick))
        if self.inbox:
            events.append((4, self.pop))
        if self.state == "leaving" and not self.mail.unacknowledged():
            events.append((1, self.depart))
        return events + self.links.events(faults=False) + self.work()


class TargetRank(Rank):
    """A target and its producer."""

    def __init__(self, world, rank, to_put):
        super().__init__(world, "target", rank)
        config = world.config
        self.side = TargetSide(
            config, rank, world.num_targets, world.num_drafts, restart_timeout=0.0, clock=world.clock
        )
        self.links = Ends(world.net, self.inc, self.side, self.send, side=0, corrupt=world.corrupt)
        residency = Residency(
            max_samples=config.max_samples,
            max_bytes=2 * config.max_bytes,
            high_watermark_bytes=config.high_watermark,
            low_watermark_bytes=config.low_watermark,
            on_free=lambda owned: memory.free(owned),
        )
        memory = make_sample_memory(config, CPU)
        self.store = NcclFeatureStore(
            f"nccl://run/{self.inc}",
            CPU,
            max_sample_bytes=config.max_sample_bytes,
            chunk_bytes=CHUNK,
            residency=residency,
            memory=memory,
            soft_cap_bytes=config.max_bytes,
            starving=self.side.starving,
            outbound=self.side.streams,
            checksums=config.verify_checksums,
        )
        self.side.wire(self, self.links, self.store)
        self.to_put = to_put
        self.offered = 0

    def put(self):
        sample_id, tensors = self.to_put[0]
        try:
            with self.side.cond:
                self.side.check_open()
        except ClosedError:
            self.to_put.clear()
            return
        ref = self.store.put(sample_id, tensors, "run")
        self.side.offer(ref)
        self.to_put.pop(0)
        self.offered += 1

    def done(self):
        delivery = self.side.delivery
        return delivery.all_settled or not (delivery.anybody_left or any(delivery.unacked().values()))

    def work(self):
        if self.state != "up":
            return []
        if self.to_put:
            nbytes = sum(t.nbytes for t in self.to_put[0][1].values())
            room = self.store.room_for(nbytes) or self.side.consumers_gone
            return [(1, self.put)] if room else []
        if not self.side.delivery.closed:
            return [(1, self.side.close_queue)]
        return [(1, self.leave)] if self.done() else []


class DraftRank(Rank):
    """A draft and its training loop: batches, a meeting with the others per round, tensors kept one round longer."""

    def __init__(self, world, rank):
        super().__init__(world, "draft", rank)
        config = world.config
        self.side = DraftSide(config, rank, world.num_targets, world.num_drafts, restart_timeout=0.0, clock=world.clock)
        self.links = Ends(world.net, self.inc, self.side, self.send, side=1)
        self.arena = Arena(world.arena_bytes, poison=True, on_free=self.side.memory_freed)
        self.store = NcclFeatureStore(
            f"nccl://run/{self.inc}",
            CPU,
            max_sample_bytes=config.max_sample_bytes,
            chunk_bytes=CHUNK,
            arena=self.arena,
            inbound=self.side,
        )
        self.side._janitor = _NoThread()
        self.side.wire(self, self.links, self.store, self.arena)
        self.queue = DraftQueue(self.side)
        self.batch, self.kept = [], []
        self.handed = 0  # samples and padding
        self.consumed = []  # (owner, id), as trained on
        self.acked = []
        self.error = None

    def take(self):
        try:
            lease = self.queue.acquire(0.0)
        except NcclStreamError as exc:
            self.error = exc
            self.finish()
            return
        if lease is None:
            if self.queue.is_drained:
                self.finish()
            return
        self.handed += 1
        if isinstance(lease, PaddingLease):
            self.queue.ack(lease)
        else:
            self.begin(lease)

    def begin(self, lease):
        """A sample was leased."""
        tensors, handle = self.store.get(lease.ref)
        expected = self.world.samples[lease.ref.store_uri.rpartition("/")[2], lease.ref.sample_id]
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        self.batch.append((lease, handle, tensors))

    def train(self):
        """The batch is whole: the tensors of the one before go only now."""
        self.kept.clear()
        for lease, handle, tensors in self.batch:
            key = lease.ref.store_uri.rpartition("/")[2], lease.ref.sample_id
            expected = self.world.samples[key]
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)  # nobody wrote into it
            self.consumed.append(key)
            if self.side.ack(lease):
                self.acked.append(key)
            self.store.release(handle)
            self.kept.append(tensors)
        self.batch.clear()

    def fail(self):
        lease, handle, _ = self.batch.pop()
        self.queue.fail(lease, reason="bad")
        self.store.release(handle)
        self.world.failures -= 1

    def finish(self):
        if self.in_hand():
            self.train()
        self.kept.clear()
        self.queue.close()
        self.side.return_leases()
        self.leave()

    def janitor(self):
        self.side._jobs.get_nowait()()

    def work(self):
        events = []
        if not self.side._jobs.empty():
            events.append((3, self.janitor))
        if self.state != "up":
            return events
        per_round = self.world.config.samples_per_round
        with self.side.cond:
            ready = self.side.finished or self.side.needs_padding or self.side._fatal is not None
            if self.side.rounds is None:
                may_take = ready or self.side.leases.table.pending_count
            else:
                may_take = ready or (
                    self.side.leases.table.pending_count
                    and self.side.leases.handed + self.side.padded < self.side.rounds.samples_released()
                )
        hand = self.in_hand()
        if hand == per_round or (hand and not self.handed % per_round):
            events += [(2, self.train)] * self.may_train()
        elif hand and (self.side.finished or (self.side.rounds is None and not may_take)):
            events += [(1, self.train)] * self.may_train()
        elif may_take and (self.side.rounds is None or self.together(per_round)):
            events.append((2, self.take))
        if self.batch and self.world.failures:
            events.append((0.2, self.fail))
        return events

    def in_hand(self):
        """Samples that wait for a batch."""
        return len(self.batch)

    def may_train(self):
        """Whether they can be used."""
        return True

    def together(self, per_round):
        begun, into = divmod(self.handed, per_round)
        others = [r for r in self.world.ranks.values() if r.role == "draft" and r.state == "up"]
        return self.side.finished or into or all(r.handed >= begun * per_round for r in others)


class _NoThread:
    """The janitor's jobs are events here."""

    name = "janitor"

    def start(self):
        pass

    def is_alive(self):
        return False


def make_sample(rng, number):
    seq = rng.choice([1, 7, 40, 120])
    return {
        "aux_hidden_states": torch.full((1, seq, 6), float(number)),
        "input_ids": torch.arange(seq).reshape(1, seq) + number,
        "attention_mask": torch.ones(1, seq, dtype=torch.int64),
        "loss_mask": torch.ones(1, seq, dtype=torch.int64),
    }


class World:
    """All ranks, and what goes wrong."""

    make_target = TargetRank
    make_draft = DraftRank

    def __init__(
        self, seed, *, targets, drafts, per_target, end, static, batch, breaks, mail_faults, failures, deaths,
        flips=0, budget=3, damaged=(), leavers=0, uneven=0,
    ):  # fmt: skip
        self.rng = random.Random(seed)
        self.clock = FakeClock(1000.0)
        self.num_targets, self.num_drafts = targets, drafts
        largest = self.largest_sample()
        self.config = StreamConfig(
            max_sample_bytes=largest,
            max_bytes=(drafts * batch + 2) * largest,
            arena_bytes=1 << 20,
            assignment="static" if static else "demand",
            end=end,
            batch_size=batch,
            lease=LONGEST_S,
            announce_window=self.rng.randint(1, 4),
            chunk_bytes=CHUNK,
            max_failures=budget,
            verify_checksums=flips > 0,
        )
        self.flips, self.flipped = flips, Counter()
        self.arena_bytes = self.smallest_arena(batch)
        self.documents, self.net, self.samples = Documents(damaged), {}, {}
        self.mail_faults, self.breaks, self.failures = mail_faults, breaks, failures
        self.deaths = list(deaths)
        self.leavers = leavers
        self.rumours = []
        self.idle_beats = 0
        self.left_early = set()
        self.ranks = {}
        for t in range(targets):
            to_put = []
            for n in range(per_target + uneven * (t == 0)):
                sample = self.samples[f"t{t}", f"s{n}"] = self.make_sample(n * targets + t)
                to_put.append((f"s{n}", sample))
            self.ranks[f"t{t}"] = self.make_target(self, t, to_put)
        for d in range(drafts):
            self.ranks[f"d{d}"] = self.make_draft(self, d)
        self.net.update({inc: rank.links for inc, rank in self.ranks.items()})
        members = [Member(r.inc, r.role, r.rank, "host", 1, "cpu", {}) for r in self.ranks.values()]
        for rank in self.ranks.values():
            rank.view = {member.inc: member for member in members}
            for member in members:
                if member.inc != rank.inc:
                    rank.side.on_joined(member)
        incs = [f"d{d}" for d in range(drafts)]
        if end != "ragged":
            for inc in incs:
                self.ranks[inc].side.start_rounds("c", incs)

    def largest_sample(self):
        return sum(t.nbytes for t in make_sample(_Always(120), 0).values())

    def smallest_arena(self, batch):
        return (4 * batch - 1) * (self.largest_sample() + 5 * 256 + 256)

    def make_sample(self, number):
        return make_sample(self.rng, number)

    # -- the network -------------------------------------------------------------------------------------------------

    def push(self, peer, text):
        copies = 1
        if self.mail_faults and self.rng.random() < 0.2:
            self.mail_faults -= 1
            copies = self.rng.choice([0, 2])
        if self.ranks[peer].state in ("up", "leaving"):
            self.ranks[peer].inbox.extend([text] * copies)

    def take(self, inbox):
        if self.mail_faults and self.rng.random() < 0.1:
            self.mail_faults -= 1
            inbox.rotate(self.rng.randrange(len(inbox)))
        return inbox.popleft()

    def corrupt(self, delivery, buffers):
        """Flip a bit of a sample that has just arrived, in one of its features."""
        if not self.flips or self.rng.random() < 0.6:
            return
        self.flips -= 1
        self.flipped[delivery.owner, delivery.sample_id] += 1
        layout = self.ranks[delivery.owner].store.layout_of(delivery.ref.feature_specs)
        name = self.rng.choice(sorted(layout.specs))
        place = layout.offsets[name] + self.rng.randrange(layout.specs[name].nbytes)
        for (start, nbytes), buffer in zip(layout.chunks, buffers, strict=True):
            if start <= place < start + nbytes:
                buffer[place - start] ^= 1 << self.rng.randrange(8)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def may_leave(self):
        """Drafts that may have enough, one of which stays. Once all are drained, what they hold is in agreed rounds."""
        drafts = [rank for rank in self.living() if rank.role == "draft" and rank.state == "up"]
        if self.config.end == "ragged":
            over = any(rank.side.finished for rank in drafts)
        else:
            over = all(rank.side._drained() for rank in drafts) or any(rank.side.rounds._proposed for rank in drafts)
        return drafts if self.leavers and len(drafts) > 1 and not over else []

    def leave_early(self, rank):
        self.leavers -= 1
        self.left_early.add(rank.inc)
        rank.finish()

    # -- death -------------------------------------------------------------------------------------------------------

    def goes(self, rank, gone):
        rank.inbox.clear()
        del self.net[rank.inc]
        for channel in rank.links.channels:
            channel[0].broken = True
        for other in self.ranks.values():
            if other is not rank:
                self.rumours.append(lambda other=other: other.see_gone(rank.inc, gone))

    def die(self):
        inc = self.deaths.pop()
        rank = self.ranks.get(inc)
        if rank is not None and rank.state in ("up", "leaving"):
            rank.state = "dead"
            self.goes(rank, Gone("died", "killed", "chance"))

    def break_wire(self, wire):
        self.breaks -= 1
        wire.broken = True

    # -- time --------------------------------------------------------------------------------------------------------

    def beat(self):
        """Nothing to do at once: time passes, and everybody looks up."""
        self.idle_beats += 1
        self.clock.now += 1.0
        for rank in self.living():
            rank.woken = True
            rank.publish_status()

    def living(self):
        return [rank for rank in self.ranks.values() if rank.state in ("up", "leaving")]

    def offer(self):
        self.check()
        events = [event for rank in self.ranks.values() for event in rank.events()]
        events += [(2, lambda n=n: self.rumours.pop(n)()) for n in range(len(self.rumours))]
        if events:
            if any(event[1].__name__ != "tick" for event in events):
                self.idle_beats = 0
            if self.breaks:
                wires = [c[0] for rank in self.living() for c in rank.links.channels if not c[0].broken]
                events += [(0.1, lambda w=w: self.break_wire(w)) for w in wires]
            events += [(0.05, lambda r=r: self.leave_early(r)) for r in self.may_leave()]
            if self.deaths:
                events.append((0.05, self.die))
            return events
        if self.living() and self.idle_beats < 12:
            return [(1, self.beat)]
        return []

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self):
        for rank in self.ranks.values():
            if rank.role == "target":
                assert rank.side.delivery.books.balanced()

    def survivors(self, role):
        return [rank for rank in self.ranks.values() if rank.role == role and rank.state != "dead"]

    def finish(self):
        drafts, targets = self.survivors("draft"), self.survivors("target")
        for rank in (*drafts, *targets):
            assert rank.state == "left", f"{rank.inc} stands still, {rank.state}"
        if self.config.end != "ragged" and drafts:
            staying = [rank for rank in drafts if rank.inc not in self.left_early]
            assert len({rank.handed for rank in staying}) <= 1, "a different number of rounds"
            assert not staying[0].handed % self.config.samples_per_round or self.failures_happened()
        for rank in drafts:
            assert not self.memory_kept(rank)
            assert not rank.side.intake.held
        for rank in targets:
            books = rank.side.delivery.books
            assert books.put == rank.offered
            if drafts and not any(draft.error for draft in drafts):
                assert books.resident == 0
                assert rank.store.health().sample_count == 0
        self.check_books_of_the_dead(drafts)
        return Counter(key for rank in self.ranks.values() if rank.role == "draft" for key in rank.consumed)

    def memory_kept(self, draft):
        """A rank that leaves takes its links down with what they carry; nothing else may keep memory."""
        return [why for _, _, why in draft.arena.holders() if "transfer" not in why]

    def failures_happened(self):
        return any(rank.side.leases.table.counts.failed for rank in self.survivors("draft"))

    def check_books_of_the_dead(self, drafts):
        for rank in self.ranks.values():
            document = self.documents.get(f"obituary/{rank.inc}")
            if document is None:
                continue
            if rank.role == "draft":  # it held samples of dead targets, whose books count them as held
                assert document["lost"] == len(document["lost_ids"]) > 0
                assert not any(document[name] for name in ("put", "acked", "dropped", "dead", "held"))
                owners = {target for target in self.ranks if self.ranks[target].state == "dead"}
            else:
                parts = [document[name] for name in ("acked", "dropped", "dead", "held", "lost")]
                assert document["put"] == sum(parts), document
                owners = {rank.inc}
            acked = [{sid for draft in drafts for by, sid in draft.acked if by == owner} for owner in owners]
            assert not set.intersection(*acked) & set(document["lost_ids"]), "reported as lost, though it was acked"


class _Always:
    def __init__(self, value):
        self.value = value

    def choice(self, _):
        return self.value
