"""DFlash: its features, validation, batch object and target backend. Nothing is shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from nccl_stream.backend import TargetBackend
from nccl_stream.batch import FeatureBatch, register_batch
from nccl_stream.capture import CausalLM, Prompt, load_causal_lm
from nccl_stream.errors import ConfigError
from nccl_stream.refs import FeatureAlgorithm, SampleRef
from nccl_stream.schema import (
    FRAME_ATTRIBUTE,
    INPUTS,
    LAST_HIDDEN,
    LAST_HIDDEN_ATTRIBUTES,
    LOGITS,
    NORM_ATTRIBUTE,
    PACKING,
    Feature,
    Schema,
    register_schema,
)

__all__ = ["DFlashTargetBatch", "HFDFlashTargetModel", "validate_dflash_ref"]

Supervision = Literal["none", "logits", "last_hidden_states"]

_SCHEMA = register_schema(
    Schema(
        FeatureAlgorithm.DFLASH,
        features=(Feature("hidden_states", ("B", "S", "L*H"), "float"), *INPUTS, LOGITS, LAST_HIDDEN, *PACKING),
        supervision={1: ((), ("logits",)), 2: (("last_hidden_states",),)},
        min_supervised_run=2,
        attributes=LAST_HIDDEN_ATTRIBUTES,
    )
)


def validate_dflash_ref(ref: SampleRef) -> None:
    """Check that ``ref`` is a DFlash ref that a consumer can use, before anything is materialized.

    Raises:
        SchemaError: (``ValueError``) another algorithm or schema version, a core feature missing, more than one
            supervision encoding, or partial packing.
    """
    _SCHEMA.validate(ref)


@register_batch
@dataclass(eq=False)
class DFlashTargetBatch(FeatureBatch):
    """Context features for one DFlash training step, every feature in place.

    Attributes:
        hidden_states: ``[batch, seq, hidden * layers]`` in the target's dtype, the layers in the configured order.
        input_ids: ``[batch, seq]`` int64.
        attention_mask: ``[batch, seq]``, dtype as given.
        loss_mask: ``[batch, seq]``, dtype as given.
        logits: ``[batch, seq, vocab]``, for distillation.
        position_ids: ``[batch, seq]`` positions inside each packed document.
        seq_lens: ``[batch, max_docs]`` lengths of the packed documents, summing to ``seq``.
        doc_remaining: ``[batch, seq]`` tokens left in the document after each slot.
        last_hidden_states: ``[batch, seq, hidden]``, in place of logits; ``attributes`` say whether they are taken
            before or after the final norm.

    Raises:
        SchemaError: (a ``ValueError``) two supervisions, or partial packing features.
    """

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.DFLASH

    hidden_states: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logits: Tensor | None = None
    position_ids: Tensor | None = field(default=None, kw_only=True)
    seq_lens: Tensor | None = field(default=None, kw_only=True)
    doc_remaining: Tensor | None = field(default=None, kw_only=True)
    last_hidden_states: Tensor | None = field(default=None, kw_only=True)


class HFDFlashTargetModel(TargetBackend):
    """Runs any Hugging Face causal LM in this process and captures the outputs of some decoder layers by hooks.

    Layer ``i``'s output equals ``hidden_states[i + 1]`` of a forward with ``output_hidden_states=True``, the last one
    taken before the final norm. Several threads may call it, and the model, at once.

    Args:
        model: A causal LM; it is put into eval mode and never trained.
        target_layer_ids: Layer indices, at least one, in the order in which the draft concatenates them.
        supervision: What a sample carries of the target's distribution: nothing (the labels are hard), full logits, or
            the last hidden states (after the final norm), from which the draft side makes logits.

    Raises:
        ConfigError: (a ``ValueError``) the decoder layers cannot be found, or ids that are not distinct layers.
    """

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.DFLASH

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int], *, supervision: Supervision = "none") -> None:
        if supervision not in ("none", "logits", "last_hidden_states"):
            raise ConfigError(f"supervision must be 'none', 'logits' or 'last_hidden_states', got {supervision!r}")
        self._lm = CausalLM(model)
        ids = list(target_layer_ids)
        if not ids or len(set(ids)) != len(ids) or not all(0 <= i < self._lm.num_layers for i in ids):
            raise ConfigError(f"target_layer_ids must be distinct layers of 0..{self._lm.num_layers - 1}, got {ids}")
        self.target_layer_ids = ids
        self.supervision = supervision
        self.model = self._lm.model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        target_layer_ids: Sequence[int],
        *,
        supervision: Supervision = "none",
        **model_kwargs: Any,
    ) -> HFDFlashTargetModel:
        """Load a causal LM by what ``AutoModelForCausalLM.from_pretrained`` takes.

        Raises:
            ConfigError: transformers is not installed, or as for the constructor.
        """
        return cls(load_causal_lm(name_or_path, **model_kwargs), target_layer_ids, supervision=supervision)

    def get_input_embeddings(self) -> nn.Module:
        return self._lm.input_embeddings()

    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> DFlashTargetBatch:
        """Run the model once, without gradients; see :meth:`CausalLM.run` for what it raises."""
        prompt = Prompt(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining)
        with_last = self.supervision == "last_hidden_states"
        forward = self._lm.run(prompt, self.target_layer_ids, norm=with_last, logits=self.supervision == "logits")
        prompt = forward.prompt
        batch = DFlashTargetBatch(
            hidden_states=forward.concatenated(self.target_layer_ids),
            input_ids=prompt.input_ids,
            attention_mask=prompt.attention_mask,
            loss_mask=prompt.loss_mask,
            logits=forward.logits,
            last_hidden_states=forward.post_norm,
            **prompt.packing,
        )
        if with_last:
            batch.attributes = {NORM_ATTRIBUTE: "post", FRAME_ATTRIBUTE: "unshifted"}
        return batch
