"""One store, several lives: a run id that is used again, a launcher that is killed, a process that forks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.distributed.harness import Journal, Run

pytestmark = pytest.mark.distributed


def test_run_id_is_used_again_after_a_clean_end(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, config={"end": "drop"}, samples=20) as run:
        for life in range(2):
            owner = run.target(0, life=life)
            takers = [run.draft(rank, life=life) for rank in range(2)]
            run.wait_ended(owner, *takers)
            assert [worker.error for worker in (owner, *takers)] == [None] * 3
            assert {number for worker in takers for number in worker.acked} == set(range(20))
            assert takers[0].books["put"] == 20, "the books are those of an earlier life"


def test_run_id_is_used_again_after_everybody_was_killed(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "drop"}, samples=40) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "gate_at": (39, "never")}, draft={"pace": 0.02})
        run.wait_got(takers[0], 5)
        for worker in (*owners, *takers):
            worker.signal(signal.SIGKILL)
        owner = run.target(0, life=1)
        takers = [run.draft(rank, life=1) for rank in range(2)]
        run.wait_ended(owner, *takers)
        assert [worker.error for worker in (owner, *takers)] == [None] * 3
        assert {number for worker in takers for number in worker.acked} == set(range(40))
        assert takers[0].books["put"] == 40


def test_ranks_notice_that_their_launcher_was_killed(tmp_path):
    """A target under a launcher of its own, drafts without one: both sides come to an end."""
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "drop"}, samples=1000) as run:
        takers = [run.draft(rank, pace=0.02) for rank in range(2)]
        spec = {**run.base, "port": run.port, "config": run.config, "rank": 0, "pace": 0.05, "name": "t0"}
        journal = Journal(tmp_path / "t0.jsonl")
        with (tmp_path / "launcher.log").open("w") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--master-port=0",
                 "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
                 "-m", "tests.distributed.launched", json.dumps(spec), str(journal.path)],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            run.wait_got(takers[0], 5)
            pid = journal.lines("pid")[0]["pid"]
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(20.0)
            error = run.wait_for("the orphan to notice", lambda: journal.lines("error"))[0]
            assert error["type"] == "LauncherLostError", error
            run.wait_for("the orphan to be gone", lambda: not is_running(pid))
            run.wait_ended(*takers)
            for taker in takers:
                assert taker.error is not None, "the end looked clean"
                assert {"PeerLostError", "ProducerFailedError"} & set(taker.error["is_a"])
        finally:
            launcher.kill()
            launcher.wait(20.0)
            for entry in journal.lines("pid"):
                if is_running(entry["pid"]):
                    os.kill(entry["pid"], signal.SIGKILL)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("killed", [False, True], ids=["leaves-late", "killed"])
def test_rank_that_keeps_the_store_goes_last(tmp_path, killed):
    """One launch without torchrun's agent: the target hosts the store, and is done long before a draft is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"one_launch": True, "own_store": True}
    with Run(
        tmp_path, targets=1, drafts=1, deaths=True, config={"end": "ragged"}, samples=8, port=port, **launch
    ) as run:
        owner, taker = run.target(0), run.draft(0, linger="evaluated")
        run.wait_for("the end of the stream", lambda: taker.said("drained") and owner.said("all put"))
        time.sleep(run.death + 1.0)  # longer than a silent rank is waited for
        assert owner.alive, "the store is gone"
        if killed:
            taker.kill()
        else:
            run.open_gate("evaluated")
            run.wait_ended(taker)
            assert taker.error is None
            assert taker.books["acked"] == 8
        run.wait_ended(owner)
        assert owner.error is None


def test_forking_data_loader_works_after_connect(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, config={"end": "drop"}, samples=40) as run:
        owners, takers = run.start_all(target={"forks": 2, "pace": 0.01}, draft={"forks": 2, "pace": 0.01})
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 3
        for worker in (*owners, *takers):
            assert worker.said("loaded")[0]["items"] == list(range(16))
        assert {number for worker in takers for number in worker.acked} == set(range(40))


@pytest.mark.parametrize("end", ["ragged", "drop"])
def test_held_tensors_keep_their_values(tmp_path, end):
    """Equal shapes, different fill values, freed memory overwritten at once: the workers compare all that they hold."""
    config = {"end": end, "poison": True, "arena_bytes": 2 << 20, "max_sample_bytes": 128 << 10}
    with Run(tmp_path, targets=2, drafts=2, config=config, samples=100, width=256) as run:
        owners, takers = run.start_all(draft={"hold": 12})
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        books = takers[0].books
        assert books["balanced"]
        assert books["acked"] + books["dropped"] == books["put"] == 200
        # A draft that had no memory while another one stood still left samples to that one, and has fewer in the end.
        assert books["dropped"] <= 2 or books["redelivered"]
