"""The books of a run, asked for at every moment of it."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from nccl_stream.errors import ControlStoreError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.testing.store_suite import make_sample
from tests.unit.test_nccl_store import CONFIG, open_pair

QUICK = replace(CONFIG, heartbeat=0.1, death_timeout=20.0)


def test_books_are_known_when_the_store_is_gone_after_the_end() -> None:
    target, draft, server = open_pair(QUICK)
    for number in range(4):
        target.queue.put(target.store.put(f"s{number}", make_sample(), "run"))
    target.queue.close()
    with FeatureDataLoader(draft.queue, draft.store) as loader:
        assert sum(1 for _ in loader) == 4
    target.close()
    assert draft.wait_ended(60.0)
    draft.close()
    del server
    gc.collect()
    for stream in (target, draft):
        statistics = stream.statistics()
        assert (statistics["put"], statistics["acked"], statistics["resident"]) == (4, 4, 0)
        assert statistics.balanced
        assert [books["acked"] for books in statistics.owners.values()] == [4]
        assert len(statistics.ranks) == 2
    assert draft.statistics().local["acked"] == 4


def test_books_of_a_rank_that_lost_the_store_are_its_own() -> None:
    target, draft, server = open_pair(QUICK)
    target.queue.put(target.store.put("s", make_sample(), "run"))
    del server
    gc.collect()
    with pytest.raises(ControlStoreError):
        target.statistics()
    with pytest.raises(ControlStoreError):
        target.close()
    statistics = target.statistics()
    assert (statistics["put"], statistics["resident"]) == (1, 1)
    assert list(statistics.ranks) == [target._node.inc]
    assert statistics.local["books"]["put"] == 1
    draft._leave("failed", None)
