"""Joining, taking over and burying, on a real TCPStore."""

import threading
from contextlib import contextmanager

import pytest

from nccl_stream.coordination.kv import ControlStore, tcp_store
from nccl_stream.coordination.membership import Identity, Membership, RunShape, Timing, read_refusal
from nccl_stream.errors import ConfigError, MembershipError, WireFormatError
from nccl_stream.testing.clock import FakeClock

TIMING = Timing(heartbeat_s=0.1, death_s=0.8, fence_s=0.5, connect_s=20.0)


@pytest.fixture
def raw():
    return tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)


def member(raw, role, rank, *, one_launch=False, connect_s=20.0, config=None, num_targets=1, num_drafts=2, **kwargs):
    shape = RunShape("run", "0", num_targets, num_drafts, one_launch, config or {})
    identity = Identity(role, rank, "host", 7, "cpu", {"torch": "2"})
    timing = Timing(TIMING.heartbeat_s, TIMING.death_s, TIMING.fence_s, connect_s)
    root = ControlStore(raw, shape.root, timeout=10.0).clone(shape.root)
    return Membership(root, shape, identity, timing, **kwargs)


@contextmanager
def beating(raw, one):
    """``one`` shows signs of life meanwhile."""
    stop = threading.Event()
    documents = ControlStore(raw, one.shape.root, timeout=10.0).clone(f"{one.shape.root}/e/{one.epoch}")

    def beat():
        seq = 1
        while not stop.wait(0.05):
            documents.set(f"status/{one.inc}", {"seq": seq})
            seq += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def test_first_one_founds_the_epoch_and_the_rest_join_it(raw):
    founder, other = member(raw, "target", 0), member(raw, "draft", 1)
    founder.join()
    with beating(raw, founder):
        other.join()
    assert other.epoch == founder.epoch
    assert set(other.read_roster()) == {founder.inc, other.inc}
    seen = founder.read_roster()[other.inc]
    assert (seen.role, seen.rank, seen.host, seen.pid, seen.gone) == ("draft", 1, "host", 7, None)


def test_all_at_once_agree_on_one_epoch(raw):
    everybody = [member(raw, "target", 0), member(raw, "draft", 0), member(raw, "draft", 1)]
    done = threading.Barrier(len(everybody) + 1)

    def join(one):
        one.join()
        with beating(raw, one):
            done.wait(30)

    threads = [threading.Thread(target=join, args=(one,)) for one in everybody]
    for thread in threads:
        thread.start()
    done.wait(30)
    for thread in threads:
        thread.join(10)
    assert len({one.epoch for one in everybody}) == 1
    assert set(everybody[0].read_roster()) == {one.inc for one in everybody}


def test_epoch_in_which_nobody_lives_is_not_believed(raw):
    dead = member(raw, "target", 0)
    dead.join()
    newcomer = member(raw, "target", 0)
    newcomer.join()
    assert newcomer.epoch != dead.epoch
    assert set(newcomer.read_roster()) == {newcomer.inc}


def test_epoch_that_is_over_and_left_by_all_is_followed_by_another_at_once(raw):
    first = member(raw, "target", 0)
    first.join()
    first.bury(first.inc, "left", "")
    first.declare_over()
    second = member(raw, "target", 0, clock=lambda: 0.0)  # however long it would take to see that nobody lives
    second.join()
    assert second.epoch != first.epoch


def test_epoch_that_is_over_is_not_followed_by_another_while_somebody_is_in_it(raw):
    first, other = member(raw, "target", 0), member(raw, "draft", 0)
    first.join()
    with beating(raw, first):
        other.join()
    first.bury(first.inc, "left", "")
    first.declare_over()
    second = member(raw, "target", 0)
    joining = threading.Thread(target=second.join)
    with beating(raw, other):
        joining.start()
        joining.join(2 * TIMING.death_s)  # longer than it takes to see that nobody lives
        assert joining.is_alive()
        assert ControlStore(raw, first.shape.root, timeout=10.0).get("epoch")["epoch"] == first.epoch
        with pytest.raises(MembershipError, match=r"last life is over, and draft rank 0 \(host pid 7\) did not"):
            member(raw, "target", 0, connect_s=1.5).join()
    joining.join(30)
    assert second.epoch not in ("", first.epoch)


