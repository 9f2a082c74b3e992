"""Which tensors of a safetensors checkpoint are the target's final norm and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nccl_stream.errors import ConfigError
from nccl_stream.target_head import TargetHead

HIDDEN, VOCAB = 4, 8


def save(folder: Path, *keys: str, shards: dict[str, tuple[str, ...]] | None = None, **config) -> dict[str, float]:
    """Write a checkpoint of these keys; every tensor has another value, which is returned by its key."""
    values = {key: float(number) for number, key in enumerate(keys, 1)}

    def tensor(key: str) -> torch.Tensor:
        wide = key.endswith(("lm_head.weight", "head.weight", "embed_tokens.weight", "wte.weight"))
        shape = (VOCAB, HIDDEN) if wide else (VOCAB,) if key == "lm_head.bias" else (HIDDEN,)
        return torch.full(shape, values[key])

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if shards is None:
        save_file({key: tensor(key) for key in keys}, folder / "model.safetensors")
        return values
    weight_map = {key: file for file, there in shards.items() for key in there}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, there in shards.items():
        save_file({key: tensor(key) for key in there}, folder / file)
    return values


def value_of(tensor: torch.Tensor | None) -> float:
    assert tensor is not None
    assert (tensor == tensor.flatten()[0]).all()
    return float(tensor.flatten()[0])


@pytest.mark.parametrize(
    ("norm", "others"),
    [
        ("model.norm.weight", ["model.layers.0.mlp.weight", "mtp.norm.weight", "mtp.layers.0.mlp.weight"]),
        ("model.norm.weight", ["mtp.norm.weight"]),
        ("model.norm.weight", ["model.layers.0.x.weight", "model.mtp.norm.weight", "model.mtp.embed_tokens.weight"]),
        ("language_model.model.norm.weight", ["multi_modal_projector.norm.weight"]),
        ("language_model.model.norm.weight", ["language_model.model.layers.0.x.weight", "vision_tower.norm.weight"]),
        ("model.norm.weight", ["model.layers.0.x.weight", "adapter.norm.weight", "adapter.deep.norm.weight"]),
        ("model.norm.weight", ["model.layers.3.shared_head.norm.weight", "model.layers.0.x.weight"]),
        ("norm.weight", ["layers.0.x.weight", "connector.norm.weight"]),
        ("transformer.ln_f.weight", ["transformer.h.0.x.weight", "score.norm.weight"]),
    ],
)
def test_norm_of_the_decoder_is_found_beside_others(tmp_path, norm, others):
    values = save(tmp_path, *others, norm, "lm_head.weight")
    head = TargetHead.from_checkpoint(tmp_path)
    assert (value_of(head.norm_weight), value_of(head.weight)) == (values[norm], values["lm_head.weight"])


def test_tied_embedding_of_the_decoder_is_found_beside_another(tmp_path):
    keys = ["model.layers.0.x.weight", "model.embed_tokens.weight", "talker.embed_tokens.weight", "model.norm.weight"]
    values = save(tmp_path, *keys, tie_word_embeddings=True)
    assert value_of(TargetHead.from_checkpoint(tmp_path).weight) == values["model.embed_tokens.weight"]


TWO = ("thinker.layers.0.x.weight", "talker.layers.0.x.weight", "thinker.norm.weight", "talker.norm.weight")


def test_what_cannot_be_told_apart_is_named_by_the_caller(tmp_path):
    values = save(tmp_path, *TWO, "lm_head.weight", "codec.head.weight")
    with pytest.raises(ConfigError, match=r"'talker\.norm\.weight', 'thinker\.norm\.weight'.*keys=.*'norm_weight'"):
        TargetHead.from_checkpoint(tmp_path)
    head = TargetHead.from_checkpoint(tmp_path, keys={"norm_weight": "thinker.norm.weight"})
    assert (value_of(head.norm_weight), value_of(head.weight)) == (values["thinker.norm.weight"], 5.0)
    keys = {"norm_weight": "talker.norm.weight", "weight": "codec.head.weight"}
    head = TargetHead.from_checkpoint(tmp_path, keys=keys)
    assert (value_of(head.norm_weight), value_of(head.weight)) == (values["talker.norm.weight"], 6.0)


def test_biases_are_those_beside_the_named_weights_unless_they_are_named_too(tmp_path):
    names = ("lm_head.weight", "lm_head.bias", "a.norm.weight", "a.norm.bias", "b.norm.weight", "b.norm.bias")
    values = save(tmp_path, *names)
    head = TargetHead.from_checkpoint(tmp_path, keys={"norm_weight": "b.norm.weight"})
    assert (value_of(head.norm_bias), value_of(head.bias)) == (values["b.norm.bias"], values["lm_head.bias"])
    keys = {"norm_weight": "b.norm.weight", "norm_bias": "a.norm.bias"}
    assert value_of(TargetHead.from_checkpoint(tmp_path, keys=keys).norm_bias) == values["a.norm.bias"]


@pytest.mark.parametrize(
    ("keys", "match"),
    [({"norm": "thinker.norm.weight"}, "'norm'"), ({"norm_weight": "model.norm.weight"}, r"model\.norm\.weight")],
    ids=["unknown part", "absent tensor"],
)
def test_keys_that_name_nothing_are_refused(tmp_path, keys, match):
    save(tmp_path, *TWO, "lm_head.weight")
    with pytest.raises(ConfigError, match=match):
        TargetHead.from_checkpoint(tmp_path, keys=keys)


def sharded(folder: Path) -> None:
    shards = {"a.safetensors": ("model.norm.weight",), "b.safetensors": ("lm_head.weight",)}
    save(folder, "model.norm.weight", "lm_head.weight", shards=shards)


def missing(shard: Path) -> None:
    shard.unlink()


def of_something_else(shard: Path) -> None:
    save_file({"other": torch.ones(4)}, shard)


def cut_short(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def folder_instead(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


@pytest.mark.parametrize("damage", [missing, of_something_else, cut_short, empty, folder_instead])
def test_damaged_shard_is_named(tmp_path, damage):
    sharded(tmp_path)
    assert value_of(TargetHead.from_checkpoint(tmp_path).weight) == 2.0
    damage(tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"b\.safetensors.*cannot be read"):
        TargetHead.from_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [cut_short, empty])
def test_damaged_single_file_is_named(tmp_path, damage):
    save(tmp_path, "model.norm.weight", "lm_head.weight")
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors.*cannot be read"):
        TargetHead.from_checkpoint(tmp_path)
