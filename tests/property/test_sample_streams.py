"""Generated streamed samples: pieces, chunks and the memory in between, against the sample as a whole.

Both ends run in one thread, in a generated order, with waits of no time. The default run is short; ``pytest -m slow``
runs ten thousand samples.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy
from nccl_stream.errors import ClosedError, MisuseError, NcclStreamError, PeerTimeoutError, StreamLostError
from nccl_stream.refs import FeatureSpec, SampleRef
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.streamed.chunks import SampleChunk, read_chunks
from nccl_stream.streamed.sample import OpenFeatureSpec, Piece, PieceReader

SPECS: dict[str, FeatureSpec | OpenFeatureSpec] = {
    "aux_hidden_states": OpenFeatureSpec((1, -1, 3), torch.float32),
    "input_ids": OpenFeatureSpec((1, -1), torch.int64),
    "attention_mask": OpenFeatureSpec((1, -1), torch.bool),
    "loss_mask": OpenFeatureSpec((-1,), torch.int8),
    "constant": FeatureSpec((2,), torch.int32),
}


def make_whole(length: int) -> dict[str, torch.Tensor]:
    whole = {}
    for number, (name, spec) in enumerate(SPECS.items()):
        full = spec.of_length(length) if isinstance(spec, OpenFeatureSpec) else spec
        whole[name] = ((torch.arange(full.numel) * 5 + number) % 127).reshape(full.shape).to(full.dtype)
    return whole


def cut(whole: dict[str, torch.Tensor], start: int, stop: int, *, constant: bool) -> dict[str, torch.Tensor]:
    part = {}
    for name, spec in SPECS.items():
        if isinstance(spec, OpenFeatureSpec):
            part[name] = whole[name].narrow(spec.dim, start, stop - start)
        elif constant:
            part[name] = whole[name]
    return part


class Watched(PieceReader):
    """A reader whose pieces are counted."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader
        self.releases: Counter[int] = Counter()

    @property
    def ref(self) -> SampleRef:
        return self._reader.ref

    @property
    def at_end(self) -> bool:
        return self._reader.at_end

    def next(self, timeout: float | None = None) -> Piece | None:
        piece = self._reader.next(timeout)
        if piece is None:
            return None
        return Piece(piece.index, piece.start, piece.length, piece.tensors, partial(self._release, piece))

    def _release(self, piece: Piece) -> None:
        self.releases[piece.index] += 1
        piece.release()

    def close(self) -> bool:
        return self._reader.close()

    def release(self) -> None:
        self._reader.release()


