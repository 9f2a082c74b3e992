"""The examples run as their docstrings say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the examples need transformers")
pytest.importorskip("accelerate", reason="the examples need accelerate")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 4  # 64 samples: 2 draft ranks x batches of 4 x 2 of them per step


@pytest.mark.parametrize(
    ("example", "samples", "says"),
    [
        ("accelerate_loop.py", 64, [f"step {STEPS}: loss ", "2 draft ranks"]),
        ("hf_trainer.py", 64, [f"draft rank {rank} of 2: {STEPS} steps" for rank in (0, 1)]),
        ("long_context.py", 4, [f", sample {number}: loss " for number in range(4)]),
    ],
)
def test_example_trains_on_every_sample(tmp_path: Path, example: str, samples: int, says: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, str(ROOT / "launch" / "examples" / example)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for text in says:
        assert text in done.stdout, done.stdout[-4000:]
    books = ast.literal_eval(next(line for line in done.stdout.splitlines() if line.startswith("{'put'")))
    assert (books["put"], books["acked"]) == (samples, samples)
