"""What a stream buffer refuses: every refused call leaves it as it was; nothing hangs and nothing ends falsely."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy
from nccl_stream.errors import ClosedError, MisuseError, PeerTimeoutError, ProducerFailedError
from nccl_stream.stream_buffer import StreamBuffer


class Clock:
    """Monotonic seconds under the test's control."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(policy: ChunkPolicy | None = None, **kwargs: Any) -> StreamBuffer:
    return StreamBuffer(7, "features", "target", policy or FixedChunkPolicy(2), **kwargs)


def feed(buffer: StreamBuffer, start: int, stop: int, walk: str | None = None) -> None:
    for index in range(start, stop):
        buffer.pre_read_register(f"t{index}", walk)
        buffer.put(f"t{index}", index)


def state_of(value: Any) -> Any:
    """All state reachable from a buffer, as plain values; locks, the hint and functions left out."""
    if type(value).__module__.startswith("nccl_stream") and hasattr(value, "__dict__"):
        skipped = ("_lock", "_pop_lock", "_changed", "_maybe_ready", "_clock", "joiner", "policy")
        return {name: state_of(part) for name, part in vars(value).items() if name not in skipped}
    if isinstance(value, dict):
        return [(key, state_of(part)) for key, part in value.items()]
    if isinstance(value, torch.Tensor):
        return (id(value), value.tolist())
    if isinstance(value, BaseException):
        return repr(value)
    if hasattr(value, "_asdict"):
        return {name: state_of(part) for name, part in value._asdict().items()}
    if isinstance(value, list | tuple) or hasattr(value, "maxlen"):
        return [state_of(part) for part in value]
    return copy.copy(value)


def refused(buffer: StreamBuffer, call: Callable[[], object], error: type[BaseException], match: str) -> None:
    before = state_of(buffer)
    with pytest.raises(error, match=match):
        call()
    assert state_of(buffer) == before


def test_state_of_sees_a_change() -> None:
    buffer = make()
    before = state_of(buffer)
    buffer.pre_read_register("a")
    assert state_of(buffer) != before


# Registration.


def test_registering_an_id_twice_is_refused() -> None:
    buffer = make(joiner=tuple)
    buffer.pre_read_register("a")
    buffer.pre_read_register_joined(["p", "q"])
    feed(buffer, 0, 1)
    for known in ("a", "p", "q", "t0"):
        refused(buffer, lambda known=known: buffer.pre_read_register(known), MisuseError, known)
        refused(buffer, lambda known=known: buffer.pre_read_register_joined(["n", known]), MisuseError, known)
    refused(buffer, lambda: buffer.pre_read_register_joined(["n", "m", "n"]), MisuseError, "twice")


def test_refused_joined_registration_registers_none_of_its_ids() -> None:
    buffer = make(joiner=tuple)
    buffer.pre_read_register("a")
    with pytest.raises(MisuseError):
        buffer.pre_read_register_joined(["fresh", "a"])
    buffer.pre_read_register("fresh")
    assert buffer.statistics().registered_pieces == 2


def test_item_without_pieces_is_refused() -> None:
    buffer = make()
    refused(buffer, lambda: buffer.pre_read_register_joined([]), MisuseError, "at least one piece")


def test_several_pieces_without_a_way_to_join_are_refused() -> None:
    buffer = make()
    refused(buffer, lambda: buffer.pre_read_register_joined(["p", "q"]), MisuseError, "joiner or a join_dim")


def test_unhashable_id_changes_nothing() -> None:
    buffer = make()
    refused(buffer, lambda: buffer.pre_read_register([1]), TypeError, "unhashable")  # type: ignore[arg-type]
    refused(buffer, lambda: buffer.put([1], 1), TypeError, "unhashable")  # type: ignore[arg-type]


def test_more_than_promised_is_refused() -> None:
    buffer = make(joiner=tuple)
    feed(buffer, 0, 2)
    buffer.signal_done(3)
    refused(buffer, lambda: buffer.pre_read_register_joined(["p", "q"]), MisuseError, "2 more are too many")
    buffer.pre_read_register("last")
    refused(buffer, lambda: buffer.pre_read_register("one more"), MisuseError, "too many")


