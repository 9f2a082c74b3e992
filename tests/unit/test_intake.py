"""Draft-side intake step by step: what is adopted, what comes back, and what is answered to whom."""

import pytest

from nccl_stream.coordination import intake as module
from nccl_stream.coordination import messages as m
from nccl_stream.coordination.intake import DraftIntake
from nccl_stream.errors import CapacityError
from tests.unit.helpers import make_ref

OWNER = "t0"


class Port:
    """Memory for ``room`` samples; writes down everything else."""

    def __init__(self, room=8):
        self.room = room
        self.told, self.posted, self.yielded_ids, self.freed = [], [], [], []
        self.unfit = None

    def tell(self, owner, message):
        self.told.append((owner, message))

    def check(self, owner, ref):
        if ref.sample_id == self.unfit:
            raise CapacityError("too large for this rank", can_wait=False)
        return ref.estimated_bytes

    def reserve(self, nbytes, label):
        if not self.room:
            return None
        self.room -= 1
        return object()

    def receive(self, delivery):
        self.posted.append(delivery)

    def yielded(self, delivery):
        self.yielded_ids.append(delivery.sample_id)

    def free(self, delivery):
        self.room += 1
        self.freed.append(delivery.sample_id)

    def heard(self):
        """What was told since the last call."""
        told, self.told = self.told, []
        return [message for _, message in told]


class Rig:
    def __init__(self, owners=1, drafts=1, static=False, room=8):
        self.port = Port(room)
        self.intake = DraftIntake(self.port, rank=0, num_targets=owners, num_drafts=drafts, static=static)
        for rank in range(owners):
            self.intake.owner_joined(f"t{rank}", rank)
            self.up(1, f"t{rank}")
        self.seqs = {}

    def up(self, gen, owner=OWNER):
        self.intake.link_opening(owner, gen)
        self.intake.link_up(owner, gen)

    def announce(self, sample_id, *, owner=OWNER, gen=1, serial=0, delivery=0, order=0, failures=0):
        seq = self.seqs[owner, gen] = self.seqs.get((owner, gen), -1) + 1
        ref = make_ref(sample_id, store_uri=f"nccl://run/{owner}").to_wire()
        self.intake.announced(owner, m.Announce(gen, seq, serial, delivery, order, failures, ref))

    def arrive(self, number=-1):
        delivery = self.port.posted.pop(number)
        self.intake.transfer_over(delivery, ok=True)
        return delivery

    def take(self, sample_id, **kwargs):
        """Announced, granted and arrived."""
        self.announce(sample_id, **kwargs)
        return self.arrive()


def key(sample_id, owner=OWNER):
    return f"nccl://run/{owner}", sample_id


# -- a delivery that arrived after all ------------------------------------------------------------------------------


def test_held_sample_is_adopted_under_its_new_number():
    rig = Rig()
    rig.take("s", serial=5)
    rig.intake.link_down(OWNER, 1)
    rig.up(2)
    rig.port.heard()
    rig.announce("s", gen=2, serial=5, delivery=1)
    assert rig.port.heard() == [m.Adopt(2, 0)]
    assert rig.port.posted == []  # nothing is fetched
    assert rig.port.yielded_ids == ["s"]  # nor handed out twice
    assert rig.intake.statistics.adopted == 1
    rig.intake.settle(key("s"), "ack")
    assert rig.port.heard() == [m.Settle([["s", 1, "ack", 0, ""]])]


def test_sample_that_was_acked_is_adopted_and_acked_again_under_its_new_number():
    rig = Rig()
    rig.take("s", serial=5)
    rig.intake.settle(key("s"), "ack")
    rig.intake.link_down(OWNER, 1)
    rig.up(2)
    rig.port.heard()
    rig.announce("s", gen=2, serial=5, delivery=3)
    assert rig.port.heard() == [m.Adopt(2, 0), m.Settle([["s", 3, "ack", 0, ""]])]
    assert rig.port.posted == []
    assert rig.intake.held == {}
    assert rig.intake.statistics.adopted == 1


def test_same_id_of_a_later_put_is_another_sample():
    rig = Rig()
    rig.take("s", serial=5)
    rig.port.heard()
    rig.announce("s", serial=6)  # the owner put it again while its first self is still in use here
    (refusal,) = rig.port.heard()
    assert (refusal.gen, refusal.seq, refusal.fault) == (1, 1, True)
    assert "in use" in refusal.reason
    assert rig.intake.held[key("s")].serial == 5
    rig.intake.settle(key("s"), "ack")
    rig.port.heard()
    rig.announce("s", serial=7)
    assert rig.port.heard() == [m.Ready(1, 2, 1)]
    assert len(rig.port.posted) == 1