def test_rank_that_comes_while_the_last_ones_leave_gives_its_slot_back(raw):
    founder, old = member(raw, "target", 0), member(raw, "draft", 0)
    founder.join()
    with beating(raw, founder):
        old.join()
        late = member(raw, "draft", 0)
        joining = threading.Thread(target=late.join)
        joining.start()  # waits for the old one to be dead
        while late.epoch == "" and joining.is_alive():
            joining.join(0.01)
    founder.bury(founder.inc, "left", "")
    founder.declare_over()
    joining.join(30)
    assert late.epoch not in ("", founder.epoch)
    assert late.inc not in founder.read_roster()


def test_epoch_that_is_over_is_followed_by_another_when_the_rest_of_it_is_dead(raw):
    first = member(raw, "target", 0)
    first.join()
    first.declare_over()
    second = member(raw, "target", 0)
    second.join()
    assert second.epoch != first.epoch


def test_rank_of_a_buried_member_is_taken_over(raw):
    founder, old = member(raw, "target", 0), member(raw, "draft", 0)
    founder.join()
    with beating(raw, founder):
        old.join()
        assert founder.bury(old.inc, "died", "killed")
        new = member(raw, "draft", 0)
        new.join()
    assert new.epoch == old.epoch
    assert set(founder.read_roster()) == {founder.inc, new.inc}
    assert founder.tombstone(old.inc).reason == "killed"


def test_rank_of_a_silent_member_is_taken_over_after_its_burial(raw):
    founder, silent = member(raw, "target", 0), member(raw, "draft", 0)
    founder.join()
    with beating(raw, founder):
        silent.join()
        new = member(raw, "draft", 0)
        new.join()
    gone = founder.tombstone(silent.inc)
    assert (gone.kind, new.epoch) == ("died", founder.epoch)
    assert gone.by.startswith(new.inc)


class Staller:
    """A clock, and a sleep in which another process beats; the first lasts ten minutes, on a host that froze."""

    def __init__(self, raw, other):
        self.now, self.stalled = 100.0, False
        self.documents = ControlStore(raw, f"{other.shape.root}/e/{other.epoch}", timeout=10.0)
        self.key, self.seq = f"status/{other.inc}", 0

    def sleep(self, seconds):
        self.now += seconds if self.stalled else 600.0
        self.seq += self.stalled
        self.stalled = True
        self.documents.set(self.key, {"seq": int(self.seq)})

    def kwargs(self):
        return {"clock": lambda: self.now, "sleep": self.sleep, "connect_s": 1000.0}


def test_newcomer_that_stood_still_takes_nobody_for_dead(raw):
    founder = member(raw, "target", 0)
    founder.join()
    newcomer = member(raw, "draft", 0, **Staller(raw, founder).kwargs())
    newcomer.join()
    assert newcomer.epoch == founder.epoch


def test_rank_is_not_taken_over_by_one_who_stood_still(raw):
    holder = member(raw, "target", 0)
    holder.join()
    staller = Staller(raw, holder)
    second = member(raw, "target", 0, **staller.kwargs())
    second.epoch = holder.epoch
    with pytest.raises(MembershipError, match="alive and holds target rank 0"):
        second._take_slot(staller.now + 1000.0)
    assert holder.tombstone(holder.inc) is None


def test_rank_of_a_living_member_is_refused_and_it_lives_on(raw):
    founder = member(raw, "target", 0)
    founder.join()
    with beating(raw, founder), pytest.raises(MembershipError, match="alive and holds target rank 0"):
        member(raw, "target", 0).join()
    assert founder.tombstone(founder.inc) is None
    assert set(founder.read_roster()) == {founder.inc}


def test_one_launch_never_reuses_a_rank(raw):
    founder = member(raw, "target", 0, one_launch=True)
    founder.join()
    founder.bury(founder.inc, "left", "")
    with beating(raw, founder), pytest.raises(MembershipError, match="could not join"):
        member(raw, "target", 0, one_launch=True, connect_s=1.5).join()
    assert founder.documents.get("over") is None
    assert ControlStore(raw, founder.shape.root, timeout=10.0).get("epoch")["epoch"] == founder.epoch


