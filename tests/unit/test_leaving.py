"""What close() says on a draft rank whose store was lost meanwhile."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import pytest

from nccl_stream.errors import ControlStoreError
from nccl_stream.testing.store_suite import make_sample
from tests.unit.test_nccl_store import CONFIG, open_pair

QUICK = replace(CONFIG, heartbeat=0.1, death_timeout=20.0)
PATIENCE = 60.0


def lose_store(*streams: Any) -> None:
    """Until they know; the last reference to the server is the caller's, who has dropped it."""
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while not all(stream._side._fatal for stream in streams):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_draft_whose_ack_nobody_confirmed_says_what_ended_the_stream() -> None:
    target, draft, server = open_pair(QUICK)
    target.queue.put(target.store.put("s", make_sample(), "run"))
    lease = draft.queue.acquire(PATIENCE)
    del server
    lose_store(target, draft)
    draft.queue.ack(lease)  # as far as this rank can tell
    with pytest.raises(ControlStoreError):
        draft.close()
    draft.close()
    with pytest.raises(ControlStoreError):
        target.close()


def test_draft_whose_acks_are_confirmed_leaves_in_peace() -> None:
    """A job that goes on after the end of its stream does not fail for a store that nobody needs any more."""
    target, draft, server = open_pair(QUICK)
    target.queue.put(target.store.put("s", make_sample(), "run"))
    target.queue.close()
    draft.queue.ack(draft.queue.acquire(PATIENCE))
    target.close()
    assert draft.wait_ended(PATIENCE)
    del server
    lose_store(draft)
    draft.close()