@pytest.mark.parametrize("outcome", ["fail", "back", "drop"])
def test_only_an_ack_is_remembered(outcome):
    rig = Rig()
    rig.take("s", serial=5)
    rig.intake.settle(key("s"), outcome, 1, "why")
    assert rig.port.heard()[-1] == m.Settle([["s", 0, outcome, 1, "why"]])
    rig.announce("s", serial=5, delivery=1)
    assert rig.port.heard() == [m.Ready(1, 1, 1)]


def test_acks_are_remembered_per_owner_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED_ACKS", 2)
    rig = Rig(owners=2)
    for serial in range(3):
        rig.take(f"s{serial}", serial=serial)
        rig.intake.settle(key(f"s{serial}"), "ack")
    assert rig.intake.estate(OWNER) == ([], ["s1", "s2"])
    assert rig.intake.estate("t1") == ([], [])
    rig.port.heard()
    rig.announce("s1", serial=1, delivery=1)
    assert rig.port.heard()[0] == m.Adopt(1, 3)
    rig.announce("s0", serial=0, delivery=1)  # long past: the owner would not announce it
    assert rig.port.heard() == [m.Ready(1, 4, 3)]
    rig.announce("s2", owner="t1", serial=2)  # the other owner's serial 2 is another sample
    assert rig.port.heard() == [m.Ready(1, 0, 0)]


def test_what_is_here_is_adopted_even_by_a_rank_that_takes_nothing_more():
    rig = Rig()
    rig.take("held", serial=1)
    rig.take("acked", serial=2)
    rig.intake.settle(key("acked"), "ack")
    rig.intake.stop("the end")
    rig.port.heard()
    rig.announce("held", serial=1, delivery=1)
    rig.announce("acked", serial=2, delivery=1)
    assert [type(message) for message in rig.port.heard()] == [m.Adopt, m.Adopt, m.Settle]


def test_unfit_announcement_is_refused_as_a_fault_even_if_it_is_here():
    rig = Rig()
    rig.port.unfit = "s"
    rig.announce("s")
    (refusal,) = rig.port.heard()
    assert (refusal.fault, refusal.reason) == (True, "too large for this rank")
    assert rig.intake.statistics.refused == 1
    assert rig.port.posted == []


# -- transfers whose link broke --------------------------------------------------------------------------------------


def test_transfer_that_completes_after_its_link_broke_goes_back():
    rig = Rig()
    rig.announce("s", serial=5)
    rig.intake.link_down(OWNER, 1)
    rig.port.heard()
    rig.arrive()
    assert rig.port.heard() == [m.Settle([["s", 0, "back", 0, "the link failed"]])]
    assert rig.port.yielded_ids == []
    assert rig.intake.held == {}
    assert rig.port.freed == ["s"]
    assert (rig.intake.statistics.voided, rig.intake.statistics.received) == (1, 0)


def test_transfer_that_failed_goes_back_and_comes_again():
    rig = Rig()
    rig.announce("s", serial=5)
    rig.intake.transfer_over(rig.port.posted.pop(), ok=False)
    assert rig.port.heard() == [m.Ready(1, 0, 0), m.Settle([["s", 0, "back", 0, "the link failed"]])]
    rig.up(2)
    rig.announce("s", gen=2, serial=5, delivery=1)
    assert rig.port.heard() == [m.Ready(2, 0, 0)]
    rig.arrive()
    assert rig.port.yielded_ids == ["s"]
    assert rig.intake.statistics.bytes_received == make_ref("s").estimated_bytes


def test_old_transfer_still_coming_to_rest_does_not_touch_the_new_delivery():
    rig = Rig()
    rig.announce("s", serial=5)
    old = rig.port.posted.pop()
    rig.intake.link_down(OWNER, 1)
    rig.up(2)
    rig.announce("s", gen=2, serial=5, delivery=1)
    new = rig.arrive()
    assert rig.intake.in_transfer(OWNER) == 1
    rig.intake.transfer_over(old, ok=True)
    assert rig.intake.held == {key("s"): new}
    assert rig.port.yielded_ids == ["s"]
    assert rig.intake.in_transfer(OWNER) == 0


def test_announcements_of_a_broken_or_foreign_generation_are_counted_and_not_answered():
    rig = Rig()
    rig.intake.link_down(OWNER, 1)
    rig.port.heard()
    rig.announce("s", gen=1)
    rig.announce("s", gen=2)
    rig.intake.announced("stranger", m.Announce(1, 0, 0, 0, 0, 0, {}))
    assert rig.port.heard() == []
    assert rig.intake.statistics.stale == 3