def test_tombstone_is_set_once_and_obeyed_by_all(raw):
    a, b = member(raw, "target", 0), member(raw, "draft", 0)
    a.join()
    with beating(raw, a):
        b.join()
    before = a.documents.get("rev")
    assert a.bury(b.inc, "died", "no heartbeat")
    assert not b.bury(b.inc, "left", "bye")
    assert a.documents.get("rev") != before  # everybody will look
    for one in (a, b):
        gone = one.read_roster()[b.inc].gone
        assert (gone.kind, gone.reason) == ("died", "no heartbeat")


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [({"num_drafts": 3}, "num_drafts"), ({"config": {"batch_size": 2}}, "batch_size"), ({"num_targets": 4}, "num_tar")],
)
def test_disagreement_is_refused_by_name_and_written_down(raw, kwargs, name):
    founder = member(raw, "target", 0, config={"batch_size": 1} if "config" in kwargs else None)
    founder.join()
    with beating(raw, founder), pytest.raises(ConfigError, match=name):
        member(raw, "draft", 0, **kwargs).join()
    assert name in read_refusal(founder.documents)


def test_refusal_is_taken_back_by_the_rank_that_comes_with_the_right_values(raw):
    founder = member(raw, "target", 0)
    founder.join()
    with beating(raw, founder):
        with pytest.raises(ConfigError):
            member(raw, "draft", 0, num_drafts=3).join()
        member(raw, "draft", 1).join()
        assert "num_drafts" in read_refusal(founder.documents), "another rank has nothing to do with it"
        member(raw, "draft", 0).join()
    assert read_refusal(founder.documents) is None


def test_predecessors_are_known_to_who_never_saw_them_and_end_at_one_that_is_known(raw):
    founder = member(raw, "target", 0)
    founder.join()
    lives = []
    with beating(raw, founder):
        for kind in ("died", "left", "failed"):
            lives.append(member(raw, "draft", 0))
            lives[-1].join()
            founder.bury(lives[-1].inc, kind, "")
        lives.append(member(raw, "draft", 0))
        lives[-1].join()
    last = founder.read_roster()[lives[-1].inc]
    found = founder.predecessors(last, ())
    assert [(one.inc, one.gone.kind) for one in found] == [
        (lives[0].inc, "died"), (lives[1].inc, "left"), (lives[2].inc, "failed"),
    ]  # fmt: skip
    assert [one.inc for one in founder.predecessors(last, {lives[1].inc})] == [lives[2].inc]


@pytest.mark.parametrize("value", [7, {"inc": "x"}, "a circle", "a stranger"])
def test_damaged_predecessor_hides_only_those_before(raw, value):
    founder, old = member(raw, "target", 0), member(raw, "draft", 0)
    founder.join()
    with beating(raw, founder):
        old.join()
        founder.bury(old.inc, "died", "")
        new = member(raw, "draft", 0)
        new.join()
    documents = founder.documents
    if value == "a circle":
        value = documents.get("slot/draft/0")
    elif value == "a stranger":
        value = {**documents.get("slot/draft/0"), "inc": "d0-stranger"}
    documents.set(f"before/{old.inc}", value)
    assert [one.inc for one in founder.predecessors(founder.read_roster()[new.inc], ())] == [old.inc]


@pytest.mark.parametrize("document", [7, {"epoch": "e"}, {"epoch": "../x", "minter": "m", "num_targets": 1}])
def test_damaged_epoch_document_is_refused(raw, document):
    ControlStore(raw, "nccl_stream/run/0", timeout=10.0).set("epoch", document)
    with pytest.raises(WireFormatError, match="epoch document"):
        member(raw, "target", 0).join()


@pytest.mark.parametrize("slot", [7, {}, {"inc": "x", "role": "draft"}, {"inc": 1}])
def test_damaged_slot_hides_only_itself(raw, slot):
    founder = member(raw, "target", 0)
    founder.join()
    founder.documents.set("slot/draft/1", slot)
    assert set(founder.read_roster()) == {founder.inc}


