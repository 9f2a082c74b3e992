"""Ranks that come back to a run which others have left: nobody waits for those, and nothing goes unreported."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed

# Few samples fit, so that a target goes on having some while no draft is up.
NARROW = {
    "end": "ragged",
    "draft_restart_timeout": 90.0,
    "high_watermark_bytes": 60_000,
    "low_watermark_bytes": 30_000,
}


def is_noticed(victim, *observers):
    """Whether each observer's log says that this incarnation is gone."""
    role = {"t": "target", "d": "draft"}[victim.name[0]]
    label = f"{role} rank {victim.name[1]} ("
    pid = f"pid {victim.process.pid})"
    return all(
        any(label in line and pid in line and "gone" in line for line in observer.log.read_text().splitlines())
        for observer in observers
    )


def kill_noticed(run, victim, *observers):
    victim.kill()
    run.wait_for(f"the death of {victim.name} to be noticed", lambda: is_noticed(victim, *observers))


@pytest.mark.parametrize("comes_back", [True])
def test_samples_of_a_target_that_dies_while_no_draft_is_up_are_reported(tmp_path, comes_back):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=NARROW, samples=40) as run:
        (survivor, victim), takers = run.start_all(draft={"pace": 0.02})
        for taker in takers:
            run.wait_got(taker, 5)
        for taker in takers:
            kill_noticed(run, taker, survivor, victim)
        kill_noticed(run, victim, survivor)
        put = {entry["number"] for entry in victim.said("put")}
        later = [run.target(1, life=1, samples=0)] if comes_back else []
        again = [run.draft(rank, life=1) for rank in range(2)]
        run.wait_ended(survivor, *later, *again)
        assert [worker.error for worker in (survivor, *later, *again)] == [None] * (3 + len(later))
        acked = {number for worker in (*takers, *again) for number in worker.acked}
        lost = {int(sample_id[1:]) for sample_id in again[0].lost}
        assert sorted(again[1].lost) == sorted(again[0].lost), "not every draft was told"
        assert len(again[0].lost) == len(lost), "an id was reported twice"
        assert put - acked <= lost, "samples are in nobody's books"
        books = again[0].books
        assert books["balanced"]
        assert books["resident"] == 0
        assert books["lost"] == len(lost)
