"""A target rank that is killed: what was delivered is used, what was not is reported, and the books balance."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


# Samples of 57 to 71 KiB in arenas that hold seven at most: see busy().
LARGE = {"max_sample_bytes": 80 << 10, "arena_bytes": 440 << 10}
FIT = 7
WIDTH = 512


def busy(run, takers, *victims, step):
    """Wait until the drafts are at work and the victims have more than fits, so that some of it is still with them.

    The drafts stand still, if nobody goes on before, at the sample of that ``step``.
    """
    most = len(takers) * (step + FIT)
    run.wait_for("more than fits", lambda: sum(len(victim.said("put")) for victim in victims) > most)
    run.wait_got(takers[-1], min(step, 5))


def own(rank, targets, samples):
    return set(range(rank, targets * samples, targets))


@pytest.mark.parametrize(
    ("drafts", "end", "assignment", "step"),
    [(2, "ragged", "demand", 9), (2, "drop", "demand", 9), (3, "drop", "static", 4)],
)
def test_killed_target_is_accounted_for(tmp_path, drafts, end, assignment, step):
    targets, samples = 2, 40
    config = {"end": end, "assignment": assignment, **LARGE}
    with Run(tmp_path, targets=targets, drafts=drafts, deaths=True, config=config, samples=samples, width=WIDTH) as run:
        (victim, survivor), takers = run.start_all(
            target={"gate_at": (samples - 1, "news")}, draft={"pace": 0.02, "stall_at": (step, "news")}
        )
        busy(run, takers, victim, step=step)
        victim.kill()
        run.wait_for("everybody to learn what was lost", lambda: all(worker.lost for worker in takers))
        run.open_gate("news")
        run.wait_ended(survivor, *takers)
        assert [worker.error for worker in (survivor, *takers)] == [None] * (1 + drafts)
        acked = {number for worker in takers for number in worker.acked}
        assert sum(len(worker.acked) for worker in takers) == len(acked)
        lost = {int(sample_id[1:]) for sample_id in takers[0].lost}
        assert all(sorted(worker.lost) == sorted(takers[0].lost) for worker in takers)
        assert lost <= own(0, targets, samples)
        assert not lost & acked, "a sample is reported lost and was used"
        books = takers[0].books
        assert books["balanced"]
        # A put reaches the journal before the sample is announced to anybody, but not before put returns: what was put
        # in the very moment of the kill may be in nobody's books, or not yet in what the victim said.
        said = [entry["number"] for entry in victim.said("put")]
        unwritten = samples + len(said) - books["put"]
        assert unwritten >= -1
        assert books["resident"] == 0
        assert books["lost"] == len(lost)
        assert books["acked"] == len(acked)
        missing = {*own(1, targets, samples), *said} - acked - lost
        unsaid = len((acked | lost) & own(0, targets, samples) - set(said))
        assert len(missing) == books["dropped"] + unwritten + unsaid
        if end == "ragged":
            assert missing == set(said[len(said) - unwritten - unsaid :])
        else:
            (rounds,) = {len(worker.got) for worker in takers}
            if assignment == "static":
                left = {*own(1, targets, samples), *own(0, targets, books["put"] - samples)} - lost
                shares = [sum(number % drafts == rank for number in left) for rank in range(drafts)]
                assert rounds == min(shares)
                assert books["dropped"] == sum(shares) - drafts * rounds
            else:
                # The survivor gives to all alike; of the victim's one may have had none and another all that fit.
                assert books["dropped"] <= (drafts - 1) * (1 + FIT)


@pytest.mark.parametrize("end", [pytest.param("ragged", marks=pytest.mark.slow), "drop"])
def test_all_targets_killed_is_an_error_on_every_draft(tmp_path, end):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config={"end": end, **LARGE}, samples=60, width=WIDTH) as run:
        owners, takers = run.start_all(draft={"pace": 0.02, "stall_at": (20, "killed")})
        busy(run, takers, *owners, step=20)
        for owner in owners:
            owner.kill()
        run.open_gate("killed")
        run.wait_ended(*takers)
        for taker in takers:
            assert taker.error is not None, "the end looked clean"
            assert taker.error["type"] == "SamplesLostError"
            assert taker.error["sample_ids"]
            assert not taker.said("drained")
        if end == "drop":
            assert len(takers[0].got) == len(takers[1].got)


def test_loss_raises_at_once_when_asked(tmp_path):
    config = {"end": "drop", "on_loss": "raise", **LARGE}
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config=config, samples=60, width=WIDTH) as run:
        (victim, survivor), takers = run.start_all(draft={"pace": 0.01, "stall_at": (20, "killed")})
        busy(run, takers, victim, step=20)
        victim.kill()
        run.open_gate("killed")
        run.wait_ended(survivor, *takers)
        for taker in takers:
            assert taker.error is not None
            assert taker.error["type"] == "SamplesLostError"
            assert len(taker.got) == len(takers[0].got)


def test_callback_that_blocks_holds_up_nothing(tmp_path):
    """It is told what died with a target and takes its time; the draft stays a member and goes on with the others."""
    with Run(tmp_path, targets=2, drafts=1, deaths=True, config={**LARGE}, samples=40, width=WIDTH) as run:
        victim, survivor = run.target(0, gate_at=(39, "never")), run.target(1, gate_at=(30, "blocked"))
        taker = run.draft(0, pace=0.02, stall_at=(9, "killed"), on_lost_gate="enough")
        busy(run, [taker], victim, step=9)
        victim.kill()
        run.open_gate("killed")
        run.wait_for("the callback to block", lambda: taker.lost)
        run.open_gate("blocked")
        run.wait_ended(survivor)
        run.wait_for("the draft to end", lambda: taker.said("books") or not taker.alive)
        run.open_gate("enough")
        run.wait_ended(taker)
        assert [worker.error for worker in (survivor, taker)] == [None, None]
        assert own(1, 2, 40) <= set(taker.acked)
        assert taker.books["balanced"]
