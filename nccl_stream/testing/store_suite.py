"""Conformance suite for feature stores: what every :class:`~nccl_stream.store.FeatureStore` must do.

Subclass :class:`FeatureStoreConformance` in a test module and override the ``harness`` fixture::

    class TestMyStore(FeatureStoreConformance):
        @pytest.fixture
        def harness(self):
            with MyStore() as store:
                yield StoreHarness(store)

        @pytest.fixture
        def capped_store(self):
            return MyStore  # a callable with the four cap and watermark keywords

A store whose producer and consumer are different objects, or live in different processes, gives both to its harness
and says in :meth:`StoreHarness.transfer` how a ref gets from one to the other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nccl_stream.errors import CapacityError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth

__all__ = ["ALL_DTYPES", "FeatureStoreConformance", "StoreHarness", "make_sample", "raw_bytes"]

ALL_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {
            dtype
            for dtype in vars(torch).values()
            # Quantized dtypes need a quantizer beside their bytes; stores refuse them.
            if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
        },
        key=str,
    )
)
"""Every dtype that a plain dense tensor can have."""


def make_sample(fill: int = 0, num_tokens: int = 8, hidden: int = 4) -> dict[str, torch.Tensor]:
    """Return an EAGLE-3 sample whose every value follows from ``fill``."""
    states = torch.arange(num_tokens * 3 * hidden, dtype=torch.float32).reshape(1, num_tokens, 3 * hidden) + fill
    return {
        "aux_hidden_states": states,
        "input_ids": torch.full((1, num_tokens), fill, dtype=torch.int64),
        "attention_mask": torch.ones(1, num_tokens, dtype=torch.int64),
        "loss_mask": torch.ones(1, num_tokens, dtype=torch.int64),
        "logits": torch.full((1, num_tokens, 16), float(fill)),
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of ``tensor`` in order as bytes; the comparison that no dtype's equality can soften."""
    # Same-sized integers: torch cannot make strided tensors of every dtype contiguous, and warns about complex32.
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    plain = tensor.detach().cpu() if carrier is None else tensor.detach().cpu().view(carrier)
    return plain.contiguous().numpy().tobytes()


class StoreHarness:
    """The stores under test and how a ref travels between them.

    Args:
        producer: the store to put into.
        consumer: the store to get from; the same by default.
        timeout: how long an effect on the other side may take, in seconds.
    """

    def __init__(self, producer: FeatureStore, consumer: FeatureStore | None = None, *, timeout: float = 20.0) -> None:
        self.producer = producer
        self.consumer = producer if consumer is None else consumer
        self.timeout = timeout

    def transfer(self, ref: SampleRef) -> SampleRef:
        """Make ``ref`` gettable on the consumer, for example by a queue, and return the consumer's ref."""
        return ref

    def settle(self, ref: SampleRef) -> None:
        """Tell the owner that the consumer is done with ``ref``, where a release alone does not."""

    def put(self, sample_id: str, tensors: Mapping[str, torch.Tensor], **kwargs: Any) -> SampleRef:
        """Put with the metadata that does not matter filled in."""
        kwargs.setdefault("run_id", "conformance")
        kwargs.setdefault("algorithm", FeatureAlgorithm.EAGLE3)
        kwargs.setdefault("schema_version", 1)
        kwargs.setdefault("target_model_version", "0")
        kwargs.setdefault("draft_weight_version", "0")
        kwargs.setdefault("num_tokens", 8)
        return self.producer.put(sample_id, tensors, **kwargs)

    def send(self, sample_id: str, tensors: Mapping[str, torch.Tensor]) -> SampleRef:
        """Put and transfer."""
        return self.transfer(self.put(sample_id, tensors))

    def finish(self, ref: SampleRef, handle: StoreHandle) -> None:
        """Release and settle."""
        self.consumer.release(handle)
        self.settle(ref)

    def eventually(self, predicate: Callable[[], bool], what: str) -> None:
        """Wait until ``predicate`` holds."""
        deadline = time.monotonic() + self.timeout
        while not predicate():
            assert time.monotonic() < deadline, f"did not come true in {self.timeout} s: {what}"
            time.sleep(0.002)

    def assert_empty(self) -> None:
        """Wait until the producer holds nothing."""
        self.eventually(lambda: self.producer.health().sample_count == 0, "the producer's store is empty")
        assert self.producer.health().resident_bytes == 0