def test_link_that_broke_before_it_was_known_to_be_up_stays_down():
    rig = Rig()
    rig.intake.link_opening(OWNER, 2)
    rig.announce("s", gen=2)
    rig.intake.link_down(OWNER, 2)
    rig.intake.link_up(OWNER, 2)
    assert rig.port.posted == []
    rig.intake.link_up(OWNER, 1)  # an old one
    rig.announce("s", gen=2)
    assert rig.port.posted == []


def test_announcement_before_the_link_is_up_here_waits_for_it():
    rig = Rig()
    rig.intake.link_opening(OWNER, 2)
    rig.announce("s", gen=2)
    assert rig.port.posted == []
    rig.intake.link_up(OWNER, 2)
    assert len(rig.port.posted) == 1
    assert rig.port.heard() == [m.Ready(2, 0, 0)]


# -- static order ----------------------------------------------------------------------------------------------------


def test_static_sample_whose_link_broke_is_waited_for():
    rig = Rig(static=True)
    rig.announce("a", serial=0, order=0)
    rig.announce("b", serial=1, order=1)
    first = rig.port.posted.pop(0)
    rig.arrive()
    assert rig.port.yielded_ids == []  # b waits for a
    rig.intake.link_down(OWNER, 1)
    rig.intake.transfer_over(first, ok=True)  # in full, but void
    assert rig.port.yielded_ids == []
    rig.up(2)
    rig.take("c", gen=2, serial=2, order=2)  # announced before the owner learnt that a did not count
    assert rig.port.yielded_ids == []
    rig.take("a", gen=2, serial=0, delivery=1, order=0)
    assert rig.port.yielded_ids == ["a", "b", "c"]


def test_static_order_goes_on_once_the_owner_says_that_nothing_more_comes():
    rig = Rig(owners=2, static=True)
    rig.announce("b", owner="t1", order=1)
    assert rig.port.posted == []  # t0 may still bring 0, for which there must be memory
    rig.intake.owner_state("t0", m.OwnerState(True, "", True, True, 0))
    rig.arrive()
    assert rig.port.yielded_ids == ["b"]


def test_static_order_goes_on_when_the_owner_is_gone():
    rig = Rig(owners=2, static=True)
    rig.announce("b", owner="t1", order=1)
    rig.intake.owner_gone("t0", "died")
    rig.arrive()
    assert rig.port.yielded_ids == ["b"]


def test_order_is_relaxed_only_when_memory_is_short_and_nothing_is_under_way():
    rig = Rig(owners=2, static=True)
    rig.announce("a", owner="t0", order=0)
    rig.announce("b", owner="t1", order=1)
    lost, other = rig.port.posted
    rig.intake.transfer_over(other, ok=True)
    rig.intake.link_down("t0", 1)
    rig.port.room = 0  # the user holds everything else
    rig.up(2, "t0")
    rig.announce("a", owner="t0", gen=2, delivery=1, order=0)
    assert rig.intake.blocked.sample_id == "a"
    assert not rig.intake.relax_order()  # the old transfer of a will bring its slot back
    rig.port.room = -1
    rig.intake.transfer_over(lost, ok=True)
    assert rig.port.yielded_ids == []
    assert rig.intake.relax_order()
    assert rig.port.yielded_ids == ["b"]
    assert rig.intake.statistics.order_relaxed == 1
    assert not rig.intake.relax_order()  # nothing waits any more
    rig.port.room = 1
    rig.intake.grant()
    rig.arrive()
    assert rig.port.yielded_ids == ["b", "a"]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_granted_in_order_of_arrival_and_to_the_head_of_each_link():
    rig = Rig(owners=2, room=1)
    rig.announce("a", owner="t0")
    rig.announce("b", owner="t1")
    rig.announce("c", owner="t0", serial=1)
    assert [d.sample_id for d in rig.port.posted] == ["a"]
    assert rig.intake.blocked.sample_id == "b"
    rig.arrive()
    rig.intake.settle(key("a"), "ack")
    rig.intake.grant()
    assert [d.sample_id for d in rig.port.posted] == ["b"]
    rig.arrive()
    rig.intake.settle(key("b", "t1"), "ack")
    rig.intake.grant()
    assert [d.sample_id for d in rig.port.posted] == ["c"]
    assert rig.intake.blocked is None


