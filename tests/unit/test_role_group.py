"""The group that DDP is given: its timeout is not that of connecting, its backend the one that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from nccl_stream.config import StreamConfig
from nccl_stream.errors import ConfigError
from tests.unit.test_nccl_store import CONFIG, open_pair

QUICK = StreamConfig(**{**vars(CONFIG), "connect_timeout": 59.0})


@pytest.fixture
def draft() -> Iterator[Any]:
    target, draft, server = open_pair(QUICK)
    yield draft
    draft.close()
    target.close()
    del server


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def test_collectives_have_the_timeout_of_torch_not_that_of_connecting(draft: Any) -> None:
    assert timeout_of(draft.process_group()) == default_pg_timeout


def test_group_is_made_once_with_what_was_asked_for(draft: Any) -> None:
    group = draft.process_group("gloo", timeout=77.0)
    assert timeout_of(group) == timedelta(seconds=77)
    assert draft.process_group() is draft.process_group("gloo") is group
    for other in ("nccl", "cpu:mpi,cuda:nccl"):
        with pytest.raises(ConfigError, match=f"backend='{other}'.*cpu:gloo"):
            draft.process_group(other)


def test_default_group_with_another_backend_is_refused(draft: Any) -> None:
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="backend='nccl'"):
            draft.process_group("nccl")
        assert draft.process_group("gloo") is dist.group.WORLD
    finally:
        draft.close()
        assert dist.is_initialized()
        dist.destroy_process_group()