def test_damaged_tombstone_buries_nobody(raw):
    founder = member(raw, "target", 0)
    founder.join()
    founder.documents.set(f"gone/{founder.inc}", {"kind": "exploded", "reason": "", "by": ""})
    assert founder.read_roster()[founder.inc].gone is None
    assert founder.tombstone(founder.inc) is None


@pytest.mark.parametrize("damage", ["x", "\xff", "7", "{}", '{ "kind": "" }', '{"kind": "exploded"}', None])
def test_who_has_a_damaged_tombstone_can_be_buried_once(raw, damage):
    a, b = member(raw, "target", 0), member(raw, "draft", 0)
    a.join()
    with beating(raw, a):
        b.join()
    key = f"{a.shape.root}/e/{a.epoch}/gone/{b.inc}"
    raw.delete_key(key) if damage is None else raw.set(key, damage)
    raw.check([key])  # an answered call: the change has reached the server
    assert a.bury(b.inc, "died", "no heartbeat")
    assert not b.bury(b.inc, "left", "bye")
    for one in (a, b):
        assert one.read_roster()[b.inc].gone.reason == "no heartbeat"


def test_who_is_gone_does_not_come_back_when_the_tombstone_is_damaged(raw):
    a, b = member(raw, "target", 0), member(raw, "draft", 0)
    a.join()
    with beating(raw, a):
        b.join()
    b.bury(b.inc, "left", "bye")
    assert a.read_roster()[b.inc].gone.kind == "left"
    a.documents.set(f"gone/{b.inc}", "x")
    assert a.read_roster()[b.inc].gone.kind == "left"


def test_rank_of_a_silent_member_with_a_damaged_tombstone_is_taken_over(raw):
    founder, old, new = (member(raw, "target", 0), member(raw, "draft", 0), member(raw, "draft", 0))
    founder.join()
    with beating(raw, founder):
        old.join()
        raw.set(f"{old.shape.root}/e/{old.epoch}/gone/{old.inc}", "x")
        raw.check(["x"])  # an answered call: the change has reached the server
        new.join()
    assert founder.tombstone(old.inc).kind == "died"
    assert new.inc in founder.read_roster()


@pytest.mark.parametrize("inc", ["d1-ffffffffffff", "d0-ffffffffffff"])
def test_slot_that_names_somebody_who_never_was_reads_as_before(raw, inc):
    """Well-formed, with nothing behind it: nobody waits for its tombstone to appear."""
    a, b = member(raw, "target", 0), member(raw, "draft", 1)
    a.join()
    with beating(raw, a):
        b.join()
    before = a.read_roster()
    slot = a.documents.get("slot/draft/1")
    a.documents.set("slot/draft/1", {**slot, "inc": inc})
    assert a.read_roster() == before
    newcomer = member(raw, "draft", 0)
    with beating(raw, a):
        newcomer.join()
    assert set(newcomer.read_roster()) == {a.inc, newcomer.inc}


def test_slot_that_names_a_member_of_another_rank_reads_as_before(raw):
    a, b, c = (member(raw, "target", 0), member(raw, "draft", 0), member(raw, "draft", 1))
    a.join()
    with beating(raw, a):
        b.join()
        c.join()
    before = a.read_roster()
    a.documents.set("slot/draft/1", {**a.documents.get("slot/draft/1"), "inc": b.inc})
    assert a.read_roster() == before


def test_silence_counts_from_the_last_change_seen_and_sleep_is_excused(raw):
    clock = FakeClock()
    one = member(raw, "target", 0)
    assert one.observe("d", {"seq": 1}, clock.now) == 0.0
    clock.advance(3)
    assert one.observe("d", {"seq": 1}, clock.now) == 3.0
    clock.advance(2)
    assert one.observe("d", {"seq": 2}, clock.now) == 0.0
    clock.advance(10)
    one.excuse(10)  # we were not looking
    assert one.observe("d", {"seq": 2}, clock.now) == 0.0
    clock.advance(1)
    assert one.observe("d", {"seq": 2}, clock.now) == 1.0
    assert one.last_seq("d") == 2
    assert one.observe("d", "nonsense", clock.now) == 0.0