def test_what_has_no_memory_can_be_declined_without_fault():
    rig = Rig(room=1)
    rig.announce("a")
    rig.announce("b", serial=1)
    rig.port.heard()
    rig.intake.decline("others wait")
    assert rig.port.heard() == [m.Refuse(1, 1, False, "others wait")]
    assert rig.intake.blocked is None
    rig.arrive()
    assert rig.port.yielded_ids == ["a"]


def test_stopped_rank_refuses_what_is_announced_and_returns_what_arrives():
    rig = Rig(room=1)
    rig.announce("a")
    rig.announce("b", serial=1)
    rig.port.heard()
    rig.intake.stop("the end")
    rig.intake.stop("again")
    rig.announce("c", serial=2)
    assert rig.port.heard() == [m.Refuse(1, 1, False, "the end"), m.Refuse(1, 2, False, "the end")]
    rig.arrive()
    assert rig.port.heard() == [m.Settle([["a", 0, "back", 0, "the end"]])]
    assert rig.port.yielded_ids == []
    assert rig.intake.statistics.received == 0


# -- owners that end -------------------------------------------------------------------------------------------------


def test_estate_of_an_owner_is_what_is_held_and_what_was_acked():
    rig = Rig(owners=2)
    rig.take("held", serial=0)
    rig.take("acked", serial=1)
    rig.take("other", owner="t1")
    rig.intake.settle(key("acked"), "ack")
    rig.announce("under way", serial=2)
    rig.announce("waits", serial=3)
    rig.intake.owner_gone(OWNER, "died")
    assert rig.intake.in_transfer(OWNER) == 2
    rig.arrive()
    rig.arrive()
    assert rig.intake.in_transfer(OWNER) == 0
    assert rig.intake.estate(OWNER) == (["held"], ["acked"])


def test_dead_owner_is_told_nothing_and_what_it_left_is_used():
    rig = Rig()
    rig.take("s", serial=0)
    rig.take("t", serial=1)
    rig.port.heard()
    rig.intake.owner_gone(OWNER, "died")
    assert rig.intake.settle(key("s"), "ack").sample_id == "s"
    assert rig.intake.settle(key("t"), "back").sample_id == "t"
    assert rig.port.heard() == []
    assert rig.port.freed == ["s", "t"]
    assert rig.intake.settle(key("s"), "ack") is None
    assert rig.intake.estate(OWNER) == ([], ["s"])
    rig.announce("late", serial=2)
    assert rig.intake.statistics.stale == 1


def test_intake_is_drained_when_the_owner_has_seen_every_return():
    rig = Rig()
    idle = {"closed": True, "error": "", "idle": True, "settled": False}
    rig.take("s")
    assert not rig.intake.drained()
    rig.intake.owner_state(OWNER, m.OwnerState(**idle, seen=0))
    assert rig.intake.drained()
    rig.intake.settle(key("s"), "fail", 1, "bad")
    assert not rig.intake.drained()  # it comes again: the owner's word is older than that
    rig.intake.owner_state(OWNER, m.OwnerState(**{**idle, "idle": False}, seen=1))
    assert not rig.intake.drained()
    rig.announce("s", delivery=1)
    rig.intake.owner_state(OWNER, m.OwnerState(**idle, seen=1))
    assert not rig.intake.drained()  # under way
    rig.arrive()
    assert rig.intake.drained()
    rig.intake.settle(key("s"), "ack")
    assert rig.intake.drained()  # an ack brings nothing back


def test_return_to_a_dead_owner_keeps_nobody_waiting():
    rig = Rig()
    rig.take("s")
    rig.intake.owner_gone(OWNER, "died")
    rig.intake.settle(key("s"), "back")
    assert rig.intake.drained()
    assert rig.intake.all_settled()
    assert rig.intake.serving_owners() == []


def test_owners_that_can_serve_this_rank():
    rig = Rig(owners=2, drafts=2, static=True)
    assert rig.intake.serving_owners() == ["t0"]  # the orders of t1 are odd, those of this rank even
    assert rig.intake.drained() is False
    assert Rig(owners=2, drafts=2).intake.serving_owners() == ["t0", "t1"]
    rig.intake.owner_gone("t0", "died")
    assert rig.intake.serving_owners() == []
    assert rig.intake.drained()  # whatever t1 still has is for others
    rig.intake.draft_gone("d1", 1)
    assert rig.intake.serving_owners() == ["t1"]
    assert not rig.intake.drained()  # unless those are no more
    rig.take("s", owner="t1", order=1)
    rig.intake.draft_forgotten("d1")
    rig.intake.owner_state("t1", m.OwnerState(True, "", True, True, 0))
    assert rig.intake.drained()


