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


def are_noticed(victims, *observers):
    return all(is_noticed(victim, *observers) for victim in victims)


def is_waiting(worker):
    """Whether it has come, and waits for others to leave."""
    return worker.log.exists() and "waits for" in worker.log.read_text()


def kill_noticed(run, victim, *observers):
    victim.kill()
    run.wait_for(f"the death of {victim.name} to be noticed", lambda: is_noticed(victim, *observers))


@pytest.mark.parametrize("comes_back", [True, False])
def test_samples_of_a_target_that_dies_while_no_draft_is_up_are_reported(tmp_path, comes_back):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=NARROW, samples=40) as run:
        (survivor, victim), takers = run.start_all(target={"gate_at": (39, "news")}, draft={"pace": 0.02})
        for taker in takers:
            run.wait_got(taker, 5)
        for taker in takers:
            taker.kill()
        run.wait_for("the deaths of the drafts to be noticed", lambda: are_noticed(takers, survivor, victim))
        kill_noticed(run, victim, survivor)
        put = {entry["number"] for entry in victim.said("put")}
        later = [run.target(1, life=1, samples=0)] if comes_back else []
        again = [run.draft(0, life=1), run.draft(1, life=1, asks_late=True)]
        run.open_gate("news")
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


def test_samples_that_a_draft_holds_of_a_dead_target_are_reported_when_it_dies_too(tmp_path):
    """The books of the target are closed before: what the draft held then is lost with the draft."""
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=NARROW, samples=40) as run:
        (survivor, victim), takers = run.start_all(draft={"stall_at": (5, "never")})
        for taker in takers:
            run.wait_got(taker, 6)
        victim.kill()
        run.wait_for(
            "the books of the target to be closed",
            lambda: all("the books of t1-" in taker.log.read_text() for taker in takers),
        )
        closed = lost_of(takers[0])
        for taker in takers:
            kill_noticed(run, taker, survivor)
        put = {entry["number"] for entry in victim.said("put")}
        again = [run.draft(rank, life=1) for rank in range(2)]
        run.wait_ended(survivor, *again)
        assert [worker.error for worker in (survivor, *again)] == [None] * 3
        acked = {number for worker in (*takers, *again) for number in worker.acked}
        lost = lost_of(again[0])
        assert lost_of(again[1]) == lost, "not every draft was told"
        assert not lost & closed, "an id was reported twice"
        assert put - acked <= lost | closed, "samples are in nobody's books"
        assert lost, "the drafts held nothing: this tests nothing"
        books = again[0].books
        assert books["balanced"]
        assert books["resident"] == 0
        assert books["lost"] == len(lost | closed)


def lost_of(worker):
    return {int(sample_id[1:]) for sample_id in worker.lost}


@pytest.mark.parametrize("end", ["left", "killed"])
def test_restarted_draft_joins_though_a_target_is_gone(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=1, deaths=True, config=NARROW, samples=30) as run:
        gone = run.target(0, samples=3)
        stays = run.target(1, gate_at=(20, "news"))
        taker = run.draft(0, pace=0.05)
        if end == "left":
            run.wait_ended(gone)
            assert gone.error is None
        else:
            run.wait_got(taker, 5)
            kill_noticed(run, gone, taker)
        kill_noticed(run, taker, stays)
        again = run.draft(0, life=1)
        run.wait_for("the restarted draft to connect", lambda: again.said("connected") or not again.alive)
        run.open_gate("news")
        run.wait_ended(stays, again)
        assert [worker.error for worker in (stays, again)] == [None] * 2
        acked = {number for worker in (taker, again) for number in worker.acked}
        assert {2 * index + 1 for index in range(30)} <= acked
        books = again.books
        assert books["balanced"]
        assert books["resident"] == 0
        assert books["put"] == 33, "the books are not those of the whole run"


