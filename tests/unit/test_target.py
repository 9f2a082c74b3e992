from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import fields

import pytest
import torch
from torch import nn

from nccl_stream.errors import ConfigError, SchemaError
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.target import Eagle3TargetBackend, Eagle3TargetBatch, HFEagle3TargetModel
from tests.unit.pipeline_support import Background, FakeTarget, packed_prompt

transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, VOCAB = 8, 16, 32


def llama(layers: int = LAYERS, attention: str = "sdpa", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **kwargs,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama()


def random_prompt(batch: int = 2, seq: int = 10):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (batch, seq), generator=generator)
    attention = torch.ones_like(ids)
    attention[0, -3:] = 0
    loss = torch.randint(0, 2, (batch, seq), generator=generator)
    return ids, attention, loss


def batch_of(**overrides) -> Eagle3TargetBatch:
    tensor = torch.zeros(1, 2)
    arguments = dict.fromkeys(("aux_hidden_states", "input_ids", "attention_mask", "loss_mask"), tensor)
    return Eagle3TargetBatch(**(arguments | overrides))


def test_batch_fields_come_in_the_documented_order():
    assert [field.name for field in fields(Eagle3TargetBatch) if not field.kw_only] == [
        "aux_hidden_states",
        "input_ids",
        "attention_mask",
        "loss_mask",
        "logits",
        "target_probs",
        "position_mask",
        "position_ids",
        "seq_lens",
        "doc_remaining",
    ]


T = torch.zeros(1, 2)


@pytest.mark.parametrize(
    "supervision",
    [
        {},
        {"target_probs": T},
        {"position_mask": T},
        {"logits": T, "target_probs": T, "position_mask": T},
        {"logits": T, "target_probs": T},
        {"logits": T, "position_mask": T},
    ],
)
def test_batch_without_exactly_one_supervision_is_refused(supervision):
    with pytest.raises(ValueError, match=r"supervision|belong together"):
        batch_of(**supervision)


@pytest.mark.parametrize("missing", ["position_ids", "seq_lens", "doc_remaining"])
def test_batch_with_partial_packing_is_refused(missing):
    packing = dict.fromkeys({"position_ids", "seq_lens", "doc_remaining"} - {missing}, T)
    with pytest.raises(ValueError, match="pack"):
        batch_of(logits=T, **packing)


def test_to_trainer_inputs_carries_each_supervision_under_the_trainers_names():
    core = {"aux_hidden_states", "input_ids", "attention_mask", "loss_mask"}
    assert set(batch_of(logits=T).to_trainer_inputs()) == core | {"target_logits"}
    probabilities = batch_of(target_probs=T, position_mask=T).to_trainer_inputs()
    assert set(probabilities) == core | {"target_probs", "position_mask"}
    packing = {"position_ids": T, "seq_lens": T, "doc_remaining": T}
    assert set(batch_of(logits=T, **packing).to_trainer_inputs()) == core | {"target_logits", *packing}


def test_backend_defaults_are_synchronous_and_without_resources():
    backend = FakeTarget()
    assert backend.algorithm is FeatureAlgorithm.EAGLE3
    assert not backend.supports_async
    with pytest.raises(NotImplementedError, match="FakeTarget"):
        backend.generate_batch_async(T, T, T)
    assert backend.close() is None
    with pytest.raises(TypeError):
        Eagle3TargetBackend()


