from __future__ import annotations

import pytest
import torch

from nccl_stream.errors import CapacityError, MisuseError, SchemaError, SpecMismatchError
from nccl_stream.producer import FeatureProducer
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.target import Eagle3TargetBatch
from tests.unit.pipeline_support import (
    HIDDEN,
    SEQ,
    VOCAB,
    Background,
    FakeTarget,
    packed_prompt,
    prompt,
    sample_bytes,
    wait_until,
)
from tests.unit.test_nccl_store import target_store


@pytest.fixture
def store() -> LocalFeatureStore:
    return LocalFeatureStore()


def producer_for(store, target=None, **kwargs) -> FeatureProducer:
    return FeatureProducer(target or FakeTarget(), store, run_id="run", **kwargs)


def test_sample_has_exactly_the_batches_features_in_field_order_with_exact_specs(store):
    ref = producer_for(store, FakeTarget(torch.bfloat16)).produce(*prompt(3))
    assert dict(ref.feature_specs) == {
        "aux_hidden_states": FeatureSpec((1, SEQ, 3 * HIDDEN), torch.bfloat16),
        "input_ids": FeatureSpec((1, SEQ), torch.int64),
        "attention_mask": FeatureSpec((1, SEQ), torch.int64),
        "loss_mask": FeatureSpec((1, SEQ), torch.int64),
        "logits": FeatureSpec((1, SEQ, VOCAB), torch.bfloat16),
    }
    assert list(ref.feature_specs) == ["aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits"]
    assert ref.estimated_bytes == sample_bytes(torch.bfloat16)


def test_packed_sample_carries_the_packing_features_last(store):
    ref = producer_for(store).produce(*packed_prompt([3, 5]))
    assert ref.feature_names()[-3:] == ("position_ids", "seq_lens", "doc_remaining")
    assert ref.feature_specs["seq_lens"] == FeatureSpec((1, 2), torch.int64)


def test_stored_tensors_are_bit_equal_to_the_backends_batch(store):
    target = FakeTarget()
    ref = producer_for(store, target).produce(*packed_prompt([2, 6]))
    tensors, _ = store.get(ref)
    for name, expected in target.generate_batch(*packed_prompt([2, 6])).features().items():
        assert torch.equal(tensors[name], expected), name


def test_num_tokens_is_the_sum_of_the_loss_mask_as_given(store):
    ids, attention, loss = prompt(1)
    loss[0, :3] = 0
    assert producer_for(store).produce(ids, attention, loss).num_tokens == SEQ - 3
    assert producer_for(store, sample_id_factory=lambda n: f"b{n}").produce(ids, attention, loss.bool()).num_tokens == 5


def test_metadata_is_mirrored_onto_the_ref(store):
    producer = producer_for(store, target_model_version="7", draft_weight_version="9")
    ref = producer.produce(*prompt(1))
    assert (ref.run_id, ref.algorithm, ref.schema_version) == ("run", FeatureAlgorithm.EAGLE3, 1)
    assert (ref.target_model_version, ref.draft_weight_version) == ("7", "9")


def test_ids_count_from_one_or_come_from_the_factory_or_the_call(store):
    producer = producer_for(store)
    assert [producer.produce(*prompt(i)).sample_id for i in range(2)] == ["sample-run-1", "sample-run-2"]
    assert producer.produce(*prompt(1), sample_id="mine").sample_id == "mine"
    assert producer.produce(*prompt(1)).sample_id == "sample-run-3"
    made = producer_for(store, sample_id_factory=lambda n: f"made-{n}")
    assert made.produce(*prompt(1)).sample_id == "made-1"


def test_backend_of_nemo_automodel_is_known_by_its_base_class(store):
    base = type("Eagle3TargetBackend", (), {})  # theirs is no relative of ours, and says nothing more

    class Theirs(base):
        def generate_batch(self, **prompt):
            return FakeTarget().generate_batch(**prompt)

    assert FeatureProducer(Theirs(), store, run_id="run").produce(*prompt(1)).algorithm is FeatureAlgorithm.EAGLE3


