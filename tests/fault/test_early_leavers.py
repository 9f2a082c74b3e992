"""A draft that leaves early hands back what it has, and ends nothing for the others."""

import signal

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("end", ["ragged", "drop", "pad"])
def test_draft_that_leaves_early_hands_back(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=3, config={"end": end}, samples=50) as run:
        owners = [run.target(rank) for rank in range(2)]
        leaver = run.draft(0, max_steps=7, pace=0.01)  # with rounds, the one that leads them
        # However slow it is, the others leave it its seven.
        others = [run.draft(rank, pace=0.02, stall_at=(20, "left")) for rank in (1, 2)]
        run.wait_ended(leaver)
        run.open_gate("left")
        run.wait_ended(*owners, *others)
        assert [worker.error for worker in (*owners, leaver, *others)] == [None] * 5
        assert len(leaver.acked) == 7
        acked = [number for worker in (leaver, *others) for number in worker.acked]
        assert len(acked) == len(set(acked)), "a sample was acked twice"
        books = others[0].books
        assert books["balanced"]
        assert books["acked"] == len(acked)
        assert books["acked"] + books["dropped"] == books["put"] == 100
        assert books["lost"] == books["dead"] == 0
        if end != "drop":
            assert set(acked) == set(range(100))
        else:
            assert books["dropped"] <= 2
        if end != "ragged":
            steps = [len(worker.got) + len(worker.said("padding")) for worker in others]
            assert steps[0] == steps[1]


def test_targets_end_when_every_draft_has_left(tmp_path):
    """Nobody takes the rest: the targets end at once and report it."""
    with Run(tmp_path, targets=2, drafts=2, config={"end": "drop"}, samples=100) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "gate_at": (50, "left")}, draft={"max_steps": 6})
        run.wait_ended(*takers)
        run.wait_drafts_gone(*owners)
        run.open_gate("left")
        run.wait_ended(*owners)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        for owner in owners:
            assert owner.said("closed"), "a put had no takers and did not say so"
            books = owner.said("own books")[-1]
            assert books["put"] == books["acked"] + books["resident"]
        assert sum(owner.said("own books")[-1]["acked"] for owner in owners) == 12


@pytest.mark.parametrize("end", ["drop", "ragged"])
def test_signal_stops_every_rank_in_good_order(tmp_path, end):
    """Handed back samples stay with their owners, and whoever handled the signal before is called."""
    with Run(tmp_path, targets=2, drafts=2, config={"end": end}, samples=4000) as run:
        owners, takers = run.start_all(
            target={"pace": 0.01}, draft={"pace": 0.01, "handle_signals": True, "books": False}
        )
        run.wait_got(takers[1], 5)
        takers[1].signal(signal.SIGTERM)
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        assert [taker.said("earlier handler") != [] for taker in takers] == [False, True]
        for owner in owners:
            assert "asked to stop" in owner.said("closed")[0]["text"]
            books = owner.said("own books")[-1]
            assert books["put"] == books["acked"] + books["resident"]
        acked = [number for taker in takers for number in taker.acked]
        assert len(acked) == len(set(acked)) == sum(owner.said("own books")[-1]["acked"] for owner in owners)
        if end == "drop":
            assert len(takers[0].got) == len(takers[1].got)
