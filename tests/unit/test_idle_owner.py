"""A draft ends while an owner has said that it is idle: it is not, before it has taken that end into account."""

from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.intake import DraftIntake
from nccl_stream.coordination.messages import OwnerState, has_left


class Port:
    def __init__(self):
        self.told = []

    def tell(self, peer, message):
        self.told.append((peer, message))

    def settled(self, sample):
        pass


def make_intake():
    intake = DraftIntake(Port(), rank=0, num_targets=1, num_drafts=2, static=False)
    intake.owner_joined("t0", 0)
    intake.owner_state("t0", OwnerState(True, "", True, False, 0))
    assert intake.drained()
    return intake


def test_owner_is_not_idle_until_it_knows_of_the_end():
    intake = make_intake()
    intake.draft_gone("d1", 1)
    assert not intake.drained()
    intake.owner_state("t0", OwnerState(True, "", False, False, 0, ["d1"]))  # the samples of d1 wait
    assert not intake.drained()
    intake.owner_state("t0", OwnerState(True, "", True, False, 0, ["d1"]))
    assert intake.drained()


def test_owner_may_know_before_we_do():
    intake = make_intake()
    intake.owner_state("t0", OwnerState(True, "", True, False, 0, ["d1"]))
    intake.draft_gone("d1", 1)
    assert intake.drained()


def test_owner_that_never_knew_the_draft_is_not_waited_for_without_end():
    intake = make_intake()
    intake.draft_gone("d1", 1)
    intake.draft_forgotten("d1")
    assert intake.drained()


def test_owner_tells_whose_end_it_knows_even_if_nothing_else_changes():
    port = Port()
    owner = OwnerDelivery(port, num_drafts=2, static=False, window=4, max_failures=3)
    owner.draft_joined("d0", 0)
    owner.draft_joined("d1", 1)
    owner.close()
    port.told.clear()
    owner.draft_gone("d1", awaited=False)
    assert [(peer, state.gone) for peer, state in port.told] == [("d0", ["d1"])]
    port.told.clear()
    owner.draft_gone("stranger", awaited=False)
    assert [(peer, state.gone) for peer, state in port.told] == [("d0", ["d1", "stranger"])]


def test_owner_is_not_idle_while_a_leaver_has_something_that_may_come_back():
    port = Port()
    owner = OwnerDelivery(port, num_drafts=2, static=False, window=4, max_failures=3)
    for rank in range(2):
        owner.draft_joined(f"d{rank}", rank)
    owner.link_up("d1", 1)
    owner.offer("s", {}, 1, 0)
    owner.close()
    port.transmit = lambda *args: None
    owner.ready("d1", 1, 0, 0)
    owner.sent("d1", 1, 0, "s", 1)
    assert [state.idle for peer, state in port.told if peer == "d0"] == [False, True]
    port.told.clear()
    owner.draft_left("d1")
    (told,) = [state for peer, state in port.told if peer == "d0"]
    assert (told.idle, told.gone) == (False, [has_left("d1")])
    owner.settle("d1", [["s", 0, "back", 0, ""]])
    assert not port.told[-1][1].idle
    owner.link_up("d0", 1)
    owner.ready("d0", 1, 0, 0)
    owner.sent("d0", 1, 0, "s", 1)
    assert port.told[-1][1].idle
