"""The target side of EAGLE-3: what a backend supplies per batch, and a backend for Hugging Face causal LMs.

Frame: at slot ``t`` a batch holds the hidden states of position ``t``, the token of position ``t + 1`` and the target's
distribution for the token of position ``t + 2``. A backend gets there by shifting ``input_ids``, ``logits`` and
``loss_mask`` left by one with zero fill; hidden states, attention mask and packing features stay where they are.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nccl_stream.eagle3 import validate_eagle3_packing_inputs
from nccl_stream.errors import ConfigError, SchemaError
from nccl_stream.refs import FeatureAlgorithm

__all__ = ["Eagle3TargetBackend", "Eagle3TargetBatch", "HFEagle3TargetModel"]

NUM_AUX_LAYERS = 3
"""EAGLE-3 concatenates the outputs of exactly three decoder layers."""


@dataclass(eq=False)
class Eagle3TargetBatch:
    """Supervision for one draft training step.

    Exactly one supervision is present: ``logits``, or ``target_probs`` together with ``position_mask``. The packing
    features are all three present or all absent.

    Attributes:
        aux_hidden_states: ``[batch, seq, hidden * 3]`` in the target's dtype, the three layers in the configured order.
        input_ids: ``[batch, seq]`` int64, shifted.
        attention_mask: ``[batch, seq]``, unshifted, dtype as given.
        loss_mask: ``[batch, seq]``, shifted, dtype as given.
        logits: ``[batch, seq, vocab]``, shifted.
        target_probs: ``[batch, seq, draft_vocab]`` fp32, softmax over the draft vocabulary, shifted.
        position_mask: ``[batch, seq, 1]`` bool, whether the target's best token is in the draft vocabulary, shifted.
        position_ids: ``[batch, seq]`` positions inside each packed document, unshifted.
        seq_lens: ``[batch, max_docs]`` lengths of the packed documents, summing to ``seq``.
        doc_remaining: ``[batch, seq]`` tokens left in the document after each slot, unshifted.

    Raises:
        SchemaError: (a ``ValueError``) none or more than one supervision, half a pair, or partial packing features.
    """

    aux_hidden_states: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logits: Tensor | None = None
    target_probs: Tensor | None = None
    position_mask: Tensor | None = None
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None

    def __post_init__(self) -> None:
        pair = [self.target_probs is not None, self.position_mask is not None]
        if any(pair) != all(pair):
            raise SchemaError("target_probs and position_mask belong together; got only one of them")
        if (self.logits is not None) == all(pair):
            raise SchemaError(
                "exactly one supervision is needed, either logits or target_probs with position_mask; "
                f"got {'both' if all(pair) else 'neither'}"
            )
        validate_eagle3_packing_inputs(
            position_ids=self.position_ids, seq_lens=self.seq_lens, doc_remaining=self.doc_remaining
        )

    def features(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name, in field order."""
        present = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in present if tensor is not None}

    def to_trainer_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of an EAGLE-3 trainer module, where ``logits`` are called ``target_logits``."""
        renamed = {"logits": "target_logits"}
        return {renamed.get(name, name): tensor for name, tensor in self.features().items()}


class Eagle3TargetBackend(ABC):
    """Where supervision comes from: a frozen target model, in this process or behind a service."""

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.EAGLE3

    @abstractmethod
    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        """Run the target once; blocks until the supervision is there (on a GPU: until it is enqueued).

        Args:
            input_ids: ``[batch, seq]`` int64, unshifted, like all arguments.
            attention_mask: ``[batch, seq]``, nonzero where a token may be attended to.
            loss_mask: ``[batch, seq]``, nonzero where the draft is supervised.
            position_ids: ``[batch, seq]``, with the two below for packed documents; all three or none.
            seq_lens: ``[batch, max_docs]``.
            doc_remaining: ``[batch, seq]``.

        Returns:
            A batch in the EAGLE-3 frame. The caller owns its tensors.
        """

    @abstractmethod
    def get_input_embeddings(self) -> nn.Module:
        """Return the target's input embedding, from which a draft may be initialised."""

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Tell the backend the draft vocabulary.

        Backends that return ``target_probs`` need it. The default ignores it: with full ``logits`` the draft side
        projects.

        Args:
            selected_token_ids: ``[draft_vocab]`` int64, target ids in draft order.
            selected_token_mask: ``[vocab]`` bool, true for the selected ids.
        """
        del selected_token_ids, selected_token_mask

    @property
    def supports_async(self) -> bool:
        """Whether :meth:`generate_batch_async` works."""
        return False

    def generate_batch_async(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Any:
        """Start :meth:`generate_batch` without waiting; returns a future-like object with ``result()``.

        Raises:
            NotImplementedError: this backend is synchronous (``supports_async`` is False).
        """
        raise NotImplementedError(f"{type(self).__name__} is synchronous: call generate_batch")

    def close(self) -> None:  # noqa: B027 - a backend without resources has nothing to do here
        """Give back what the backend holds (connections, servers). Idempotent."""


class HFEagle3TargetModel(Eagle3TargetBackend):
    """Runs any Hugging Face causal LM in this process and captures the outputs of three decoder layers by hooks.

    Layer ``i``'s output equals ``hidden_states[i + 1]`` of a forward with ``output_hidden_states=True`` (except for the
    last layer, whose entry there is taken after the final norm). Several threads may call it, and the model, at once.

    Args:
        model: A causal LM: called with ``input_ids``, ``attention_mask`` and ``use_cache``, it returns an object with
            ``logits`` of ``[batch, seq, vocab]``. It is put into eval mode and never trained.
        aux_layer_ids: Three distinct layer indices, in the order in which the draft concatenates them. Default:
            ``1, n // 2 - 1, n - 4`` for ``n`` layers.

    Raises:
        ConfigError: (a ``ValueError``) the decoder layers cannot be found, the ids are not three distinct layers, or
            the model is too shallow for the default ids.
    """

    def __init__(self, model: nn.Module, aux_layer_ids: Sequence[int] | None = None) -> None:
        self._layers = _decoder_layers(model)
        ids = _default_aux_layer_ids(len(self._layers)) if aux_layer_ids is None else list(aux_layer_ids)
        self.aux_layer_ids = _validated_aux_layer_ids(ids, len(self._layers))
        self.model = model.eval()

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, aux_layer_ids: Sequence[int] | None = None, **model_kwargs: Any
    ) -> HFEagle3TargetModel:
        """Load a causal LM by hub name or path.

        Args:
            name_or_path: What ``AutoModelForCausalLM.from_pretrained`` takes.
            aux_layer_ids: As for the constructor.
            **model_kwargs: Passed on to ``from_pretrained`` (dtype, device map, ...).

        Raises:
            ConfigError: transformers is not installed, or as for the constructor.
        """
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ConfigError(
                f"loading {name_or_path!r} by name needs transformers: install nccl-stream[hf]"
            ) from error
        return cls(AutoModelForCausalLM.from_pretrained(name_or_path, **model_kwargs), aux_layer_ids)

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return embeddings

    # no_grad, not inference_mode: a colocated trainer saves these tensors for its backward.
    @torch.no_grad()
    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        """Run the model once, without gradients; arguments are moved to the model's device first.

        Packed documents do not see each other: with ``seq_lens`` the model gets a block-diagonal causal mask.

        Raises:
            SchemaError: shapes that do not fit together, or partial packing features.
            ConfigError: the model's attention cannot keep packed documents apart; the message says what can.
        """
        validate_eagle3_packing_inputs(position_ids=position_ids, seq_lens=seq_lens, doc_remaining=doc_remaining)
        _check_prompt_shapes(input_ids, attention_mask, loss_mask, position_ids, doc_remaining, seq_lens)
        device = next((p.device for p in self.model.parameters()), input_ids.device)
        input_ids, attention_mask, loss_mask = (t.to(device) for t in (input_ids, attention_mask, loss_mask))
        model_inputs: dict[str, Any] = {"attention_mask": attention_mask}
        packing: dict[str, Tensor] = {}
        if position_ids is not None and seq_lens is not None and doc_remaining is not None:
            packing = {
                "position_ids": position_ids.to(device),
                "seq_lens": seq_lens.to(device),
                "doc_remaining": doc_remaining.to(device),
            }
            model_inputs["position_ids"] = packing["position_ids"]
            model_inputs["attention_mask"] = self._packed_mask(packing["seq_lens"], input_ids.shape)
        with self._capturing() as captured:
            outputs = self.model(input_ids=input_ids, use_cache=False, **model_inputs)
        missing = [layer_id for layer_id in self.aux_layer_ids if layer_id not in captured]
        if missing:
            raise ConfigError(f"the model's forward did not run layers {missing}; choose other aux_layer_ids")
        return Eagle3TargetBatch(
            aux_hidden_states=torch.cat([captured[layer_id] for layer_id in self.aux_layer_ids], dim=-1),
            input_ids=_shift_left(input_ids),
            attention_mask=attention_mask,
            loss_mask=_shift_left(loss_mask),
            logits=_shift_left(_logits_of(outputs)),
            **packing,
        )

    @contextmanager
    def _capturing(self) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        caller = threading.get_ident()

        def capture(layer_id: int) -> Any:
            def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
                # The hooks of one call see the forwards of all threads that use the model meanwhile.
                if threading.get_ident() == caller:
                    captured[layer_id] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._layers[layer_id].register_forward_hook(capture(layer_id)) for layer_id in self.aux_layer_ids]
        try:
            yield captured
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


def _shift_left(tensor: Tensor) -> Tensor:
    """Shift ``[batch, seq, ...]`` left by one along ``seq``; the freed last slot is zero."""
    shifted = torch.empty_like(tensor)
    shifted[:, :-1] = tensor[:, 1:]
    shifted[:, -1:] = 0
    return shifted


def _block_causal_mask(seq_lens: Tensor, seq: int, dtype: torch.dtype) -> Tensor:
    """Return an additive ``[batch, 1, seq, seq]`` mask: causal, and only within the same document."""
    if bool((seq_lens.sum(dim=1) != seq).any()):
        raise SchemaError(f"seq_lens of each row must sum to the sequence length {seq}, got {seq_lens.sum(1).tolist()}")
    slots = torch.arange(seq, device=seq_lens.device)
    document = torch.searchsorted(seq_lens.cumsum(dim=1), slots.expand(len(seq_lens), -1).contiguous(), right=True)
    visible = (document[:, :, None] == document[:, None, :]) & (slots[:, None] >= slots[None, :])
    blocked = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return blocked.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _check_prompt_shapes(input_ids: Tensor, *same: Tensor | None) -> None:
    *per_slot, seq_lens = same
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise SchemaError(f"input_ids must be a non-empty [batch, seq], got {tuple(input_ids.shape)}")
    for tensor in per_slot:
        if tensor is not None and tensor.shape != input_ids.shape:
            raise SchemaError(f"masks and positions must be {tuple(input_ids.shape)}, got {tuple(tensor.shape)}")
    if seq_lens is not None and (seq_lens.dim() != 2 or len(seq_lens) != len(input_ids)):
        raise SchemaError(f"seq_lens must be [{len(input_ids)}, max_docs], got {tuple(seq_lens.shape)}")


def _logits_of(outputs: Any) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the target must return an object with logits, got {type(outputs).__name__}")
    return logits


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if callable(get_text_config) else config


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Find the list of decoder layers: the outermost module list as long as the config says the decoder is deep."""
    depth = getattr(_text_config(model), "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ConfigError(f"{type(model).__name__}.config must state num_hidden_layers")
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    for root in (decoder, model):
        if not isinstance(root, nn.Module):
            continue
        lists = [
            (name.count("."), module)
            for name, module in root.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth
        ]
        if lists:
            return min(lists, key=lambda item: item[0])[1]
    raise ConfigError(f"found no list of {depth} decoder layers in {type(model).__name__}")


def _default_aux_layer_ids(num_layers: int) -> list[int]:
    ids = [1, num_layers // 2 - 1, num_layers - 4]
    if len(set(ids)) != NUM_AUX_LAYERS or min(ids) < 0 or max(ids) >= num_layers:
        raise ConfigError(
            f"a target of {num_layers} layers is too shallow for the default aux layers {ids}; pass aux_layer_ids, "
            f"three distinct indices in 0..{num_layers - 1}, the same as the draft's configuration"
        )
    return ids


def _validated_aux_layer_ids(ids: list[int], num_layers: int) -> list[int]:
    if len(ids) != NUM_AUX_LAYERS or len(set(ids)) != NUM_AUX_LAYERS:
        raise ConfigError(f"aux_layer_ids must be three distinct layers, got {ids}")
    outside = [layer_id for layer_id in ids if not 0 <= layer_id < num_layers]
    if outside:
        raise ConfigError(f"aux_layer_ids {outside} are outside 0..{num_layers - 1}, the target's layers")
    return ids
