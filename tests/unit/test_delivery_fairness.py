"""Who is given a sample when several drafts are equally in need."""

from __future__ import annotations

from typing import Any

from nccl_stream.coordination.delivery import OwnerDelivery
from nccl_stream.coordination.messages import Announce, Message
from nccl_stream.coordination.owned import OwnedSample


class Recorder:
    def __init__(self) -> None:
        self.given: list[str] = []

    def tell(self, draft: str, message: Message) -> None:
        if isinstance(message, Announce):
            self.given.append(draft)

    def transmit(self, draft: str, gen: int, seq: int, sample: OwnedSample) -> None: ...

    def settled(self, sample: OwnedSample) -> None: ...


def deal(prefer: int, samples: int, num_drafts: int = 2) -> list[str]:
    port = Recorder()
    owner = OwnerDelivery(port, num_drafts=num_drafts, static=False, window=8, max_failures=3, abreast=1, prefer=prefer)
    for rank in range(num_drafts):
        owner.draft_joined(f"d{rank}", rank)
        owner.link_up(f"d{rank}", 1)
    ref: dict[str, Any] = {}
    for i in range(samples):
        owner.offer(f"s{i}", ref, 1, i)
    return port.given


def test_two_owners_with_odd_counts_fill_the_last_round_together() -> None:
    given = deal(0, 3) + deal(1, 3)
    assert sorted(given) == ["d0"] * 3 + ["d1"] * 3


def test_an_owner_gives_in_turns_from_the_draft_it_prefers() -> None:
    assert deal(2, 6, num_drafts=3) == ["d2", "d0", "d1", "d2", "d0", "d1"]


def test_sample_that_died_before_anybody_was_handed_it_takes_no_place_in_a_round() -> None:
    for outcome, expected in (("corrupt", "d1"), ("fail", "d0")):
        port = Recorder()
        owner = OwnerDelivery(port, num_drafts=2, static=False, window=8, max_failures=0, abreast=1, prefer=0)
        for rank in range(2):
            owner.draft_joined(f"d{rank}", rank)
            owner.link_up(f"d{rank}", 1)
        for i in range(2):
            owner.offer(f"s{i}", {}, 1, i)
            owner.ready(f"d{i}", 1, 0, 0)
            owner.sent(f"d{i}", 1, 0, f"s{i}", 1)
        owner.settle("d0", [["s0", 0, "ack", 0, ""]])
        owner.settle("d1", [["s1", 0, outcome, 1, "bad"]])
        assert owner.books.dead == 1
        owner.offer("s2", {}, 1, 2)
        assert port.given == ["d0", "d1", expected]
