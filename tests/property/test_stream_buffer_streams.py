"""Generated streams against an offline computation of what a stream buffer must hand out.

The default run is short. ``pytest -m slow`` runs ten thousand streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy
from nccl_stream.stream_buffer import StreamBuffer, StreamChunk

# The place of one chunk: start_offset, context_items, num_items.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Stream:
    """A stream and the order of what happens to it.

    Attributes:
        policy: how it is cut.
        pieces: how many pieces each item has; the length is the number of items.
        walks: the walk of each item; empty for an untagged buffer.
        primed: leading context items.
        delays: how many events after its registration each piece arrives.
        done_at: the event after which done is signalled; late values mean the end.
        num_items_known: whether done carries the total.
        pops: per event, how many ready chunks the consumer takes; cycled.
        misuse: per event, which misuse is tried; cycled.
    """

    policy: ChunkPolicy
    pieces: tuple[int, ...]
    walks: tuple[str, ...] = ()
    primed: int = 0
    delays: tuple[int, ...] = (0,)
    done_at: int = 10**6
    num_items_known: bool = True
    pops: tuple[int, ...] = (99,)
    misuse: tuple[int, ...] = (0,)

    @property
    def runs(self) -> list[int]:
        """The lengths of the runs of equal walks."""
        if not self.walks:
            return [len(self.pieces)]
        lengths: list[int] = []
        for index, walk in enumerate(self.walks):
            if index and walk == self.walks[index - 1]:
                lengths[-1] += 1
            else:
                lengths.append(1)
        return lengths


def sizes_of(policy: ChunkPolicy) -> tuple[int, int, int]:
    """New items of a run's first chunk, new items of later ones, and how many delivered ones these repeat at most."""
    if isinstance(policy, FixedChunkPolicy):
        return policy.chunk_size, policy.chunk_size, 0
    if isinstance(policy, SlidingWindowChunkPolicy):
        return policy.window, policy.stride, policy.window - policy.stride
    assert isinstance(policy, LeftContextChunkPolicy)
    return policy.chunk, policy.chunk, policy.left_context


def offline(stream: Stream) -> list[Place]:
    """The chunks of a stream that is there as a whole before the first pop."""
    first, step, repeat = sizes_of(stream.policy)
    places: list[Place] = []
    origin = 0
    for run, length in enumerate(stream.runs):
        primed = stream.primed if run == 0 else 0
        begin, end = 0, primed + first
        delivered = 0
        while delivered < length:
            stop = min(end, length)
            context = min(max(delivered, primed if begin == delivered == 0 else 0) - begin, stop - begin)
            places.append((origin + begin, context, stop - begin))
            delivered = stop
            begin, end = max(0, delivered - repeat), delivered + step
        origin += length
    return places or [(0, 0, 0)]


def schedule(stream: Stream) -> Iterator[tuple[str, Any]]:
    """The events in order: registrations in stream order, arrivals later, done somewhere."""
    timed: list[tuple[float, int, str, Any]] = []
    serial = 0
    for index, count in enumerate(stream.pieces):
        ids = [(index, piece) for piece in range(count)]
        timed.append((index, serial, "register", ids))
        for tensor_id in ids:
            delay = stream.delays[serial % len(stream.delays)]
            serial += 1
            timed.append((index + 0.5 + delay, serial, "put", tensor_id))
    last = len(stream.pieces)
    # A done that does not say how many there are must not overtake a registration.
    done_at = stream.done_at if stream.num_items_known else max(stream.done_at, last)
    timed.append((min(done_at, last + 40) + 0.75, 0, "done", None))
    for _, _, kind, what in sorted(timed, key=lambda event: event[:2]):
        yield kind, what


