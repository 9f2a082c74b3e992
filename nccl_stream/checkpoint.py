"""Finds the final norm and the head in a safetensors checkpoint, and reads those tensors and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from nccl_stream.errors import ConfigError

__all__ = ["HeadTensors", "read_head"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_HEADS = ("lm_head", "embed_out")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")

# Model types (prefixes) whose final norm multiplies by 1 + w.
_ONE_PLUS = ("gemma", "recurrent_gemma", "vaultgemma", "t5gemma", "qwen3_next", "nemotron")
_WITHOUT_ONE_PLUS = ("gemma3n", "gemma4", "nemotron_h")
_LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class HeadTensors:
    """What a checkpoint says of the target's head.

    Attributes:
        tensors: ``weight``, ``norm_weight``, and ``bias``, ``norm_bias`` where the checkpoint has them.
        config: the parsed ``config.json`` of the text model.
        eps: of the final norm.
        offset: added to the norm's weight.
        centered: whether the norm subtracts the mean.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    eps: float
    offset: float
    centered: bool


def read_head(path: Path, device: str) -> HeadTensors:
    """Read head and final norm of the checkpoint in folder ``path``.

    Raises:
        ConfigError: (a ``ValueError``) a file is missing or malformed, or no tensor or several look like one of them.
    """
    full = _read_json(path / "config.json")
    config = {**full, **(full.get("text_config") or {})}
    files = _files_of(path)
    head = _find(files, _HEADS, "weight")
    if head is None or full.get("tie_word_embeddings") is True:
        tied = _find(files, _EMBEDDINGS, "weight")
        if tied is None or (head is None and config.get("tie_word_embeddings") is False):
            raise ConfigError(f"{path} holds no head: {_HEADS}, nor an embedding that it is tied to")
        head = tied
    norm = _find(files, _NORMS, "weight")
    if norm is None:
        raise ConfigError(f"{path} holds no final norm: one of {_NORMS} outside of the layers")
    keys = {"weight": head, "norm_weight": norm}
    for name, weight in (("bias", head), ("norm_bias", norm)):
        bias = weight.removesuffix("weight") + "bias"
        if bias in files:
            keys[name] = bias
    tensors: dict[str, Tensor] = {}
    for name, key in keys.items():
        with safe_open(path / files[key], framework="pt", device=device) as file:
            tensors[name] = file.get_tensor(key)
    kind = str(config.get("model_type", ""))
    eps = next((config[name] for name in ("rms_norm_eps", *_LAYER_NORM_EPS) if name in config), 1e-6)
    one_plus = kind.startswith(_ONE_PLUS) and not kind.startswith(_WITHOUT_ONE_PLUS)
    # LayerNorms have a bias, except for those of Cohere.
    centered = "norm_bias" in keys or kind.startswith("cohere")
    return HeadTensors(tensors, config, float(eps), float(one_plus), centered)


def _files_of(path: Path) -> dict[str, str]:
    """Return each tensor's key and the file in folder ``path`` that has it."""
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ConfigError(f"{path / _INDEX} has no weight_map of keys to file names")
        return weight_map
    if not (path / _SINGLE).is_file():
        raise ConfigError(f"{path} holds neither {_SINGLE} nor {_INDEX}")
    with safe_open(path / _SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return parsed


def _find(keys: Iterable[str], modules: tuple[str, ...], leaf: str) -> str | None:
    """Return the one key whose last module is among ``modules`` and that is not inside of a layer or a tower."""

    def outside(key: str) -> bool:
        parts = key.split(".")
        return not any(part.isdigit() or "vision" in part or "visual" in part or "audio" in part for part in parts)

    ends: Callable[[str], bool] = lambda key: key.split(".")[-2:] in [[module, leaf] for module in modules]  # noqa: E731
    found = [key for key in keys if ends(key) and outside(key)]
    if len(found) > 1:
        raise ConfigError(f"cannot tell which of {sorted(found)} is meant")
    return found[0] if found else None