def test_registration_after_the_end_is_refused() -> None:
    buffer = make()
    feed(buffer, 0, 1)
    buffer.signal_done()
    assert buffer.pop_chunk().is_final
    refused(buffer, lambda: buffer.pre_read_register("a"), ClosedError, "ended")
    refused(buffer, lambda: buffer.pre_read_register_joined(["a"]), ClosedError, "ended")


def test_done_that_contradicts_is_refused() -> None:
    buffer = make()
    feed(buffer, 0, 3)
    refused(buffer, lambda: buffer.signal_done(-1), MisuseError, "negative")
    refused(buffer, lambda: buffer.signal_done(2), MisuseError, "3 are registered")
    assert not buffer.producer_done
    buffer.signal_done(4)
    refused(buffer, lambda: buffer.signal_done(5), MisuseError, "with 4 items, and now with 5")
    refused(buffer, lambda: buffer.signal_done(), MisuseError, "and now with 0")


def test_priming_late_or_negatively_is_refused() -> None:
    buffer = make()
    refused(buffer, lambda: buffer.prime_context(-1), MisuseError, "negative")
    feed(buffer, 0, 2)
    buffer.pop_chunk()
    refused(buffer, lambda: buffer.prime_context(1), MisuseError, "before the first chunk")


# Pops.


def test_pop_without_a_ready_chunk_is_refused() -> None:
    buffer = make()
    refused(buffer, buffer.pop_chunk, MisuseError, "no chunk is ready")
    feed(buffer, 0, 1)
    refused(buffer, buffer.pop_chunk, MisuseError, "1 of 1 registered")
    feed(buffer, 1, 2)
    assert buffer.pop_chunk().data == {"data": [0, 1]}


def test_pop_after_the_final_chunk_is_refused() -> None:
    buffer = make()
    feed(buffer, 0, 2)
    buffer.signal_done(2)
    assert buffer.pop_chunk().is_final
    assert not buffer.has_chunk_ready()
    for _ in range(2):
        refused(buffer, buffer.pop_chunk, ClosedError, "final chunk")


def test_puts_that_are_dropped_change_only_their_counter() -> None:
    buffer = make(joiner=tuple)
    feed(buffer, 0, 1)
    buffer.pre_read_register("gap")
    buffer.pre_read_register("ahead")
    buffer.put("ahead", 2)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("p", "P")
    before = asdict(buffer.statistics())
    for repeated in ("t0", "ahead", "p"):
        buffer.put(repeated, "other")
    buffer.put("unknown", "other")
    after = asdict(buffer.statistics())
    assert after == before | {"dropped_repeated": 3, "dropped_unknown": 1}
    buffer.put("gap", 1)
    buffer.put("q", "Q")
    buffer.signal_done()
    assert [buffer.pop_chunk().data["data"] for _ in range(2)] == [[0, 1], [2, ("P", "Q")]]


def test_puts_after_the_end_are_counted_and_dropped() -> None:
    buffer = make()
    feed(buffer, 0, 1)
    buffer.signal_done()
    buffer.pop_chunk()
    buffer.put("t0", 0)
    buffer.put("never seen", 0)
    statistics = buffer.statistics()
    assert (statistics.dropped_late, statistics.retained_items) == (2, 0)
    assert not buffer.has_chunk_ready()


def test_chunk_that_cannot_be_stacked_stays_poppable() -> None:
    buffer = make()
    buffer.pre_read_register("a")
    buffer.pre_read_register("b")
    buffer.put("a", torch.zeros(2))
    buffer.put("b", torch.zeros(3))
    refused(buffer, buffer.pop_chunk, RuntimeError, "stack")
    assert buffer.has_chunk_ready()


def test_failing_joiner_leaves_the_last_piece_missing() -> None:
    attempts: list[list[int]] = []

    def join(pieces: list[int]) -> object:
        attempts.append(pieces)
        if len(attempts) == 1:
            raise OSError("no space")
        return sum(pieces)

    buffer = make(FixedChunkPolicy(1), joiner=join)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("q", 1)
    refused(buffer, lambda: buffer.put("p", 2), OSError, "no space")
    assert not buffer.has_chunk_ready()
    buffer.put("p", 3)
    assert buffer.pop_chunk().data == {"data": [4]}
    assert attempts == [[2, 1], [3, 1]]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 2), (3, 5)],  # skips an item
        [(0, 2), (1, 2)],  # delivers nothing new
        [(0, 2), (-1, 4)],  # begins before the stream
    ],
)
def test_policy_that_breaks_its_contract_is_refused(spans: list[tuple[int, int]]) -> None:
    class Broken(ChunkPolicy):
        def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
            return spans[chunk_index]

    buffer = make(Broken())
    feed(buffer, 0, 6)
    refused(buffer, buffer.pop_chunk, MisuseError, "Broken")