class Player:
    """Plays a stream into a buffer and checks, at every event, what must hold at any time."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.buffer = StreamBuffer(
            1, "edge", "producer", stream.policy, joiner=tuple, walk_tagged=bool(stream.walks), arrival_timeout=None
        )
        self.chunks: list[StreamChunk] = []
        self.registered = 0
        self.arrived: set[int] = set()
        self.missing_pieces = dict(enumerate(stream.pieces))
        self.done = False

    def item(self, index: int) -> Any:
        """The item as the consumer sees it: its handle, or the tuple of its pieces."""
        count = self.stream.pieces[index]
        return (index, 0) if count == 1 else tuple((index, piece) for piece in range(count))

    def play(self) -> list[StreamChunk]:
        buffer, stream = self.buffer, self.stream
        if stream.primed:
            buffer.prime_context(stream.primed)
        for position, (kind, what) in enumerate(schedule(stream)):
            self.try_misuse(stream.misuse[position % len(stream.misuse)])
            if kind == "register":
                walk = stream.walks[self.registered] if stream.walks else None
                if len(what) == 1:
                    buffer.pre_read_register(what[0], walk)
                else:
                    buffer.pre_read_register_joined(what, walk)
                self.registered += 1
            elif kind == "put":
                buffer.put(what, what)
                self.missing_pieces[what[0]] -= 1
                if not self.missing_pieces[what[0]]:
                    self.arrived.add(what[0])
            else:
                buffer.signal_done(sum(stream.pieces) if stream.num_items_known else 0)
                self.done = True
            self.take(stream.pops[position % len(stream.pops)])
        self.take(10**6)
        return self.chunks

    def take(self, limit: int) -> None:
        buffer = self.buffer
        for _ in range(limit):
            hint = buffer.maybe_ready
            if not buffer.has_chunk_ready():
                self.check_memory()
                return
            assert hint, "the hint was wrongly False"
            walk = buffer.peek_walk()
            chunk = buffer.pop_chunk()
            if self.stream.walks and chunk.num_items:
                assert walk == self.stream.walks[chunk.start_offset]
            self.chunks.append(chunk)
            assert len(self.chunks) <= len(self.stream.pieces) + 2, "the stream does not end"

    def check_memory(self) -> None:
        """With nothing ready, what is kept is less than a window, a closed run's context, and what is out of order."""
        first, step, repeat = sizes_of(self.stream.policy)
        available = self.buffer.statistics().available_items
        out_of_order = sum(1 for index in self.arrived if index >= available)
        window = max(self.stream.primed + first, step + repeat)
        left_over = repeat if self.stream.walks else 0
        assert self.buffer.statistics().retained_items <= window - 1 + left_over + out_of_order

    def try_misuse(self, which: int) -> None:
        """Break a precondition. The rest of the play shows that nothing came of it."""
        buffer, sent = self.buffer, sum(self.stream.pieces[: self.registered])
        ended = bool(self.chunks) and self.chunks[-1].is_final
        if which == 1 and self.registered:
            with pytest.raises((ValueError, RuntimeError)):
                buffer.pre_read_register((self.registered - 1, 0))
            with pytest.raises((ValueError, RuntimeError)):
                buffer.pre_read_register_joined([(-5, 0), (0, 0)], "another walk")
        elif which == 2:
            buffer.put((-1, 0), "unknown")
            for index in self.arrived:
                buffer.put((index, 0), "repeated")
        elif which == 3 and not buffer.has_chunk_ready():
            with pytest.raises((ValueError, RuntimeError)):
                buffer.pop_chunk()
        elif which == 4:
            with pytest.raises(ValueError, match="negative"):
                buffer.signal_done(-1)
            if self.done or sent > 1:
                with pytest.raises(ValueError, match="done"):
                    buffer.signal_done(10**6 if self.done else sent - 1)
        elif which == 5 and (self.chunks or self.done) and not ended:
            if self.chunks:
                with pytest.raises(ValueError, match="first chunk"):
                    buffer.prime_context(1)
            if self.done and self.stream.num_items_known:
                with pytest.raises(ValueError, match="too many"):
                    buffer.pre_read_register_joined([(-2, n) for n in range(sum(self.stream.pieces) - sent + 1)])
        elif which == 6:
            buffer.store_uningested_edge(which)
            assert buffer.pop_waiting_edge() == which


def check(stream: Stream) -> None:
    """Play the stream and compare everything with the offline computation."""
    player = Player(stream)
    chunks = player.play()
    total = len(stream.pieces)
    whole = [player.item(index) for index in range(total)]

    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    places = [(chunk.start_offset, chunk.context_items, chunk.num_items) for chunk in chunks]
    expected = offline(stream)
    if places != expected:
        # The one freedom: a consumer that had everything before done gets the end as an empty chunk of its own.
        assert places == [*expected, (total, 0, 0)]
        assert expected != [(0, 0, 0)]

    new: list[Any] = []
    for chunk in chunks:
        data = chunk.data["data"] or []
        assert data == whole[chunk.start_offset : chunk.start_offset + chunk.num_items]
        new += data[chunk.context_items :]
    assert new == whole[min(stream.primed, stream.runs[0]) :]

    released = [item for chunk in chunks for item in chunk.released]
    assert released == whole
    for position, chunk in enumerate(chunks):
        later = {item for after in chunks[position + 1 :] for item in after.data["data"] or []}
        assert later.isdisjoint(chunk.released)
    assert player.buffer.statistics().retained_items == 0
    assert not player.buffer.has_chunk_ready()


