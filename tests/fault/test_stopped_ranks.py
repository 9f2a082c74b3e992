"""Ranks that stand still: for a moment nothing dies; for too long, the others go on and the stopped rank is fenced."""

import signal
import time

import pytest

from tests.distributed.harness import Run, soon

pytestmark = pytest.mark.distributed


def test_moment_of_standstill_harms_nobody(tmp_path):
    config = {"end": "drop", "death_timeout": 4 * soon()}
    with Run(tmp_path, targets=2, drafts=2, config=config, samples=60) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "gate_at": (59, "go on")}, draft={"pace": 0.02})
        run.wait_got(takers[0], 5)
        run.wait_got(takers[1], 5)
        for worker in (takers[1], owners[1], takers[0]):
            worker.signal(signal.SIGSTOP)
            time.sleep(soon() / 4)
            worker.signal(signal.SIGCONT)
        run.open_gate("go on")
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        books = takers[0].books
        assert books["balanced"]
        assert books["acked"] + books["dropped"] == books["put"] == 120
        assert books["lost"] == books["dead"] == books["redelivered"] == 0


@pytest.mark.parametrize("end", [pytest.param("ragged", marks=pytest.mark.slow), "drop"])
def test_draft_that_stands_still_too_long(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=3, deaths=True, config={"end": end}, samples=60) as run:
        owners, takers = run.start_all(target={"gate_at": (59, "stopped")}, draft={"pace": 0.02})
        victim, others = takers[0], takers[1:]
        run.wait_got(victim, 5)
        victim.signal(signal.SIGSTOP)
        run.open_gate("stopped")
        run.wait_ended(*owners, *others)
        assert [worker.error for worker in (*owners, *others)] == [None] * 4
        victim.signal(signal.SIGCONT)
        run.wait_ended(victim)
        assert victim.error["type"] == "FencedError", victim.error
        books = others[0].books
        assert books["balanced"]
        assert books["acked"] + books["dropped"] == books["put"] == 120
        assert books["dropped"] <= 2 * (end == "drop")
        # What the victim had in hand went to others; nothing it did afterwards counts.
        acked = [number for worker in others for number in worker.acked]
        assert len(acked) == len(set(acked))
        assert len(set(range(120)) - set(acked) - set(victim.acked)) <= books["dropped"]


@pytest.mark.parametrize("end", [pytest.param("ragged", marks=pytest.mark.slow), "drop"])
def test_target_that_stands_still_too_long(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config={"end": end}, samples=60) as run:
        victim = run.target(0, pace=0.05, gate_at=(59, "woken"))
        survivor = run.target(1, gate_at=(59, "news"))
        takers = [run.draft(rank, pace=0.02) for rank in range(2)]
        run.wait_for("the victim to be at work", lambda: len(victim.said("put")) > 5)
        run.wait_got(takers[0], 5)
        victim.signal(signal.SIGSTOP)
        run.wait_for(
            "its death to be known",
            lambda: all("target rank 0" in w.log.read_text() and "is gone" in w.log.read_text() for w in takers),
        )
        run.open_gate("news")
        run.wait_ended(survivor, *takers)
        assert [worker.error for worker in (survivor, *takers)] == [None] * 3
        victim.signal(signal.SIGCONT)
        run.open_gate("woken")
        run.wait_ended(victim)
        assert victim.error["type"] == "FencedError", victim.error
        books = takers[0].books
        assert books["balanced"]
        assert books["lost"] == len(takers[0].lost)
        acked = {number for worker in takers for number in worker.acked}
        assert len(set(range(1, 120, 2)) - acked) <= books["dropped"]


def test_stopped_rank_finds_a_run_that_is_over(tmp_path):
    """Everybody else has left long ago when it wakes up."""
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "ragged"}, samples=20) as run:
        owners, (victim, other) = run.start_all(target={"gate_at": (19, "stopped")}, draft={"pace": 0.05})
        run.wait_got(victim, 2)
        victim.signal(signal.SIGSTOP)
        run.open_gate("stopped")
        run.wait_ended(*owners, other)
        time.sleep(0.5)
        victim.signal(signal.SIGCONT)
        run.wait_ended(victim)
        assert victim.error["type"] == "FencedError", victim.error