@pytest.mark.parametrize("layer_ids", [None, [5, 0, 2]])
def test_hooks_capture_what_output_hidden_states_gives(model, layer_ids):
    ids, attention, loss = random_prompt()
    target = HFEagle3TargetModel(model, layer_ids)
    assert target.aux_layer_ids == (layer_ids or [1, LAYERS // 2 - 1, LAYERS - 4])
    batch = target.generate_batch(ids, attention, loss)
    with torch.no_grad():
        reference = model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
    expected = torch.cat([reference.hidden_states[i + 1] for i in target.aux_layer_ids], dim=-1)
    assert torch.equal(batch.aux_hidden_states, expected)
    assert batch.aux_hidden_states.shape == (*ids.shape, 3 * HIDDEN)
    assert torch.equal(batch.logits[:, :-1], reference.logits[:, 1:])


def test_frame_shifts_ids_logits_and_loss_mask_left_with_zero_fill_and_nothing_else(model):
    ids, attention, loss = random_prompt()
    before = [tensor.clone() for tensor in (ids, attention, loss)]
    batch = HFEagle3TargetModel(model).generate_batch(ids, attention, loss)
    assert torch.equal(batch.input_ids[:, :-1], ids[:, 1:])
    assert torch.equal(batch.loss_mask[:, :-1], loss[:, 1:])
    for shifted in (batch.input_ids, batch.loss_mask, batch.logits):
        assert not shifted[:, -1].any()
    assert torch.equal(batch.attention_mask, attention)
    assert batch.loss_mask.dtype == loss.dtype
    assert all(torch.equal(a, b) for a, b in zip((ids, attention, loss), before, strict=True))


def test_no_gradient_no_hook_and_no_training_mode_stay_behind(model):
    model.train()
    batch = HFEagle3TargetModel(model).generate_batch(*random_prompt())
    assert not model.training
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in batch.features().values())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_forward_raises(model):
    target = HFEagle3TargetModel(model)
    ids = torch.full((1, 4), VOCAB + 5)
    with pytest.raises(IndexError):
        target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    assert not any(module._forward_hooks for module in model.modules())


def test_threads_that_share_a_model_get_their_own_hidden_states(model):
    target = HFEagle3TargetModel(model)
    inside = threading.Barrier(2, timeout=30)
    prompts = [random_prompt(1, 6), random_prompt(3, 6)]
    expected = [target.generate_batch(*prompt).aux_hidden_states for prompt in prompts]

    def meet(*_: object) -> None:
        inside.wait()

    # Both threads have their hooks in place before either runs a layer.
    handle = model.get_input_embeddings().register_forward_pre_hook(meet)
    try:
        calls = [Background(lambda prompt=prompt: target.generate_batch(*prompt)) for prompt in prompts]
        batches = [call.result() for call in calls]
    finally:
        handle.remove()
    assert all(torch.equal(batch.aux_hidden_states, aux) for batch, aux in zip(batches, expected, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_see_only_themselves(attention):
    model = llama(attention=attention)
    target = HFEagle3TargetModel(model)
    ids, mask, loss, position_ids, seq_lens, remaining = packed_prompt([3, 5, 2])
    packed = target.generate_batch(ids, mask, loss, position_ids, seq_lens, remaining)
    start = 0
    for length in (3, 5, 2):
        document = ids[:, start : start + length]
        ones = torch.ones_like(document)
        alone = target.generate_batch(document, ones, ones)
        torch.testing.assert_close(
            packed.aux_hidden_states[:, start : start + length], alone.aux_hidden_states, rtol=1e-5, atol=1e-6
        )
        start += length
    assert torch.equal(packed.position_ids, position_ids)
    assert torch.equal(packed.seq_lens, seq_lens)
    assert torch.equal(packed.doc_remaining, remaining)


def test_packed_rows_with_padded_seq_lens_and_several_rows():
    target = HFEagle3TargetModel(llama())
    first, second = packed_prompt([4, 4]), packed_prompt([8])
    seq_lens = torch.tensor([[4, 4, 0], [8, 0, 0]])
    rows = [torch.cat([a, b]) for a, b in zip(first[:4], second[:4], strict=True)]
    both = target.generate_batch(*rows, seq_lens, torch.cat([first[5], second[5]]))
    for row, one in enumerate((first, second)):
        alone = target.generate_batch(*one)
        torch.testing.assert_close(both.logits[row : row + 1], alone.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seq_lens": torch.tensor([[3, 3]])}, "sum to"),
        ({"seq_lens": torch.tensor([[3, 5], [4, 4]])}, "seq_lens must be"),
        ({"seq_lens": None}, "pack"),
        ({"loss_mask": torch.ones(1, 7, dtype=torch.long)}, "must be"),
        ({"position_ids": torch.ones(2, 8, dtype=torch.long)}, "must be"),
        ({"input_ids": torch.ones(8, dtype=torch.long)}, "non-empty"),
    ],
)
def test_prompts_whose_shapes_do_not_fit_are_refused(model, changes, match):
    names = ("input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens", "doc_remaining")
    arguments = dict(zip(names, packed_prompt([3, 5]), strict=True)) | changes
    with pytest.raises(SchemaError, match=match):
        HFEagle3TargetModel(model).generate_batch(**arguments)


def test_attention_that_cannot_keep_documents_apart_is_refused_instead_of_mixing_them():
    packed = packed_prompt([3, 5])
    model = llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="sdpa"):
        HFEagle3TargetModel(model).generate_batch(*packed)
    model.config._attn_implementation = "flash_attention_2"
    two_rows = [torch.cat([part, part]) for part in packed]
    with pytest.raises(ConfigError, match="one row"):
        HFEagle3TargetModel(model).generate_batch(*two_rows)
    model.config._attn_implementation = "sdpa"
    model.config.sliding_window = 4
    with pytest.raises(ConfigError, match="sliding window"):
        HFEagle3TargetModel(model).generate_batch(*packed)


def test_too_shallow_a_model_says_what_to_pass():
    with pytest.raises(ValueError, match=r"5 layers.*aux_layer_ids.*0\.\.4"):
        HFEagle3TargetModel(llama(5))
    assert HFEagle3TargetModel(llama(5), [0, 2, 4]).aux_layer_ids == [0, 2, 4]


@pytest.mark.parametrize("layer_ids", [[0, 1], [0, 1, 1], [0, 1, LAYERS], [-1, 0, 1], [0, 1, 2, 3], []])
def test_layer_ids_that_are_not_three_distinct_layers_are_refused(model, layer_ids):
    with pytest.raises(ValueError, match="aux_layer_ids"):
        HFEagle3TargetModel(model, layer_ids)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "qwen3", "gemma2"])
