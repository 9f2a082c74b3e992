"""Rounds step by step: what a follower tells, what a leader releases, and how it ends."""

import pytest

from nccl_stream.coordination import messages as m
from nccl_stream.coordination.rounds import MAX_ERROR_TEXT, ROUNDS_AHEAD, EndDecision, Rounds
from nccl_stream.errors import WireFormatError


class Port:
    def __init__(self):
        self.told, self.ends, self.searches = [], [], 0

    def tell(self, draft, message):
        self.told.append((draft, message))

    def propose_end(self, decision):
        self.ends.append(decision)

    def find_end(self):
        self.searches += 1

    def heard(self):
        told, self.told = self.told, []
        return told


def make(me="d0", members=("d0", "d1", "d2"), per_round=2, pad=False, apart=False):
    port = Port()
    return Rounds(port, me, "c", list(members), samples_per_round=per_round, pad=pad, apart=apart), port


def own(rounds, handed=0, pending=0, drained=False, stop=False, error=""):
    rounds.update(handed=handed, pending=pending, drained=drained, stop=stop, error=error)


def have(samples, begun=0, go=0, drained=False, stop=False, error="", cohort="c"):
    return m.Have(cohort, samples, begun, go, drained, stop, error)


# -- the leader releases ---------------------------------------------------------------------------------------------


def test_round_is_released_when_everybody_has_its_batch():
    rounds, port = make()
    own(rounds, pending=4)
    rounds.heard("d1", have(3))
    assert (rounds.samples_released(), port.heard()) == (0, [])  # d2 has not been heard
    rounds.heard("d2", have(2))
    assert rounds.samples_released() == 2
    assert port.heard() == [("d1", m.Go("c", 1)), ("d2", m.Go("c", 1))]
    rounds.heard("d1", have(4, go=1))
    assert port.heard() == []  # d2 lacks one
    rounds.heard("d2", have(4))  # has not seen the first word, and needs it no more
    assert port.heard() == [("d1", m.Go("c", 2)), ("d2", m.Go("c", 2))]


def test_word_is_given_once_per_round_and_draft():
    rounds, port = make(members=("d0", "d1"))
    own(rounds, pending=2)
    rounds.heard("d1", have(2))
    port.heard()
    rounds.heard("d1", have(3))
    own(rounds, pending=3)
    assert port.heard() == []


def test_release_runs_no_further_ahead_than_two_rounds_of_the_slowest():
    rounds, _ = make(members=("d0", "d1"), per_round=1)
    rounds.heard("d1", have(9, begun=1))
    own(rounds, handed=3, pending=6)
    assert rounds.samples_released() == 1 + ROUNDS_AHEAD
    rounds.heard("d1", have(9, begun=2, go=3))
    assert rounds.samples_released() == 2 + ROUNDS_AHEAD


def test_draft_that_gets_nothing_more_holds_up_nobody_where_it_can_pad():
    for drained, pad, apart, released in [
        (True, True, True, 4), (False, True, True, 2), (True, False, False, 2), (True, True, False, 2),
    ]:  # fmt: skip
        rounds, port = make(members=("d0", "d1"), pad=pad, apart=apart)
        rounds.heard("d1", have(2, begun=1, drained=drained))
        own(rounds, handed=2, pending=2)
        assert (rounds.samples_released(), port.ends) == (released, [])


def test_begun_counts_a_round_from_its_first_sample():
    rounds, port = make(me="d1")
    own(rounds, handed=3, pending=1)
    assert port.heard() == [("d0", have(4, begun=2))]


def test_reports_of_strangers_and_of_other_cohorts_do_not_count():
    rounds, port = make(members=("d0", "d1"))
    own(rounds, pending=2)
    rounds.heard("d9", have(2))
    rounds.heard("d1", have(2, cohort="other"))
    assert (rounds.samples_released(), port.heard()) == (0, [])


def test_nothing_is_released_while_a_dead_member_is_awaited():
    rounds, port = make(members=("d0", "d1"))
    rounds.member_gone("d1", awaited=True)
    own(rounds, pending=2)
    rounds.heard("d1", have(2))
    assert (rounds.samples_released(), port.ends, port.heard()) == (0, [], [])
    rounds.member_gone("d1", awaited=False)
    assert rounds.samples_released() == 2


# -- a follower ------------------------------------------------------------------------------------------------------


