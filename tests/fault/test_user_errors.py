"""A target's own code fails: the drafts get an error, at the same round, and never a clean end."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("targets", "drafts", "end"), [(2, 2, "drop"), (2, 2, "ragged"), (1, 3, "pad")])
def test_failure_of_a_target_reaches_every_draft(tmp_path, targets, drafts, end):
    with Run(tmp_path, targets=targets, drafts=drafts, config={"end": end}, samples=60) as run:
        owners = [run.target(rank, raise_at=30 if rank == 0 else None, pace=0.01) for rank in range(targets)]
        takers = [run.draft(rank, pace=0.01 * (1 + rank)) for rank in range(drafts)]
        run.wait_ended(*owners, *takers)
        assert owners[0].error["type"] == "ZeroDivisionError"
        for taker in takers:
            assert taker.error is not None, "the end looked clean"
            assert taker.error["type"] == "ProducerFailedError", taker.error
            assert "ZeroDivisionError" in taker.error["text"]
            assert "the target's own code is wrong" in taker.error["text"]
            if end != "ragged":
                assert len(taker.got) == len(takers[0].got)
        for owner in owners[1:]:
            # Its samples have takers no more; it says so, or had been done before.
            assert owner.error is None or "PeerLostError" in owner.error["is_a"], owner.error


def test_drafts_that_all_fail_end_the_targets(tmp_path):
    with Run(tmp_path, targets=2, drafts=2, config={"end": "drop"}, samples=100) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "gate_at": (50, "failed")}, draft={"raise_at": 5})
        run.wait_ended(*takers)
        run.wait_drafts_gone(*owners)
        run.open_gate("failed")
        run.wait_ended(*owners)
        for taker in takers:
            assert taker.error["type"] == "ZeroDivisionError"
        for owner in owners:
            assert owner.error is None
            assert owner.said("closed"), "a put had no takers and did not say so"
            books = owner.said("own books")[-1]
            assert books["put"] == books["acked"] + books["resident"]
