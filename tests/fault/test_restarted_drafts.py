"""A draft job that is killed and started again goes on with the targets that stayed up."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("end", "assignment"), [("ragged", "demand"), ("drop", "static")])
def test_killed_draft_job_goes_on_when_started_again(tmp_path, end, assignment):
    config = {"end": end, "assignment": assignment, "draft_restart_timeout": 60.0}
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=config, samples=40) as run:
        # The run cannot end before the kills, however late they come.
        owners, takers = run.start_all(target={"gate_at": (39, "killed")}, draft={"pace": 0.02})
        run.wait_got(takers[0], 5)
        run.wait_got(takers[1], 5)
        for taker in takers:
            taker.kill()
        run.open_gate("killed")
        again = [run.draft(rank, life=1) for rank in range(2)]
        run.wait_ended(*owners, *again)
        assert [worker.error for worker in (*owners, *again)] == [None] * 4
        acked = [number for worker in again for number in worker.acked]
        assert len(acked) == len(set(acked))
        books = again[0].books
        assert books["balanced"]
        assert books["put"] == 80
        assert books["lost"] == books["dead"] == books["resident"] == 0
        # What the killed ranks had acked may or may not have been heard of; so may what they had in hand, whose ack may
        # have gone out before they could say so.
        before = {number for worker in takers for number in worker.got}
        assert len(set(range(80)) - set(acked) - before) <= books["dropped"]
        assert books["acked"] == 80 - books["dropped"]
        if end == "drop":
            # Each rank has all samples of one target, less what its predecessor had acked of them.
            heard = [
                owner.said("own books")[-1]["acked"] - len(own.acked) for owner, own in zip(owners, again, strict=True)
            ]
            assert all(0 <= count <= len(worker.got) for count, worker in zip(heard, takers, strict=True))
            assert books["dropped"] == max(heard) - min(heard)
            assert len(again[0].got) == len(again[1].got) == 40 - max(heard)
        else:
            assert books["dropped"] == 0


def test_one_rank_of_independent_drafts_restarts(tmp_path):
    # Few samples may be under way, and the other draft stops until the new incarnation has some: it cannot take all.
    config = {
        "end": "ragged",
        "draft_restart_timeout": 60.0,
        "high_watermark_bytes": 60_000,
        "low_watermark_bytes": 30_000,
    }
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=config, samples=60) as run:
        owners, (victim, other) = run.start_all(draft={"stall_at": (10, "restarted")})
        run.wait_got(victim, 5)
        victim.kill()
        again = run.draft(0, life=1, stall_at=(1 << 30, ""))
        run.wait_got(again, 5)
        run.open_gate("restarted")
        run.wait_ended(*owners, other, again)
        assert [worker.error for worker in (*owners, other, again)] == [None] * 4
        # The victim may have sent the ack of what it had in hand before it could say so.
        assert set(range(120)) - set(other.acked) - set(again.acked) <= set(victim.got)
        books = other.books
        assert books["balanced"]
        assert books["acked"] == books["put"] == 120


def test_draft_job_that_does_not_come_back_is_given_up(tmp_path):
    config = {"end": "drop", "draft_restart_timeout": 1.0}
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=config, samples=40) as run:
        owners, takers = run.start_all(draft={"pace": 0.02, "stall_at": (20, "never")})
        run.wait_got(takers[0], 5)
        for taker in takers:
            taker.kill()
        run.wait_ended(*owners)
        for owner in owners:
            assert owner.error is None
            books = owner.said("own books")[-1]
            assert books["resident"] == len(books["resident_ids"]) > 0
            assert books["put"] == books["acked"] + books["resident"]