def test_layers_are_found_in_other_architectures(kind):
    sizes = {
        "gpt2": {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 32},
        "gpt_neox": {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32},
        "opt": {
            "hidden_size": 16,
            "num_hidden_layers": 5,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
        },
    }
    common = {
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
    }
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **sizes.get(kind, common))
    model = transformers.AutoModelForCausalLM.from_config(config)
    target = HFEagle3TargetModel(model, [0, 2, 3])
    ids, attention, loss = random_prompt(1, 6)
    batch = target.generate_batch(ids, attention, loss)
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=attention, output_hidden_states=True).hidden_states
    assert torch.equal(batch.aux_hidden_states, torch.cat([hidden[i + 1] for i in (0, 2, 3)], dim=-1))


def test_model_without_decoder_layers_is_refused():
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        HFEagle3TargetModel(nn.Linear(2, 2))


def test_from_pretrained_loads_by_path(tmp_path, model):
    model.save_pretrained(tmp_path)
    target = HFEagle3TargetModel.from_pretrained(str(tmp_path), [0, 1, 2])
    ids, attention, loss = random_prompt()
    expected = HFEagle3TargetModel(model, [0, 1, 2]).generate_batch(ids, attention, loss)
    assert torch.equal(target.generate_batch(ids, attention, loss).logits, expected.logits)
    assert target.get_input_embeddings().weight.shape == (VOCAB, HIDDEN)


def test_transformers_is_not_imported_before_a_model_is_loaded_by_name():
    code = "import sys, nccl_stream.target; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
