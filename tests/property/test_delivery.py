"""Owner-side delivery against a model, driven by Hypothesis: every order of answers, outcomes, failures and deaths."""

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.messages import Announce, OwnerState
from nccl_stream.coordination.owned import Phase

DRAFTS = 2
WINDOW = 3
MAX_FAILURES = 1
SELDOM = st.sampled_from([False, False, False, True])
PICK = st.integers(0, 10**6)
OUTCOMES = st.sampled_from(["ack", "fail", "back", "drop"])
BOOKED = {"ack": "acked", "drop": "dropped"}


class ModelSample:
    """What must be true of one sample."""

    def __init__(self, sid, order, serial):
        self.sid, self.order, self.serial = sid, order, serial
        self.phase, self.delivery, self.failures = Phase.RESIDENT, 0, 0
        self.draft, self.seq, self.outcome = "", -1, ""
        self.transfers = 0
        self.freed = False
        self.orphan = False  # resident while nobody took samples for its rank

    def take_back(self, drop):
        self.phase, self.delivery, self.draft, self.seq = Phase.RESIDENT, self.delivery + 1, "", -1
        self.orphan = False
        if drop:
            self.end("dropped")

    def end(self, outcome):
        assert not self.outcome
        self.outcome, self.draft, self.seq = outcome, "", -1

    def fail(self, failures, drop):
        self.failures += max(failures, 1)
        if self.failures > MAX_FAILURES:
            self.end("dead")
        else:
            self.take_back(drop)


class ModelDraft:
    """What must be true of one draft incarnation."""

    def __init__(self, inc, rank):
        self.inc, self.rank = inc, rank
        self.minted = 0  # generations handed out so far
        self.gen = 0  # newest generation that was up or went down
        self.linked = self.ended = False
        self.seen = 0
        self.open = {}  # seq -> sid, unanswered
        self.told = None
        self.reset()

    def reset(self):
        self.announced = 0  # seqs of this generation
        self.posted = {}  # seq -> turn of its receive
        self.underway = []  # seqs whose Ready has not arrived yet
        self.heard = set()  # turns of those that have
        self.sent = 0  # next turn that may be transmitted


