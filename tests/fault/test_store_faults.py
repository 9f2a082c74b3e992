"""The store's host is killed or freezes: every process raises a named error within its deadline, none hangs."""

import signal

import pytest

from tests.distributed.harness import Run
from tests.distributed.workers import piped_target

pytestmark = pytest.mark.distributed


def fault(run, number):
    run.store.signal(number)


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGKILL, "drop"),
        (signal.SIGSTOP, "drop"),
        pytest.param(signal.SIGSTOP, "ragged", marks=pytest.mark.slow),
    ],
)
def test_every_rank_says_that_the_store_is_gone(tmp_path, number, end):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config={"end": end}, samples=250) as run:
        # Each kind of rank in each kind of wait: putting and paced, waiting for outcomes, consuming, waiting for work.
        owners = [run.target(0, pace=0.05), run.target(1, gate_at=(20, "never"))]
        takers = [run.draft(0, pace=0.05), run.draft(1)]
        run.wait_for("target 1 to stand at its gate", lambda: len(owners[1].said("put")) == 20)
        run.wait_got(takers[0], 5)
        fault(run, number)
        run.open_gate("never")
        run.wait_ended(*owners, *takers)
        for worker in (*owners, *takers):
            assert worker.error is not None, f"{worker.name} ended as if all were well"
            assert worker.error["type"] == "ControlStoreError", worker.error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_store_that_goes_away_while_ranks_connect(tmp_path, number):
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"connect_timeout": 8.0}, samples=1) as run:
        there = [run.target(0), run.draft(0)]
        run.wait_for("the ranks to be joining", lambda: all(w.log.exists() and w.log.stat().st_size for w in there))
        fault(run, number)
        late = run.draft(1)
        run.wait_ended(*there, late)
        for worker in (*there, late):
            assert worker.error is not None
            assert worker.error["type"] == "ControlStoreError", worker.error


@pytest.mark.parametrize(
    ("number", "idle"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), pytest.param(signal.SIGSTOP, False, marks=pytest.mark.slow)],
    ids=["killed-no-room", "killed-no-prompts", "frozen-no-room"],
)
def test_pipeline_that_waits_says_that_the_store_is_gone(tmp_path, number, idle):
    """The thread that produces waits for what only a living process can get: room in its store, or a prompt."""
    config = {"end": "ragged", "max_samples": 2}
    with Run(tmp_path, targets=1, drafts=1, deaths=True, config=config, samples=2 if idle else 100) as run:
        owner = run.start("t0", piped_target, rank=0, idle=idle)
        taker = run.draft(0, stall_at=(0, "never"))
        run.wait_for("the target to have produced", lambda: len(owner.said("forward")) >= (2 if idle else 3))
        run.wait_got(taker, 1)
        fault(run, number)
        run.wait_ended(owner)
        assert owner.error is not None, "it ended as if all were well"
        assert owner.error["type"] == "ControlStoreError", owner.error