def test_follower_tells_whole_rounds_while_it_runs_and_every_sample_once_drained():
    rounds, port = make(me="d1")
    own(rounds, pending=2)
    own(rounds, pending=3)
    assert port.heard() == [("d0", have(2))]
    own(rounds, pending=3, drained=True)
    assert port.heard() == [("d0", have(3, drained=True))]
    own(rounds, pending=3, drained=True)
    assert port.heard() == []


def test_follower_obeys_the_present_members_of_its_cohort_only():
    rounds, _ = make(me="d1")
    rounds.on_go("d0", m.Go("other", 5))
    rounds.on_go("d9", m.Go("c", 5))
    assert rounds.samples_released() == 0
    rounds.on_go("d0", m.Go("c", 2))
    rounds.on_go("d0", m.Go("c", 1))  # an old word
    assert rounds.samples_released() == 4
    rounds.member_gone("d0", awaited=False)
    rounds.on_go("d0", m.Go("c", 7))
    assert rounds.samples_released() == 4


def test_new_leader_is_told_everything_again():
    rounds, port = make(me="d2")
    own(rounds, pending=2)
    rounds.on_go("d0", m.Go("c", 1))
    port.heard()
    rounds.member_gone("d0", awaited=False)
    assert rounds.leader == "d1"
    assert port.heard() == [("d1", have(2, go=1))]
    assert port.searches == 0


def test_follower_that_leaves_tells_nothing_more():
    rounds, port = make(me="d1")
    rounds.leave()
    own(rounds, pending=2)
    assert port.heard() == []


def test_long_error_is_cut_to_what_a_message_may_hold():
    rounds, port = make(me="d1")
    own(rounds, error="x" * 100_000)
    ((_, report),) = port.heard()
    assert report.error == "x" * MAX_ERROR_TEXT
    assert m.decode_message(m.encode_message(report)) == report


# -- a new leader ----------------------------------------------------------------------------------------------------


def test_new_leader_looks_for_an_end_before_it_decides_anything():
    rounds, port = make(me="d1", members=("d0", "d1", "d2"))
    own(rounds, pending=4)
    rounds.heard("d2", have(4, go=1))  # kept: it knew of the death before us
    rounds.member_gone("d0", awaited=False)
    assert port.searches == 1
    assert rounds.samples_released() == 0
    rounds.no_end()
    assert rounds.samples_released() == 4
    assert ("d2", m.Go("c", 2)) in port.heard()


def test_new_leader_passes_on_what_the_old_one_released():
    rounds, port = make(me="d1", members=("d0", "d1", "d2"))
    own(rounds, pending=4)
    rounds.on_go("d0", m.Go("c", 2))
    rounds.member_gone("d0", awaited=False)
    rounds.no_end()
    port.heard()
    rounds.heard("d2", have(2))  # has less than what was released to us
    assert port.heard() == [("d2", m.Go("c", 2))]
    assert rounds.samples_released() == 4


def test_new_leader_does_not_repeat_what_the_old_one_told():
    rounds, port = make(me="d1", members=("d0", "d1", "d2"))
    own(rounds, pending=4)
    rounds.heard("d2", have(4, go=2))
    rounds.on_go("d0", m.Go("c", 2))
    rounds.member_gone("d0", awaited=False)
    port.heard()
    rounds.no_end()
    assert port.heard() == []


def test_new_leader_takes_over_the_end_that_stands():
    rounds, port = make(me="d1", members=("d0", "d1"))
    own(rounds, pending=2, drained=True)
    rounds.member_gone("d0", awaited=False)
    rounds.ended(EndDecision(5, "", False))
    own(rounds, pending=2, drained=True)
    assert (rounds.end, port.ends, rounds.samples_released()) == (EndDecision(5, "", False), [], 10)
    rounds.ended(EndDecision(1, "late", True))  # there is only one
    assert rounds.end == EndDecision(5, "", False)


# -- the end ---------------------------------------------------------------------------------------------------------


def end_of(reports, *, pad=False, apart=False, **mine):
    """What the leader of two or more proposes, which has ``mine`` and hears these reports."""
    members = [f"d{rank}" for rank in range(len(reports) + 1)]
    rounds, port = make(members=members, pad=pad, apart=apart)
    for member, report in zip(members[1:], reports, strict=True):
        rounds.heard(member, report)
    own(rounds, **mine)
    assert len(port.ends) <= 1
    return port.ends[0] if port.ends else None


