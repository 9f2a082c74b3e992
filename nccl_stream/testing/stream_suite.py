"""Conformance suite for streamed samples: what every store that takes them must do.

Subclass :class:`SampleStreamConformance` in a test module and override the ``harness`` fixture, as for
:mod:`nccl_stream.testing.store_suite`. :meth:`~nccl_stream.testing.store_suite.StoreHarness.transfer` is called with a
ref whose sample is still open. Where a queue stands in between, override also :meth:`StreamHarness.give_back`.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nccl_stream.errors import (
    CapacityError,
    ClosedError,
    MisuseError,
    NcclStreamError,
    PeerTimeoutError,
    SampleNotFoundError,
    StreamBrokenError,
    StreamLostError,
)
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.streamed.sample import OpenFeatureSpec, Piece, PieceReader, StreamWriter
from nccl_stream.testing.store_suite import ALL_DTYPES, StoreHarness, raw_bytes

__all__ = ["SPECS", "SampleStreamConformance", "StreamHarness", "cut", "make_whole"]

HIDDEN = 3
PIECE = 4
SHORT_S = 0.05  # how long a call is watched that must not return

SPECS: dict[str, FeatureSpec | OpenFeatureSpec] = {
    "aux_hidden_states": OpenFeatureSpec((1, -1, 3 * HIDDEN), torch.float32),
    "input_ids": OpenFeatureSpec((1, -1), torch.int64),
    "attention_mask": OpenFeatureSpec((1, -1), torch.int64),
    "loss_mask": OpenFeatureSpec((1, -1), torch.int64),
    "logits": OpenFeatureSpec((1, -1, 5), torch.bfloat16),
    "constant": FeatureSpec((2, 2), torch.float64),
    "turned": OpenFeatureSpec((-1, 2), torch.uint8),
}
"""Specs of the samples here: open along different axes, and one feature that comes once."""


def make_whole(length: int, fill: int = 0) -> dict[str, torch.Tensor]:
    """Return a sample of ``length`` positions whose every value follows from its place and ``fill``."""
    whole = {}
    for number, (name, spec) in enumerate(SPECS.items()):
        full = spec.of_length(length) if isinstance(spec, OpenFeatureSpec) else spec
        values = (torch.arange(full.numel) * 7 + 31 * number + fill) % 251
        whole[name] = values.reshape(full.shape).to(full.dtype)
    return whole


def cut(whole: Mapping[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return positions ``start`` to ``stop`` of a sample; what has no open axis only with position 0."""
    piece = {}
    for name, tensor in whole.items():
        spec = SPECS[name]
        if isinstance(spec, OpenFeatureSpec):
            piece[name] = tensor.narrow(spec.dim, start, stop - start)
        elif start == 0:
            piece[name] = tensor
    return piece


class StreamHarness(StoreHarness):
    """The stores under test; see :class:`~nccl_stream.testing.store_suite.StoreHarness`."""

    def open(self, sample_id: str, **kwargs: Any) -> StreamWriter:
        """Open a streamed sample with the metadata that does not matter filled in."""
        kwargs.setdefault("specs", SPECS)
        kwargs.setdefault("run_id", "conformance")
        kwargs.setdefault("algorithm", FeatureAlgorithm.EAGLE3)
        kwargs.setdefault("piece_length", PIECE)
        kwargs.setdefault("window", 2)
        return self.producer.open_stream(sample_id, **kwargs)

    def begin(self, sample_id: str, **kwargs: Any) -> tuple[StreamWriter, PieceReader]:
        """Open a streamed sample and its reader."""
        writer = self.open(sample_id, **kwargs)
        return writer, self.consumer.open_reader(self.transfer(writer.ref))

    def give_back(self, ref: SampleRef) -> SampleRef:
        """The consumer could not use the sample: return the ref under which it comes again."""
        return ref

    def consume(self, reader: PieceReader) -> None:
        """Settle and release."""
        self.settle(reader.ref)
        reader.release()