policies = st.one_of(
    st.builds(FixedChunkPolicy, st.integers(1, 6)),
    st.integers(1, 7).flatmap(
        lambda window: st.builds(SlidingWindowChunkPolicy, st.just(window), st.integers(1, window))
    ),
    st.builds(LeftContextChunkPolicy, st.integers(1, 5), st.integers(0, 12)),
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    policy = draw(policies)
    tagged = draw(st.booleans())
    primed = draw(st.one_of(st.just(0), st.integers(0, 8)))
    first, step, _ = sizes_of(policy)
    # Totals at and around the ends of chunks, where the end of a stream is easiest to get wrong.
    around = st.builds(lambda n, off: max(0, primed + first + n * step + off), st.integers(-1, 4), st.integers(-1, 1))
    if tagged:
        lengths = draw(st.lists(st.tuples(st.sampled_from("xyz"), st.one_of(around, st.integers(1, 9))), max_size=4))
        walks = tuple(walk for walk, length in lengths for _ in range(length))
        total = len(walks)
    else:
        total, walks = draw(st.one_of(around, st.integers(0, 30))), ()
    return Stream(
        policy,
        pieces=tuple(draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=total, max_size=total))),
        walks=walks,
        primed=primed,
        delays=tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))),
        done_at=draw(st.one_of(st.just(10**6), st.integers(-1, 40))),
        num_items_known=draw(st.booleans()),
        pops=tuple(draw(st.lists(st.sampled_from([0, 1, 99]), min_size=1, max_size=6))),
        misuse=tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))),
    )


@settings(max_examples=150, deadline=None)
@given(streams())
@example(Stream(FixedChunkPolicy(3), (1,) * 6))
@example(Stream(FixedChunkPolicy(3), (1,) * 6, pops=(0,)))
@example(Stream(SlidingWindowChunkPolicy(4, 2), (1,) * 8, done_at=0))
@example(Stream(LeftContextChunkPolicy(2, 5), (1, 2, 3), ("x", "y", "y"), primed=4))
def test_every_stream_equals_its_offline_chunks(stream: Stream) -> None:
    check(stream)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_streams_equal_their_offline_chunks() -> None:
    every = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
    every(given(streams())(check))()


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 6),
    left_context=st.integers(0, 9),
    total=st.integers(0, 40),
    order=st.randoms(use_true_random=False),
    eager=st.booleans(),
)
def test_left_context_output_equals_the_offline_computation(
    chunk: int, left_context: int, total: int, order: Any, eager: bool
) -> None:
    """A causal filter that looks back ``left_context`` items gives the same from chunks as from the whole stream."""
    values = torch.arange(1, total + 1, dtype=torch.int64) ** 2 % 97
    taps = torch.arange(1, left_context + 2, dtype=torch.int64)

    def causal(window: torch.Tensor) -> list[int]:
        padded = torch.cat([torch.zeros(left_context, dtype=torch.int64), window])
        return [int((padded[at : at + left_context + 1] * taps).sum()) for at in range(len(window))]

    buffer = StreamBuffer(1, "edge", "producer", LeftContextChunkPolicy(chunk, left_context))
    for index in range(total):
        buffer.pre_read_register(index)
    arrivals = list(range(total))
    order.shuffle(arrivals)
    output: list[int] = []

    def take() -> None:
        while buffer.has_chunk_ready():
            popped = buffer.pop_chunk()
            if popped.num_items:
                output.extend(causal(popped.data["data"].reshape(-1))[popped.context_items :])

    for index in arrivals:
        buffer.put(index, values[index])
        if eager:
            take()
    buffer.signal_done(total)
    take()
    assert output == causal(values)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.just("new"), st.just("pop"), st.integers(0, 9)), max_size=60))
def test_edges_come_out_in_their_first_order_whatever_is_given_back(actions: list[Any]) -> None:
    buffer = StreamBuffer(1, "edge", "producer", FixedChunkPolicy(1))
    waiting: list[int] = []
    edges: list[list[int]] = []
    in_hand: list[int] = []
    for action in actions:
        if action == "new":
            edges.append([len(edges)])
            waiting.append(len(edges) - 1)
            buffer.store_uningested_edge(edges[-1])
        elif action == "pop":
            popped = buffer.pop_waiting_edge()
            assert popped is (edges[waiting[0]] if waiting else None)
            if waiting:
                in_hand.append(waiting.pop(0))
                del in_hand[:-10]  # the older ones are ingested
        elif in_hand:
            back = in_hand.pop(action % len(in_hand))
            buffer.store_uningested_edge(edges[back])
            waiting = sorted([*waiting, back])
