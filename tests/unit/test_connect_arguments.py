"""Where a process stands in the run: what connect makes of its arguments and of torchrun's environment."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest

import nccl_stream
from nccl_stream.config import StreamConfig
from nccl_stream.errors import ConfigError, ControlStoreError, PeerTimeoutError
from nccl_stream.ranks.place import find_place

TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def place(monkeypatch: pytest.MonkeyPatch, env_rank: int, world: int, **arguments: Any) -> Any:
    monkeypatch.setenv("RANK", str(env_rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    names = ("store", "role", "rank", "num_targets", "num_drafts", "target_ranks")
    return find_place(*(arguments.get(name) for name in names))


def test_one_launch_first_ranks_are_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [place(monkeypatch, rank, 5, num_targets=2) for rank in range(5)]
    assert [(p.role, p.rank) for p in places] == [
        ("target", 0), ("target", 1), ("draft", 0), ("draft", 1), ("draft", 2),
    ]  # fmt: skip
    assert all((p.num_targets, p.num_drafts, p.one_launch) == (2, 3, True) for p in places)


def test_one_launch_explicit_target_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [place(monkeypatch, rank, 4, target_ranks=[3, 1]) for rank in range(4)]
    assert [(p.role, p.rank) for p in places] == [("draft", 0), ("target", 0), ("draft", 1), ("target", 1)]
    assert places[0].global_ranks == (0, 2)
    assert places[1].global_ranks == (1, 3)


def test_restart_count_is_part_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    first = place(monkeypatch, 0, 2, num_targets=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert place(monkeypatch, 0, 2, num_targets=1).scope != first.scope


def test_two_launches_take_their_own_count_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(monkeypatch, 1, 2, store="tcp://h:1", role="draft", num_targets=3)
    assert (found.role, found.rank, found.num_targets, found.num_drafts) == ("draft", 1, 3, 2)
    assert not found.one_launch


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "num_targets"),
        ({"num_targets": 0}, "positive"),
        ({"num_targets": True}, "positive"),
        ({"num_targets": 4}, "at least one target and one draft"),
        ({"num_targets": 9}, "at least one target and one draft"),
        ({"target_ranks": [0, 7]}, "do not fit"),
        ({"target_ranks": [-1]}, "do not fit"),
        ({"target_ranks": [0], "num_targets": 2}, "target_ranks names 1"),
        ({"num_targets": 1, "num_drafts": 2}, "leaves 3"),
        ({"role": "trainer"}, "'target' or 'draft'"),
        ({"rank": 1}, "rank goes with role"),
        ({"role": "draft"}, "num_targets and num_drafts"),
        ({"role": "draft", "num_targets": 1, "num_drafts": 3}, "has 4 ranks"),
        ({"role": "draft", "rank": 2, "num_targets": 1, "num_drafts": 2}, "outside"),
        ({"role": "draft", "rank": "0", "num_targets": 1, "num_drafts": 1}, "rank must be an int"),
        ({"role": "draft", "rank": False, "num_targets": 1, "num_drafts": 1}, "rank must be an int"),
        ({"target_ranks": ["a", 0]}, "sequence of ints"),
        ({"target_ranks": 2}, "sequence of ints"),
    ],
)
def test_wrong_roles_and_counts_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place(monkeypatch, 0, 4, **arguments)


def test_no_role_outside_of_torchrun_says_what_to_pass() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        nccl_stream.connect(run_id="x", num_targets=1)


@pytest.mark.parametrize("run_id", ["", "a/b", 7, "x" * 201])
def test_bad_run_id_is_refused(run_id: Any) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        nccl_stream.connect(run_id=run_id, num_targets=1)


@pytest.mark.parametrize(
    "address", ["host:1", "tcp://host", "tcp://:1", "tcp://host:port", "tcp://h:99999", "tcp://h:0", "tcp://h:\u00b2"]
)
def test_bad_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        nccl_stream.connect(address, run_id="x", role="draft", rank=0, num_targets=1, num_drafts=1)


@pytest.mark.parametrize("store", [5, b"tcp://host:1", object()])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="TCPStore"):
        nccl_stream.connect(store, run_id="x", role="draft", rank=0, num_targets=1, num_drafts=1)


@pytest.mark.parametrize("config", [{}, {"batch_size": 1}, StreamConfig])
def test_what_is_no_configuration_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="StreamConfig"):
        nccl_stream.connect("tcp://h:1", run_id="x", role="draft", rank=0, num_targets=1, num_drafts=1, config=config)


QUICK = StreamConfig(connect_timeout=1.0, device="cpu")


@pytest.mark.parametrize(
    "variables", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}]
)
def test_launch_that_does_not_say_where_to_meet_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        nccl_stream.connect(run_id="x", num_targets=1, config=QUICK)


@pytest.mark.parametrize(
    ("own_rank", "error", "names"),
    [(0, PeerTimeoutError, "draft rank 0"), (1, ControlStoreError, "rank 0 of the launch")],
)
def test_rank_of_a_launch_without_an_agent_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch, own_rank: int, error: type[Exception], names: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", str(own_rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(error, match=names):
        nccl_stream.connect(run_id="x", num_targets=1, config=QUICK)


def test_store_that_is_not_there_is_named_within_the_deadline() -> None:
    with pytest.raises(ControlStoreError, match="nccl-stream store"):
        nccl_stream.connect(
            "tcp://127.0.0.1:9",
            run_id="x",
            role="draft",
            rank=0,
            num_targets=1,
            num_drafts=1,
            config=StreamConfig(connect_timeout=1.0),
        )


def test_arena_too_small_names_the_size_that_would_do() -> None:
    config = StreamConfig(max_sample_bytes=1 << 20, arena_bytes=1 << 20)
    with pytest.raises(ConfigError, match=str(config.smallest_arena())):
        nccl_stream.connect(
            "tcp://127.0.0.1:9", run_id="x", role="draft", rank=0, num_targets=1, num_drafts=1, config=config
        )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_bytes": 1 << 20, "max_sample_bytes": 1 << 20}, "optimizer window of 4 samples"),
        ({"max_samples": 3}, "at least 4"),
        ({"fanout": 1, "assignment": "static"}, "leave fanout unset"),
        ({"fanout": 1}, "at least 2"),
    ],
)
def test_sizes_that_would_get_stuck_are_refused(values: dict[str, Any], complaint: str) -> None:
    config = StreamConfig(**{"max_sample_bytes": 1 << 20, **values})
    with pytest.raises(ConfigError, match=complaint):
        config.check_run(num_targets=2, num_drafts=4)


@pytest.mark.parametrize(
    ("fanout", "targets", "drafts", "links"),
    [(None, 2, 40, 40), (None, 40, 2, 40), (8, 2, 16, 8), (2, 16, 4, 8), (1, 3, 2, 2), (99, 3, 2, 3)],
)
def test_most_links_are_those_of_the_busiest_rank(fanout: int | None, targets: int, drafts: int, links: int) -> None:
    assert StreamConfig(fanout=fanout).most_links(num_targets=targets, num_drafts=drafts) == links


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 0},
        {"heartbeat": -1.0},
        {"death_timeout": 2.0, "heartbeat": 1.0},
        {"assignment": "random"},
        {"end": "never"},
        {"device": "not-a-device"},
        {"low_watermark_bytes": 10, "high_watermark_bytes": 10},
        {"high_watermark_bytes": 1 << 60},
        {"chunk_bytes": 1000},
        {"max_failures": -1},
        {"depth": True},
        {"max_shared_bytes": 0},
        {"low_watermark_bytes": "1"},
        {"low_watermark_bytes": True},
        {"high_watermark_bytes": 1.5},
        {"draft_restart_timeout": -5},
        {"draft_restart_timeout": "x"},
        {"draft_restart_timeout": math.nan},
        {"draft_restart_timeout": math.inf},
        {"connect_timeout": math.inf},
        {"connect_timeout": 10**400},
        {"transfer_timeout": math.nan},
        {"heartbeat": math.inf, "death_timeout": math.inf},
        {"lease": True},
        {"poison": "no"},
        {"check_finite": "no"},
        {"verify_checksums": 1},
        {"device": 3.5},
        {"device": 0},
        {"device": ["cpu"]},
        {"end": ["drop"]},
        {"max_bytes": 1e9},
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values)).partition("_")[0]):
        StreamConfig(**values)


def test_values_that_mean_something_are_taken() -> None:
    StreamConfig(draft_restart_timeout=0, lease=1, low_watermark_bytes=0, max_failures=0, device_bytes=0)
