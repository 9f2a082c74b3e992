"""Runs a Hugging Face causal LM once and captures inner hidden states by hooks; shared by all algorithms' backends."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nccl_stream.errors import ConfigError, SchemaError

__all__ = ["EMBEDDING", "CausalLM", "Forward", "Prompt", "final_norm_of", "load_causal_lm", "shift_left"]

EMBEDDING = -1
"""Layer id of the embedding output: what the first decoder layer gets."""

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


@dataclass(frozen=True)
class Prompt:
    """What a backend is asked to run: tensors of ``[batch, seq]``, ``seq_lens`` ``[batch, max_docs]``, all unshifted.

    Raises:
        SchemaError: (a ``ValueError``) shapes that do not fit together, or partial packing features.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.numel() == 0:
            raise SchemaError(f"input_ids must be a non-empty [batch, seq], got {tuple(self.input_ids.shape)}")
        shape = self.input_ids.shape
        for tensor in (self.attention_mask, self.loss_mask, self.position_ids, self.doc_remaining):
            if tensor is not None and tensor.shape != shape:
                raise SchemaError(f"masks and positions must be {tuple(shape)}, got {tuple(tensor.shape)}")
        packing = (self.position_ids, self.seq_lens, self.doc_remaining)
        if any(tensor is None for tensor in packing) and any(tensor is not None for tensor in packing):
            raise SchemaError("sequence packing needs position_ids, seq_lens and doc_remaining together")
        if self.seq_lens is not None and (self.seq_lens.dim() != 2 or len(self.seq_lens) != len(self.input_ids)):
            raise SchemaError(f"seq_lens must be [{len(self.input_ids)}, max_docs], got {tuple(self.seq_lens.shape)}")

    def to(self, device: torch.device) -> Prompt:
        """Return the prompt on ``device``."""
        tensors: dict[str, Any] = {n: None if tensor is None else tensor.to(device) for n, tensor in vars(self).items()}
        return Prompt(**tensors)

    @property
    def packing(self) -> dict[str, Tensor]:
        """The packing features by name; empty when nothing is packed."""
        if self.position_ids is None or self.seq_lens is None or self.doc_remaining is None:
            return {}
        return {"position_ids": self.position_ids, "seq_lens": self.seq_lens, "doc_remaining": self.doc_remaining}


@dataclass
class Forward:
    """What one forward gave.

    Attributes:
        prompt: the prompt, on the model's device.
        layers: layer id to its output ``[batch, seq, hidden]``.
        pre_norm: what the final norm got, ``[batch, seq, hidden]``; None unless asked for.
        post_norm: what it returned, the input of the head.
        logits: ``[batch, seq, vocab]``; None unless asked for.
    """

    prompt: Prompt
    layers: dict[int, Tensor] = field(default_factory=dict)
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    logits: Tensor | None = None

    def concatenated(self, layer_ids: Sequence[int]) -> Tensor:
        """Return the layers' outputs side by side, ``[batch, seq, hidden * len(layer_ids)]``."""
        return torch.cat([self.layers[layer_id] for layer_id in layer_ids], dim=-1)


