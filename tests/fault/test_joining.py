"""Runs that cannot be formed: the error names who is missing, or what does not match, on every rank."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


def is_joining(worker):
    """Whether it is in the roster and has seen somebody else there."""
    return worker.log.exists() and "sees" in worker.log.read_text()


def error_of(worker):
    assert worker.error is not None, f"{worker.name} joined a run that cannot be"
    return worker.error["type"], worker.error["text"]


def test_rank_that_never_comes_is_named(tmp_path):
    with Run(tmp_path, targets=2, drafts=2, config={"connect_timeout": 6.0}, samples=1) as run:
        there = [run.target(0), run.target(1), run.draft(0)]
        run.wait_ended(*there)
        for worker in there:
            kind, text = error_of(worker)
            assert kind in ("PeerTimeoutError", "MembershipError")
            assert kind == "MembershipError" or "draft rank 1" in text
        assert "PeerTimeoutError" in [error_of(worker)[0] for worker in there]


def test_peer_that_never_opens_its_side_of_a_link(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "ragged"}, samples=1) as run:
        drafts = [run.draft(0), run.draft(1, no_links=True)]
        run.wait_for("the drafts to be members", lambda: all(is_joining(draft) for draft in drafts))
        # Only the target runs out of patience: a draft that gave up first would be one that left.
        target = run.target(0, config={"connect_timeout": 6.0})
        run.wait_ended(target, *drafts)
        kind, text = error_of(target)
        assert kind == "LinkTimeoutError"
        assert "draft rank 1" in text


def test_ranks_that_disagree_on_the_config(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, samples=1) as run:
        agreeing = [run.target(0), run.draft(0)]
        run.wait_for("two ranks to be joining", lambda: all(is_joining(worker) for worker in agreeing))
        odd = run.draft(1, config={"chunk_bytes": 4096})
        run.wait_ended(*agreeing, odd)
        kind, text = error_of(odd)
        assert kind == "ConfigError"
        assert "chunk_bytes" in text
        assert "4096" in text
        for worker in agreeing:
            kind, text = error_of(worker)
            assert kind == "MembershipError"
            assert "chunk_bytes" in text


def test_ranks_that_disagree_on_who_is_there(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, samples=1) as run:
        agreeing = run.target(0)
        run.wait_for("the target to be joining", lambda: agreeing.log.exists())
        odd = run.draft(0, drafts=3)
        run.wait_ended(agreeing, odd)
        errors = {error_of(agreeing)[0], error_of(odd)[0]}
        assert errors == {"ConfigError", "MembershipError"}
        assert all("num_drafts" in error_of(worker)[1] for worker in (agreeing, odd))


def test_arena_too_small_says_what_would_do(tmp_path):
    config = {"arena_bytes": 4 << 20, "max_sample_bytes": 2 << 20}
    with Run(tmp_path, targets=1, drafts=1, config=config, samples=1) as run:
        ranks = [run.target(0), run.draft(0)]
        run.wait_ended(*ranks)
        for worker in ranks:
            kind, text = error_of(worker)
            assert kind == "ConfigError"
            needed = 3 * ((2 << 20) + (2 << 20) // 64 + (64 << 10))
            assert str(needed) in text


def test_second_process_under_the_same_rank_is_refused(tmp_path):
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "ragged"}, samples=100) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "after": "done"}, draft={"pace": 0.01})
        run.wait_got(takers[0], 3)
        double = run.draft(0, life=1)
        run.wait_ended(double)
        kind, text = error_of(double)
        assert kind == "MembershipError"
        assert "draft rank 0" in text
        run.open_gate("done")
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 3
        assert {number for worker in takers for number in worker.acked} == set(range(100))


def test_two_processes_under_the_same_rank_from_the_start(tmp_path):
    with Run(tmp_path, targets=1, drafts=1, deaths=True, samples=5) as run:
        first, second = run.draft(0), run.draft(0, life=1)
        run.wait_for("both to be there", lambda: first.log.exists() and second.log.exists())
        owner = run.target(0, after="done")
        run.wait_for("one of them to be refused", lambda: first.error or second.error)
        run.open_gate("done")
        run.wait_ended(owner, first, second)
        assert owner.error is None
        errors = [worker.error for worker in (first, second)]
        assert errors.count(None) == 1, "exactly one of them may hold the rank"
        assert next(error for error in errors if error)["type"] == "MembershipError"
        assert sum(len(worker.acked) for worker in (first, second)) == 5