# -- generations and stragglers --------------------------------------------------------------------------------------


def test_news_of_an_old_generation_does_not_touch_the_new_link():
    rig = Rig(room=1)
    rig.up(2)
    rig.announce("a", gen=2)
    rig.announce("b", gen=2, serial=1)
    rig.intake.link_down(OWNER, 1)
    rig.intake.link_opening(OWNER, 1)
    rig.arrive()
    assert rig.port.yielded_ids == ["a"]
    rig.intake.settle(key("a"), "ack")
    rig.intake.grant()
    rig.arrive()
    assert rig.port.yielded_ids == ["a", "b"]


def test_static_sample_that_is_returned_before_its_turn_is_not_yielded():
    rig = Rig(static=True)
    rig.announce("a", order=0)
    rig.announce("b", serial=1, order=1)
    rig.arrive()
    rig.intake.settle(key("b"), "back")
    rig.arrive()
    assert rig.port.yielded_ids == ["a"]


def test_static_sample_that_was_failed_comes_again_ahead_of_everything():
    rig = Rig(owners=2, static=True)
    rig.take("a", owner="t0", order=0)
    rig.take("b", owner="t1", order=1)
    rig.intake.settle(key("a"), "fail", 1, "bad")
    rig.intake.settle(key("b", "t1"), "fail", 1, "bad")
    # Order 2 is due next and has not been announced; those that were failed wait for nobody, nor for each other.
    rig.announce("b", owner="t1", delivery=1, order=1, failures=1)
    assert [d.sample_id for d in rig.port.posted] == ["b"]
    rig.announce("a", owner="t0", delivery=1, order=0, failures=1)
    rig.arrive(0)
    assert rig.port.yielded_ids == ["a", "b", "b"]
    rig.announce("d", owner="t1", serial=1, order=3)
    rig.arrive(0)
    assert rig.port.yielded_ids == ["a", "b", "b", "a"]
    assert rig.port.posted == []
    rig.take("c", owner="t0", serial=1, order=2)
    rig.arrive()
    assert rig.port.yielded_ids == ["a", "b", "b", "a", "c", "d"]


def test_static_order_does_not_wait_for_one_that_was_failed_and_may_be_a_dead_letter_by_now():
    rig = Rig(static=True)
    rig.take("a", order=0)
    rig.take("b", serial=1, order=1)
    rig.intake.settle(key("a"), "fail", 1, "bad")
    rig.announce("a", delivery=1, order=0, failures=1)
    rig.intake.link_down(OWNER, 1)
    rig.arrive()
    rig.up(2)
    rig.take("c", gen=2, serial=2, order=2)
    assert rig.port.yielded_ids == ["a", "b", "c"]


def test_static_order_waits_for_a_void_transfer_that_its_owner_takes_for_delivered():
    rig = Rig(owners=2, static=True)
    rig.announce("a", owner="t0", order=0)
    rig.announce("b", owner="t1", order=1)
    lost, other = rig.port.posted
    rig.intake.owner_state("t0", m.OwnerState(True, "", True, False, 0))
    rig.intake.link_down("t0", 1)
    rig.intake.transfer_over(other, ok=True)
    assert rig.port.yielded_ids == []
    assert not rig.intake.drained()
    rig.intake.transfer_over(lost, ok=True)
    assert rig.port.yielded_ids == []
    rig.port.posted.clear()
    rig.up(2, "t0")
    rig.take("a", owner="t0", gen=2, delivery=1, order=0)
    assert rig.port.yielded_ids == ["a", "b"]


def test_static_order_waits_for_a_sample_whose_link_broke_twice():
    rig = Rig(owners=2, static=True)
    rig.announce("a", owner="t0", order=0)
    rig.announce("b", owner="t1", order=1)
    lost, other = rig.port.posted
    rig.port.posted.clear()
    rig.intake.link_down("t0", 1)
    rig.intake.transfer_over(lost, ok=False)
    rig.port.room = 0
    rig.up(2, "t0")
    rig.announce("a", owner="t0", gen=2, delivery=1, order=0)  # no memory now
    rig.intake.link_down("t0", 2)
    rig.port.room = 8
    rig.intake.transfer_over(other, ok=True)
    assert rig.port.yielded_ids == []
    rig.up(3, "t0")
    rig.take("a", owner="t0", gen=3, delivery=2, order=0)
    assert rig.port.yielded_ids == ["a", "b"]