class CausalLM:
    """A frozen causal LM. Several threads may run it at once.

    Args:
        model: called with ``input_ids``, ``attention_mask`` and ``use_cache``, it returns an object with ``logits``. It
            is put into eval mode and never trained.

    Raises:
        ConfigError: (a ``ValueError``) the decoder layers cannot be found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owner, self._layers = _decoder_layers(model)
        self.model = model.eval()
        self._can_skip_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    def input_embeddings(self) -> nn.Module:
        """The input embedding."""
        embeddings: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return embeddings

    # no_grad, not inference_mode: a colocated trainer saves these tensors for its backward.
    @torch.no_grad()
    def run(
        self, prompt: Prompt, layer_ids: Sequence[int] = (), *, norm: bool = False, logits: bool = False
    ) -> Forward:
        """Run the model once, without gradients; the prompt is moved to its device first.

        Layer ``i``'s output equals ``hidden_states[i + 1]`` of a forward with ``output_hidden_states=True`` (except for
        the last layer, whose entry there is taken after the final norm), and that of :data:`EMBEDDING`
        ``hidden_states[0]``. Packed documents do not see each other: the model gets a block-diagonal causal mask.

        Args:
            prompt: what to run.
            layer_ids: the layers to capture.
            norm: whether to capture both sides of the final norm.
            logits: whether they are needed; without, a model that can leave out its head does.

        Raises:
            SchemaError: ``seq_lens`` that do not sum to the sequence length.
            ConfigError: the model's attention cannot keep packed documents apart, the message says what can; or its
                forward did not run what shall be captured.
        """
        device = next((p.device for p in self.model.parameters()), prompt.input_ids.device)
        prompt = prompt.to(device)
        arguments: dict[str, Any] = {"input_ids": prompt.input_ids, "attention_mask": prompt.attention_mask}
        if prompt.seq_lens is not None:
            arguments["position_ids"] = prompt.position_ids
            arguments["attention_mask"] = self._packed_mask(prompt.seq_lens, prompt.input_ids.shape)
        if self._can_skip_logits and not logits:
            arguments["logits_to_keep"] = 1
        forward = Forward(prompt)
        with self._capturing(forward, layer_ids, norm):
            outputs = self.model(use_cache=False, **arguments)
        missing = [layer_id for layer_id in layer_ids if layer_id not in forward.layers]
        if missing:
            raise ConfigError(f"the model's forward did not run layers {missing}; choose other layer ids")
        if norm and forward.post_norm is None:
            raise ConfigError(f"the forward of {type(self.model).__name__} did not run its final norm")
        if logits:
            forward.logits = _logits_of(outputs)
        return forward

    @contextmanager
    def _capturing(self, forward: Forward, layer_ids: Sequence[int], norm: bool) -> Iterator[None]:
        caller = threading.get_ident()

        def on_this_thread(store: Callable[..., None]) -> Any:
            def hook(_module: nn.Module, *captured: Any) -> None:
                # The hooks of one call see the forwards of all threads that use the model meanwhile.
                if threading.get_ident() == caller:
                    store(*captured)

            return hook

        def layer_hook(layer_id: int) -> Any:
            def store(_inputs: object, output: Any) -> None:
                forward.layers[layer_id] = output[0] if isinstance(output, tuple) else output

            return on_this_thread(store)

        def store_first_input(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            forward.layers[EMBEDDING] = inputs[0] if inputs else keywords["hidden_states"]

        def store_norm(inputs: tuple[Any, ...], output: Any) -> None:
            forward.pre_norm, forward.post_norm = inputs[0], output

        handles = [
            self._layers[layer_id].register_forward_hook(layer_hook(layer_id))
            for layer_id in layer_ids
            if layer_id != EMBEDDING
        ]
        try:
            if EMBEDDING in layer_ids:
                hook = on_this_thread(store_first_input)
                handles.append(self._layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            if norm:
                handles.append(_final_norm(self._owner, self.model).register_forward_hook(on_this_thread(store_norm)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _packed_mask(self, seq_lens: Tensor, shape: torch.Size) -> Tensor | None:
        """Return what keeps packed documents apart in this model's attention: a 4-D additive mask, or None."""
        config = _text_config(self.model)
        attention = getattr(config, "_attn_implementation", None) or "eager"
        batch, seq = shape
        if "flash" in attention:
            if batch != 1:
                raise ConfigError(
                    f"{attention} keeps packed documents apart only in batches of one row, got {batch}; "
                    "pack into one row or load the model with attn_implementation='sdpa'"
                )
            return None  # Flash attention finds the documents by their position ids.
        if attention not in ("eager", "sdpa"):
            raise ConfigError(f"packed batches need attn_implementation 'sdpa', 'eager' or flash, not {attention!r}")
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True) and int(window) < seq:
            raise ConfigError(
                f"packed rows of {seq} tokens exceed the model's sliding window of {window}, which an explicit mask "
                "would switch off; pack at most that many tokens or use flash attention"
            )
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return _block_causal_mask(seq_lens, seq, dtype)


def load_causal_lm(name_or_path: str, **model_kwargs: Any) -> nn.Module:
    """Load a causal LM by hub name or path.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"loading {name_or_path!r} by name needs transformers: install nccl-stream[hf]") from error
    model: nn.Module = AutoModelForCausalLM.from_pretrained(name_or_path, **model_kwargs)
    return model


def shift_left(tensor: Tensor) -> Tensor:
    """Return ``[batch, seq, ...]`` shifted left by one along ``seq``; the freed last slot is zero."""
    shifted = torch.empty_like(tensor)
    shifted[:, :-1] = tensor[:, 1:]
    shifted[:, -1:] = 0
    return shifted


def final_norm_of(model: nn.Module) -> nn.Module:
    """Return the norm between the last decoder layer and the head.

    Raises:
        ConfigError: (a ``ValueError``) it is not found.
    """
    return _final_norm(_decoder_layers(model)[0], model)


def _final_norm(owner: nn.Module, model: nn.Module) -> nn.Module:
    for name in _NORM_NAMES:
        module = getattr(owner, name, None)
        if isinstance(module, nn.Module):
            return module
    raise ConfigError(f"found no final norm beside the decoder layers of {type(model).__name__}: {_NORM_NAMES}")


def _block_causal_mask(seq_lens: Tensor, seq: int, dtype: torch.dtype) -> Tensor:
    """Return an additive ``[batch, 1, seq, seq]`` mask: causal, and only within the same document."""
    if bool((seq_lens.sum(dim=1) != seq).any()):
        raise SchemaError(f"seq_lens of each row must sum to the sequence length {seq}, got {seq_lens.sum(1).tolist()}")
    slots = torch.arange(seq, device=seq_lens.device)
    document = torch.searchsorted(seq_lens.cumsum(dim=1), slots.expand(len(seq_lens), -1).contiguous(), right=True)
    visible = (document[:, :, None] == document[:, None, :]) & (slots[:, None] >= slots[None, :])
    blocked = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return blocked.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _logits_of(outputs: Any) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the target must return an object with logits, got {type(outputs).__name__}")
    return logits


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if callable(get_text_config) else config


def _decoder_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Find the decoder layers, and the module that owns them.

    They are the outermost module list as long as the config says the decoder is deep.
    """
    depth = getattr(_text_config(model), "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ConfigError(f"{type(model).__name__}.config must state num_hidden_layers")
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    for root in (decoder, model):
        if not isinstance(root, nn.Module):
            continue
        lists = [
            (name, module)
            for name, module in root.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth
        ]
        if lists:
            name, layers = min(lists, key=lambda item: item[0].count("."))
            return root.get_submodule(name.rpartition(".")[0]), layers
    raise ConfigError(f"found no list of {depth} decoder layers in {type(model).__name__}")