def test_unknown_backend_is_refused_unless_the_algorithm_is_given(store):
    class Unknown:
        def generate_batch(self, input_ids, attention_mask, loss_mask):
            return FakeTarget().generate_batch(input_ids, attention_mask, loss_mask)

    with pytest.raises(ValueError, match="Unknown"):
        FeatureProducer(Unknown(), store, run_id="run")
    # Such a backend knows nothing of packing, and is not bothered with it.
    forced = FeatureProducer(Unknown(), store, run_id="run", algorithm=FeatureAlgorithm.EAGLE3)
    assert forced.produce(*prompt(1)).algorithm is FeatureAlgorithm.EAGLE3


@pytest.mark.parametrize("run_id", ["", None])
def test_empty_run_id_is_refused(store, run_id):
    with pytest.raises(MisuseError, match="run_id"):
        FeatureProducer(FakeTarget(), store, run_id=run_id)


@pytest.mark.parametrize("missing", [3, 4, 5])
def test_partial_packing_is_refused_before_the_forward(store, missing):
    target = FakeTarget()
    arguments = list(packed_prompt([4, 4]))
    arguments[missing] = None
    with pytest.raises(ValueError, match="pack"):
        producer_for(store, target).produce(*arguments)
    assert target.num_forwards == 0


class ProbabilityTarget(FakeTarget):
    def generate_batch(self, input_ids, attention_mask, loss_mask):
        batch = super().generate_batch(input_ids, attention_mask, loss_mask)
        return Eagle3TargetBatch(
            batch.aux_hidden_states,
            batch.input_ids,
            batch.attention_mask,
            batch.loss_mask,
            target_probs=batch.logits[..., :4].softmax(-1),
            position_mask=torch.ones(1, SEQ, 1, dtype=torch.bool),
        )


def test_batch_without_logits_is_refused_until_the_vocabulary_is_mapped(store):
    target = ProbabilityTarget()
    producer = producer_for(store, target)
    with pytest.raises(SchemaError, match="set_vocab_mapping"):
        producer.produce(*prompt(1))
    assert store.health().sample_count == 0
    mapping = torch.arange(4), torch.arange(VOCAB) < 4
    producer.set_vocab_mapping(*mapping)
    assert target.vocab_mapping == mapping
    assert producer.produce(*prompt(1)).feature_names()[-2:] == ("target_probs", "position_mask")


class ShapedTarget(FakeTarget):
    """Returns the fake target's features, as a plain mapping, with some of them changed."""

    def __init__(self, **changes) -> None:
        super().__init__()
        self.changes = changes

    def generate_batch(self, input_ids, attention_mask, loss_mask):
        features = super().generate_batch(input_ids, attention_mask, loss_mask).features()
        return {**features, **self.changes}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("aux_hidden_states", torch.zeros(1, SEQ, 3 * HIDDEN + 1)),
        ("aux_hidden_states", torch.zeros(1, SEQ, 3 * HIDDEN, dtype=torch.int64)),
        ("input_ids", torch.zeros(1, SEQ)),
        ("attention_mask", torch.ones(SEQ)),
        ("loss_mask", torch.ones(1, 3)),
        ("logits", torch.zeros(2, SEQ, VOCAB)),
        ("logits", torch.zeros(1, SEQ + 1, VOCAB)),
    ],
    ids=["odd width", "ids as states", "float ids", "no rows", "short mask", "other rows", "other length"],
)
def test_batch_whose_features_do_not_fit_together_is_refused_before_the_put(store, name, tensor):
    producer = producer_for(store, ShapedTarget(**{name: tensor}))
    with pytest.raises(SchemaError):
        producer.produce(*prompt(1))
    assert store.health().sample_count == 0


def test_value_that_is_no_tensor_is_the_stores_to_refuse(store):
    with pytest.raises(MisuseError, match="must be a tensor"):
        producer_for(store, ShapedTarget(loss_mask=[1] * SEQ)).produce(*prompt(1))
    assert store.health().sample_count == 0


@pytest.mark.parametrize(("position", "worth"), [(0, False), (1, True), (SEQ - 1, True)])
def test_producer_says_whether_a_prompt_would_train_anything(store, position, worth):
    """The first token of a prompt predicts nothing, so nothing is learned of its own label."""
    mask = torch.zeros(1, SEQ, dtype=torch.long)
    mask[0, position] = 1
    assert producer_for(store).is_worth_a_forward(mask) is worth


