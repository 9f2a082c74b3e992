"""EAGLE-3: its features, their documented names, validation, and the batch object.

Frame: at slot ``t`` a batch holds the hidden states of position ``t``, the token of position ``t + 1`` and the target's
distribution for the token of position ``t + 2``. A backend gets there by shifting ``input_ids``, ``loss_mask`` and the
supervision left by one with zero fill; hidden states, attention mask and packing features stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from nccl_stream.batch import FeatureBatch, register_batch
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.schema import (
    INPUTS,
    LAST_HIDDEN,
    LAST_HIDDEN_ATTRIBUTES,
    LOGITS,
    PACKING,
    Feature,
    Schema,
    register_schema,
)

__all__ = [
    "EAGLE3_CORE_FEATURES",
    "EAGLE3_DRAFT_VOCAB_SUPERVISION",
    "EAGLE3_LAST_HIDDEN_SCHEMA_VERSION",
    "EAGLE3_LAST_HIDDEN_SUPERVISION",
    "EAGLE3_LOGITS_SUPERVISION",
    "EAGLE3_PACKING_FEATURES",
    "EAGLE3_SCHEMA_VERSION",
    "EAGLE3_SUPERVISION_ENCODINGS",
    "Eagle3TargetBatch",
    "eagle3_logits_feature_specs",
    "eagle3_logits_tensors",
    "eagle3_sample_bytes",
    "validate_eagle3_packing_inputs",
    "validate_eagle3_ref",
]

_SCHEMA = register_schema(
    Schema(
        FeatureAlgorithm.EAGLE3,
        features=(
            Feature("aux_hidden_states", ("B", "S", "3*H"), "float"),
            *INPUTS,
            LOGITS,
            Feature("target_probs", ("B", "S", "Vd"), "float", itemsize=4),
            Feature("position_mask", ("B", "S", "1"), "mask", itemsize=1),
            LAST_HIDDEN,
            *PACKING,
        ),
        supervision={1: (("logits",), ("target_probs", "position_mask")), 2: (("last_hidden_states",),)},
        shifted=("input_ids", "loss_mask", "logits", "target_probs", "position_mask"),
        attributes=LAST_HIDDEN_ATTRIBUTES,
    )
)

EAGLE3_SCHEMA_VERSION = 1
"""Version of refs that carry logits, or target probabilities over the draft vocabulary."""

EAGLE3_LAST_HIDDEN_SCHEMA_VERSION = 2
"""Version of refs that carry the target's last hidden states instead."""

EAGLE3_CORE_FEATURES: tuple[str, ...] = FeatureAlgorithm.EAGLE3.required_features
EAGLE3_LOGITS_SUPERVISION, EAGLE3_DRAFT_VOCAB_SUPERVISION = _SCHEMA.supervision[EAGLE3_SCHEMA_VERSION]
(EAGLE3_LAST_HIDDEN_SUPERVISION,) = _SCHEMA.supervision[EAGLE3_LAST_HIDDEN_SCHEMA_VERSION]
EAGLE3_SUPERVISION_ENCODINGS: tuple[str, ...] = EAGLE3_CORE_FEATURES + EAGLE3_LOGITS_SUPERVISION
"""Names of a full-logits sample in the order of its batch."""

EAGLE3_PACKING_FEATURES: tuple[str, ...] = _SCHEMA.packing


def validate_eagle3_packing_inputs(
    *,
    position_ids: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    doc_remaining: torch.Tensor | None,
) -> None:
    """Check that the packing inputs are all given or all None.

    Raises:
        SchemaError: (``ValueError``) some are and some are not.
    """
    values = zip(EAGLE3_PACKING_FEATURES, (position_ids, seq_lens, doc_remaining), strict=True)
    _SCHEMA.check_packing(name for name, value in values if value is not None)


def validate_eagle3_ref(ref: SampleRef) -> None:
    """Check that ``ref`` is an EAGLE-3 ref that a consumer can use, before anything is materialized.

    Raises:
        SchemaError: (``ValueError``) another algorithm or schema version, a core feature missing, not exactly one
            supervision encoding, or partial packing.
    """
    _SCHEMA.validate(ref)


def eagle3_sample_bytes(
    supervision: str,
    *,
    seq: int,
    hidden: int,
    vocab: int,
    draft_vocab: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Return the bytes of one sample of ``batch`` rows of ``seq`` tokens, without packing.

    Args:
        supervision: ``"logits"``, ``"target_probs"`` or ``"last_hidden_states"``.
        seq: tokens per row.
        hidden: the target's hidden size.
        vocab: the target's vocabulary.
        draft_vocab: tokens of the draft vocabulary; the whole vocabulary if None.
        batch: rows.
        dtype: of the target's activations.

    Raises:
        KeyError: another supervision.
    """
    groups = {
        group[0]: group for group in (*_SCHEMA.supervision[EAGLE3_SCHEMA_VERSION], EAGLE3_LAST_HIDDEN_SUPERVISION)
    }
    sizes = {"B": batch, "S": seq, "H": hidden, "V": vocab, "Vd": vocab if draft_vocab is None else draft_vocab}
    return _SCHEMA.sample_bytes(sizes, supervision=groups[supervision], dtype=dtype)


def eagle3_logits_tensors(
    *,
    aux_hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    logits: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    doc_remaining: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Collect the outputs of a target backend under their feature names, in the order of the batch.

    Args:
        aux_hidden_states: ``[batch, seq, hidden * 3]``, any float dtype.
        input_ids: ``[batch, seq]`` int64, shifted left by one.
        attention_mask: ``[batch, seq]``.
        loss_mask: ``[batch, seq]``, shifted left by one.
        logits: ``[batch, seq, vocab]``, shifted left by one.
        position_ids: ``[batch, seq]``; only with packing.
        seq_lens: ``[batch, max_docs]``; only with packing.
        doc_remaining: ``[batch, seq]``; only with packing.

    Returns:
        The given tensors themselves, without those that are None.
    """
    tensors = {
        "aux_hidden_states": aux_hidden_states,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "logits": logits,
        "position_ids": position_ids,
        "seq_lens": seq_lens,
        "doc_remaining": doc_remaining,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def eagle3_logits_feature_specs(
    aux_hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    logits: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    doc_remaining: torch.Tensor | None = None,
) -> dict[str, FeatureSpec]:
    """Return the specs of what :func:`eagle3_logits_tensors` returns for the same arguments."""
    tensors = eagle3_logits_tensors(
        aux_hidden_states=aux_hidden_states,
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        logits=logits,
        position_ids=position_ids,
        seq_lens=seq_lens,
        doc_remaining=doc_remaining,
    )
    return {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}


@register_batch
@dataclass(eq=False)
class Eagle3TargetBatch(FeatureBatch):
    """Supervision for one draft training step.

    Exactly one supervision is present: ``logits``, ``target_probs`` together with ``position_mask``, or
    ``last_hidden_states``. The packing features are all three present or all absent.

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
        last_hidden_states: ``[batch, seq, hidden]``, what the target's head (or its final norm) takes; ``attributes``
            say which of the two and in which frame.

    Raises:
        SchemaError: (a ``ValueError``) none or more than one supervision, half a pair, or partial packing features.
    """

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.EAGLE3
    trainer_names: ClassVar[dict[str, str]] = {"logits": "target_logits"}

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
    last_hidden_states: Tensor | None = field(default=None, kw_only=True)
