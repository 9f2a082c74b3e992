"""The main job under torchrun: streaming must not change what is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 5
SMALL = ("--device", "cpu", "--steps", STEPS, "--batch", 2, "--seq-len", 48)
MEASURED = ("--eval-every", STEPS, "--eval-prompts", 2, "--eval-tokens", 4)


def main_job(out: Path, *options: object, ranks: int) -> tuple[list[list[str]], str]:
    """Losses per draft rank, as hex floats, and what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    losses = out / "losses.json"
    command += [str(ROOT / "launch" / "train_draft.py"), "--out", str(out), "--losses", str(losses)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *(str(option) for option in options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(losses.read_text())["losses"], done.stdout


def test_static_streamed_losses_are_bit_equal_to_colocated_ones(tmp_path: Path) -> None:
    streamed, printed = main_job(
        tmp_path / "s", *SMALL, *MEASURED, "--num-targets", 2, "--assignment", "static", ranks=4
    )
    colocated, _ = main_job(tmp_path / "c", *SMALL, "--eval-every", 0, "--colocated", ranks=2)
    assert streamed == colocated
    assert [len(losses) for losses in streamed] == [STEPS, STEPS]
    assert streamed[0] != streamed[1]
    assert f"put {2 * STEPS} = acked {2 * STEPS} + dropped 0 + dead 0 + lost 0 + resident 0  (balanced)" in printed
    assert "draft-and-verify and plain greedy decoding agree: yes" in printed
    assert (tmp_path / "s" / "train_draft.png").stat().st_size > 10_000