class DocumentedStore(LocalFeatureStore):
    """Written to the documented contract alone."""

    def put(
        self,
        sample_id,
        tensors,
        run_id,
        algorithm=FeatureAlgorithm.EAGLE3,
        schema_version=1,
        target_model_version="0",
        draft_weight_version="0",
        num_tokens=0,
    ):
        return super().put(
            sample_id,
            tensors,
            run_id,
            algorithm,
            schema_version,
            target_model_version,
            draft_weight_version,
            num_tokens,
        )


class StatesTarget(FakeTarget):
    """Returns last hidden states instead of logits."""

    def generate_batch(self, input_ids, attention_mask, loss_mask):
        features = super().generate_batch(input_ids, attention_mask, loss_mask).features()
        del features["logits"]
        batch = Eagle3TargetBatch(**features, last_hidden_states=torch.zeros(1, SEQ, HIDDEN))
        batch.attributes = {NORM_ATTRIBUTE: "post", FRAME_ATTRIBUTE: "shifted"}
        return batch


def test_store_that_takes_no_attributes_is_named_where_a_sample_needs_them(store):
    documented = DocumentedStore()
    assert producer_for(documented).produce(*prompt(1)).num_tokens == SEQ
    producer = producer_for(documented, StatesTarget())
    with pytest.raises(MisuseError, match=r"DocumentedStore.*attributes.*last_hidden_states\.frame"):
        producer.produce(*prompt(1))
    assert documented.health().sample_count == 1
    assert producer_for(store, StatesTarget()).produce(*prompt(1)).attributes[FRAME_ATTRIBUTE] == "shifted"


def test_digest_of_the_vocabulary_is_left_out_where_a_store_takes_no_attributes():
    producer = producer_for(DocumentedStore(), ProbabilityTarget())
    producer.set_vocab_mapping(torch.arange(4), torch.arange(VOCAB) < 4)
    assert not producer.produce(*prompt(1)).attributes


def test_full_store_raises_and_keeps_nothing_when_not_asked_to_wait():
    store = LocalFeatureStore(max_samples=1)
    target = FakeTarget()
    producer = producer_for(store, target)
    producer.produce(*prompt(1))
    with pytest.raises(MemoryError):
        producer.produce(*prompt(2))
    assert (store.health().sample_count, target.num_forwards) == (1, 2)


def test_full_store_is_waited_for_without_a_second_forward():
    store = LocalFeatureStore(max_samples=1)
    target = FakeTarget()
    producer = producer_for(store, target)
    first = producer.produce(*prompt(1))
    waiting = Background(lambda: producer.produce(*prompt(2), abort_when=lambda: False))
    wait_until(lambda: target.num_forwards == 2, "the second forward")
    assert waiting.running
    store.discard(first)
    tensors, _ = store.get(waiting.result())
    assert int(tensors["input_ids"][0, 0]) == 2
    assert target.num_forwards == 2


def test_wait_for_room_ends_when_aborted():
    store = LocalFeatureStore(max_samples=1)
    producer = producer_for(store)
    producer.produce(*prompt(1))
    answers = iter([False, False, True])
    with pytest.raises(MemoryError):
        producer.produce(*prompt(2), abort_when=lambda: next(answers))
    assert store.health().sample_count == 1


def test_sample_that_can_never_fit_raises_at_once_and_says_what_would_do():
    store = LocalFeatureStore(
        max_bytes=sample_bytes() - 1, high_watermark_bytes=sample_bytes() - 1, low_watermark_bytes=1
    )
    with pytest.raises(CapacityError, match=str(sample_bytes())) as caught:
        producer_for(store).produce(*prompt(1), abort_when=lambda: False)
    assert not caught.value.can_wait


