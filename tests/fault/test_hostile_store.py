"""Anybody who reaches the store can write to it: nothing of it is executed, and a run completes or names an error."""

import json
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.distributed.harness import Run
from tests.distributed.workers import vandal

pytestmark = pytest.mark.distributed


def test_garbage_in_every_inbox_is_dropped(tmp_path):
    with Run(tmp_path, targets=2, drafts=2, config={"end": "drop"}, samples=60) as run:
        owners, takers = run.start_all(target={"pace": 0.02, "gate_at": (20, "attacked")}, draft={"pace": 0.02})
        run.wait_got(takers[0], 3)
        attack(run, "inboxes", tmp_path / "canary")
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        assert not (tmp_path / "canary").exists(), "a value of the store was executed"
        books = takers[0].books
        assert books["balanced"]
        assert books["acked"] + books["dropped"] == books["put"] == 120
        assert books["dropped"] <= 2


KINDS = ["/slot/", "/gone/", "/status/", "/epoch", "/cohort"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in ("/journal/", "/rev", "/link/")]


@pytest.mark.parametrize("kind", [*KINDS, "nccl_stream/"])
def test_garbage_in_keys_is_survived_or_named(tmp_path, kind):
    """One kind of key at a time, so that damage in one place does not hide what another does; then all of them."""
    fatal = kind in ("/gone/", "/epoch", "nccl_stream/")
    with Run(tmp_path, targets=2, drafts=2, deaths=fatal, config={"end": "drop"}, samples=40) as run:
        canary = tmp_path / "canary"
        target = {"pace": 0.03, "gate_at": (10, "attacked")}
        owners, takers = run.start_all(target=target, draft={"pace": 0.02, "books": False})
        run.wait_got(takers[0], 3)
        attack(run, kind, canary)
        run.wait_ended(*owners, *takers)
        judge(canary, owners, takers)
        if not fatal:
            assert [worker.error for worker in (*owners, *takers)] == [None] * 4


def damage(run, what, change):
    """Change one key of the run once."""
    store = dist.TCPStore("127.0.0.1", run.port, is_master=False, timeout=timedelta(seconds=30))
    (key,) = [key for key in store.list_keys() if what in key]
    store.set(key, change(store.get(key)))
    (rev,) = [key for key in store.list_keys() if key.endswith("/rev")]
    store.set(rev, '"changed"')
    store.get(rev)  # an answered call: the changes have reached the server


def test_rank_whose_tombstone_is_damaged_stops_and_the_others_go_on(tmp_path):
    config = {"end": "drop"}
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config=config, samples=60) as run:
        (owner,), takers = run.start_all(target={"pace": 0.03}, draft={"pace": 0.02, "books": False})
        run.wait_got(takers[1], 3)
        damage(run, "/gone/d1-", lambda value: "x")
        run.wait_ended(owner, *takers)
        assert takers[1].error["type"] == "FencedError", takers[1].error
        assert owner.error is None
        assert takers[0].error is None
        assert len(takers[0].acked) == len(set(takers[0].acked))
        books = owner.said("own books")[-1]
        assert books["put"] == books["acked"] + books["dropped"] == 60


def test_slot_that_names_nobody_harms_nobody(tmp_path):
    def lie(value):
        return json.dumps({**json.loads(value), "inc": "d1-ffffffffffff"})

    with Run(tmp_path, targets=1, drafts=2, deaths=True, config={"end": "drop"}, samples=60) as run:
        (owner,), takers = run.start_all(target={"pace": 0.03}, draft={"pace": 0.02})
        run.wait_got(takers[1], 3)
        damage(run, "/slot/draft/1", lie)
        run.wait_ended(owner, *takers)
        assert [worker.error for worker in (owner, *takers)] == [None] * 3
        assert takers[0].books["balanced"]


def test_garbage_while_ranks_join_is_survived_or_named(tmp_path):
    with Run(tmp_path, targets=2, drafts=2, deaths=True, config={"connect_timeout": 10.0}, samples=20) as run:
        canary = tmp_path / "canary"
        attacker = run.start("vandal", vandal, attack="nccl_stream/", canary=str(canary))
        run.wait_for("the vandal to be there", lambda: attacker.said("round"))
        owners, takers = run.start_all(draft={"books": False})
        run.wait_ended(*owners, *takers)
        judge(canary, owners, takers)


def attack(run, kind, canary):
    """Let the targets go on once somebody writes garbage to such keys."""
    attacker = run.start("vandal", vandal, attack=kind, canary=str(canary))
    run.wait_for("a key to be attacked", lambda: any(entry["written"] for entry in attacker.said("round")))
    run.open_gate("attacked")


def judge(canary, owners, takers):
    assert not canary.exists(), "a value of the store was executed"
    for worker in (*owners, *takers):
        assert worker.error is None or "NcclStreamError" in worker.error["is_a"], worker.error
        assert "control thread failed" not in worker.log.read_text(), "a thread met with a value it did not expect"
    # Whatever became of the run, no sample came with another's values (the workers look), and none counts twice.
    # What a draft has acked that did not live to tell may come to another one.
    for counted in ([worker for worker in takers if worker.error is None], *([worker] for worker in takers)):
        acked = [number for worker in counted for number in worker.acked]
        assert len(acked) == len(set(acked))
