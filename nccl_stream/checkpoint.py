"""Finds the final norm and the head in a safetensors checkpoint, and reads those tensors and no others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nccl_stream.errors import ConfigError

__all__ = ["HeadTensors", "read_head"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_HEADS = ("lm_head", "embed_out")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_PARTS = ("weight", "bias", "norm_weight", "norm_bias")
# Parts of modules that have norms and embeddings of their own: towers and what joins them, multi-token prediction.
_ELSEWHERE = ("vision", "visual", "audio", "projector", "mtp")
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


def read_head(path: Path, device: str, given: Mapping[str, str] | None = None) -> HeadTensors:
    """Read head and final norm of the checkpoint in folder ``path``.

    Args:
        path: the folder.
        device: where the tensors go.
        given: the keys of some of the tensors, by their names in :class:`HeadTensors`; the others are found.

    Raises:
        ConfigError: (a ``ValueError``) a file is missing or malformed, or no tensor or several look like one of them.
    """
    full = _read_json(path / "config.json")
    config = {**full, **(full.get("text_config") or {})}
    files = _files_of(path)
    keys = dict(given or {})
    if unknown := sorted(keys.keys() - set(_PARTS)):
        raise ConfigError(f"keys must name some of {list(_PARTS)}, got {unknown}")
    if absent := sorted(set(keys.values()) - files.keys()):
        raise ConfigError(f"{path} has no tensors {absent}")
    if "weight" not in keys:
        keys["weight"] = _find_head(path, files, full.get("tie_word_embeddings"), config.get("tie_word_embeddings"))
    if "norm_weight" not in keys:
        norm = _find(files, _NORMS, "norm_weight")
        if norm is None:
            raise ConfigError(f"{path} holds no final norm: one of {_NORMS} outside of the layers")
        keys["norm_weight"] = norm
    for name, weight in (("bias", keys["weight"]), ("norm_bias", keys["norm_weight"])):
        bias = weight.removesuffix("weight") + "bias"
        if bias in files:
            keys.setdefault(name, bias)
    tensors: dict[str, Tensor] = {}
    for name, key in keys.items():
        with _named(path / files[key]), safe_open(path / files[key], framework="pt", device=device) as file:
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
    with _named(path / _SINGLE), safe_open(path / _SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return parsed


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _find_head(path: Path, keys: Collection[str], tied: object, text_tied: object) -> str:
    head = _find(keys, _HEADS, "weight")
    if head is not None and tied is not True:
        return head
    embedding = _find(keys, _EMBEDDINGS, "weight")
    if embedding is None or (head is None and text_tied is False):
        raise ConfigError(f"{path} holds no head: {_HEADS}, nor an embedding that it is tied to")
    return embedding


def _find(keys: Collection[str], modules: tuple[str, ...], part: str) -> str | None:
    """Return the one weight whose module is among ``modules`` and that is not inside of a layer or elsewhere.

    Of several, the one of the module that has the layers.
    """
    paths = {key: key.split(".") for key in keys}
    found = [
        key
        for key, path in paths.items()
        if path[-1] == "weight"
        and path[-2:-1] in [[module] for module in modules]
        and not any(name.isdigit() or any(other in name for other in _ELSEWHERE) for name in path)
    ]
    if len(found) > 1:
        # Of "model.layers.0. ..." it is "model".
        owners = [path[: at - 1] for path in paths.values() for at, name in enumerate(path) if at and name.isdigit()]
        found = [key for key in found if paths[key][:-2] in owners] or found
    if len(found) > 1:
        raise ConfigError(f"cannot tell which of {sorted(found)} is meant: say it with keys={{{part!r}: ...}}")
    return found[0] if found else None
