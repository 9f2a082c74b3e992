"""NeMo AutoModel's queue, loader, producer and pipeline on our stores, and ours on NeMo's, with the real package."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import threading
import warnings

import pytest
import torch

if importlib.util.find_spec("nemo_automodel") is None:
    pytest.skip("nemo-automodel is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages that it imports
    from nemo_automodel.components.speculative import streaming as nemo
    from nemo_automodel.components.speculative.eagle.backend import Eagle3TargetBackend as NemoBackend
    from nemo_automodel.components.speculative.eagle.target import Eagle3TargetBatch as NemoBatch

import nccl_stream
from nccl_stream.eagle3 import Eagle3TargetBatch
from nccl_stream.errors import CapacityError, ConfigError, MisuseError, ProducerFailedError
from nccl_stream.interop.nemo import (
    _StoreForNemo,
    _StoreFromNemo,
    as_nemo_queue,
    as_nemo_store,
    from_nemo_ref,
    from_nemo_store,
    to_nemo_ref,
)
from nccl_stream.refs import FeatureSpec
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness, make_sample, raw_bytes
from tests.unit.pipeline_support import Background, FakeTarget, fill_of, packed_prompt, prompt, prompts
from tests.unit.test_nccl_store import CONFIG, open_pair

FEATURES = ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits")
PACKING = ("position_ids", "seq_lens", "doc_remaining")


class NemoTarget(NemoBackend):
    """Our fake target behind NeMo's contract."""

    def __init__(self):
        self.ours = FakeTarget(torch.bfloat16)

    def generate_batch(self, input_ids, attention_mask, loss_mask, **packing):
        return NemoBatch(**self.ours.generate_batch(input_ids, attention_mask, loss_mask, **packing).features())

    def get_input_embeddings(self):
        return self.ours.get_input_embeddings()


def colocated(batch):
    """What a batch of the target contains without any streaming."""
    return FakeTarget(torch.bfloat16).generate_batch(*batch).features()