class FeatureStoreConformance:
    """Inherit, override :meth:`harness`, and optionally :meth:`capped_store`."""

    @pytest.fixture
    def harness(self) -> Iterator[StoreHarness]:
        """Yield a fresh, empty harness with room for at least 64 samples and 16 MiB."""
        raise NotImplementedError("override the harness fixture")

    @pytest.fixture
    def capped_store(self) -> Callable[..., FeatureStore]:
        """Return a factory for producer-side stores that takes the cap and watermark keywords."""
        pytest.skip("this store offers no caps to test")

    # -- content --

    @pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_get_every_dtype_and_layout_is_byte_exact(self, harness: StoreHarness, dtype: torch.dtype) -> None:
        pattern = (torch.arange(6 * 4 * dtype.itemsize) * 37 + 11).to(torch.uint8)
        if dtype is torch.bool:
            pattern &= 1
        matrix = pattern.view(dtype).reshape(6, 4)
        tensors = {
            **make_sample(),
            "plain": matrix,
            "strided": matrix.t()[1:, ::2],
            "expanded": matrix[:1].expand(3, 4),
            "scalar": matrix[2, 3],
            "empty": matrix[:0],
        }
        expected = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
        ref = harness.send("s", tensors)
        got, handle = harness.consumer.get(ref)
        assert list(got) == list(tensors)
        for name, tensor in tensors.items():
            assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw_bytes(got[name]) == expected[name], name
        harness.finish(ref, handle)

    def test_get_keeps_the_order_of_features(self, harness: StoreHarness) -> None:
        tensors = dict(reversed(make_sample().items()))
        ref = harness.send("s", tensors)
        assert ref.feature_names() == tuple(tensors)
        got, handle = harness.consumer.get(ref)
        assert list(got) == list(tensors)
        harness.finish(ref, handle)

    def test_put_describes_exactly_what_was_put(self, harness: StoreHarness) -> None:
        tensors = make_sample()
        ref = harness.put("s", tensors, run_id="r", num_tokens=5, target_model_version="7", draft_weight_version="9")
        assert (ref.sample_id, ref.run_id, ref.num_tokens) == ("s", "r", 5)
        assert (ref.target_model_version, ref.draft_weight_version) == ("7", "9")
        assert ref.feature_specs == {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}
        assert ref.estimated_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        ref = harness.transfer(ref)
        _, handle = harness.consumer.get(ref)
        harness.finish(ref, handle)

    def test_put_source_overwritten_afterwards_does_not_show(self, harness: StoreHarness) -> None:
        tensors = make_sample(fill=3)
        expected = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
        ref = harness.put("s", tensors)
        for tensor in tensors.values():
            tensor.fill_(99)
        ref = harness.transfer(ref)
        got, handle = harness.consumer.get(ref)
        assert {name: raw_bytes(tensor) for name, tensor in got.items()} == expected
        harness.finish(ref, handle)

    def test_get_result_written_into_does_not_reach_the_store(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample(fill=3))
        first, first_handle = harness.consumer.get(ref)
        for tensor in first.values():
            tensor.zero_()
        second, second_handle = harness.consumer.get(ref)
        assert {n: raw_bytes(t) for n, t in second.items()} == {n: raw_bytes(t) for n, t in make_sample(3).items()}
        harness.consumer.release(first_handle)
        harness.finish(ref, second_handle)

    def test_put_requires_grad_is_stored_detached(self, harness: StoreHarness) -> None:
        tensors = make_sample()
        tensors["aux_hidden_states"].requires_grad_()
        ref = harness.send("s", tensors)
        got, handle = harness.consumer.get(ref)
        assert not got["aux_hidden_states"].requires_grad
        harness.finish(ref, handle)

    def test_get_with_device_puts_everything_there(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        got, handle = harness.consumer.get(ref, "cpu")
        assert {tensor.device.type for tensor in got.values()} == {"cpu"}
        harness.finish(ref, handle)

    def test_get_equal_shapes_in_flight_together_do_not_swap(self, harness: StoreHarness) -> None:
        refs = [harness.put(f"s{fill}", make_sample(fill)) for fill in range(8)]
        refs = [harness.transfer(ref) for ref in refs]
        for fill, ref in reversed(list(enumerate(refs))):
            got, handle = harness.consumer.get(ref)
            assert {n: raw_bytes(t) for n, t in got.items()} == {n: raw_bytes(t) for n, t in make_sample(fill).items()}
            harness.finish(ref, handle)
        harness.assert_empty()

    def test_get_sample_of_a_thousand_features_arrives_whole(self, harness: StoreHarness) -> None:
        tensors = {**make_sample(), **{f"extra{i}": torch.full((i % 5,), i, dtype=torch.int16) for i in range(1000)}}
        ref = harness.send("s", tensors)
        got, handle = harness.consumer.get(ref)
        assert all(raw_bytes(got[name]) == raw_bytes(tensor) for name, tensor in tensors.items())
        harness.finish(ref, handle)
        harness.assert_empty()

    # -- lifetime --

    def test_get_after_release_raises_key_error(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        _, handle = harness.consumer.get(ref)
        harness.finish(ref, handle)
        with pytest.raises(KeyError):
            harness.consumer.get(ref)

    def test_release_of_the_last_handle_frees(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        before = harness.producer.health()
        _, first = harness.consumer.get(ref)
        _, second = harness.consumer.get(ref)
        assert first.handle_id != second.handle_id
        harness.consumer.release(first)
        assert harness.producer.health() == before
        harness.finish(ref, second)
        harness.assert_empty()

    def test_release_twice_does_not_count_for_a_sibling(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample(fill=5))
        _, first = harness.consumer.get(ref)
        got, second = harness.consumer.get(ref)
        harness.consumer.release(first)
        harness.consumer.release(first)
        assert harness.producer.health().sample_count == 1
        assert raw_bytes(got["logits"]) == raw_bytes(make_sample(5)["logits"])
        harness.finish(ref, second)
        harness.consumer.release(second)
        harness.assert_empty()

    def test_release_forged_handle_changes_nothing(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        _, handle = harness.consumer.get(ref)
        harness.consumer.release(dataclasses.replace(handle, handle_id=handle.handle_id + 10**9))
        assert harness.producer.health().sample_count == 1
        again, other = harness.consumer.get(ref)
        assert list(again) == list(ref.feature_names())
        harness.consumer.release(other)
        harness.finish(ref, handle)
        harness.assert_empty()

    def test_discard_drops_a_sample_that_nobody_will_consume(self, harness: StoreHarness) -> None:
        ref = harness.put("s", make_sample())
        assert harness.producer.discard(ref)
        harness.assert_empty()
        assert not harness.producer.discard(ref)

    def test_put_same_id_again_after_it_was_freed_is_accepted(self, harness: StoreHarness) -> None:
        for fill in range(3):
            ref = harness.send("s", make_sample(fill))
            got, handle = harness.consumer.get(ref)
            assert int(got["input_ids"][0, 0]) == fill
            harness.finish(ref, handle)
            harness.assert_empty()

    def test_gc_on_a_healthy_store_takes_nothing(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        assert harness.producer.gc() == 0
        _, handle = harness.consumer.get(ref)
        assert harness.consumer.gc() == 0
        harness.finish(ref, handle)

    # -- misuse --

    def test_get_ref_of_another_store_raises_key_error(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        with pytest.raises(KeyError):
            harness.consumer.get(dataclasses.replace(ref, store_uri="elsewhere://somewhere"))
        _, handle = harness.consumer.get(ref)
        harness.finish(ref, handle)

    def test_get_ref_never_put_raises_key_error(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        with pytest.raises(KeyError):
            harness.consumer.get(dataclasses.replace(ref, sample_id="never-put"))
        _, handle = harness.consumer.get(ref)
        harness.finish(ref, handle)

    def test_release_handle_of_another_store_raises_value_error(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        _, handle = harness.consumer.get(ref)

        class Other(FeatureStore):
            put = get = release = health = gc = close = None  # type: ignore[assignment]

        with pytest.raises(ValueError):
            harness.consumer.release(dataclasses.replace(handle, store=Other()))
        harness.finish(ref, handle)

    @pytest.mark.parametrize("change", ["shape", "dtype"])
    def test_get_ref_that_contradicts_what_is_stored_raises_runtime_error(
        self, harness: StoreHarness, change: str
    ) -> None:
        ref = harness.send("s", make_sample())
        spec = ref.feature_specs["logits"]
        wrong = FeatureSpec((*spec.shape, 1), spec.dtype) if change == "shape" else FeatureSpec(spec.shape, torch.int32)
        with pytest.raises(RuntimeError):
            harness.consumer.get(dataclasses.replace(ref, feature_specs={**ref.feature_specs, "logits": wrong}))
        _, handle = harness.consumer.get(ref)
        harness.finish(ref, handle)
        harness.assert_empty()

    @pytest.mark.parametrize(
        ("sample_id", "tensors"),
        [
            ("", make_sample()),
            (7, make_sample()),
            ("s", {}),
            ("s", {**make_sample(), "bad": [1, 2]}),
            ("s", dict([*make_sample().items(), (3, torch.zeros(1))])),
            ("s", {**make_sample(), "bad": torch.zeros(2, 2).to_sparse()}),
            ("s", {**make_sample(), "bad": torch.zeros(2, device="meta")}),
            ("s", {name: tensor for name, tensor in make_sample().items() if name != "loss_mask"}),
        ],
        ids=["empty-id", "int-id", "no-tensors", "list", "int-name", "sparse", "meta", "missing-required"],
    )
    def test_put_bad_input_raises_value_error_and_leaves_nothing(
        self, harness: StoreHarness, sample_id: str, tensors: dict[str, torch.Tensor]
    ) -> None:
        with pytest.raises(ValueError):
            harness.put(sample_id, tensors)
        health = harness.producer.health()
        assert (health.sample_count, health.resident_bytes) == (0, 0)

    def test_put_duplicate_id_raises_value_error_and_keeps_the_first(self, harness: StoreHarness) -> None:
        ref = harness.put("s", make_sample(fill=1))
        before = harness.producer.health()
        with pytest.raises(ValueError):
            harness.put("s", make_sample(fill=2))
        assert harness.producer.health() == before
        ref = harness.transfer(ref)
        got, handle = harness.consumer.get(ref)
        assert int(got["input_ids"][0, 0]) == 1
        harness.finish(ref, handle)

    # -- health and end --

    def test_health_is_ints_and_flags_and_follows_the_samples(self, harness: StoreHarness) -> None:
        refs: list[SampleRef] = []
        for count in range(3):
            health = harness.producer.health()
            assert isinstance(health, StoreHealth)
            assert {type(value) for value in dataclasses.astuple(health)} <= {int, bool}
            assert health.sample_count == count
            assert health.resident_bytes == sum(ref.estimated_bytes for ref in refs)
            refs.append(harness.put(f"s{count}", make_sample(num_tokens=count + 1)))
        for ref in refs:
            ref = harness.transfer(ref)
            _, handle = harness.consumer.get(ref)
            harness.finish(ref, handle)
        harness.assert_empty()

    def test_close_clears_refuses_later_calls_and_is_idempotent(self, harness: StoreHarness) -> None:
        ref = harness.send("s", make_sample())
        _, handle = harness.consumer.get(ref)
        harness.consumer.close()
        harness.consumer.close()
        with pytest.raises(RuntimeError):
            harness.consumer.get(ref)
        with pytest.raises(RuntimeError):
            harness.consumer.release(handle)
        harness.producer.close()
        harness.producer.close()
        with pytest.raises(RuntimeError):
            harness.put("t", make_sample())
        with pytest.raises(RuntimeError):
            harness.producer.gc()
        health = harness.producer.health()
        assert (health.sample_count, health.resident_bytes) == (0, 0)

    def test_put_get_release_from_several_threads_mixes_nothing_up(self, harness: StoreHarness) -> None:
        def run(worker: int) -> None:
            for step in range(10):
                fill = worker * 100 + step
                ref = harness.send(f"s{fill}", make_sample(fill))
                got, handle = harness.consumer.get(ref)
                assert raw_bytes(got["logits"]) == raw_bytes(make_sample(fill)["logits"])
                harness.finish(ref, handle)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(run, worker) for worker in range(4)]:
                future.result()
        harness.assert_empty()

    # -- caps --

    def test_caps_sample_count_reached_raises_memory_error_until_one_leaves(
        self, capped_store: Callable[..., FeatureStore]
    ) -> None:
        with capped_store(max_samples=2, max_bytes=None, high_watermark_bytes=None, low_watermark_bytes=None) as store:
            harness = StoreHarness(store)
            first = harness.put("a", make_sample())
            harness.put("b", make_sample())
            before = store.health()
            with pytest.raises(MemoryError) as info:
                harness.put("c", make_sample())
            assert isinstance(info.value, CapacityError)
            assert info.value.can_wait
            assert store.health() == before
            store.discard(first)
            harness.put("c", make_sample())

    def test_caps_bytes_reached_raises_memory_error_and_says_whether_waiting_helps(
        self, capped_store: Callable[..., FeatureStore]
    ) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
        with capped_store(
            max_samples=None, max_bytes=2 * size - 1, high_watermark_bytes=None, low_watermark_bytes=None
        ) as store:
            harness = StoreHarness(store)
            first = harness.put("a", make_sample())
            assert store.health().capacity_bytes == 2 * size - 1
            with pytest.raises(CapacityError) as info:
                harness.put("b", make_sample())
            assert info.value.can_wait
            big = make_sample(num_tokens=64)
            needed = sum(tensor.numel() * tensor.element_size() for tensor in big.values())
            with pytest.raises(CapacityError, match=str(needed)) as info:
                harness.put("b", big)
            assert not info.value.can_wait
            assert store.health().sample_count == 1
            store.discard(first)
            harness.put("b", make_sample())

    def test_caps_watermark_flags_turn_at_the_thresholds_themselves(
        self, capped_store: Callable[..., FeatureStore]
    ) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
        with capped_store(
            max_samples=None, max_bytes=10 * size, high_watermark_bytes=3 * size, low_watermark_bytes=size
        ) as store:
            harness = StoreHarness(store)
            flags = []
            for index in range(4):
                health = store.health()
                flags.append((health.low_watermark_hit, health.high_watermark_hit))
                harness.put(f"s{index}", make_sample())
            assert flags == [(True, False), (True, False), (False, False), (False, True)]

    @pytest.mark.parametrize(
        "caps",
        [
            {"max_samples": None, "max_bytes": None},
            {"max_samples": 0},
            {"max_bytes": -1},
            {"high_watermark_bytes": 100, "low_watermark_bytes": 100},
            {"high_watermark_bytes": 100, "low_watermark_bytes": 101},
        ],
        ids=["none", "zero-samples", "negative-bytes", "no-band", "crossed"],
    )
    def test_caps_that_cannot_work_raise_value_error(
        self, capped_store: Callable[..., FeatureStore], caps: dict[str, int | None]
    ) -> None:
        with pytest.raises(ValueError):
            capped_store(**caps)