def test_policy_that_asks_for_released_items_is_refused() -> None:
    class Backwards(ChunkPolicy):
        def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
            return (0 if chunk_index == 2 else delivered), delivered + 2

    buffer = make(Backwards())
    feed(buffer, 0, 6)
    assert buffer.pop_chunk().released == [0, 1]
    refused(buffer, buffer.pop_chunk, MisuseError, "before 2 are released")


def test_policy_whose_first_span_is_wrong_is_refused_at_construction() -> None:
    class Late(ChunkPolicy):
        def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
            return 1, 2

    with pytest.raises(MisuseError, match="Late"):
        make(Late())


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_arrival_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(MisuseError, match="arrival_timeout"):
        make(arrival_timeout=timeout)


# A producer that fails.


def test_failure_is_an_error_to_the_consumer_never_a_final_chunk() -> None:
    buffer = make()
    feed(buffer, 0, 3)
    buffer.has_chunk_ready()
    cause = OSError("disk full")
    buffer.signal_failed(cause)
    assert buffer.maybe_ready
    assert not buffer.pop_chunk().is_final  # a full chunk that is there is still good
    assert buffer.has_chunk_ready()
    refused(buffer, buffer.pop_chunk, ProducerFailedError, "2 delivered, 3 of 3 .*disk full")
    with pytest.raises(ProducerFailedError) as caught:
        buffer.pop_chunk()
    assert caught.value.__cause__ is cause
    assert buffer.has_chunk_ready()  # it stays an error, so that no consumer waits on


def test_failure_wins_over_done() -> None:
    buffer = make()
    feed(buffer, 0, 2)
    buffer.signal_done(2)
    buffer.signal_failed(OSError("late"))
    assert not buffer.pop_chunk().is_final
    with pytest.raises(ProducerFailedError):
        buffer.pop_chunk()


def test_failure_of_an_endless_stream_ends_it() -> None:
    buffer = make(FixedChunkPolicy(2, continue_after_done=True))
    feed(buffer, 0, 1)
    buffer.signal_failed(OSError("gone"))
    with pytest.raises(ProducerFailedError):
        buffer.pop_chunk()


def test_first_failure_counts() -> None:
    buffer = make()
    buffer.signal_failed(OSError("first"))
    buffer.signal_failed(OSError("second"))
    with pytest.raises(ProducerFailedError, match="first"):
        buffer.pop_chunk()


def test_failure_after_the_end_changes_nothing() -> None:
    buffer = make()
    buffer.signal_done()
    assert buffer.pop_chunk().is_final
    before = state_of(buffer)
    buffer.signal_failed(OSError("late"))
    assert state_of(buffer) == before


def test_failure_flushes_a_run_that_another_walk_closed() -> None:
    buffer = make(FixedChunkPolicy(5), walk_tagged=True)
    feed(buffer, 0, 2, "x")
    feed(buffer, 2, 4, "y")
    buffer.signal_failed(OSError("gone"))
    assert buffer.pop_chunk().data == {"data": [0, 1]}
    with pytest.raises(ProducerFailedError):
        buffer.pop_chunk()


# Items that never arrive.


def test_missing_item_is_named_after_the_deadline() -> None:
    clock = Clock()
    buffer = make(FixedChunkPolicy(2), joiner=tuple, arrival_timeout=30.0, clock=clock)
    feed(buffer, 0, 1)
    buffer.pre_read_register("lost")
    buffer.pre_read_register("here")
    buffer.put("here", 2)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("p", 3)
    clock.now += 29.9
    assert not buffer.has_chunk_ready()
    refused(buffer, buffer.pop_chunk, MisuseError, "no chunk is ready")
    assert not buffer.maybe_ready
    clock.now += 0.1
    assert buffer.maybe_ready  # the hint must not hide the error
    assert buffer.has_chunk_ready()
    refused(buffer, buffer.pop_chunk, PeerTimeoutError, "from target.*stood still for 30.0 s.*missing are 'lost', 'q'$")


