"""A draft rank that is killed in the middle of a run: nothing is lost."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


def everything(targets, samples):
    return set(range(targets * samples))


@pytest.mark.parametrize(
    ("targets", "drafts", "samples", "end"),
    [
        (2, 2, 50, "drop"),
        (1, 3, 90, "ragged"),
        pytest.param(2, 2, 50, "ragged", marks=pytest.mark.slow),
        pytest.param(1, 3, 90, "drop", marks=pytest.mark.slow),
    ],
)
def test_killed_draft_loses_nothing(tmp_path, targets, drafts, samples, end):
    with Run(tmp_path, targets=targets, drafts=drafts, deaths=True, config={"end": end}, samples=samples) as run:
        # The run cannot end before the kill, however late that comes.
        owners, takers = run.start_all(target={"gate_at": (samples - 1, "killed")}, draft={"pace": 0.01})
        victim, others = takers[0], takers[1:]  # with rounds, rank 0 is the one that leads them
        run.wait_got(victim, 8)
        victim.kill()
        run.open_gate("killed")
        run.wait_ended(*owners, *others)
        assert [worker.error for worker in (*owners, *others)] == [None] * (targets + drafts - 1)
        acked = [number for worker in others for number in worker.acked]
        assert len(acked) == len(set(acked)), "a sample was acked twice"
        # What the victim had acked may or may not have reached the owner: those may come again. So may what it had in
        # hand, whose ack it may have sent before it could say so. Nothing else may miss.
        missing = everything(targets, samples) - set(acked) - set(victim.got)
        books = others[0].books
        assert books["balanced"]
        assert books["put"] == targets * samples
        assert books["lost"] == books["dead"] == books["resident"] == 0
        if end == "ragged":
            assert missing == set()
            assert books["acked"] == books["put"]
        else:
            # An aligned end drops what the drafts that are left cannot share evenly: per owner at most one round each.
            assert len(missing) <= books["dropped"] <= targets * (len(others) - 1)
            assert len({len(worker.got) for worker in others}) == 1
