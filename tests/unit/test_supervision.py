"""The three ways to carry the target's distribution, on real models: same loss, fewer bytes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from nccl_stream import FeatureDataLoader, FeatureProducer, LocalFeatureStore, SampleRefQueue
from nccl_stream.eagle3 import Eagle3TargetBatch, eagle3_sample_bytes
from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.target import HFEagle3TargetModel
from nccl_stream.target_head import HeadSettings, TargetHead
from nccl_stream.vocab import VOCABULARY_ATTRIBUTE, DraftVocabulary, draft_supervision
from tests.unit.pipeline_support import packed_prompt

transformers = pytest.importorskip("transformers")

HIDDEN, VOCAB, LAYERS = 16, 48, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "gemma2-softcap": lambda: transformers.Gemma2Config(**SIZES, final_logit_softcapping=2.0),
    "granite-scaled": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere-centered": lambda: transformers.CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=2),
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)  # norms that all look alike would prove nothing
            else:
                parameter.mul_(20)  # logits large enough for the soft cap to bend them
    return model.to(dtype).eval()


def prompt(seq: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCAB, (2, seq), generator=generator)
    return ids, torch.ones_like(ids), torch.randint(0, 2, (2, seq), generator=generator)


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary.from_ids(torch.tensor([7, 3, *range(20, 40)]), VOCAB)


def stream(model: nn.Module, supervision: str, prompts=None, **options):
    """The refs and batches of one prompt, through producer, store, queue and loader."""
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    backend = HFEagle3TargetModel(model, supervision=supervision, **options)
    producer = FeatureProducer(backend, store, "run")
    if supervision == "target_probs":
        mapped = vocabulary()
        producer.set_vocab_mapping(mapped.selected_token_ids, mapped.selected_token_mask)
    ref = producer.produce(*(prompt() if prompts is None else prompts))
    queue.put(ref)
    queue.close()
    (batch,) = FeatureDataLoader(queue, store)
    return ref, batch


def loss_of(batch: Eagle3TargetBatch) -> Tensor:
    """Cross entropy of a fixed random draft, over the draft vocabulary, as EAGLE-3 trains it."""
    probs, mask = batch.target_probs, batch.position_mask
    if probs is None:
        probs, mask = draft_supervision(batch.logits, batch.loss_mask, vocabulary())
    generator = torch.Generator().manual_seed(11)
    draft = torch.randn(probs.shape, generator=generator).log_softmax(-1)
    assert int(mask.sum()) > 2
    return -(probs.float() * draft).sum(-1, keepdim=True)[mask].mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_three_supervisions_give_one_loss(kind, dtype):
    model = make(kind, dtype)
    head = TargetHead.from_model(model)
    losses = {name: loss_of(stream(model, name)[1]) for name in ("logits", "target_probs")}
    for norm in ("pre", "post"):
        ref, batch = stream(model, "last_hidden_states", last_hidden_norm=norm)
        assert (ref.schema_version, ref.attributes[NORM_ATTRIBUTE]) == (2, norm)
        assert batch.logits is None
        losses[norm] = loss_of(head.supervise(batch))
        losses[f"{norm} draft vocabulary"] = loss_of(head.supervise(batch, vocabulary()))
    for name, loss in losses.items():
        assert loss == pytest.approx(float(losses["logits"]), rel=DTYPES[dtype]), name


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_head_gives_the_models_logits_in_their_frame_whatever_the_chunk(kind, norm):
    model = make(kind)
    expected = stream(model, "logits")[1]
    batch = stream(model, "last_hidden_states", last_hidden_norm=norm)[1]
    for chunk_tokens in (1, 6, 1024):
        made = TargetHead.from_model(model, chunk_tokens=chunk_tokens).supervise(batch)
        torch.testing.assert_close(made.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert not made.logits[:, -1].any()
        assert set(made) == set(expected)
        assert made.sample_ids == batch.sample_ids
        assert not made.attributes


def test_model_whose_logits_are_changed_behind_the_head_is_refused():
    model = make("llama")
    forward = model.forward

    def doubled(*args, logits_to_keep=0, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs

    model.forward = doubled
    with pytest.raises(ConfigError, match="does something"):
        TargetHead.from_model(model)


def test_frame_of_the_ref_decides_whether_states_are_shifted():
    model = make("llama")
    head = TargetHead.from_model(model)
    shifted = stream(model, "last_hidden_states")[1]
    assert shifted.attributes[FRAME_ATTRIBUTE] == "shifted"
    core = {n: t for n, t in shifted.items() if n != "last_hidden_states"}
    ids, attention, _ = prompt()
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=attention, output_hidden_states=True).hidden_states[-1]
    in_place = Eagle3TargetBatch(**core, last_hidden_states=states)
    in_place.attributes = {NORM_ATTRIBUTE: "post", FRAME_ATTRIBUTE: "unshifted"}
    made = head.supervise(in_place).logits
    torch.testing.assert_close(made, head.supervise(shifted).logits, rtol=1e-4, atol=1e-4)


def test_supervise_leaves_other_batches_alone_and_needs_a_norm_for_states_before_it():
    model = make("llama")
    head = TargetHead(model.lm_head.weight)
    with_logits = stream(model, "logits")[1]
    assert head.supervise(with_logits) is with_logits
    with pytest.raises(ConfigError, match="norm_weight"):
        head.supervise(stream(model, "last_hidden_states", last_hidden_norm="pre")[1])
    with pytest.raises(MisuseError, match="'pre' or 'post'"):
        head.logits(torch.zeros(1, 1, HIDDEN), norm="post_norm")


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packing_is_bit_equal_beside_last_hidden_states(norm):
    model = make("llama")
    packed = packed_prompt([3, 5])
    expected = HFEagle3TargetModel(model, supervision="last_hidden_states", last_hidden_norm=norm).generate_batch(
        *packed
    )
    ref, batch = stream(model, "last_hidden_states", packed, last_hidden_norm=norm)
    assert list(ref.feature_names())[-3:] == ["position_ids", "seq_lens", "doc_remaining"]
    assert set(batch) == set(expected)
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    for name, given in zip(("position_ids", "seq_lens", "doc_remaining"), packed[3:], strict=True):
        assert torch.equal(batch[name], given)
    made = TargetHead.from_model(model).supervise(batch)
    assert all(torch.equal(made[name], batch[name]) for name in ("position_ids", "seq_lens", "doc_remaining"))
    logits = stream(model, "logits", packed)[1].logits
    torch.testing.assert_close(made.logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpoint_gives_the_models_head_from_the_needed_tensors_alone(kind, sharded, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="4KB" if sharded else "1GB")
    if sharded:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {file for key, file in index.items() if not any(part.isdigit() for part in key.split("."))}
        unneeded = set(index.values()) - needed
        assert unneeded
        for file in unneeded:
            (tmp_path / file).unlink()
    head, expected = TargetHead.from_checkpoint(tmp_path), TargetHead.from_model(model)
    assert head.settings == expected.settings
    assert head.tensors().keys() == expected.tensors().keys()
    assert all(torch.equal(head.tensors()[name], tensor) for name, tensor in expected.tensors().items())
    assert TargetHead.from_checkpoint(tmp_path, dtype=torch.bfloat16).weight.dtype is torch.bfloat16


def test_checkpoint_that_does_not_tell_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        TargetHead.from_checkpoint(tmp_path)
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match="neither"):
        TargetHead.from_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"lm_head.weight": "../elsewhere.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="weight_map"):
        TargetHead.from_checkpoint(tmp_path)
    weight_map = {"lm_head.weight": "a.safetensors", "text.lm_head.weight": "a.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="which of"):
        TargetHead.from_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match="no head"):  # an untied model's embedding is no head
        TargetHead.from_checkpoint(tmp_path)


def test_head_survives_the_way_to_another_rank_and_stays_out_of_checkpoints_and_optimizers():
    head = TargetHead.from_model(make("gemma2-softcap"))
    copy = TargetHead.from_tensors(head.tensors())
    states = torch.randn(1, 3, HIDDEN)
    assert torch.equal(copy.logits(states, norm="pre"), head.logits(states, norm="pre"))
    assert copy.settings == head.settings
    assert copy.settings.offset == 1.0
    assert not copy.state_dict()
    assert not list(copy.parameters())
    assert not copy.logits(states.requires_grad_()).requires_grad


@pytest.mark.parametrize(
    "weights", [{"bias": torch.zeros(3)}, {"norm_weight": torch.zeros(3)}, {"norm_bias": torch.zeros(VOCAB)}]
)
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(MisuseError, match="must be"):
        TargetHead(torch.zeros(VOCAB, HIDDEN), settings=HeadSettings(), **weights)


def test_last_hidden_samples_have_at_most_an_eighth_of_the_bytes_of_logits():
    qwen3_8b = {"seq": 4096, "hidden": 4096, "vocab": 151_936, "draft_vocab": 32_000}
    logits, probs, states = (
        eagle3_sample_bytes(name, **qwen3_8b) for name in ("logits", "target_probs", "last_hidden_states")
    )
    assert (round(logits / 1e9, 2), round(probs / 1e9, 2), round(states / 1e9, 2)) == (1.35, 0.63, 0.13)
    assert states * 8 <= logits
    with pytest.raises(KeyError):
        eagle3_sample_bytes("labels", **qwen3_8b)


@pytest.mark.parametrize("supervision", ["logits", "target_probs", "last_hidden_states"])
def test_sample_bytes_are_those_of_a_real_sample(supervision):
    ref, _ = stream(make("llama"), supervision)
    assert ref.estimated_bytes == eagle3_sample_bytes(
        supervision, batch=2, seq=10, hidden=HIDDEN, vocab=VOCAB, draft_vocab=len(vocabulary()), dtype=torch.float32
    )


def test_head_of_the_target_is_not_run_for_last_hidden_states():
    model = make("llama")
    widths = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: widths.append(output.shape[1]))
    stream(model, "last_hidden_states")
    assert widths == [1]


@pytest.mark.parametrize("options", [{"supervision": "labels"}, {"last_hidden_norm": "both"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ConfigError, match="must be one of"):
        HFEagle3TargetModel(make("llama"), **options)


def test_target_probs_without_a_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="set_vocab_mapping"):
        HFEagle3TargetModel(make("llama"), supervision="target_probs").generate_batch(*prompt())


def test_target_probs_are_over_the_draft_vocabulary_and_masked_where_the_best_token_is_outside():
    model = make("llama")
    logits, probs = stream(model, "logits")[1], stream(model, "target_probs")[1]
    mapped = vocabulary()
    expected = logits.logits[..., mapped.selected_token_ids].softmax(-1)
    torch.testing.assert_close(probs.target_probs[:, :-1], expected[:, :-1])
    assert probs.target_probs.dtype is torch.float32
    best = logits.logits.argmax(-1)
    inside = torch.isin(best, mapped.selected_token_ids) & (logits.loss_mask != 0)
    assert inside.any()
    assert not inside.all()
    assert torch.equal(probs.position_mask.squeeze(-1)[:, :-1], inside[:, :-1])
    assert not probs.target_probs[:, -1].any()
    assert not probs.position_mask[:, -1].any()


def test_vocabulary_that_differs_on_the_two_sides_is_refused_and_the_sample_stays():
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    ours = vocabulary()
    producer = FeatureProducer(HFEagle3TargetModel(make("llama"), supervision="target_probs"), store, "run")
    producer.set_vocab_mapping(ours.selected_token_ids, ours.selected_token_mask)
    ref = producer.produce(*prompt())
    assert ref.attributes[VOCABULARY_ATTRIBUTE] == ours.digest
    queue.put(ref)
    reordered = DraftVocabulary.from_ids(ours.selected_token_ids.flip(0), VOCAB)
    with pytest.raises(ConfigError, match=r"same map"):
        next(FeatureDataLoader(queue, store, vocabulary=reordered))
    assert (queue.pending_count(), store.health().sample_count) == (1, 1)
    assert next(FeatureDataLoader(queue, store, vocabulary=vocabulary())).target_probs is not None


def probabilities(width: int) -> dict[str, Tensor]:
    """Core features and ``target_probs`` over ``width`` draft tokens."""
    ids = torch.arange(1, 7).unsqueeze(0)
    return {
        "aux_hidden_states": torch.randn(1, 6, 3 * HIDDEN),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
        "target_probs": torch.rand(1, 6, width),
        "position_mask": torch.ones(1, 6, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize(
    ("width", "attributes", "match"),
    [
        (len(vocabulary()), {}, "does not say"),
        (4, {}, r"\[1, 6, 4\]"),
        (4, {VOCABULARY_ATTRIBUTE: vocabulary().digest}, r"\[1, 6, 4\]"),
        (len(vocabulary()), {VOCABULARY_ATTRIBUTE: "0" * 64}, "same map"),
    ],
    ids=["no digest", "no digest, other width", "other width", "other digest"],
)
def test_probabilities_that_may_be_over_another_vocabulary_are_refused_and_stay(width, attributes, match):
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    queue.put(store.put("s", probabilities(width), "run", attributes=attributes))
    with pytest.raises(ConfigError, match=match):
        next(FeatureDataLoader(queue, store, vocabulary=vocabulary()))
    assert (queue.pending_count(), store.health().sample_count) == (1, 1)


def test_loader_with_a_vocabulary_takes_samples_that_need_none():
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    queue.put(FeatureProducer(HFEagle3TargetModel(make("llama")), store, "run").produce(*prompt()))
    assert next(FeatureDataLoader(queue, store, vocabulary=vocabulary())).logits is not None


def test_loader_without_a_vocabulary_warns_once_that_nothing_is_compared(caplog):
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    for number in range(3):
        attributes = {VOCABULARY_ATTRIBUTE: vocabulary().digest}
        queue.put(store.put(f"s{number}", probabilities(len(vocabulary())), "run", attributes=attributes))
    queue.close()
    assert len(list(FeatureDataLoader(queue, store))) == 3
    warnings = [record.getMessage() for record in caplog.records if "vocabulary=" in record.getMessage()]
    assert len(warnings) == 1
    assert "s0" in warnings[0]