def test_overdue_item_may_still_arrive() -> None:
    clock = Clock()
    buffer = make(arrival_timeout=30.0, clock=clock)
    feed(buffer, 0, 1)
    buffer.pre_read_register("slow")
    clock.now += 31
    with pytest.raises(PeerTimeoutError):
        buffer.pop_chunk()
    buffer.put("slow", 1)
    assert buffer.pop_chunk().data == {"data": [0, 1]}


def test_deadline_counts_from_the_last_progress() -> None:
    clock = Clock()
    buffer = make(FixedChunkPolicy(10), joiner=tuple, arrival_timeout=30.0, clock=clock)
    clock.now += 1000  # nothing is owed yet
    buffer.pre_read_register("a")
    buffer.pre_read_register("b")
    buffer.pre_read_register_joined(["p", "q", "r"])
    for name in "abpq":
        clock.now += 29
        assert not buffer.has_chunk_ready()
        buffer.put(name, name)
    clock.now += 29
    assert not buffer.has_chunk_ready()
    buffer.put("r", "r")
    clock.now += 1000
    assert not buffer.has_chunk_ready()  # all that was registered is there
    buffer.pre_read_register("c")
    clock.now += 29
    assert not buffer.has_chunk_ready()
    clock.now += 1
    assert buffer.has_chunk_ready()


def test_deadline_of_an_item_in_pieces_counts_from_its_registration() -> None:
    clock = Clock()
    buffer = make(FixedChunkPolicy(10), joiner=tuple, arrival_timeout=30.0, clock=clock)
    clock.now += 1000
    buffer.pre_read_register_joined(["p", "q"])
    assert not buffer.has_chunk_ready()
    clock.now += 30
    assert buffer.has_chunk_ready()


def test_later_arrivals_do_not_extend_the_wait_for_an_earlier_item() -> None:
    clock = Clock()
    buffer = make(FixedChunkPolicy(10), arrival_timeout=30.0, clock=clock)
    buffer.pre_read_register("lost")
    for index in range(3):
        clock.now += 10
        feed(buffer, index, index + 1)
    with pytest.raises(PeerTimeoutError, match="'lost'"):
        buffer.pop_chunk()


def test_promised_items_that_are_never_registered_are_reported() -> None:
    clock = Clock()
    buffer = make(FixedChunkPolicy(10), arrival_timeout=30.0, clock=clock)
    feed(buffer, 0, 2)
    clock.now += 1000
    buffer.signal_done(5)
    assert not buffer.has_chunk_ready()
    clock.now += 30
    with pytest.raises(PeerTimeoutError, match="missing are 3 that were promised and never registered"):
        buffer.pop_chunk()
    buffer.pre_read_register("lost")
    clock.now += 30
    with pytest.raises(PeerTimeoutError, match="missing are 'lost', and 2 that were promised"):
        buffer.pop_chunk()


def test_ready_chunk_comes_before_an_overdue_item() -> None:
    clock = Clock()
    buffer = make(arrival_timeout=30.0, clock=clock)
    feed(buffer, 0, 2)
    buffer.pre_read_register("lost")
    clock.now += 31
    assert buffer.pop_chunk().num_items == 2
    with pytest.raises(PeerTimeoutError):
        buffer.pop_chunk()


