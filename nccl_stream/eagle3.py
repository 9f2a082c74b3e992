"""The EAGLE-3 features by their documented names: constants, validation, and packing of a backend's outputs."""

from __future__ import annotations

import torch

from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.schema import schema_of

__all__ = [
    "EAGLE3_CORE_FEATURES",
    "EAGLE3_DRAFT_VOCAB_SUPERVISION",
    "EAGLE3_LAST_HIDDEN_SCHEMA_VERSION",
    "EAGLE3_LAST_HIDDEN_SUPERVISION",
    "EAGLE3_LOGITS_SUPERVISION",
    "EAGLE3_PACKING_FEATURES",
    "EAGLE3_SCHEMA_VERSION",
    "EAGLE3_SUPERVISION_ENCODINGS",
    "eagle3_logits_feature_specs",
    "eagle3_logits_tensors",
    "validate_eagle3_packing_inputs",
    "validate_eagle3_ref",
]

_SCHEMA = schema_of(FeatureAlgorithm.EAGLE3)

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