def test_store_without_a_way_to_wait_is_asked_again_but_not_about_the_impossible():
    class Refusing(LocalFeatureStore):
        wait_for_room = None
        num_puts = 0

        def put(self, *args, **kwargs):
            self.num_puts += 1
            if self.num_puts <= 2:
                raise CapacityError("refused", can_wait=self.can_wait)
            return super().put(*args, **kwargs)

    store = Refusing()
    store.can_wait = True
    producer_for(store).produce(*prompt(1), abort_when=lambda: False)
    assert store.num_puts == 3
    store = Refusing()
    store.can_wait = False
    with pytest.raises(CapacityError):
        producer_for(store).produce(*prompt(1), abort_when=lambda: False)
    assert store.num_puts == 1


def test_bare_memory_error_is_not_waited_for():
    """It may be the machine that is out of memory, not the store."""

    class Exhausted(LocalFeatureStore):
        def put(self, *args, **kwargs):
            raise MemoryError

    with pytest.raises(MemoryError):
        producer_for(Exhausted()).produce(*prompt(1), abort_when=lambda: False)


def test_spec_drift_evicts_the_sample_and_raises(store):
    class Drifting(LocalFeatureStore):
        def put(self, sample_id, tensors, **kwargs):
            changed = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
            return super().put(sample_id, changed, **kwargs)

    drifting = Drifting()
    with pytest.raises(SpecMismatchError, match="sample-run-1") as caught:
        producer_for(drifting).produce(*prompt(1))
    assert isinstance(caught.value, RuntimeError)
    assert drifting.health().resident_bytes == 0


def test_discard_evicts_and_may_be_repeated(store):
    producer = producer_for(store)
    ref = producer.produce(*prompt(1))
    producer.discard(ref)
    producer.discard(ref)
    assert store.health().resident_bytes == 0


@pytest.mark.parametrize("step", ["forward", "id", "put", "copy"])
def test_error_in_any_step_of_produce_leaves_nothing_resident(step, monkeypatch):
    """Field scenario: an exception between reserving and storing must give the room back."""
    boom = RuntimeError(f"boom in {step}")

    def fail(*args, **kwargs):
        raise boom

    store = LocalFeatureStore()
    target = FakeTarget(on_forward=fail if step == "forward" else None)
    producer = producer_for(store, target, sample_id_factory=fail if step == "id" else None)
    if step == "put":
        monkeypatch.setattr(store, "put", fail)
    if step == "copy":
        monkeypatch.setattr("nccl_stream.stores.local.copy_tensor", fail)
    with pytest.raises(RuntimeError, match="boom"):
        producer.produce(*prompt(1))
    health = store.health()
    assert (health.resident_bytes, health.sample_count) == (0, 0)


def test_outputs_are_made_without_gradients():
    seen: list[bool] = []
    target = FakeTarget(on_forward=lambda n: seen.append(torch.is_grad_enabled()))
    producer_for(LocalFeatureStore(), target).produce(*prompt(1))
    assert seen == [False]


def test_input_embeddings_are_the_backends(store):
    target = FakeTarget()
    producer = producer_for(store, target)
    assert producer.get_input_embeddings() is target.embedding
    producer.close()
    producer.close()


class LargeTarget(FakeTarget):
    """Features that are large enough to be sent from where they lie; one of them is the prompt's own memory."""

    def generate_batch(self, input_ids, attention_mask, loss_mask):
        self.made = torch.ones(1, input_ids.shape[1], 3)
        return {
            "aux_hidden_states": self.made,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "loss_mask": loss_mask,
            "logits": torch.ones(1, input_ids.shape[1], 4),
        }


@pytest.mark.parametrize("donate", [False, True])
def test_donated_features_are_the_backends_own_except_for_the_prompts(donate):
    target, ids = LargeTarget(), torch.zeros(1, 1 << 17, dtype=torch.int64)
    expected = ids.clone()
    with target_store() as store:
        producer = producer_for(store, target, donate=donate)
        ref = producer.produce(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=torch.ones_like(ids))
        ids.fill_(7)
        target.made[0, 0, 0] = 5.0
        found, _ = store.get(ref)
        assert torch.equal(found["input_ids"], expected)
        assert float(found["aux_hidden_states"][0, 0, 0]) == (5.0 if donate else 1.0)


def test_store_that_takes_no_donations_is_not_offered_any(store):
    ref = producer_for(store, donate=True).produce(*prompt(3))
    assert store.get(ref)[0]["logits"].shape == (1, SEQ, VOCAB)