def test_clean_end_comes_when_all_are_drained_and_have_begun_their_last_whole_round():
    assert end_of([have(5, begun=2, drained=True)], handed=3, pending=2, drained=True) == EndDecision(2, "", False)
    assert end_of([have(5, begun=2)], handed=3, pending=2, drained=True) is None
    assert end_of([have(5, begun=2, drained=True)], handed=2, pending=3, drained=True) is None  # round 2 is not begun
    assert end_of([have(5, begun=1, drained=True)], handed=3, pending=2, drained=True) is None


def test_padded_end_covers_the_last_sample_of_everybody():
    mine = {"handed": 3, "pending": 2, "drained": True}
    assert end_of([have(4, begun=2, drained=True)], pad=True, **mine) == EndDecision(3, "", False)
    assert end_of([have(4, begun=2, drained=True)], pad=True, handed=3, pending=1, drained=True).rounds == 2
    assert end_of([have(9, begun=2, drained=True)], pad=True, **mine) == EndDecision(5, "", False)
    assert end_of([have(9, drained=True, error="bad")], pad=True, **mine) == EndDecision(2, "bad", False)


def test_error_ends_after_what_everybody_can_do_and_the_first_one_is_told():
    assert end_of([have(4, error="his")], handed=2, pending=2, error="mine") == EndDecision(2, "mine", False)
    assert end_of([have(2, error="his")], pending=4) == EndDecision(1, "his", False)
    assert end_of([have(2, go=3, error="his")], pending=2) == EndDecision(3, "his", False)  # those were released


def test_stop_ends_after_what_was_released_and_is_no_stop_when_all_is_done():
    assert end_of([have(8, go=1, stop=True)], pending=8) == EndDecision(1, "", True)
    assert end_of([have(8)], pending=8, stop=True) == EndDecision(0, "", True)
    done = {"handed": 4, "pending": 0, "drained": True}
    assert end_of([have(4, begun=2, drained=True, stop=True)], **done) == EndDecision(2, "", False)
    assert end_of([have(5, drained=True, stop=True)], pad=True, **done) == EndDecision(2, "", False)


def test_draft_that_gets_nothing_more_ends_it_for_those_that_have_samples_of_their_own():
    mine = {"handed": 4, "pending": 6}
    assert end_of([have(5, begun=2, drained=True)], apart=True, **mine) == EndDecision(2, "", False)
    assert end_of([have(5, begun=1, drained=True)], apart=True, **mine) is None
    assert end_of([have(5, begun=2, drained=True)], **mine) is None  # others may give it some
    assert end_of([have(5, begun=2, drained=True)], apart=True, pad=True, **mine) is None
    assert end_of([have(13, begun=2, drained=True)], apart=True, **mine) is None  # it is not the one that has least


def test_leader_that_has_left_decides_nothing():
    rounds, port = make(members=("d0", "d1"))
    rounds.leave()
    own(rounds, drained=True)
    rounds.heard("d1", have(0, drained=True))
    assert port.ends == []


def test_end_is_proposed_once():
    rounds, port = make(members=("d0", "d1"))
    rounds.heard("d1", have(0, drained=True))
    own(rounds, drained=True)
    own(rounds, drained=True, error="late")
    assert port.ends == [EndDecision(0, "", False)]


def test_end_releases_what_it_says():
    rounds, port = make(me="d1")
    rounds.on_go("d0", m.Go("c", 1))
    rounds.ended(EndDecision(3, "", False))
    assert rounds.samples_released() == 6
    own(rounds, pending=1)
    assert port.heard() == []


GOOD = {"rounds": 3, "error": "", "stopped": False}


def test_end_document_goes_through_the_store():
    assert EndDecision.from_wire(EndDecision(3, "bad", True).to_wire()) == EndDecision(3, "bad", True)
    assert EndDecision.of(m.End("c", [], 3, "bad", True)) == EndDecision(3, "bad", True)


@pytest.mark.parametrize(
    "document",
    [None, 3, [], {}, {**GOOD, "more": 1}, {"rounds": 3, "error": ""}]
    + [{**GOOD, "rounds": wrong} for wrong in (-1, 2**62, 1.0, True, "3", None)]
    + [{**GOOD, "error": wrong} for wrong in (None, 1, [])]
    + [{**GOOD, "stopped": wrong} for wrong in (None, 0, "no")],
)
def test_damaged_end_document_is_refused(document):
    with pytest.raises(WireFormatError, match="damaged end"):
        EndDecision.from_wire(document)
