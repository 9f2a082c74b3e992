"""Streams whose transfers are issued by the threads that use them, over links that follow NCCL's rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import nccl_stream.ranks.links
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.testing.nccl_double import Fabric, connected_links
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, SPECS, cut, make_whole
from tests.unit.test_nccl_store import CONFIG, open_pair

PATIENCE = 60.0
PUMPED = replace(CONFIG, issue="pump", heartbeat=0.2)


class Doubles:
    """Both ends of every link, made when the first one is asked for; notes who issues transfers."""

    def __init__(self) -> None:
        self.fabrics: list[Fabric] = []
        self.issuers: set[str] = set()
        self._ends: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def open_link(self, store: Any, prefix: str, side: int, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if prefix not in self._ends:
                *ends, fabric = connected_links()
                self.fabrics.append(fabric)
                self._ends[prefix] = [self._watched(end) for end in ends]
            return self._ends[prefix][side]

    def _watched(self, link: Any) -> Any:
        for name in ("send", "recv"):
            issue = getattr(link, name)

            def note_and_issue(buf: Any, issue: Callable[[Any], Any] = issue) -> Any:
                self.issuers.add(threading.current_thread().name)
                return issue(buf)

            setattr(link, name, note_and_issue)
        return link


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Doubles:
    doubles = Doubles()
    monkeypatch.setattr(nccl_stream.ranks.links, "open_link", doubles.open_link)
    return doubles


@pytest.fixture
def pumped(doubles: Doubles) -> Iterator[Any]:
    """A target and a draft, and how to run a body for each of them in a thread of its own."""
    target, draft, server = open_pair(replace(PUMPED, max_samples=2))

    def run(*bodies: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def guarded(body: Callable[[], None]) -> None:
            try:
                body()
            except BaseException as exc:  # noqa: BLE001 - shown below, in the test's thread
                errors.append(exc)

        names = {body.__name__ for body in bodies}
        threads = [threading.Thread(target=guarded, args=(b,), name=b.__name__, daemon=True) for b in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not [thread.name for thread in threads if thread.is_alive()], "hangs"
        assert not errors
        assert doubles.issuers == names, "transfers are issued by who uses the stream, and by nobody else"
        assert [fabric.misuse for fabric in doubles.fabrics] == [[]]

    yield target, draft, run
    for stream in (draft, target):  # of a test that failed; not for ever
        closing = threading.Thread(target=stream.close, daemon=True)
        closing.start()
        closing.join(10.0)
    del server


def test_rank_that_waits_for_samples_room_or_outcomes_moves_them_itself(pumped: Any) -> None:
    target, draft, run = pumped
    got = []

    def producer() -> None:
        for number in range(8):
            sample = make_sample(fill=number)
            nbytes = sum(tensor.nbytes for tensor in sample.values())
            while not target.store.wait_for_room(nbytes, PATIENCE):
                pass
            target.queue.put_blocks_until_below(target.store.put(f"s{number}", sample, "run"))
        target.close()

    def consumer() -> None:
        with FeatureDataLoader(draft.queue, draft.store) as loader:
            for batch in loader:
                got.append(batch["input_ids"].clone())
        draft.close()

    run(producer, consumer)
    assert len(got) == 8
    for number, ids in enumerate(got):
        assert torch.equal(ids, make_sample(fill=number)["input_ids"])


def test_writers_and_readers_of_streamed_samples_move_the_pieces_themselves(pumped: Any) -> None:
    target, draft, run = pumped
    whole = make_whole(6 * PIECE)
    got = []

    def producer() -> None:
        writer = target.store.open_stream("s", SPECS, "run", piece_length=PIECE, window=2)
        target.queue.put(writer.ref)
        for start in range(0, 6 * PIECE, PIECE):
            writer.append(cut(whole, start, start + PIECE))
        writer.close()
        target.close()

    def consumer() -> None:
        lease = None
        while lease is None:
            lease = draft.queue.acquire(PATIENCE)
        reader = draft.store.open_reader(lease.ref)
        for piece in reader:
            got.append(piece.tensors["input_ids"].clone())
            piece.release()
        reader.release()
        draft.queue.ack(lease)
        assert draft.wait_ended(PATIENCE)
        draft.close()

    run(producer, consumer)
    assert torch.equal(torch.cat(got, dim=1), whole["input_ids"])
