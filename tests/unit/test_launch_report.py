"""The main job's report and its data: books, bottleneck, throughput, and windows that depend on the seed alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from _report import Progress, books, bottleneck, summary, throughput
from _text import ByteTokenizer, Windows, held_out_prompts

BALANCED = {"put": 8, "acked": 7, "dropped": 1, "dead": 0, "lost": 0, "resident": 0, "bytes": 0, "paused_s": 0.0}


def test_books_are_judged() -> None:
    assert books(BALANCED) == "put 8 = acked 7 + dropped 1 + dead 0 + lost 0 + resident 0  (balanced)"
    assert "NOT BALANCED: the outcomes sum to 7" in books({**BALANCED, "dropped": 0})


def test_idle_share_is_the_mean_over_targets_and_bytes_are_the_runs() -> None:
    progress = Progress(total_steps=2, num_drafts=2, num_targets=2)
    progress.begin()
    progress.observe({**BALANCED, "bytes": 77, "paused_s": 1e9})
    assert progress.idle_shares[-1][1] == 1.0
    assert progress.bytes == 77
    progress.observe(BALANCED)
    assert progress.idle_shares[-1][1] == 0.0


@pytest.mark.parametrize(
    ("wait", "idle", "held_up_by"),
    [(0.5, 0.1, "the targets"), (0.02, 0.6, "the drafts"), (0.05, 0.1, "neither"), (0.0, None, "no target ranks")],
)
def test_bottleneck_is_the_side_the_other_waits_for(wait: float, idle: float | None, held_up_by: str) -> None:
    assert bottleneck(wait, idle).startswith(held_up_by)


def test_throughput_counts_the_samples_of_all_drafts() -> None:
    seconds = [0.5 * step for step in range(1, 81)]
    rates = throughput(seconds, num_drafts=2, points=10)
    assert [rate for _, rate in rates] == pytest.approx([4.0] * len(rates))
    assert rates[-1][0] == 36.5


def test_summary_compares_the_ends_of_the_run() -> None:
    progress = Progress(total_steps=2, num_drafts=2, num_targets=1)
    progress.begin()
    progress.accept(1.0, seconds=0.0)
    for loss in (3.0, 2.0):
        progress.step(loss, waited_s=0.0)
    progress.observe({**BALANCED, "paused_s": 1e9})
    progress.accept(2.5, seconds=0.0)
    text = summary(progress, BALANCED)
    assert "loss        3.000 -> 2.000" in text
    assert "acceptance  1.00 -> 2.50" in text
    assert "put 8 = acked 7" in text
    assert "bottleneck  the drafts" in text


def test_windows_depend_on_seed_and_index_alone() -> None:
    tokens = torch.arange(1000)
    first, second = (Windows(tokens, count=6, batch=3, length=16, seed=7) for _ in range(2))
    forwards = [first[index]["input_ids"] for index in range(6)]
    backwards = [second[index]["input_ids"] for index in reversed(range(6))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not torch.equal(forwards[0], forwards[1])
    assert not torch.equal(forwards[0], Windows(tokens, count=6, batch=3, length=16, seed=8)[0]["input_ids"])
    assert torch.equal(forwards[0][:, 1:], forwards[0][:, :-1] + 1)
    with pytest.raises(IndexError):
        first[6]


def test_held_out_prompts_are_spread_and_of_equal_length() -> None:
    prompts = held_out_prompts(torch.arange(100), count=4, length=10)
    assert [int(prompt[0]) for prompt in prompts] == [0, 25, 50, 75]
    assert {prompt.numel() for prompt in prompts} == {10}
    with pytest.raises(ValueError, match="too few"):
        held_out_prompts(torch.arange(39), count=4, length=10)


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve, yes")) == "naïve, yes"