def test_long_lists_of_missing_ids_are_cut() -> None:
    clock = Clock()
    buffer = make(arrival_timeout=30.0, clock=clock)
    for index in range(100):
        buffer.pre_read_register(index)
    clock.now += 31
    with pytest.raises(PeerTimeoutError, match=r"missing are 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
        buffer.pop_chunk()


def test_without_a_timeout_a_missing_item_is_awaited_for_ever() -> None:
    clock = Clock()
    buffer = make(arrival_timeout=None, clock=clock)
    buffer.pre_read_register("slow")
    clock.now += 1e9
    assert not buffer.has_chunk_ready()


# Threads.


def test_wait_wakes_on_put_and_at_the_end() -> None:
    buffer = make(FixedChunkPolicy(1))
    buffer.pre_read_register("a")
    results: list[bool] = []

    def consume() -> None:
        final = False
        while not final:
            results.append(buffer.wait_chunk_ready(60))
            final = buffer.pop_chunk().is_final
        results.append(buffer.wait_chunk_ready(60))

    consumer = threading.Thread(target=consume)
    consumer.start()
    buffer.put("a", 0)
    buffer.signal_done(1)
    consumer.join(30)
    assert not consumer.is_alive()
    assert len(results) >= 2
    assert results == [True] * (len(results) - 1) + [False]


def test_wait_returns_when_the_time_is_up_or_an_item_is_overdue() -> None:
    buffer = make(FixedChunkPolicy(1), arrival_timeout=0.05)
    assert not buffer.wait_chunk_ready(0.01)
    buffer.pre_read_register("lost")
    assert buffer.wait_chunk_ready(60)
    with pytest.raises(PeerTimeoutError, match="lost"):
        buffer.pop_chunk()


def test_wait_for_another_walk_sleeps_although_an_item_is_overdue() -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return 100.0 + looks

    buffer = make(FixedChunkPolicy(1), walk_tagged=True, arrival_timeout=0.5, clock=clock)
    feed(buffer, 0, 1, "x")
    buffer.pre_read_register("lost", "y")
    before = looks
    assert not buffer.wait_chunk_ready(0.05, "y")
    assert looks - before < 20


@pytest.mark.parametrize("end", ["close", "fail"])
def test_wait_is_released_by_close_and_by_failure(end: str) -> None:
    buffer = make(FixedChunkPolicy(1))
    answers: list[bool] = []
    consumer = threading.Thread(target=lambda: answers.append(buffer.wait_chunk_ready(60)))
    consumer.start()
    if end == "close":
        buffer.close()
    else:
        buffer.signal_failed(OSError("gone"))
    consumer.join(30)
    assert not consumer.is_alive()
    assert answers == [end == "fail"]


def test_many_threads_put_while_one_pops() -> None:
    total, num_threads = 3000, 4
    buffer = make(LeftContextChunkPolicy(7, 3), join_dim=0)
    for index in range(total):
        buffer.pre_read_register_joined([(index, 0), (index, 1)])

    def produce(part: int) -> None:
        # Backwards, so that whole stretches become available at once; every put is repeated.
        for index in reversed(range(part, total, num_threads)):
            for piece in (1, 0, 0, 1):
                buffer.put((index, piece), torch.tensor([2 * index + piece]))

    threads = [threading.Thread(target=produce, args=(part,)) for part in range(num_threads)]
    for thread in threads:
        thread.start()
    buffer.signal_done(2 * total)
    found: list[int] = []
    while True:
        assert buffer.wait_chunk_ready(60)
        chunk = buffer.pop_chunk()
        if chunk.num_items:
            found += chunk.data["data"][chunk.context_items :].flatten().tolist()
        if chunk.is_final:
            break
    for thread in threads:
        thread.join(30)
    assert found == list(range(2 * total))
    assert buffer.statistics().retained_items == 0


def test_puts_go_on_while_a_joiner_or_a_policy_is_slow() -> None:
    inside, leave = threading.Event(), threading.Event()

    def join(pieces: list[int]) -> object:
        inside.set()
        assert leave.wait(30)
        return sum(pieces)

    buffer = make(FixedChunkPolicy(1), joiner=join)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.pre_read_register("other")
    buffer.put("p", 1)
    slow = threading.Thread(target=buffer.put, args=("q", 2))
    slow.start()
    assert inside.wait(30)
    buffer.put("q", 99)  # repeated: the piece is being joined
    buffer.put("other", 4)
    assert buffer.statistics().dropped_repeated == 1
    leave.set()
    slow.join(30)
    assert [buffer.pop_chunk().data["data"] for _ in range(2)] == [[3], [4]]


def test_close_during_a_join_gives_the_pieces_back_once() -> None:
    buffer: StreamBuffer
    held: list[Any] = []

    def join(pieces: list[int]) -> object:
        held.extend(buffer.close())
        return sum(pieces)

    buffer = make(FixedChunkPolicy(1), joiner=join)
    buffer.pre_read_register_joined(["p", "q"])
    buffer.put("p", 1)
    buffer.put("q", 2)
    assert held == [1, 2]
    assert buffer.statistics().retained_items == 0