def assert_same(batch, expected):
    for name, tensor in expected.items():
        got = getattr(batch, name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(got) == raw_bytes(tensor), name


@pytest.fixture(params=["local", "shared_dir"])
def our_store(request, tmp_path):
    make = {
        "local": nccl_stream.LocalFeatureStore,
        "shared_dir": lambda: nccl_stream.SharedDirFeatureStore(str(tmp_path)),
    }
    with make[request.param]() as store:
        yield store


@pytest.fixture(params=["local", "shared_dir"])
def nemo_store(request, tmp_path):
    make = {"local": nemo.LocalFeatureStore, "shared_dir": lambda: nemo.SharedDirFeatureStore(str(tmp_path))}
    store = make[request.param]()
    yield store
    store.close()


def run_nemo(queue, producing_store, consuming_store, source):
    """NeMo's producer and pipeline into NeMo's loader; yields its batches."""
    producer = nemo.FeatureProducer(NemoTarget(), producing_store, run_id="run")
    with (
        nemo.AsyncFeaturePipeline(producer, queue, source),
        nemo.FeatureDataLoader(queue, consuming_store) as loader,
    ):
        yield from loader


# -- NeMo's parts on our stores --


@pytest.mark.parametrize("queue_of", ["nemo", "ours"])
def test_nemo_pipeline_runs_on_our_store_and_is_bit_equal_to_colocated(our_store, queue_of):
    store = as_nemo_store(our_store)
    assert isinstance(store, nemo.FeatureStore)
    queue = nemo.SampleRefQueue(store) if queue_of == "nemo" else as_nemo_queue(nccl_stream.SampleRefQueue(our_store))
    batches = list(run_nemo(queue, store, store, prompts(5)))
    assert all(isinstance(batch, NemoBatch) for batch in batches)
    for fill, batch in enumerate(batches, 1):
        assert_same(batch, colocated(prompt(fill)))
    assert len(batches) == 5
    assert our_store.health().sample_count == 0


def test_nemo_pipeline_carries_packing_through_our_store(our_store):
    store = as_nemo_store(our_store)
    packed = packed_prompt([3, 5])
    # NeMo's six-tuple has the last two the other way round.
    source = iter([packed])
    (batch,) = run_nemo(nemo.SampleRefQueue(store), store, store, source)
    assert_same(batch, colocated(packed))


def test_nemo_loader_reads_a_stream_and_nemo_pipeline_feeds_it():
    target, draft, _server = open_pair(CONFIG)
    produced = as_nemo_queue(target.queue), as_nemo_store(target.store)
    consumed = as_nemo_queue(draft.queue), as_nemo_store(draft.store)
    seen = []

    def train():
        for batch in nemo.FeatureDataLoader(*consumed):
            fill = fill_of(batch)
            assert_same(batch, colocated(prompt(fill)))
            seen.append(fill)

    errors = []

    def guarded():
        try:
            train()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    producer = nemo.FeatureProducer(NemoTarget(), produced[1], run_id="run")
    pipeline = nemo.AsyncFeaturePipeline(producer, produced[0], prompts(6))
    pipeline.start()
    pipeline.join(60)
    pipeline.stop()
    thread.join(60)
    assert not thread.is_alive()
    draft.close()
    target.close()
    assert errors == []
    assert seen == [1, 2, 3, 4, 5, 6]


class RecordingStore(nccl_stream.FeatureStore):
    """Notes the very tensors that pass through it."""

    store_uri = "mem://recording"

    def __init__(self):
        self.inner = nccl_stream.LocalFeatureStore()
        self.put_tensors = self.got_tensors = None

    def put(self, sample_id, tensors, *args, **kwargs):
        self.put_tensors = tensors
        return self.inner.put(sample_id, tensors, *args, **kwargs)

    def get(self, ref, device=None):
        self.got_tensors, handle = self.inner.get(ref, device)
        return self.got_tensors, handle

    def release(self, handle):
        self.inner.release(handle)

    def gc(self):
        return self.inner.gc()

    def health(self):
        return self.inner.health()

    def close(self):
        self.inner.close()


def test_tensors_pass_through_both_adapters_without_a_copy():
    recording = RecordingStore()
    store = _StoreFromNemo(_StoreForNemo(recording))
    nemo_side = as_nemo_store(recording)
    tensors = make_sample()
    ref = store.put("s", tensors, "run")
    assert all(recording.put_tensors[name] is tensor for name, tensor in tensors.items())
    got, handle = store.get(ref)
    assert all(got[name] is tensor for name, tensor in recording.got_tensors.items())
    got, nemo_handle = nemo_side.get(to_nemo_ref(ref))
    assert all(got[name] is tensor for name, tensor in recording.got_tensors.items())
    nemo_side.release(nemo_handle)
    store.release(handle)
    assert recording.health().sample_count == 0
    recording.close()


def test_nemo_loader_does_not_lose_the_sample_put_just_before_the_close(our_store):
    ours = nccl_stream.SampleRefQueue(our_store)
    queue = as_nemo_queue(ours)
    assert queue.acquire(poll_interval=0.001) is None
    # What the loader's thread does not see, between its empty poll and its look at is_closed:
    ours.put(our_store.put("last", make_sample(), "run"))
    ours.close()
    assert not queue.is_closed
    assert [fill_of(batch) for batch in nemo.FeatureDataLoader(queue, as_nemo_store(our_store))] == [0]
    assert queue.is_closed


def test_error_of_our_producer_reaches_nemo_loader(our_store):
    ours = nccl_stream.SampleRefQueue(our_store)
    ours.close(error=ValueError("no more targets"))
    with pytest.raises(ProducerFailedError, match="no more targets"):
        next(nemo.FeatureDataLoader(as_nemo_queue(ours), as_nemo_store(our_store)))


def test_lease_of_our_queue_is_acked_once_and_failed_ones_come_again(our_store):
    ours = nccl_stream.SampleRefQueue(our_store)
    queue = as_nemo_queue(ours)
    queue.put(to_nemo_ref(our_store.put("s", make_sample(), "run")))
    first = queue.acquire()
    assert isinstance(first, nemo.Lease)
    assert queue.outstanding_count() == 1
    queue.fail(first)
    queue.fail(first)
    second = queue.acquire()
    assert (second.redelivery_count, first.redelivery_count) == (1, 0)
    queue.ack(first)
    assert queue.outstanding_count() == 1
    queue.ack(dataclasses.replace(second))
    assert (queue.outstanding_count(), queue.pending_count()) == (0, 0)


def test_nemo_handle_that_is_dropped_does_not_keep_the_sample(our_store):
    store = as_nemo_store(our_store)
    ref = store.put("s", make_sample(), run_id="run")
    store.get(ref)
    gc.collect()
    assert store.gc() == 1
    _, handle = store.get(ref)
    store.release(handle)
    store.release(handle)
    assert store.health().sample_count == 0


def test_errors_of_our_store_are_those_that_nemo_expects(our_store):
    store = as_nemo_store(our_store)
    ref = store.put("s", make_sample(), run_id="run", algorithm=nemo.FeatureAlgorithm.EAGLE3)
    with pytest.raises(ValueError):
        store.put("s", make_sample(), run_id="run")
    _, handle = store.get(ref)
    with pytest.raises(ValueError):
        as_nemo_store(our_store).release(handle)
    wrong = {**ref.feature_specs, "logits": nemo.FeatureSpec((1,), torch.int8)}
    with pytest.raises(RuntimeError):
        store.get(dataclasses.replace(ref, feature_specs=wrong))
    store.release(handle)
    with pytest.raises(KeyError):
        store.get(ref)
    store.close()
    with pytest.raises(RuntimeError):
        store.get(ref)


# -- our parts on NeMo's stores --


def test_our_pipeline_runs_on_nemo_store_and_is_bit_equal_to_colocated(nemo_store):
    store = from_nemo_store(nemo_store)
    queue = nccl_stream.SampleRefQueue(store)
    producer = nccl_stream.FeatureProducer(
        FakeTarget(torch.bfloat16), store, run_id="run", algorithm=nccl_stream.FeatureAlgorithm.EAGLE3
    )
    seen = []
    with nccl_stream.AsyncFeaturePipeline(producer, queue, prompts(5)):
        for batch in nccl_stream.FeatureDataLoader(queue, store):
            assert_same(batch, colocated(prompt(fill_of(batch))))
            seen.append(fill_of(batch))
    assert seen == [1, 2, 3, 4, 5]
    assert nemo_store.health().sample_count == 0


def test_our_producer_runs_nemo_backend_without_being_told_its_algorithm():
    queue = nccl_stream.SampleRefQueue(store := nccl_stream.LocalFeatureStore())
    producer = nccl_stream.FeatureProducer(NemoTarget(), store, run_id="run")
    with (
        nccl_stream.AsyncFeaturePipeline(producer, queue, [prompt(1), packed_prompt([3, 5])]),
        nccl_stream.FeatureDataLoader(queue, store) as loader,
    ):
        for batch, source in zip(loader, (prompt(1), packed_prompt([3, 5])), strict=True):
            assert_same(batch, colocated(source))


def test_batch_of_more_samples_than_nemo_store_holds_comes_with_those_it_holds():
    store = from_nemo_store(nemo.LocalFeatureStore(max_samples=4))
    queue = nccl_stream.SampleRefQueue(store)
    producer = nccl_stream.FeatureProducer(FakeTarget(torch.bfloat16), store, run_id="run")
    with nccl_stream.AsyncFeaturePipeline(producer, queue, prompts(10)):
        loader = nccl_stream.FeatureDataLoader(queue, store, batch_size=5)
        pulled = Background(lambda: [len(batch.sample_ids) for batch in loader])
        assert pulled.result() == [4, 4, 2]


def test_probabilities_over_a_draft_vocabulary_pass_and_last_hidden_states_are_refused(nemo_store):
    store = from_nemo_store(nemo_store)
    core = {name: tensor for name, tensor in colocated(prompt(1)).items() if name != "logits"}

    class Target(FakeTarget):
        def generate_batch(self, *_args, **_packing):
            batch = Eagle3TargetBatch(**core, **supervision)
            batch.attributes = attributes
            return batch

    producer = nccl_stream.FeatureProducer(Target(), store, "run")
    mask = torch.arange(16) < 4
    producer.set_vocab_mapping(torch.arange(4), mask)
    seq = core["input_ids"].shape[1]
    supervision = {
        "target_probs": torch.full((1, seq, 4), 0.25),
        "position_mask": torch.ones(1, seq, 1, dtype=torch.bool),
    }
    attributes = {}
    assert "target_probs" in producer.produce(*prompt(1)).feature_names()
    supervision = {"last_hidden_states": torch.zeros(1, seq, 4)}
    attributes = {NORM_ATTRIBUTE: "pre", FRAME_ATTRIBUTE: "shifted"}
    with pytest.raises(MisuseError, match="cannot carry"):
        producer.produce(*prompt(1))
    assert nemo_store.health().sample_count == 1


def test_sample_that_our_loader_gives_back_is_still_freed_in_nemo_store(nemo_store):
    store = from_nemo_store(nemo_store)
    queue = nccl_stream.SampleRefQueue(store)
    queue.put(store.put("s", make_sample(), "run"))
    loader = nccl_stream.FeatureDataLoader(queue, store)
    next(loader)
    error = OverflowError()
    loader.__exit__(OverflowError, error, None)  # the trainer raised
    gc.collect()
    assert nemo_store.health().sample_count == 1
    assert len(list(nccl_stream.FeatureDataLoader(queue, store))) == 1
    assert nemo_store.health().sample_count == 0


def test_errors_of_nemo_store_are_ours():
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
    store = from_nemo_store(
        nemo.LocalFeatureStore(max_samples=1, max_bytes=2 * nbytes, high_watermark_bytes=None, low_watermark_bytes=None)
    )
    ref = store.put("s", make_sample(), "run")
    with pytest.raises(CapacityError) as info:
        store.put("t", make_sample(), "run")
    assert info.value.can_wait
    store.discard(ref)
    with pytest.raises(CapacityError) as info:
        store.put("t", {**make_sample(), "extra": torch.zeros(nbytes)}, "run")
    assert not info.value.can_wait
    with pytest.raises(nccl_stream.errors.SampleNotFoundError):
        store.get(ref)
    with pytest.raises(ValueError, match="attributes"):
        store.put("t", make_sample(), "run", attributes={"last_hidden_states": "pre_norm"})
    store.close()
    with pytest.raises(nccl_stream.errors.ClosedError):
        store.gc()


def test_file_that_one_package_writes_the_other_reads(tmp_path):
    ours = nccl_stream.SharedDirFeatureStore(str(tmp_path))
    theirs = nemo.SharedDirFeatureStore(str(tmp_path))
    ref = ours.put("s", make_sample(3), "run")
    tensors, handle = theirs.get(to_nemo_ref(ref))
    assert {n: raw_bytes(t) for n, t in tensors.items()} == {n: raw_bytes(t) for n, t in make_sample(3).items()}
    theirs.release(handle)
    nemo_ref = theirs.put("t", make_sample(4), run_id="run")
    tensors, handle = ours.get(from_nemo_ref(nemo_ref))
    assert raw_bytes(tensors["logits"]) == raw_bytes(make_sample(4)["logits"])
    ours.release(handle)
    assert os.listdir(tmp_path) == []
    ours.close()
    theirs.close()


# -- both ways --


class TestConformanceThroughBothAdapters(FeatureStoreConformance):
    """Our store as NeMo's as ours: what the adapters add or lose would show."""

    @pytest.fixture
    def harness(self):
        with _StoreFromNemo(_StoreForNemo(nccl_stream.LocalFeatureStore())) as store:
            yield StoreHarness(store)

    @pytest.fixture
    def capped_store(self):
        return lambda **caps: _StoreFromNemo(_StoreForNemo(nccl_stream.LocalFeatureStore(**caps)))


def test_our_store_keeps_its_own_word_on_whether_waiting_helps():
    class Refusing(RecordingStore):
        def put(self, *args, **kwargs):
            raise CapacityError("never", can_wait=False)

    store = _StoreFromNemo(_StoreForNemo(Refusing()))
    with pytest.raises(CapacityError, match="never") as info:
        store.put("s", make_sample(), "run")
    assert not info.value.can_wait


def test_ref_survives_the_way_there_and_back(our_store):
    ref = our_store.put("s", make_sample(), "run", num_tokens=3, target_model_version="7", draft_weight_version="9")
    there = to_nemo_ref(ref)
    assert isinstance(there, nemo.SampleRef)
    assert there.algorithm is nemo.FeatureAlgorithm.EAGLE3
    assert there.feature_names() == ref.feature_names()
    back = from_nemo_ref(there)
    assert back == ref
    assert all(type(spec) is FeatureSpec for spec in back.feature_specs.values())


def test_adapting_back_gives_the_original(our_store, nemo_store):
    assert from_nemo_store(as_nemo_store(our_store)) is our_store
    assert as_nemo_store(from_nemo_store(nemo_store)) is nemo_store


def test_padding_cannot_be_given_to_nemo_loader_and_is_settled(our_store):
    template = our_store.put("s", make_sample(), "run")

    class PaddingQueue(nccl_stream.SampleRefQueue):
        acked = ()

        def acquire(self, poll_interval=0.05):
            lease = nccl_stream.Lease(template, 0.0, nccl_stream.VisibilityTimeout())
            object.__setattr__(lease, "is_padding", True)
            return lease

        def ack(self, lease):
            self.acked = (*self.acked, lease.ref.sample_id)

    queue = PaddingQueue(our_store)
    with pytest.raises(ConfigError, match="ragged"):
        as_nemo_queue(queue).acquire()
    assert queue.acked == ("s",)
