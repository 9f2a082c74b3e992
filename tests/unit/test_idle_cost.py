"""What a stream costs its store while nothing happens: per heartbeat, whatever the number of processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from torch.distributed import TCPStore

import nccl_stream
from nccl_stream.config import StreamConfig
from nccl_stream.coordination.kv import clone_store
from nccl_stream.ranks import links

MIB = 1 << 20
CONFIG = StreamConfig(
    max_sample_bytes=MIB // 4,
    arena_bytes=2 * MIB,
    max_bytes=2 * MIB,
    device="cpu",
    heartbeat=0.05,
    death_timeout=100.0,
    connect_timeout=100.0,
)


class CountingStore:
    """A client of the store that counts its calls and those of all its clones."""

    def __init__(self, store: TCPStore, calls: Counter[str] | None = None) -> None:
        self.store = store
        self.calls: Counter[str] = Counter() if calls is None else calls

    def clone(self) -> CountingStore:
        return CountingStore(self.store.clone(), self.calls)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name == "set_timeout":
            return method

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return method(*args)

        return call


def wait_beats(streams: list[Any], count: int) -> None:
    goals = [(stream, stream._node._status_seq + count) for stream in streams]
    deadline = time.monotonic() + 60.0
    while any(stream._node._status_seq < goal for stream, goal in goals):
        assert time.monotonic() < deadline, "a heart has stopped"
        time.sleep(0.01)


@pytest.fixture
def open_streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    # A process group is built from a store of torch's own; what it does there belongs to the link's opening.
    monkeypatch.setattr(links, "clone_store", lambda store: clone_store(store.store))
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    streams: list[Any] = []
    stores: list[CountingStore] = []
    errors: list[BaseException] = []

    def join(role: Any, rank: int, num_targets: int, num_drafts: int, store: CountingStore) -> None:
        try:
            ranks = {"num_targets": num_targets, "num_drafts": num_drafts}
            stream = nccl_stream.connect(store, run_id="idle", role=role, rank=rank, config=CONFIG, **ranks)  # type: ignore[arg-type]
            streams.append((stream, store))
        except BaseException as exc:  # noqa: BLE001 - shown below, in the test's thread
            errors.append(exc)

    def open_all(num_targets: int, num_drafts: int) -> tuple[list[Any], list[CountingStore]]:
        threads = []
        for role, count in (("target", num_targets), ("draft", num_drafts)):
            for rank in range(count):
                client = CountingStore(TCPStore("127.0.0.1", server.port, is_master=False))
                args = (role, rank, num_targets, num_drafts, client)
                threads.append(threading.Thread(target=join, args=args, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not errors
        stores.extend(store for _, store in streams)
        return [stream for stream, _ in streams], stores

    yield open_all
    leavers = [threading.Thread(target=stream.close, daemon=True) for stream, _ in streams]
    for thread in leavers:
        thread.start()
    for thread in leavers:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("num_targets", "num_drafts"), [(1, 1), (2, 3)])
def test_idle_process_makes_two_store_calls_per_heartbeat(open_streams: Any, num_targets: int, num_drafts: int) -> None:
    """However many there are: its own status out, and one look at a few others."""
    streams, stores = open_streams(num_targets, num_drafts)
    # What the introductions bring with them comes to an end, on a busy machine later than on an idle one.
    windows = [surplus(streams, stores)]
    while max(windows[-1]) > 0 and len(windows) < 6:
        windows.append(surplus(streams, stores))
    assert max(windows[-1]) <= 0, windows
    assert min(windows[-1]) >= -4, "the heart beats without being heard"


def surplus(streams: list[Any], stores: list[CountingStore]) -> list[int]:
    """Store calls of each process in about 30 heartbeats, beyond two for each that may have been under way."""
    before = [reading(stream, store) for stream, store in zip(streams, stores, strict=True)]
    wait_beats(streams, 30)
    after = [reading(stream, store) for stream, store in zip(streams, stores, strict=True)]
    return [
        calls - calls_before - 2 * (beats - beats_before + 1)
        for (beats_before, calls_before), (beats, calls) in zip(before, after, strict=True)
    ]


def reading(stream: Any, store: CountingStore) -> tuple[int, int]:
    """Heartbeats and store calls so far, both of one moment: no heart beats between the two looks."""
    while True:
        beats, calls = stream._node._status_seq, sum(store.calls.values())
        if stream._node._status_seq == beats:
            return beats, calls
