import copy
import dataclasses
import gc
import inspect
import threading

import pytest
import torch

from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness, make_sample


class TestLocalFeatureStoreConformance(FeatureStoreConformance):
    @pytest.fixture
    def harness(self):
        with LocalFeatureStore() as store:
            yield StoreHarness(store)

    @pytest.fixture
    def capped_store(self):
        return LocalFeatureStore


@pytest.fixture
def store():
    with LocalFeatureStore() as store:
        yield store


def test_defaults_are_the_documented_ones():
    parameters = inspect.signature(LocalFeatureStore).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "max_samples": 64,
        "max_bytes": 256 * 1024 * 1024,
        "high_watermark_bytes": 192 * 1024 * 1024,
        "low_watermark_bytes": 64 * 1024 * 1024,
    }
    with LocalFeatureStore() as store:
        ref = store.put("s", make_sample(), "run")
        assert (ref.algorithm, ref.schema_version, ref.num_tokens) == (FeatureAlgorithm.EAGLE3, 1, 0)
        assert (ref.target_model_version, ref.draft_weight_version) == ("0", "0")


def test_uri_is_unique_per_instance_even_when_memory_is_reused():
    uris = set()
    for _ in range(50):
        store = LocalFeatureStore()
        assert f"{id(store):x}" not in store.store_uri
        uris.add(store.store_uri)
        del store
    assert len(uris) == 50
    assert all(uri.startswith("mem://") for uri in uris)


def test_put_attributes_travel_in_the_ref(store):
    ref = store.put("s", make_sample(), "run", attributes={"norm": "pre"})
    assert ref.attributes == {"norm": "pre"}


@pytest.mark.parametrize("failing_call", range(len(make_sample())))
def test_put_that_fails_at_any_feature_returns_the_room(store, monkeypatch, failing_call):
    calls = []

    def copy_or_fail(tensor, device=None):
        calls.append(tensor)
        if len(calls) == failing_call + 1:
            raise MemoryError("no memory for the copy")
        return tensor.clone()

    monkeypatch.setattr("nccl_stream.stores.local.copy_tensor", copy_or_fail)
    with pytest.raises(MemoryError, match="no memory"):
        store.put("s", make_sample(), "run")
    assert (store.health().sample_count, store.health().resident_bytes) == (0, 0)
    monkeypatch.undo()
    store.put("s", make_sample(), "run")


def test_get_that_fails_holds_nothing(store, monkeypatch):
    ref = store.put("s", make_sample(), "run")

    def fail(tensor, device=None):
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr("nccl_stream.stores.local.copy_tensor", fail)
    with pytest.raises(MemoryError) as info:
        store.get(ref)
    monkeypatch.undo()
    _, handle = store.get(ref)
    store.release(handle)
    # Although the traceback keeps the frame of the failed get, and with it the handle, alive.
    assert info.tb is not None
    assert store.health().sample_count == 0


def test_get_copies_outside_the_lock(store, monkeypatch):
    """While one consumer copies, everybody else can use the store."""
    ref = store.put("s", make_sample(), "run")
    copying, proceed = threading.Event(), threading.Event()

    def slow(tensor, device=None):
        copying.set()
        assert proceed.wait(20)
        return tensor.clone()

    monkeypatch.setattr("nccl_stream.stores.local.copy_tensor", slow)
    got = []
    consumer = threading.Thread(target=lambda: got.append(store.get(ref)), daemon=True)
    consumer.start()
    assert copying.wait(20)
    assert store.health().sample_count == 1
    store.discard(ref)
    assert store.health().sample_count == 1
    proceed.set()
    consumer.join(20)
    tensors, handle = got[0]
    assert torch.equal(tensors["logits"], make_sample()["logits"])
    store.release(handle)
    assert store.health().sample_count == 0


def test_close_during_a_put_refuses_it(store, monkeypatch):
    copying, proceed = threading.Event(), threading.Event()

    def slow(tensor, device=None):
        copying.set()
        assert proceed.wait(20)
        return tensor.clone()

    monkeypatch.setattr("nccl_stream.stores.local.copy_tensor", slow)
    errors = []

    def produce():
        try:
            store.put("s", make_sample(), "run")
        except RuntimeError as error:
            errors.append(error)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    assert copying.wait(20)
    store.close()
    proceed.set()
    producer.join(20)
    assert len(errors) == 1
    assert store.health().sample_count == 0


def test_gc_ends_the_hold_of_a_dropped_handle_and_keeps_the_sample(store):
    ref = store.put("s", make_sample(fill=4), "run")
    tensors = store.get(ref)[0]
    gc.collect()
    assert store.gc() == 1
    assert store.gc() == 0
    again, handle = store.get(ref)
    assert torch.equal(again["logits"], tensors["logits"])
    store.release(handle)
    assert store.health().sample_count == 0


def test_release_frees_although_a_dead_consumer_never_released(store):
    ref = store.put("s", make_sample(), "run")
    store.get(ref)
    gc.collect()
    _, handle = store.get(ref)
    store.release(handle)
    assert store.health().resident_bytes == 0


def test_gc_frees_a_consumed_sample_that_only_a_dropped_handle_held(store):
    ref = store.put("s", make_sample(), "run")
    kept = [store.get(ref)]
    _, handle = store.get(ref)
    store.release(handle)
    assert store.health().sample_count == 1
    kept.clear()
    gc.collect()
    assert store.gc() == 1
    assert store.health().sample_count == 0


def test_release_of_a_copy_of_a_dropped_handle_counts(store):
    ref = store.put("s", make_sample(), "run")
    _, handle = store.get(ref)
    twin = copy.copy(handle)
    del handle
    gc.collect()
    assert store.gc() == 1
    store.release(twin)
    assert store.health().sample_count == 0


def test_release_of_something_else_is_refused(store):
    with pytest.raises(ValueError):
        store.release("handle")


def test_discard_of_a_held_sample_waits_for_the_handle(store):
    ref = store.put("s", make_sample(), "run")
    _, handle = store.get(ref)
    assert store.discard(ref)
    assert not store.discard(ref)
    assert store.health().sample_count == 1
    store.release(handle)
    assert store.health().sample_count == 0


def test_discard_of_a_foreign_ref_does_nothing(store):
    ref = store.put("s", make_sample(), "run")
    assert not store.discard(dataclasses.replace(ref, store_uri="mem://other"))
    assert store.health().sample_count == 1


def test_wait_for_room_ends_with_the_store(store):
    for index in range(64):
        store.put(f"s{index}", make_sample(), "run")
    assert not store.room_for(1)
    errors = []

    def wait():
        try:
            store.wait_for_room(1, 1000)
        except RuntimeError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    store.close()
    waiter.join(20)
    assert len(errors) == 1


def test_watermarks_left_out_mean_the_cap_and_zero():
    size = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
    with LocalFeatureStore(4, size, None, None) as store:
        assert (store.health().high_watermark_hit, store.health().low_watermark_hit) == (False, True)
        store.put("s", make_sample(), "run")
        assert (store.health().high_watermark_hit, store.health().low_watermark_hit) == (True, False)


def test_lazy_views_are_materialized(store):
    values = torch.tensor([1 + 2j, 3 - 4j])
    sample = {**make_sample(), "conj": values.conj(), "neg": torch._neg_view(torch.ones(3))}
    got, handle = store.get(store.put("s", sample, "run"))
    assert torch.equal(got["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(got["neg"], -torch.ones(3))
    assert not got["conj"].is_conj()
    store.release(handle)