@dataclass(frozen=True)
class Sample:
    """A sample and the order of what happens to it.

    Attributes:
        policy: how it is cut.
        length: positions.
        piece_length: positions of a full piece.
        spare: pieces that the window has beyond what the policy needs.
        actions: what is tried, one after the other; cycled. "read" also when there is nothing, "append" also when
            there is no room.
        retain: whether it is retained.
        restarts: how often the reader stops in the middle and another one begins.
    """

    policy: ChunkPolicy
    length: int
    piece_length: int
    spare: int = 1
    actions: tuple[str, ...] = ("append", "read")
    retain: bool = False
    restarts: int = 0

    @property
    def policy_needs(self) -> int:
        """Pieces of the longest chunk with its context."""
        if isinstance(self.policy, FixedChunkPolicy):
            return self.policy.chunk_size
        if isinstance(self.policy, SlidingWindowChunkPolicy):
            return self.policy.window
        assert isinstance(self.policy, LeftContextChunkPolicy)
        return self.policy.chunk + self.policy.left_context

    @property
    def window(self) -> int:
        return self.policy_needs + self.spare

    @property
    def num_pieces(self) -> int:
        return -(-self.length // self.piece_length)


class Player:
    """Plays a sample and checks, at every step, what must hold at any time."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.whole = make_whole(sample.length)
        self.store = LocalFeatureStore(max_bytes=1 << 20, high_watermark_bytes=None, low_watermark_bytes=None)
        self.writer = self.store.open_stream(
            "s", SPECS, "run", piece_length=sample.piece_length, window=sample.window, retain=sample.retain
        )
        self.window_bytes = self.store.health().resident_bytes
        self.appended = 0
        self.complete = False
        self.chunks: list[SampleChunk] = []
        self.begin()

    def begin(self) -> None:
        self.reader = Watched(self.store.open_reader(self.writer.ref))
        self.iterator = read_chunks(self.reader, self.sample.policy, timeout=0.0)
        self.chunks = []

    def play(self) -> None:
        actions, restarts = self.sample.actions, self.sample.restarts
        limit = 20 * (self.sample.num_pieces + 5) * (restarts + 1)
        # A schedule need not contain both kinds of action: whatever it is, it comes to its end.
        for step in range(limit):
            for action in (actions[step % len(actions)], "append", "read"):
                if restarts and self.chunks and action == "read" and self.can_restart():
                    restarts -= 1
                    assert self.reader.close() is True
                    self.begin()
                getattr(self, action)()
                self.check_bounds()
                if self.chunks and self.chunks[-1].place.is_final:
                    return
        raise AssertionError("the sample does not end")

    def can_restart(self) -> bool:
        return self.sample.retain or not self.reader.releases

    def append(self) -> None:
        sample = self.sample
        if self.complete:
            return
        start = self.appended * sample.piece_length
        if start >= sample.length:
            assert self.writer.close() == sample.num_pieces
            self.complete = True
            return
        piece = cut(self.whole, start, min(start + sample.piece_length, sample.length), constant=not self.appended)
        if self.appended - len(self.reader.releases) < sample.window:
            assert self.writer.append(piece, timeout=0.0) == self.appended
            self.appended += 1
        else:
            with pytest.raises(PeerTimeoutError):
                self.writer.append(piece, timeout=0.0)

    def read(self) -> None:
        try:
            self.chunks.append(next(self.iterator))
        except PeerTimeoutError:
            # Nothing came because nothing is there, not because the window is full.
            assert self.appended < self.sample.num_pieces or not self.complete

    def misuse(self) -> None:
        """Break preconditions. The rest of the play shows that nothing came of it."""
        length = self.sample.piece_length
        whole = make_whole(2 * length)
        bad: list[Any] = [
            {},
            cut(whole, 0, length + 1, constant=not self.appended),
            cut(whole, 0, 0, constant=not self.appended),
            cut(whole, 0, length, constant=bool(self.appended)),
            {**cut(whole, 0, length, constant=not self.appended), "more": whole["input_ids"]},
            {**cut(whole, 0, length, constant=not self.appended), "input_ids": whole["input_ids"].float()[:, :length]},
        ]
        expected = ClosedError if self.complete else MisuseError
        for piece in bad:
            with pytest.raises(expected):
                self.writer.append(piece, timeout=0.0)
        if not self.appended:
            with pytest.raises(MisuseError):
                self.writer.close()
        with pytest.raises(MisuseError):
            self.store.open_stream("s", SPECS, "run", piece_length=1, window=1)
        if self.complete:
            self.writer.fail("too late")

    def check_bounds(self) -> None:
        sample = self.sample
        assert max(self.reader.releases.values(), default=0) <= 1, "a piece was released twice"
        assert self.appended - len(self.reader.releases) <= sample.window or sample.restarts
        resident = self.store.health().resident_bytes
        if not sample.retain:
            assert resident == self.window_bytes
        else:
            per_piece = self.window_bytes // sample.window + 1
            assert resident <= max(self.window_bytes, self.window_bytes + per_piece * (self.appended - sample.window))

    def finish(self) -> None:
        assert self.reader.at_end
        assert next(self.iterator, None) is None
        self.reader.release()
        assert self.store.health().sample_count == 0
        assert self.store.health().resident_bytes == 0


def check(sample: Sample) -> None:
    player = Player(sample)
    player.play()
    whole, chunks = player.whole, player.chunks
    new: dict[str, list[torch.Tensor]] = {name: [] for name in SPECS}
    delivered = pieces = 0
    for number, chunk in enumerate(chunks):
        place = chunk.place
        assert place.chunk_index == number
        assert place.is_final == (number == len(chunks) - 1)
        assert place.num_positions is not None
        assert place.num_positions > place.context_positions
        assert place.num_items <= sample.policy_needs
        # The place is the same whether one counts pieces or positions.
        assert place.start_position == place.start_offset * sample.piece_length
        assert place.context_positions == place.context_items * sample.piece_length
        assert place.start_offset + place.context_items == pieces
        assert place.start_position + place.context_positions == delivered
        stop = place.start_position + place.num_positions
        expected = cut(whole, place.start_position, stop, constant=True)
        assert list(chunk.tensors) == list(SPECS)
        for name, tensor in expected.items():
            assert chunk.tensors[name].dtype is tensor.dtype
            assert torch.equal(chunk.tensors[name], tensor), name
            spec = SPECS[name]
            if isinstance(spec, OpenFeatureSpec):
                skip = place.context_positions
                new[name].append(chunk.tensors[name].narrow(spec.dim, skip, place.num_positions - skip))
        delivered, pieces = stop, place.start_offset + place.num_items
    assert (delivered, pieces) == (sample.length, sample.num_pieces)
    for name, spec in SPECS.items():
        if isinstance(spec, OpenFeatureSpec):
            assert torch.equal(torch.cat(new[name], dim=spec.dim), whole[name])
    assert player.reader.releases == dict.fromkeys(range(sample.num_pieces), 1), "each piece is released once"
    player.finish()


policies = st.one_of(
    st.builds(FixedChunkPolicy, st.integers(1, 4)),
    st.integers(1, 5).flatmap(
        lambda window: st.builds(SlidingWindowChunkPolicy, st.just(window), st.integers(1, window))
    ),
    st.builds(LeftContextChunkPolicy, st.integers(1, 3), st.integers(0, 5)),
)


def first_and_step(policy: ChunkPolicy) -> tuple[int, int]:
    """New pieces of the first chunk and of later ones."""
    _, first = policy.next_span(0, 0)
    _, second = policy.next_span(first, 1)
    return first, second - first


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    policy, piece_length = draw(policies), draw(st.integers(1, 4))
    first, step = first_and_step(policy)
    # Totals at and around the ends of pieces and of chunks, where the end is easiest to get wrong.
    around = st.builds(
        lambda chunks, pieces, positions: (first + chunks * step + pieces) * piece_length + positions,
        st.integers(-1, 4),
        st.integers(-1, 1),
        st.integers(-1, 1),
    )
    return Sample(
        policy,
        length=max(1, draw(st.one_of(around, st.integers(1, 40)))),
        piece_length=piece_length,
        spare=draw(st.integers(1, 3)),
        actions=tuple(draw(st.lists(st.sampled_from(["append", "append", "read", "misuse"]), min_size=1, max_size=8))),
        retain=(retain := draw(st.booleans())),
        restarts=draw(st.integers(0, 2)) if retain else draw(st.sampled_from([0, 0, 1])),
    )


@settings(max_examples=250, deadline=None)
@given(samples())
@example(Sample(FixedChunkPolicy(1), 1, 1))
@example(Sample(LeftContextChunkPolicy(2, 1), 12, 2, actions=("append", "misuse", "read")))
@example(Sample(SlidingWindowChunkPolicy(3, 1), 9, 3, retain=True, restarts=2))
def test_every_sample_comes_through_whole(sample: Sample) -> None:
    check(sample)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_samples_come_through_whole() -> None:
    every = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
    every(given(samples())(check))()


@settings(max_examples=80, deadline=None)
@given(samples(), st.integers(0, 12), st.integers(0, 12))
def test_reader_that_stops_anywhere_leaves_nothing_behind(sample: Sample, appends: int, reads: int) -> None:
    player = Player(sample)
    for step in range(max(appends, reads)):
        if step < appends:
            player.append()
        if step < reads:
            player.read()
            if player.chunks and player.chunks[-1].place.is_final:
                break
    lost = bool(player.reader.releases) and not sample.retain
    assert player.reader.close() is not lost
    if not lost:
        player.writer.fail("over")
        assert player.store.discard(player.writer.ref)
    else:
        with pytest.raises(StreamLostError):
            player.store.open_reader(player.writer.ref)
    assert player.store.health().resident_bytes == 0
    if not player.complete:
        with pytest.raises(NcclStreamError):
            player.writer.append(cut(player.whole, 0, 1, constant=True), timeout=0.0)


@settings(max_examples=80, deadline=None)
@given(samples())
def test_window_without_a_spare_piece_is_an_error_or_suffices_but_never_a_standstill(sample: Sample) -> None:
    player = Player(Sample(sample.policy, sample.length, sample.piece_length, spare=0, actions=sample.actions))
    try:
        player.play()
    except MisuseError as error:
        refusal = str(error)
    else:
        player.finish()
        return
    assert f"window of {player.sample.window} pieces" in refusal
    assert player.appended - len(player.reader.releases) == player.sample.window