@pytest.mark.parametrize("end", ["left", "killed"])
def test_restarted_target_joins_though_a_draft_is_gone(tmp_path, end):
    config = {**NARROW, "draft_restart_timeout": 1.0}
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=config, samples=30) as run:
        stays = run.target(0, gate_at=(20, "news"))
        victim = run.target(1, gate_at=(10, "never"))
        gone = run.draft(0, **({"max_steps": 5} if end == "left" else {}))
        taker = run.draft(1)
        if end == "left":
            run.wait_ended(gone)
            assert gone.error is None
        else:
            run.wait_got(gone, 5)
            kill_noticed(run, gone, stays)
        kill_noticed(run, victim, stays, taker)
        again = run.target(1, life=1)
        run.wait_for("the restarted target to connect", lambda: again.said("connected") or not again.alive)
        run.open_gate("news")
        run.wait_ended(stays, again, taker)
        assert [worker.error for worker in (stays, again, taker)] == [None] * 3
        acked = {number for worker in (gone, taker) for number in worker.acked}
        assert {2 * index + 1 for index in range(30)} <= acked, "samples of the new life are missing"
        assert taker.books["balanced"]
        assert taker.books["resident"] == 0


def test_mistyped_restart_spoils_nothing_for_the_next(tmp_path):
    with Run(tmp_path, targets=1, drafts=1, deaths=True, config=NARROW, samples=30) as run:
        owner, taker = run.target(0), run.draft(0, pace=0.02)
        run.wait_got(taker, 5)
        kill_noticed(run, taker, owner)
        odd = run.draft(0, life=1, config={"chunk_bytes": 4096})
        run.wait_ended(odd)
        assert odd.error["type"] == "ConfigError"
        again = run.draft(0, life=2)
        run.wait_ended(owner, again)
        assert [worker.error for worker in (owner, again)] == [None] * 2
        assert set(taker.acked) | set(again.acked) == set(range(30))


def test_rank_that_comes_back_to_a_launch_waits_for_the_others(tmp_path):
    """One script, two stages under one run id: the first one to be done with the first stage ends it for nobody."""
    config = {"end": "ragged"}
    with Run(tmp_path, targets=1, drafts=2, config=config, samples=30, one_launch=True) as run:
        owner = run.target(0, gate_at=(20, "second stage"))
        early, late = run.draft(0, max_steps=5), run.draft(1)
        run.wait_ended(early)
        assert early.error is None
        again = run.draft(0, life=1)
        run.wait_for("it to wait for the others", lambda: is_waiting(again) or not late.alive)
        run.open_gate("second stage")
        run.wait_ended(owner, late)
        assert [worker.error for worker in (owner, late)] == [None] * 2
        assert set(early.acked) | set(late.acked) == set(range(30))
        others = [run.target(0, life=1), run.draft(1, life=1)]
        run.wait_ended(*others, again)
        assert [worker.error for worker in (*others, again)] == [None] * 3
        assert set(others[1].acked) | set(again.acked) == set(range(30))
        assert again.books["put"] == 30, "the books are those of the first stage"


def test_next_life_waits_for_drafts_that_still_use_the_last_one(tmp_path):
    """Two launches: the targets have left, and a draft evaluates what it got."""
    with Run(tmp_path, targets=1, drafts=2, config={"end": "ragged"}, samples=20) as run:
        owner = run.target(0)
        quick, slow = run.draft(0), run.draft(1, linger="evaluated")
        run.wait_ended(owner, quick)
        again = [run.target(0, life=1), run.draft(0, life=1)]
        run.wait_for("it to wait for the draft", lambda: is_waiting(again[0]) or not slow.alive)
        run.open_gate("evaluated")
        run.wait_ended(slow)
        assert slow.error is None
        again.append(run.draft(1, life=1))
        run.wait_ended(*again)
        assert [worker.error for worker in (owner, quick, *again)] == [None] * 5
        assert set(again[1].acked) | set(again[2].acked) == set(range(20))