class DeliveryMachine(RuleBasedStateMachine):
    """Plays the user, the network and all drafts of one owner; the port's calls are checked as they come."""

    @initialize(static=st.booleans())
    def start(self, static):
        self.static = static
        self.delivery = OwnerDelivery(self, num_drafts=DRAFTS, static=static, window=WINDOW, max_failures=MAX_FAILURES)
        self.samples = {}
        self.drafts = {}
        self.former = []  # incarnations that are gone
        self.awaited = set(range(DRAFTS))
        self.closed, self.error, self.run_ended, self.drop = False, "", False, False
        self.transfers = []  # (inc, gen, seq, sid) under way
        self.history = []  # every announcement ever made: (inc, gen, seq, sid, delivery)
        self.late = self.redelivered = 0
        self.count = 0

    # -- the port ----------------------------------------------------------------------------------------------------

    def tell(self, inc, message):
        draft = self.drafts[inc]
        if isinstance(message, OwnerState):
            draft.told = message
            return
        assert isinstance(message, Announce)
        sample = self.samples[message.ref["id"]]
        assert draft.linked
        assert not draft.ended
        assert not self.error
        assert (message.gen, message.seq) == (draft.gen, draft.announced)
        assert sample.phase is Phase.RESIDENT
        assert not sample.outcome
        assert (message.serial, message.delivery, message.order, message.failures) == (
            sample.serial, sample.delivery, sample.order, sample.failures,
        )  # fmt: skip
        assert len(draft.open) < WINDOW
        assert self.slot(sample) in (None, draft.rank)
        draft.announced += 1
        draft.open[message.seq] = sample.sid
        sample.phase, sample.draft, sample.seq = Phase.ASSIGNED, inc, message.seq
        self.history.append((inc, message.gen, message.seq, sample.sid, message.delivery))

    def transmit(self, inc, gen, seq, owned):
        draft, sample = self.drafts[inc], self.samples[owned.sample_id]
        assert draft.linked
        assert draft.gen == gen
        assert draft.posted[seq] == draft.sent  # ready, and nothing else, lets bytes go, in the order of the receives
        assert draft.sent in draft.heard
        draft.sent += 1
        assert (sample.phase, sample.draft, sample.seq) == (Phase.ASSIGNED, inc, seq)
        assert owned.delivery == sample.delivery
        sample.phase = Phase.IN_FLIGHT
        sample.transfers += 1
        self.transfers.append((inc, gen, seq, sample.sid))

    def settled(self, owned):
        sample = self.samples[owned.sample_id]
        assert sample.outcome == owned.outcome
        assert sample.transfers == 0
        assert not sample.freed
        sample.freed = True

    # -- the model ---------------------------------------------------------------------------------------------------

    def slot(self, sample):
        """The only rank that may have the sample; None for any."""
        return None if not self.static or sample.orphan else sample.order % DRAFTS

    def mark_orphans(self):
        expected = self.expected_ranks()
        for sample in self.samples.values():
            if sample.phase is Phase.RESIDENT and sample.order % DRAFTS not in expected:
                sample.orphan = True

    def expected_ranks(self):
        """Ranks somebody takes samples for, or will."""
        return self.awaited | {d.rank for d in self.drafts.values() if not d.ended}

    def held(self, inc):
        return [s for s in self.samples.values() if s.draft == inc and not s.outcome]

    def lose_link(self, draft):
        for sample in self.held(draft.inc):
            if sample.phase is not Phase.DELIVERED:
                sample.take_back(self.drop)
                self.redelivered += 1
        draft.linked = False
        draft.open.clear()
        self.mark_orphans()

    def pick(self, items, number):
        return items[number % len(items)]

    # -- the user ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.closed)
    @rule(number=st.integers(1, 3), gap=st.integers(0, 2))
    def put(self, number, gap):
        for _ in range(number):
            sid = f"s{self.count}"
            sample = ModelSample(sid, self.count + gap, self.count)
            self.samples[sid] = sample
            self.count += 1
            self.mark_orphans()
            if self.drop:
                sample.end("dropped")
            self.delivery.offer(sid, {"id": sid}, 100, sample.order)

    @rule(error=st.sampled_from(["", "", "", "boom"]), really=SELDOM)
    def close(self, error, really):
        if not really:
            return
        self.closed, self.error = True, self.error or error
        self.delivery.close(error)

    # -- drafts ------------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, DRAFTS - 1))
    def join(self, rank):
        inc = f"d{rank}-{len(self.drafts) + len(self.former)}"
        if any(d.rank == rank for d in self.drafts.values()):
            return
        self.add_draft(inc, rank)

    def add_draft(self, inc, rank):
        self.drafts[inc] = ModelDraft(inc, rank)
        self.awaited.add(rank)
        self.delivery.draft_joined(inc, rank)

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, awaited=st.booleans(), successor=st.sampled_from([False, False, True]), really=SELDOM)
    def die(self, number, awaited, successor, really):
        if not really:
            return
        draft = self.pick(list(self.drafts.values()), number)
        if successor:  # the next incarnation is seen before the end of this one
            self.add_draft(f"{draft.inc}+", draft.rank)
        del self.drafts[draft.inc]
        self.former.append(draft)
        if not awaited and not any(d.rank == draft.rank and not d.ended for d in self.drafts.values()):
            self.awaited.discard(draft.rank)
        for sample in self.held(draft.inc):
            sample.take_back(self.drop)
            self.redelivered += 1
        self.mark_orphans()
        self.delivery.draft_gone(draft.inc, awaited=awaited)

    @rule(rank=st.integers(0, DRAFTS - 1), really=SELDOM)
    def give_up_waiting(self, rank, really):
        if not really:
            return
        if not any(d.rank == rank and not d.ended for d in self.drafts.values()):
            self.awaited.discard(rank)
        self.mark_orphans()
        self.delivery.stop_awaiting(rank)

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, really=SELDOM)
    def leave(self, number, really):
        if not really:
            return
        draft = self.pick(list(self.drafts.values()), number)
        draft.ended = True
        if not any(d.rank == draft.rank and not d.ended for d in self.drafts.values()):
            self.awaited.discard(draft.rank)
        self.mark_orphans()
        self.delivery.draft_ended(draft.inc)

    @rule(drop=st.booleans(), really=SELDOM, truly=SELDOM)
    def end_run(self, drop, really, truly):
        if not (really and truly):
            return
        self.run_ended = True
        if drop:
            self.drop = True
            for sample in self.samples.values():
                if sample.phase is Phase.RESIDENT and not sample.outcome:
                    sample.end("dropped")
            self.delivery.drop_rest()
        else:
            self.delivery.end()

    # -- links -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, stale=st.sampled_from([0, 0, 0, 1, 2]), anyway=SELDOM)
    def link_up(self, number, stale, anyway):
        down = [d for d in self.drafts.values() if not d.linked]
        if not down and not anyway:
            return
        draft = self.pick(down or list(self.drafts.values()), number)
        if not stale:
            draft.minted += 1
        self.bring_up(draft, max(draft.minted - stale, 1))

    def bring_up(self, draft, gen):
        if gen > draft.gen:
            if draft.linked:
                self.lose_link(draft)
            draft.gen, draft.linked = gen, True
            draft.reset()
        self.delivery.link_up(draft.inc, gen)

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, stale=st.sampled_from([0, 0, 1]), early=st.booleans(), really=SELDOM)
    def link_down(self, number, stale, early, really):
        if not really:
            return
        draft = self.pick(list(self.drafts.values()), number)
        if early:  # the link broke before its coming up was told
            draft.minted += 1
        gen = max(draft.minted - stale, 1)
        if gen == draft.gen and draft.linked:
            self.lose_link(draft)
        if gen > draft.gen:
            if draft.linked:
                self.lose_link(draft)
            draft.gen = gen
        self.delivery.link_down(draft.inc, gen)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self, inc, gen, seq):
        """Apply an answer to the model; the sample it decides about, or None when it is late."""
        draft = self.drafts.get(inc)
        if draft is None or not draft.linked or draft.gen != gen or seq not in draft.open:
            self.late += 1
            return None
        return self.samples[draft.open.pop(seq)]

    @precondition(lambda self: any(d.open for d in self.drafts.values()))
    @rule(number=PICK, kind=st.sampled_from(["ready"] * 5 + ["refuse", "fault", "adopt"]))
    def answer_announcement(self, number, kind):
        draft, seq = self.pick([(d, seq) for d in self.drafts.values() for seq in d.open], number)
        self.say(kind, draft.inc, draft.gen, seq)

    @precondition(lambda self: any(d.open for d in self.drafts.values()))
    @rule(number=PICK)
    def post_receive(self, number):
        """A receive is posted and its Ready on the way: others may overtake it."""
        draft, seq = self.pick([(d, seq) for d in self.drafts.values() for seq in d.open], number)
        self.post(draft, seq)

    def post(self, draft, seq):
        if seq not in draft.posted:
            draft.posted[seq] = len(draft.posted)
            draft.underway.append(seq)

    def say(self, kind, inc, gen, seq):
        draft = self.drafts.get(inc)
        current = draft is not None and draft.linked and draft.gen == gen and seq in draft.open
        if current and kind == "ready":
            self.post(draft, seq)
        elif current and seq in draft.posted:
            return  # only one answer per announcement
        turn = draft.posted.get(seq, 0) if draft is not None else 0
        sample = self.answer(inc, gen, seq)
        if kind == "ready":
            if sample is not None:
                draft.underway.remove(seq)
                draft.heard.add(turn)
            self.delivery.ready(inc, gen, seq, turn)
        elif kind == "adopt":
            if sample is not None:
                sample.phase = Phase.DELIVERED
            self.delivery.adopted(inc, gen, seq)
        else:
            if sample is not None:
                self.refuse(sample, fault=kind == "fault")
            self.delivery.refused(inc, gen, seq, "no", fault=kind == "fault")

    def refuse(self, sample, *, fault):
        if fault:
            self.fail(sample, 1)
        else:
            sample.take_back(self.drop)
            self.redelivered += 1
        self.mark_orphans()

    def fail(self, sample, failures):
        before = sample.delivery
        sample.fail(failures, self.drop)
        self.mark_orphans()
        self.redelivered += sample.delivery != before

    @precondition(lambda self: self.history)
    @rule(number=PICK, kind=st.sampled_from(["ready", "refuse", "fault", "adopt"]))
    def answer_again(self, number, kind):
        inc, gen, seq, _, _ = self.pick(self.history, number)
        self.say(kind, inc, gen, seq)

    # -- transfers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.transfers)
    @rule(number=PICK, fails=st.sampled_from([False] * 5 + [True]))
    def transfer_ends(self, number, fails):
        at = number % len(self.transfers)
        inc, gen, seq, sid = self.transfers.pop(at)
        draft, sample = self.drafts.get(inc), self.samples[sid]
        sample.transfers -= 1
        if fails:
            self.delivery.transfer_over(sid)
            if draft is not None and draft.gen == gen:
                if draft.linked:
                    self.lose_link(draft)
                self.delivery.link_down(inc, gen)
            return
        current = draft is not None and draft.gen == gen and (sample.draft, sample.seq) == (inc, seq)
        if current and sample.phase is Phase.IN_FLIGHT:
            sample.phase = Phase.DELIVERED
        self.delivery.sent(inc, gen, seq, sid, 100)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def settle(self, inc, sid, delivery, outcome, failures):
        draft, sample = self.drafts.get(inc), self.samples.get(sid)
        if draft is not None and outcome != "ack":
            draft.seen += 1
        current = sample is not None and not sample.outcome and (sample.draft, sample.delivery) == (inc, delivery)
        if not current or sample.phase is Phase.ASSIGNED:
            self.late += 1
        elif outcome == "fail":
            self.fail(sample, failures)
        elif outcome == "back":
            self.refuse(sample, fault=False)
        else:
            sample.end(BOOKED[outcome])
        self.delivery.settle(inc, [[sid, delivery, outcome, failures, "why"]])

    @precondition(lambda self: any(s.draft and not s.outcome for s in self.samples.values()))
    @rule(number=PICK, outcome=OUTCOMES, failures=st.integers(0, 2))
    def settle_current(self, number, outcome, failures):
        sample = self.pick([s for s in self.samples.values() if s.draft and not s.outcome], number)
        self.settle(sample.draft, sample.sid, sample.delivery, outcome, failures)

    @precondition(lambda self: self.history)
    @rule(number=PICK, outcome=OUTCOMES, other=st.sampled_from([None, None, "d9-9", 0]))
    def settle_any(self, number, outcome, other):
        """Outcomes repeated, of earlier deliveries, from the wrong draft, of unknown samples."""
        inc, _, _, sid, delivery = self.pick(self.history, number)
        if other == 0:
            sid = "unknown"
        elif other is not None:
            inc = other
        self.settle(inc, sid, delivery, outcome, 1)

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def holds(self):
        self.books_balance()
        self.phases_agree()
        self.memory_is_freed_at_once_and_never_under_a_transfer()
        self.nothing_resident_is_forgotten()
        self.every_receive_whose_turn_has_come_is_served()
        self.drafts_know_how_things_stand()
        self.knows_whether_anybody_is_left()

    def books_balance(self):
        books = self.delivery.books
        counts = Counter(s.outcome or "resident" for s in self.samples.values())
        assert books.balanced()
        assert books.put == len(self.samples)
        for name in ("acked", "dropped", "dead", "resident"):
            assert getattr(books, name) == counts[name], name
        assert books.late == self.late
        assert books.redelivered == self.redelivered
        assert len(self.delivery.dead_letters) == counts["dead"]
        assert self.delivery.all_settled == (counts["resident"] == 0)

    def phases_agree(self):
        expected = {s.sid: s.phase for s in self.samples.values() if not s.outcome}
        assert self.delivery.phases() == expected
        assert self.delivery.undelivered == sum(phase is not Phase.DELIVERED for phase in expected.values())
        assert self.delivery.unacked() == {inc: len(self.held(inc)) for inc in self.drafts}
        assert self.delivery.resident_ids() == [s.sid for s in self.samples.values() if not s.outcome]

    def memory_is_freed_at_once_and_never_under_a_transfer(self):
        for sample in self.samples.values():
            assert sample.freed == (bool(sample.outcome) and sample.transfers == 0)

    def nothing_resident_is_forgotten(self):
        if self.error:
            return
        able = [d for d in self.drafts.values() if d.linked and not d.ended and len(d.open) < WINDOW]
        for sample in self.samples.values():
            if sample.phase is Phase.RESIDENT and not sample.outcome:
                assert not any(self.slot(sample) in (None, d.rank) for d in able), sample.sid

    def every_receive_whose_turn_has_come_is_served(self):
        for draft in self.drafts.values():
            if draft.linked:
                assert draft.sent not in draft.heard

    def drafts_know_how_things_stand(self):
        if not self.closed or self.error:
            assert all(d.told is None or d.told.error == self.error for d in self.drafts.values())
            return
        live = [s for s in self.samples.values() if not s.outcome]
        undelivered = [s for s in live if s.phase is not Phase.DELIVERED]
        may_come_back = any(d.ended and self.held(inc) for inc, d in self.drafts.items())
        for draft in self.drafts.values():
            mine = undelivered
            if self.static:
                mine = [
                    s for s in undelivered
                    if s.draft == draft.inc or (not s.draft and self.slot(s) in (None, draft.rank))
                ]  # fmt: skip
            idle = not mine and not may_come_back
            assert draft.told == OwnerState(True, self.error, idle, not live, draft.seen)

    def knows_whether_anybody_is_left(self):
        takers = any(not d.ended for d in self.drafts.values())
        awaited = bool(self.awaited) and not self.run_ended
        assert self.delivery.anybody_left == (takers or awaited)
        starving = any(d.linked and not d.ended and not self.held(d.inc) for d in self.drafts.values())
        assert self.delivery.starving() == starving

    def teardown(self):
        """Once nothing fails any more everything that can be delivered is, and the books close."""
        if not hasattr(self, "delivery") or self.error:
            return
        for draft in list(self.drafts.values()):
            if draft.ended:
                self.die_quietly(draft)
        for rank in range(DRAFTS):
            if not any(d.rank == rank for d in self.drafts.values()):
                self.add_draft(f"last{rank}", rank)
        for draft in self.drafts.values():
            if not draft.linked:
                draft.minted = max(draft.minted, draft.gen) + 1
                self.bring_up(draft, draft.minted)
        for _ in range(10 * len(self.samples) + 10):
            if self.delivery.all_settled and not self.transfers:
                break
            for draft in list(self.drafts.values()):
                for seq in list(draft.open):
                    self.say("ready", draft.inc, draft.gen, seq)
            while self.transfers:
                self.transfer_ends_well()
            for draft in list(self.drafts.values()):
                for sample in self.held(draft.inc):
                    if sample.phase is Phase.DELIVERED:
                        self.settle(draft.inc, sample.sid, sample.delivery, "ack", 0)
        assert self.delivery.all_settled
        assert all(s.freed for s in self.samples.values())
        self.books_balance()

    def transfer_ends_well(self):
        inc, gen, seq, sid = self.transfers.pop()
        draft, sample = self.drafts.get(inc), self.samples[sid]
        sample.transfers -= 1
        if draft is not None and draft.gen == gen and (sample.draft, sample.seq) == (inc, seq):
            sample.phase = Phase.DELIVERED if sample.phase is Phase.IN_FLIGHT else sample.phase
        self.delivery.sent(inc, gen, seq, sid, 100)

    def die_quietly(self, draft):
        del self.drafts[draft.inc]
        for sample in self.held(draft.inc):
            sample.take_back(self.drop)
            self.redelivered += 1
        self.mark_orphans()
        self.delivery.draft_gone(draft.inc, awaited=True)


TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = settings(
    max_examples=15,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

MOVES = {
    "put": (4, {"number": [1, 2, 3], "gap": [0, 1, 2]}),
    "close": (1, {"error": ["", "", "", "", "boom"], "really": [False] * 9 + [True]}),
    "join": (2, {"rank": range(DRAFTS)}),
    "die": (1, {"number": range(99), "awaited": [True, False], "successor": [False, True], "really": [False, True]}),
    "give_up_waiting": (1, {"rank": range(DRAFTS), "really": [False, True]}),
    "leave": (1, {"number": range(99), "really": [False] * 9 + [True]}),
    "end_run": (1, {"drop": [False, True], "really": [False, True], "truly": [False] * 9 + [True]}),
    "link_up": (3, {"number": range(99), "stale": [0, 0, 0, 1, 2], "anyway": [False] * 9 + [True]}),
    "link_down": (1, {"number": range(99), "stale": [0, 0, 1], "early": [False, True], "really": [False, True]}),
    "answer_announcement": (9, {"number": range(99), "kind": ["ready"] * 9 + ["refuse", "fault", "adopt"]}),
    "post_receive": (2, {"number": range(99)}),
    "answer_again": (1, {"number": range(999), "kind": ["ready", "refuse", "fault", "adopt"]}),
    "transfer_ends": (5, {"number": range(99), "fails": [False] * 9 + [True]}),
    "settle_current": (5, {"number": range(99), "outcome": ["ack", "ack", "fail", "back", "drop"], "failures": [0, 1]}),
    "settle_any": (2, {"number": range(999), "outcome": [*BOOKED, "fail", "back"], "other": [None, None, "d9-9", 0]}),
}


@given(seed=st.integers(0, 2**32), static=st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_long_runs_keep_every_promise(seed, static):
    """The same moves, many more of them than a state machine affords."""
    rng = random.Random(seed)
    machine = DeliveryMachine()
    machine.start(static=static)
    weights = [weight for weight, _ in MOVES.values()]
    for _ in range(250):
        name = rng.choices(list(MOVES), weights)[0]
        move = getattr(machine, name)
        if all(p(machine) for p in move.hypothesis_stateful_rule.preconditions):
            move(**{arg: rng.choice(choices) for arg, choices in MOVES[name][1].items()})
            machine.holds()
    machine.teardown()
