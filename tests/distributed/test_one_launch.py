"""One launch of targets and drafts together, the drafts in a DDP group with real collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed import one_launch
from tests.distributed.harness import PATIENCE, Journal, Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CONFIG = {
    "max_sample_bytes": 4096,
    "arena_bytes": 1 << 20,
    "max_bytes": 1 << 20,
    "heartbeat": 0.25,
    "death_timeout": PATIENCE,
    "connect_timeout": PATIENCE,
}


def launch(folder, *options, ranks, num_targets, samples, config, **spec):
    """Run a launch to its end; returns the journals by (life, global rank)."""
    spec = {"folder": str(folder), "num_targets": num_targets, "samples": samples, "run_id": "run", **spec}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command += ["-m", "tests.distributed.one_launch", json.dumps({**spec, "config": {**CONFIG, **config}})]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    paths = [(path, *path.stem.removeprefix("rank").split(".")) for path in folder.glob("rank*.jsonl")]
    return {(int(life), int(rank)): Journal(path) for path, rank, life in paths}


def fills(journals):
    return Counter(entry["fill"] for journal in journals for entry in journal.lines("step"))


def all_fills(samples):
    dataset = one_launch.Fills(samples)
    return Counter(int(dataset[index]["input_ids"][0]) for index in range(samples))


def test_one_target_feeds_three_drafts_that_train_together_under_backpressure(tmp_path):
    """Samples for whoever lacks one, room for one round, one draft that starts late, one that is slow, all in DDP."""
    samples, slow = 46, (1, 0.02)
    caps = {"max_samples": 3, "announce_window": 1}
    journals = launch(tmp_path, ranks=4, num_targets=1, samples=samples, config=caps, late=2, slow=slow)
    assert [journals[0, rank].lines("connected")[0]["role"] for rank in range(4)] == ["target"] + 3 * ["draft"]
    drafts = [journals[0, rank] for rank in (1, 2, 3)]
    assert [len(draft.lines("step")) for draft in drafts] == 3 * [samples // 3]
    assert len({json.dumps(draft.lines("weights")[0]["values"]) for draft in drafts}) == 1
    left_over = all_fills(samples) - fills(drafts)
    assert left_over.total() == samples % 3
    assert fills(drafts) + left_over == all_fills(samples), "a sample came twice"
    for draft in drafts:
        books = draft.lines("books")[0]
        assert books["balanced"]
        assert books["paused_s"] > 0
        assert (books["put"], books["acked"], books["dropped"]) == (samples, samples - samples % 3, samples % 3)


def test_launch_starts_over_after_one_of_its_ranks_was_killed(tmp_path):
    """Nobody hangs who trains with the one that died, and the next life of the launch meets nothing of the first."""
    world, samples = 3, 20
    told = {"num_targets": 1, "samples": samples, "world": world, "die": ("0", 1, 4)}
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config=CONFIG, **told) as run:
        death = {"config": {"death_timeout": run.death}}
        lives = []
        for life in range(2):
            ranks = [
                run.start(f"{life}.{rank}", one_launch.rank_of_a_launch, env_rank=rank, life=life, **death)
                for rank in range(world)
            ]
            run.wait_ended(*ranks)
            lives.append(ranks)
        assert len(lives[0][2].said("step")) == 4
        assert lives[0][1].error is not None
        assert [rank.error for rank in lives[1]] == [None] * world
        drafts = [rank.journal for rank in lives[1][1:]]
        assert fills(drafts) == all_fills(samples)
        assert [len(draft.lines("step")) for draft in drafts] == 2 * [samples // 2]
        for draft in drafts:
            books = draft.lines("books")[0]
            assert books["balanced"]
            assert books["put"] == books["acked"] == samples, "the books are those of the first life"


def test_two_static_runs_are_equal_to_the_last_bit(tmp_path):
    """Though other ranks are slow in the second one, and start late."""
    world, samples = 4, 24
    told = {"num_targets": 2, "samples": samples, "world": world}
    with Run(tmp_path, targets=2, drafts=2, config={**CONFIG, "assignment": "static"}, **told) as run:
        runs = []
        for number, hindrance in enumerate(({"slow": (0, 0.02)}, {"slow": (1, 0.02), "late": 0})):
            ranks = [
                run.start(f"{number}.{rank}", one_launch.rank_of_a_launch, env_rank=rank, run_id=f"run{number}",
                          **hindrance, config={"max_samples": 2} if "late" in hindrance else {})
                for rank in range(world)
            ]  # fmt: skip
            run.wait_ended(*ranks)
            assert [rank.error for rank in ranks] == [None] * world
            runs.append([[{**entry, "at": 0} for entry in rank.said("step") + rank.said("weights")] for rank in ranks])
    assert runs[0] == runs[1]
    assert [len(steps) for steps in runs[0]] == [0, 0, samples // 2 + 1, samples // 2 + 1]
    assert runs[0][2] != runs[0][3]
