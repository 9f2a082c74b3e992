"""DFlash and DSpark: what their backends capture, and their way through producer, store, queue and loader."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nccl_stream import FeatureAlgorithm, FeatureDataLoader, FeatureProducer, LocalFeatureStore, SampleRefQueue
from nccl_stream.batch import batch_of
from nccl_stream.dflash import DFlashTargetBatch, HFDFlashTargetModel, validate_dflash_ref
from nccl_stream.dspark import DSparkTargetBatch, HFDSparkTargetModel, validate_dspark_ref
from nccl_stream.eagle3 import Eagle3TargetBatch, validate_eagle3_ref
from nccl_stream.errors import ConfigError, MisuseError, SchemaError
from nccl_stream.schema import schema_of
from nccl_stream.target import HFEagle3TargetModel
from tests.unit.pipeline_support import packed_prompt
from tests.unit.test_target import HIDDEN, LAYERS, llama, random_prompt

BATCHES = {
    FeatureAlgorithm.EAGLE3: Eagle3TargetBatch,
    FeatureAlgorithm.DFLASH: DFlashTargetBatch,
    FeatureAlgorithm.DSPARK: DSparkTargetBatch,
}
VALIDATORS = {
    FeatureAlgorithm.EAGLE3: validate_eagle3_ref,
    FeatureAlgorithm.DFLASH: validate_dflash_ref,
    FeatureAlgorithm.DSPARK: validate_dspark_ref,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama()


def backend_of(algorithm: FeatureAlgorithm, model: nn.Module):
    return {
        FeatureAlgorithm.EAGLE3: lambda: HFEagle3TargetModel(model),
        FeatureAlgorithm.DFLASH: lambda: HFDFlashTargetModel(model, [6, 1]),
        FeatureAlgorithm.DSPARK: lambda: HFDSparkTargetModel(model, [-1, 2, LAYERS - 1]),
    }[algorithm]()


def reference(model, ids, attention):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=attention, output_hidden_states=True)


def stream(backend, *prompts):
    """Everything a producer makes of ``prompts``, as a loader yields it, with the refs."""
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    producer = FeatureProducer(backend, store, "run")
    refs = [producer.produce(*prompt) for prompt in prompts]
    for ref in refs:
        queue.put(ref)
    queue.close()
    loader = FeatureDataLoader(queue, store, algorithm=backend.algorithm)
    batches = list(loader)
    assert store.health().sample_count == 0
    return refs, batches


@pytest.mark.parametrize("layer_ids", [[3], [5, 0, 2, LAYERS - 1]])
def test_dflash_captures_layers_in_order_and_shifts_nothing(model, layer_ids):
    ids, attention, loss = random_prompt()
    batch = HFDFlashTargetModel(model, layer_ids, supervision="logits").generate_batch(ids, attention, loss)
    expected = reference(model, ids, attention)
    inner = [i for i in layer_ids if i != LAYERS - 1]
    width = HIDDEN * len(inner)
    assert torch.equal(
        batch.hidden_states[..., :width], torch.cat([expected.hidden_states[i + 1] for i in inner], dim=-1)
    )
    if LAYERS - 1 in layer_ids:  # the last one is taken before the final norm
        assert torch.equal(model.model.norm(batch.hidden_states[..., width:]), expected.hidden_states[-1])
    assert torch.equal(batch.logits, expected.logits)
    assert torch.equal(batch.input_ids, ids)
    assert torch.equal(batch.loss_mask, loss)
    assert torch.equal(batch.attention_mask, attention)


def test_dflash_supervision_is_chosen(model):
    ids, attention, loss = random_prompt()
    plain = HFDFlashTargetModel(model, [1]).generate_batch(ids, attention, loss)
    assert (plain.logits, plain.last_hidden_states) == (None, None)
    backend = HFDFlashTargetModel(model, [1], supervision="last_hidden_states")
    batch = backend.generate_batch(ids, attention, loss)
    assert batch.logits is None
    assert torch.equal(batch.last_hidden_states, reference(model, ids, attention).hidden_states[-1])
    (ref,), _ = stream(backend, (ids, attention, loss))
    assert ref.schema_version == 2
    assert dict(ref.attributes) == {"last_hidden_states.norm": "post", "last_hidden_states.frame": "unshifted"}
    with pytest.raises(ConfigError, match="supervision"):
        HFDFlashTargetModel(model, [1], supervision="target_probs")


def test_dspark_context_is_hidden_states_from_embedding_to_post_norm(model):
    ids, attention, loss = random_prompt()
    batch = HFDSparkTargetModel(model, [-1, 2, LAYERS - 1]).generate_batch(ids, attention, loss)
    states = reference(model, ids, attention).hidden_states
    assert torch.equal(batch.target_hidden_states, torch.cat([states[0], states[3], states[LAYERS]], dim=-1))
    assert torch.equal(batch.target_last_hidden_states, states[LAYERS])
    assert torch.equal(batch.input_ids, ids)
    assert torch.equal(batch.loss_mask, loss)
    assert batch.attention_mask is None


def test_no_head_is_run_when_nobody_asks_for_logits(model):
    widths = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: widths.append(output.shape[1]))
    try:
        ids, attention, loss = random_prompt()
        HFDSparkTargetModel(model, [1]).generate_batch(ids, attention, loss)
        HFDFlashTargetModel(model, [1], supervision="logits").generate_batch(ids, attention, loss)
    finally:
        hook.remove()
    assert widths == [1, ids.shape[1]]


@pytest.mark.parametrize("layer_ids", [[], [1, 1], [2, 1], [-2], [LAYERS], [0, -1]])
def test_dspark_layer_ids_that_do_not_increase_are_refused(model, layer_ids):
    with pytest.raises(ConfigError, match="strictly increasing"):
        HFDSparkTargetModel(model, layer_ids)


@pytest.mark.parametrize("layer_ids", [[], [1, 1], [-1], [LAYERS]])
def test_dflash_layer_ids_that_are_not_distinct_layers_are_refused(model, layer_ids):
    with pytest.raises(ConfigError, match="distinct"):
        HFDFlashTargetModel(model, layer_ids)


@pytest.mark.parametrize("algorithm", FeatureAlgorithm)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_every_algorithm_goes_from_producer_to_loader_bit_equal(model, algorithm, packed):
    backend = backend_of(algorithm, model)
    assert backend.get_input_embeddings() is model.model.embed_tokens
    prompt = packed_prompt([3, 5]) if packed else random_prompt()
    expected = backend.generate_batch(*prompt)
    (ref,), (batch,) = stream(backend, prompt)
    assert ref.algorithm is algorithm
    VALIDATORS[algorithm](ref)
    schema_of(algorithm).validate(ref, shapes=True)
    assert type(batch) is BATCHES[algorithm]
    assert batch.sample_ids == (ref.sample_id,)
    assert list(batch) == list(ref.feature_names()) == list(expected.features())
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert ("seq_lens" in batch) is packed
    assert ref.num_tokens == int(prompt[2].sum())


@pytest.mark.parametrize("algorithm", FeatureAlgorithm)
def test_validators_refuse_refs_of_other_algorithms(model, algorithm):
    (ref,), _ = stream(backend_of(algorithm, model), random_prompt())
    for other, validate in VALIDATORS.items():
        if other is not algorithm:
            with pytest.raises(ValueError, match=algorithm.value):
                validate(ref)


@pytest.mark.parametrize("algorithm", FeatureAlgorithm)
def test_padding_leases_become_batches_of_every_algorithm(model, algorithm):
    (ref,), _ = stream(backend_of(algorithm, model), random_prompt())
    padding = batch_of(algorithm, schema_of(algorithm).padding(ref), attributes=ref.attributes)
    assert type(padding) is BATCHES[algorithm]
    assert padding.sample_ids == ()
    assert int(padding.loss_mask.sum()) == 0


@pytest.mark.parametrize("as_mapping", [False, True])
def test_dspark_backend_with_other_names_is_stored_under_the_schemas(as_mapping):
    ids = torch.arange(1, 7).unsqueeze(0)
    context, last = torch.rand(1, 6, 8), torch.rand(1, 6, 4)

    def generate_batch(**_prompt):
        features = {"hidden_states": context, "last_hidden_states": last, "input_ids": ids, "loss_mask": ids}
        return features if as_mapping else SimpleNamespace(**features)

    backend = SimpleNamespace(generate_batch=generate_batch, algorithm=FeatureAlgorithm.DSPARK)
    (ref,), (batch,) = stream(backend, (ids, ids, ids))
    assert ref.feature_names() == ("target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask")
    assert torch.equal(batch.target_hidden_states, context)
    assert torch.equal(batch.target_last_hidden_states, last)


def test_feature_under_two_names_and_a_missing_frame_leave_nothing_behind():
    ids = torch.arange(1, 7).unsqueeze(0)
    states = torch.rand(1, 6, 4)
    store = LocalFeatureStore()
    features = {"hidden_states": states, "input_ids": ids, "attention_mask": ids, "loss_mask": ids}

    def produce(algorithm, **extra):
        backend = SimpleNamespace(generate_batch=lambda **_prompt: {**features, **extra}, algorithm=algorithm)
        FeatureProducer(backend, store, "run").produce(ids, ids, ids)

    with pytest.raises(MisuseError, match="two names"):
        produce(FeatureAlgorithm.DSPARK, target_hidden_states=states, last_hidden_states=states)
    with pytest.raises(SchemaError, match="norm"):
        produce(FeatureAlgorithm.DFLASH, last_hidden_states=states)
    with pytest.raises(SchemaError, match="exactly one supervision"):
        produce(FeatureAlgorithm.DFLASH, last_hidden_states=states, logits=states)
    assert store.health().sample_count == 0


def test_batches_are_mappings_and_move_between_devices(model):
    batch = backend_of(FeatureAlgorithm.DSPARK, model).generate_batch(*random_prompt())
    batch.sample_ids = ("a",)
    assert list(batch) == ["target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"]
    assert len(batch) == 4
    assert batch["input_ids"] is batch.input_ids
    assert "attention_mask" not in batch
    with pytest.raises(KeyError):
        batch["sample_ids"]
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert (type(moved), moved.sample_ids) == (DSparkTargetBatch, ("a",))
    assert batch == batch
    assert batch != moved
    assert len({batch, moved}) == 2