def write(writer: StreamWriter, whole: Mapping[str, torch.Tensor], length: int, *, close: bool = True) -> int:
    """Append all pieces of a sample; returns their number."""
    for start in range(0, length, PIECE):
        writer.append(cut(whole, start, min(start + PIECE, length)), timeout=60.0)
    return writer.close() if close else -(-length // PIECE)


def next_piece(reader: PieceReader) -> Piece:
    """The next piece, which must come."""
    piece = reader.next(timeout=60.0)
    assert piece is not None
    return piece


def check_piece(piece: Piece, whole: Mapping[str, torch.Tensor]) -> None:
    """Assert that a piece is the part of ``whole`` that it says it is, in the order of features."""
    expected = cut(whole, piece.start, piece.start + piece.length)
    assert list(piece.tensors) == list(expected)
    for name, tensor in expected.items():
        assert piece.tensors[name].shape == tensor.shape
        assert piece.tensors[name].dtype is tensor.dtype
        assert raw_bytes(piece.tensors[name]) == raw_bytes(tensor), name


def check_rest(reader: PieceReader, whole: Mapping[str, torch.Tensor], length: int, *, first: int = 0) -> None:
    """Read and release everything from piece ``first`` on, and assert that it is ``whole``."""
    position = first * PIECE
    for index in range(first, -(-length // PIECE)):
        piece = next_piece(reader)
        assert (piece.index, piece.start) == (index, position)
        assert piece.length == min(PIECE, length - position)
        check_piece(piece, whole)
        position += piece.length
        piece.release()
        del piece
    assert not reader.at_end
    assert reader.next(timeout=60.0) is None
    assert reader.at_end
    assert reader.next() is None


class SampleStreamConformance:
    """Inherit, override :meth:`harness`, and optionally :meth:`capped_store`."""

    @pytest.fixture
    def harness(self) -> Iterator[StreamHarness]:
        """Yield a fresh, empty harness with room for at least 8 windows of the samples here."""
        raise NotImplementedError("override the harness fixture")

    @pytest.fixture
    def capped_store(self) -> Callable[..., Any]:
        """Return a factory for producer-side stores that takes the cap and watermark keywords."""
        pytest.skip("this store offers no caps to test")

    # -- content --

    @pytest.mark.parametrize("window", [1, 2, 5])
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 40])
    def test_pieces_arrive_in_order_and_byte_exact(self, harness: StreamHarness, length: int, window: int) -> None:
        whole = make_whole(length)
        writer, reader = harness.begin("s", window=window)
        with ThreadPoolExecutor(1) as pool:
            num_pieces = pool.submit(write, writer, whole, length)
            check_rest(reader, whole, length)
            assert num_pieces.result(60) == -(-length // PIECE)
        harness.consume(reader)
        harness.assert_empty()

    def test_every_dtype_is_byte_exact(self, harness: StreamHarness) -> None:
        wholes = {}
        for dtype in ALL_DTYPES:
            pattern = (torch.arange(2 * 6 * dtype.itemsize) * 37 + 11).to(torch.uint8)
            pattern = pattern & 1 if dtype is torch.bool else pattern
            wholes[str(dtype)] = pattern.view(dtype).reshape(6, 2)
        specs: dict[str, FeatureSpec | OpenFeatureSpec] = {
            **{name: spec for name, spec in SPECS.items() if name in FeatureAlgorithm.EAGLE3.required_features},
            **{name: OpenFeatureSpec.of(tensor, 0) for name, tensor in wholes.items()},
        }
        plain = {name: tensor for name, tensor in make_whole(6).items() if name in specs}
        writer, reader = harness.begin("s", specs=specs)
        for start, stop in ((0, 4), (4, 6)):
            writer.append({**cut(plain, start, stop), **{n: t[start:stop] for n, t in wholes.items()}}, timeout=60.0)
        writer.close()
        for start, stop in ((0, 4), (4, 6)):
            piece = next_piece(reader)
            for name, tensor in wholes.items():
                assert piece.tensors[name].dtype is tensor.dtype
                assert raw_bytes(piece.tensors[name]) == raw_bytes(tensor[start:stop]), name
            piece.release()
        harness.consume(reader)

    def test_appended_tensors_are_the_callers_again(self, harness: StreamHarness) -> None:
        whole = make_whole(PIECE)
        source = {name: tensor.clone() for name, tensor in whole.items()}
        writer, reader = harness.begin("s")
        writer.append(source, timeout=60.0)
        for tensor in source.values():
            tensor.zero_()
        check_piece(next_piece(reader), whole)

    def test_ref_says_how_the_sample_travels(self, harness: StreamHarness) -> None:
        writer = harness.open("s", window=3, num_tokens=7, attributes={"a": "b"})
        ref = writer.ref
        assert ref == SampleRef.from_json(ref.to_json())
        assert ref.stream is not None
        assert (ref.stream.piece_length, ref.stream.window, ref.stream.retain) == (PIECE, 3, False)
        assert ref.stream.dims == {name: spec.dim for name, spec in SPECS.items() if isinstance(spec, OpenFeatureSpec)}
        assert ref.feature_names() == tuple(SPECS)
        assert (ref.num_tokens, ref.attributes) == (7, {"a": "b"})
        piece = make_whole(PIECE)
        assert ref.feature_specs == {name: FeatureSpec.of(tensor) for name, tensor in piece.items()}
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in piece.items()}
        assert ref.estimated_bytes == 3 * sum(sizes.values()) - 2 * sizes["constant"]
        assert harness.producer.health().resident_bytes >= ref.estimated_bytes

    def test_pieces_come_before_the_sample_is_complete(self, harness: StreamHarness) -> None:
        whole = make_whole(2 * PIECE)
        writer, reader = harness.begin("s")
        for start in (0, PIECE):
            writer.append(cut(whole, start, start + PIECE), timeout=60.0)
            piece = next_piece(reader)
            check_piece(piece, whole)
            piece.release()
        with pytest.raises(PeerTimeoutError, match="piece 2"):
            reader.next(timeout=SHORT_S)
        writer.close()
        assert reader.next(timeout=60.0) is None
        harness.consume(reader)

    def test_get_joins_the_sample_and_waits_for_its_end(self, harness: StreamHarness) -> None:
        whole = make_whole(3 * PIECE + 1)
        writer = harness.open("s", window=1)
        ref = harness.transfer(writer.ref)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(harness.consumer.get, ref)
            write(writer, whole, 3 * PIECE + 1, close=False)
            time.sleep(SHORT_S)
            assert not joined.done()
            writer.close()
            tensors, handle = joined.result(60)
        assert list(tensors) == list(SPECS)
        for name, tensor in whole.items():
            assert raw_bytes(tensors[name]) == raw_bytes(tensor)
            tensors[name].zero_()  # memory of its own
        harness.finish(ref, handle)
        harness.assert_empty()

    def test_interleaved_streams_do_not_disturb_each_other(self, harness: StreamHarness) -> None:
        wholes = [make_whole(5 * PIECE + index, fill=index) for index in range(3)]
        pairs = [harness.begin(f"s{index}") for index in range(3)]
        for start in range(0, 6 * PIECE, PIECE):
            for index, ((writer, reader), whole) in enumerate(zip(pairs, wholes, strict=True)):
                stop = min(start + PIECE, 5 * PIECE + index)
                if start < stop:
                    writer.append(cut(whole, start, stop), timeout=60.0)
                    piece = next_piece(reader)
                    check_piece(piece, whole)
                    piece.release()
        for writer, reader in pairs:
            writer.close()
            assert reader.next(timeout=60.0) is None
            harness.consume(reader)
        harness.assert_empty()

    # -- pace --

    def test_append_waits_for_a_release_and_a_timeout_changes_nothing(self, harness: StreamHarness) -> None:
        whole = make_whole(4 * PIECE)
        writer, reader = harness.begin("s", window=2)
        write(writer, whole, 2 * PIECE, close=False)
        first, second = next_piece(reader), next_piece(reader)
        for _ in range(2):
            with pytest.raises(PeerTimeoutError, match="2 pieces"):
                writer.append(cut(whole, 2 * PIECE, 3 * PIECE), timeout=SHORT_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(writer.append, cut(whole, 2 * PIECE, 3 * PIECE))
            time.sleep(SHORT_S)
            assert not waiting.done()
            second.release()  # in any order
            second.release()  # once
            del second
            assert waiting.result(60) == 2
        with pytest.raises(PeerTimeoutError):
            writer.append(cut(whole, 3 * PIECE, 4 * PIECE), timeout=SHORT_S)
        check_piece(first, whole)
        first.release()
        del first
        assert writer.append(cut(whole, 3 * PIECE, 4 * PIECE), timeout=60.0) == 3
        writer.close()
        check_rest(reader, whole, 4 * PIECE, first=2)
        harness.consume(reader)
        harness.assert_empty()

    def test_memory_is_bounded_by_the_window(self, harness: StreamHarness) -> None:
        whole = make_whole(30 * PIECE)
        writer, reader = harness.begin("s", window=2)
        bound = harness.producer.health().resident_bytes
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(write, writer, whole, 30 * PIECE)
            while (piece := reader.next(timeout=60.0)) is not None:
                assert harness.producer.health().resident_bytes <= bound
                piece.release()
                del piece
            done.result(60)
        harness.consume(reader)
        harness.assert_empty()

    # -- misuse leaves everything as it was --

    @pytest.mark.parametrize(
        "bad",
        [
            "missing",
            "unknown",
            "empty",
            "long",
            "zero",
            "uneven",
            "dtype",
            "shape",
            "constant-missing",
            "scalar",
            "not-tensors",
        ],
    )
    def test_append_of_what_does_not_fit_changes_nothing(self, harness: StreamHarness, bad: str) -> None:
        whole = make_whole(3 * PIECE)
        piece: Any = cut(whole, 0, PIECE)
        if bad == "missing":
            del piece["loss_mask"]
        elif bad == "unknown":
            piece["surprise"] = torch.zeros(1)
        elif bad == "empty":
            piece = {}
        elif bad == "long":
            piece = cut(whole, 0, PIECE + 1)
        elif bad == "zero":
            piece = cut(whole, 0, 0)
        elif bad == "uneven":
            piece["turned"] = piece["turned"][:-1]
        elif bad == "dtype":
            piece["input_ids"] = piece["input_ids"].int()
        elif bad == "shape":
            piece["logits"] = piece["logits"][..., :-1]
        elif bad == "constant-missing":
            del piece["constant"]
        elif bad == "scalar":
            piece["input_ids"] = torch.tensor(1)
        else:
            piece = {name: tensor.tolist() for name, tensor in piece.items()}
        writer, reader = harness.begin("s")
        with pytest.raises(MisuseError):
            writer.append(piece, timeout=60.0)
        with pytest.raises(MisuseError):
            writer.close()  # there is nothing yet
        writer.append(cut(whole, 0, PIECE), timeout=60.0)
        if bad != "constant-missing":
            with pytest.raises(MisuseError):
                writer.append(piece, timeout=60.0)
        with pytest.raises(MisuseError):
            # What has no open axis comes once.
            writer.append({**cut(whole, PIECE, 2 * PIECE), "constant": whole["constant"]}, timeout=60.0)
        writer.append(cut(whole, PIECE, 2 * PIECE - 1), timeout=60.0)
        with pytest.raises(MisuseError, match="shorter"):
            writer.append(cut(whole, 2 * PIECE - 1, 2 * PIECE), timeout=60.0)
        assert writer.close() == writer.close() == 2
        check_rest(reader, whole, 2 * PIECE - 1)
        harness.consume(reader)
        harness.assert_empty()

    @pytest.mark.parametrize(
        "changes",
        [
            {"piece_length": 0},
            {"window": 0},
            {"window": 1.5},
            {"retain": 1},
            {"specs": {}},
            {"specs": None},
            {"specs": {name: FeatureSpec((1, PIECE), torch.float32) for name in SPECS}},
            {"specs": {**SPECS, "input_ids": (1, PIECE)}},
            {"specs": {name: SPECS[name] for name in ("input_ids", "loss_mask")}},
            {"run_id": ""},
            {"attributes": {"a": 1}},
        ],
    )
    def test_open_of_what_cannot_work_leaves_nothing(self, harness: StreamHarness, changes: dict[str, Any]) -> None:
        with pytest.raises(MisuseError):
            harness.open("s", **changes)
        harness.assert_empty()
        harness.open("s")

    def test_open_of_a_name_in_use_is_refused(self, harness: StreamHarness) -> None:
        writer = harness.open("s")
        with pytest.raises(MisuseError, match="already"):
            harness.open("s")
        with pytest.raises(MisuseError, match="already"):
            harness.put("s", make_whole(PIECE))
        writer.append(make_whole(PIECE), timeout=60.0)
        for bad in ("", None):
            with pytest.raises(MisuseError):
                harness.open(bad)  # type: ignore[arg-type]

    def test_calls_after_the_end_are_refused(self, harness: StreamHarness) -> None:
        whole = make_whole(PIECE)
        writer, reader = harness.begin("s")
        write(writer, whole, PIECE)
        with pytest.raises(ClosedError):
            writer.append(cut(whole, 0, PIECE))
        writer.fail("too late")  # without effect
        check_rest(reader, whole, PIECE)
        harness.consume(reader)
        reader.release()
        reader.close()
        with pytest.raises(ClosedError):
            reader.next()

    def test_open_reader_of_a_whole_or_foreign_sample_is_refused(self, harness: StreamHarness) -> None:
        whole = harness.send("whole", make_whole(PIECE))
        with pytest.raises(MisuseError, match="not streamed"):
            harness.consumer.open_reader(whole)
        writer = harness.open("s")
        foreign = dataclasses.replace(writer.ref, store_uri="mem://elsewhere")
        with pytest.raises(SampleNotFoundError):
            harness.consumer.open_reader(foreign)

    # -- failures --

    @pytest.mark.parametrize("num_pieces", [0, 1, 2])
    def test_failed_producer_makes_the_reader_raise_with_how_far_it_got(
        self, harness: StreamHarness, num_pieces: int
    ) -> None:
        whole = make_whole(2 * PIECE)
        writer, reader = harness.begin("s")
        write(writer, whole, num_pieces * PIECE, close=False)
        writer.fail(ValueError("prefill went wrong"))
        writer.fail("and again")
        for _ in range(num_pieces):
            piece = next_piece(reader)
            check_piece(piece, whole)
            piece.release()
        for _ in range(2):
            with pytest.raises(StreamBrokenError, match="prefill went wrong") as info:
                reader.next(timeout=60.0)
            assert (info.value.num_pieces, info.value.num_positions) == (num_pieces, num_pieces * PIECE)
            assert info.value.sample_id == "s"
        assert not reader.at_end
        with pytest.raises(ClosedError, match="prefill"):
            writer.append(cut(whole, 0, PIECE))
        with pytest.raises(ClosedError):
            writer.close()
        reader.close()

    def test_failure_wakes_a_reader_that_waits(self, harness: StreamHarness) -> None:
        writer, reader = harness.begin("s")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.next)
            time.sleep(SHORT_S)
            assert not waiting.done()
            writer.fail("gone")
            with pytest.raises(StreamBrokenError, match="gone"):
                waiting.result(60)

    def test_get_of_a_sample_that_breaks_raises(self, harness: StreamHarness) -> None:
        writer = harness.open("s")
        ref = harness.transfer(writer.ref)
        writer.append(make_whole(PIECE), timeout=60.0)
        writer.fail("gone")
        with pytest.raises(StreamBrokenError, match="gone"):
            harness.consumer.get(ref)

    def test_writer_as_context_closes_or_fails(self, harness: StreamHarness) -> None:
        whole = make_whole(PIECE)
        writer, reader = harness.begin("good")
        with writer:
            writer.append(whole, timeout=60.0)
        check_rest(reader, whole, PIECE)
        harness.consume(reader)
        writer, reader = harness.begin("bad")
        with pytest.raises(KeyError), writer:
            raise KeyError("mine")
        with pytest.raises(StreamBrokenError, match="mine"):
            reader.next(timeout=60.0)
        reader.close()
        writer, reader = harness.begin("empty")
        with pytest.raises(MisuseError, match="no piece"), writer:
            pass
        with pytest.raises(StreamBrokenError, match="no piece"):
            reader.next(timeout=60.0)

    def test_writer_that_is_dropped_counts_as_failed(self, harness: StreamHarness) -> None:
        writer, reader = harness.begin("s")
        del writer
        gc.collect()
        with pytest.raises(StreamBrokenError, match="dropped"):
            reader.next(timeout=60.0)

    # -- early stops --

    @pytest.mark.parametrize("how", ["close", "drop"])
    def test_reader_that_stops_early_frees_everything_and_stops_the_producer(
        self, harness: StreamHarness, how: str
    ) -> None:
        whole = make_whole(4 * PIECE)
        writer, reader = harness.begin("s", window=2)
        write(writer, whole, 2 * PIECE, close=False)
        next_piece(reader).release()
        next_piece(reader)
        writer.append(cut(whole, 2 * PIECE, 3 * PIECE), timeout=60.0)
        ref = reader.ref
        outcome: list[BaseException] = []

        def keep_on() -> None:
            try:
                writer.append(cut(whole, 3 * PIECE, 4 * PIECE))
            except NcclStreamError as error:
                outcome.append(error)

        thread = threading.Thread(target=keep_on)
        thread.start()
        if how == "close":
            assert reader.close() is False
            assert reader.close() is False
            with pytest.raises(ClosedError):
                reader.next()
        del reader
        gc.collect()
        harness.give_back(ref)
        thread.join(60)
        assert not thread.is_alive()
        assert [type(error) for error in outcome] == [StreamLostError]
        with pytest.raises(StreamLostError):
            writer.append(cut(whole, 3 * PIECE, 4 * PIECE))
        with pytest.raises(StreamLostError):
            writer.close()
        writer.fail("whatever")
        harness.assert_empty()
        with pytest.raises((StreamLostError, SampleNotFoundError)):
            harness.consumer.open_reader(ref)

    def test_closing_a_reader_wakes_it(self, harness: StreamHarness) -> None:
        writer, reader = harness.begin("s")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.next)
            time.sleep(SHORT_S)
            assert not waiting.done()
            reader.close()
            with pytest.raises(ClosedError):
                waiting.result(60)
        writer.fail("not needed")

    def test_reader_that_released_nothing_can_be_followed_by_another(self, harness: StreamHarness) -> None:
        whole = make_whole(3 * PIECE)
        writer, reader = harness.begin("s", window=2)
        write(writer, whole, 2 * PIECE, close=False)
        check_piece(next_piece(reader), whole)
        ref = reader.ref
        assert reader.close() is True
        assert reader.close() is True
        del reader
        again = harness.consumer.open_reader(harness.give_back(ref))
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: (writer.append(cut(whole, 2 * PIECE, 3 * PIECE)), writer.close()))
            check_rest(again, whole, 3 * PIECE)
            assert done.result(60) == (2, 3)
        harness.consume(again)
        harness.assert_empty()

    def test_retained_sample_is_read_again_from_its_beginning(self, harness: StreamHarness) -> None:
        whole = make_whole(5 * PIECE + 1)
        writer, reader = harness.begin("s", window=2, retain=True)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(write, writer, whole, 5 * PIECE + 1)
            for _ in range(3):
                next_piece(reader).release()
            ref = reader.ref
            assert reader.close() is True
            ref = harness.give_back(ref)
            reader = harness.consumer.open_reader(ref)
            check_rest(reader, whole, 5 * PIECE + 1)
            assert done.result(60) == 6
        reader.close()
        del reader
        ref = harness.give_back(ref)
        tensors, handle = harness.consumer.get(ref)
        assert raw_bytes(tensors["logits"]) == raw_bytes(whole["logits"])
        harness.finish(ref, handle)
        harness.assert_empty()

    def test_reader_as_context_releases_only_what_was_read_to_its_end(self, harness: StreamHarness) -> None:
        whole = make_whole(PIECE)
        writer, reader = harness.begin("s")
        write(writer, whole, PIECE)
        ref = reader.ref
        with reader:
            pass
        del reader
        ref = harness.give_back(ref)
        with harness.consumer.open_reader(ref) as reader:
            check_rest(reader, whole, PIECE)
            harness.settle(ref)
        harness.assert_empty()

    # -- caps --

    def test_caps_count_the_window_when_the_sample_is_opened(self, capped_store: Callable[..., Any]) -> None:
        with capped_store(
            max_samples=None, max_bytes=10_000_000, high_watermark_bytes=None, low_watermark_bytes=None
        ) as probe:
            window = StreamHarness(probe).open("s").ref.estimated_bytes
        with capped_store(
            max_samples=None, max_bytes=2 * window - 1, high_watermark_bytes=None, low_watermark_bytes=None
        ) as store:
            harness = StreamHarness(store)
            writer = harness.open("a")
            with pytest.raises(CapacityError) as info:
                harness.open("b")
            assert info.value.can_wait
            with pytest.raises(CapacityError) as info:
                harness.open("c", window=100)
            assert not info.value.can_wait
            assert store.health().sample_count == 1
            writer.append(make_whole(PIECE), timeout=60.0)
            writer.close()
            assert store.discard(writer.ref)
            assert store.health().resident_bytes == 0
            harness.open("b")

    def test_caps_bound_a_retained_sample_and_leave_it_as_it_was(self, capped_store: Callable[..., Any]) -> None:
        whole = make_whole(8 * PIECE)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in cut(whole, 0, PIECE).items()}
        piece = sum(sizes.values()) - sizes["constant"]
        with capped_store(
            max_samples=None,
            max_bytes=4 * piece + sizes["constant"],
            high_watermark_bytes=None,
            low_watermark_bytes=None,
        ) as store:
            writer = StreamHarness(store).open("s", window=2, retain=True)
            reader = store.open_reader(writer.ref)
            for start in range(0, 4 * PIECE, PIECE):
                writer.append(cut(whole, start, start + PIECE), timeout=60.0)
                next_piece(reader).release()
            assert store.health().resident_bytes == 4 * piece + sizes["constant"]
            with pytest.raises(CapacityError):
                writer.append(cut(whole, 4 * PIECE, 5 * PIECE), timeout=60.0)
            assert writer.close() == 4
            assert reader.next() is None
            reader.release()
            assert store.health().resident_bytes == 0

    def test_closed_store_wakes_and_refuses_both_ends(self, capped_store: Callable[..., Any]) -> None:
        with capped_store() as store:
            writer, reader = StreamHarness(store).begin("s", window=1)
            writer.append(make_whole(PIECE), timeout=60.0)
            with ThreadPoolExecutor(2) as pool:
                next_piece(reader)
                appending = pool.submit(writer.append, cut(make_whole(2 * PIECE), PIECE, 2 * PIECE))
                reading = pool.submit(reader.next)
                time.sleep(SHORT_S)
                store.close()
                for waiting in (appending, reading):
                    with pytest.raises(ClosedError):
                        waiting.result(60)
            with pytest.raises(ClosedError):
                writer.close()
            reader.close()
            with pytest.raises(ClosedError):
                store.open_reader(writer.ref)
            with pytest.raises(ClosedError):
                StreamHarness(store).open("t")
