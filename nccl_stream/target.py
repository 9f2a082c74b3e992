"""The target side of EAGLE-3: what a backend supplies per batch, and a backend for Hugging Face causal LMs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from nccl_stream.backend import TargetBackend
from nccl_stream.capture import CausalLM, Forward, Prompt, load_causal_lm, shift_left
from nccl_stream.eagle3 import Eagle3TargetBatch, validate_eagle3_packing_inputs
from nccl_stream.errors import ConfigError
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.vocab import DraftVocabulary, draft_supervision

__all__ = ["Eagle3TargetBackend", "Eagle3TargetBatch", "HFEagle3TargetModel"]

Supervision = Literal["logits", "target_probs", "last_hidden_states"]
Norm = Literal["pre", "post"]

NUM_AUX_LAYERS = 3
"""EAGLE-3 concatenates the outputs of exactly three decoder layers."""


class Eagle3TargetBackend(TargetBackend):
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
        """Run the target once; see :meth:`TargetBackend.generate_batch`."""


class HFEagle3TargetModel(Eagle3TargetBackend):
    """Runs any Hugging Face causal LM in this process and captures the outputs of three decoder layers by hooks.

    Layer ``i``'s output equals ``hidden_states[i + 1]`` of a forward with ``output_hidden_states=True`` (except for the
    last layer, whose entry there is taken after the final norm). Several threads may call it, and the model, at once.

    Args:
        model: A causal LM: called with ``input_ids``, ``attention_mask`` and ``use_cache``, it returns an object with
            ``logits`` of ``[batch, seq, vocab]``. It is put into eval mode and never trained.
        aux_layer_ids: Three distinct layer indices, in the order in which the draft concatenates them. Default:
            ``1, n // 2 - 1, n - 4`` for ``n`` layers.
        supervision: What a sample carries of the target's distribution: full ``logits``; ``target_probs`` over the
            draft vocabulary, which needs :meth:`set_vocab_mapping`; or ``last_hidden_states``, the smallest, of which
            a :class:`nccl_stream.target_head.TargetHead` makes either on the draft side. The model's head is run only
            for the first two.
        last_hidden_norm: Whether last hidden states are taken before or after the final norm.

    Raises:
        ConfigError: (a ``ValueError``) the decoder layers cannot be found, the ids are not three distinct layers, the
            model is too shallow for the default ids, or a supervision that does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        supervision: Supervision = "logits",
        last_hidden_norm: Norm = "post",
    ) -> None:
        for name, value, allowed in (
            ("supervision", supervision, get_args(Supervision)),
            ("last_hidden_norm", last_hidden_norm, get_args(Norm)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {list(allowed)}, got {value!r}")
        self.supervision = supervision
        self.last_hidden_norm = last_hidden_norm
        self._vocabulary: DraftVocabulary | None = None
        self._lm = CausalLM(model)
        ids = _default_aux_layer_ids(self._lm.num_layers) if aux_layer_ids is None else list(aux_layer_ids)
        self.aux_layer_ids = _validated_aux_layer_ids(ids, self._lm.num_layers)
        self.model = self._lm.model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        supervision: Supervision = "logits",
        last_hidden_norm: Norm = "post",
        **model_kwargs: Any,
    ) -> HFEagle3TargetModel:
        """Load a causal LM by hub name or path.

        Args:
            name_or_path: What ``AutoModelForCausalLM.from_pretrained`` takes.
            aux_layer_ids: As for the constructor.
            supervision: As for the constructor.
            last_hidden_norm: As for the constructor.
            **model_kwargs: Passed on to ``from_pretrained`` (dtype, device map, ...).

        Raises:
            ConfigError: transformers is not installed, or as for the constructor.
        """
        model = load_causal_lm(name_or_path, **model_kwargs)
        return cls(model, aux_layer_ids, supervision=supervision, last_hidden_norm=last_hidden_norm)

    def get_input_embeddings(self) -> nn.Module:
        return self._lm.input_embeddings()

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Set the draft vocabulary that ``target_probs`` are over; see :meth:`TargetBackend.set_vocab_mapping`."""
        self._vocabulary = DraftVocabulary(selected_token_ids, selected_token_mask)

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
            ConfigError: the model's attention cannot keep packed documents apart, the message says what can; or
                ``target_probs`` without a draft vocabulary.
        """
        validate_eagle3_packing_inputs(position_ids=position_ids, seq_lens=seq_lens, doc_remaining=doc_remaining)
        prompt = Prompt(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining)
        if self.supervision == "target_probs" and self._vocabulary is None:
            raise ConfigError("target_probs need the draft vocabulary: call set_vocab_mapping first")
        from_states = self.supervision == "last_hidden_states"
        forward = self._lm.run(prompt, self.aux_layer_ids, norm=from_states, logits=not from_states)
        batch = Eagle3TargetBatch(
            aux_hidden_states=forward.concatenated(self.aux_layer_ids),
            input_ids=shift_left(forward.prompt.input_ids),
            attention_mask=forward.prompt.attention_mask,
            loss_mask=shift_left(forward.prompt.loss_mask),
            **self._supervise(forward),
            **forward.prompt.packing,
        )
        if from_states:
            batch.attributes = {NORM_ATTRIBUTE: self.last_hidden_norm, FRAME_ATTRIBUTE: "shifted"}
        return batch

    def _supervise(self, forward: Forward) -> dict[str, Tensor]:
        if self.supervision == "last_hidden_states":
            states = forward.pre_norm if self.last_hidden_norm == "pre" else forward.post_norm
            assert states is not None
            return {"last_hidden_states": shift_left(states)}
        assert forward.logits is not None
        if self._vocabulary is None or self.supervision == "logits":
            return {"logits": shift_left(forward.logits)}
        vocabulary = self._vocabulary.to(forward.logits.device)
        probs, mask = draft_supervision(forward.logits, forward.prompt.loss_mask, vocabulary)
        return {"target_probs": shift_left(probs), "position_mask": shift_left(mask)}


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
