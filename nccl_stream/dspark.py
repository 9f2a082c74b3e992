"""DSpark: its features, validation, batch object and target backend. Nothing is shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nccl_stream.backend import TargetBackend
from nccl_stream.batch import FeatureBatch, register_batch
from nccl_stream.capture import EMBEDDING, CausalLM, Prompt, load_causal_lm
from nccl_stream.errors import ConfigError
from nccl_stream.refs import FeatureAlgorithm, FrozenDict, SampleRef
from nccl_stream.schema import INPUTS, PACKING, Feature, Schema, register_schema

__all__ = ["DSparkTargetBatch", "HFDSparkTargetModel", "validate_dspark_ref"]

_SCHEMA = register_schema(
    Schema(
        FeatureAlgorithm.DSPARK,
        features=(
            Feature("target_hidden_states", ("B", "S", "L*H"), "float"),
            Feature("target_last_hidden_states", ("B", "S", "H"), "float"),
            *INPUTS,
            *PACKING,
        ),
        supervision={1: ((),)},
        renames=FrozenDict(
            {"hidden_states": "target_hidden_states", "last_hidden_states": "target_last_hidden_states"}
        ),
        min_supervised_run=2,
    )
)


def validate_dspark_ref(ref: SampleRef) -> None:
    """Check that ``ref`` is a DSpark ref that a consumer can use, before anything is materialized.

    Raises:
        SchemaError: (``ValueError``) another algorithm or schema version, a core feature missing, or partial packing.
    """
    _SCHEMA.validate(ref)


@register_batch
@dataclass(eq=False)
class DSparkTargetBatch(FeatureBatch):
    """Context and supervision for one DSpark training step, every feature in place.

    Attributes:
        target_hidden_states: ``[batch, seq, hidden * layers]`` in the target's dtype, the layers in ascending order.
        target_last_hidden_states: ``[batch, seq, hidden]``, taken after the target's final norm; the distribution of
            label ``t`` comes from slot ``t - 1``.
        input_ids: ``[batch, seq]`` int64.
        loss_mask: ``[batch, seq]``, dtype as given.
        attention_mask: ``[batch, seq]``, dtype as given; DSpark trainers do without.
        position_ids: ``[batch, seq]`` positions inside each packed document.
        seq_lens: ``[batch, max_docs]`` lengths of the packed documents, summing to ``seq``.
        doc_remaining: ``[batch, seq]`` tokens left in the document after each slot.

    Raises:
        SchemaError: (a ``ValueError``) partial packing features.
    """

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.DSPARK

    target_hidden_states: Tensor
    target_last_hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    attention_mask: Tensor | None = field(default=None, kw_only=True)
    position_ids: Tensor | None = field(default=None, kw_only=True)
    seq_lens: Tensor | None = field(default=None, kw_only=True)
    doc_remaining: Tensor | None = field(default=None, kw_only=True)


class HFDSparkTargetModel(TargetBackend):
    """Runs any Hugging Face causal LM in this process and captures context layers and the head's input by hooks.

    The context equals ``hidden_states[i + 1]`` of a forward with ``output_hidden_states=True`` for every id ``i``: that
    of -1 is the embedding output, and the last layer's is taken after the final norm. Several threads may call it, and
    the model, at once.

    Args:
        model: A causal LM; it is put into eval mode and never trained.
        target_layer_ids: Strictly increasing layer ids, at least one; -1 stands for the embedding output.

    Raises:
        ConfigError: (a ``ValueError``) the decoder layers cannot be found, or ids that break the rule.
    """

    algorithm: ClassVar[FeatureAlgorithm] = FeatureAlgorithm.DSPARK

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int]) -> None:
        self._lm = CausalLM(model)
        self._last = self._lm.num_layers - 1
        ids = list(target_layer_ids)
        if not ids or not all(EMBEDDING <= i <= self._last for i in ids) or any(a >= b for a, b in pairwise(ids)):
            raise ConfigError(
                f"target_layer_ids must be strictly increasing layers of 0..{self._last}, -1 for the embedding output; "
                f"got {ids}"
            )
        self.target_layer_ids = ids
        self.model = self._lm.model

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, target_layer_ids: Sequence[int], **model_kwargs: Any
    ) -> HFDSparkTargetModel:
        """Load a causal LM by what ``AutoModelForCausalLM.from_pretrained`` takes.

        Raises:
            ConfigError: transformers is not installed, or as for the constructor.
        """
        return cls(load_causal_lm(name_or_path, **model_kwargs), target_layer_ids)

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
    ) -> DSparkTargetBatch:
        """Run the model once, without gradients; see :meth:`CausalLM.run` for what it raises."""
        prompt = Prompt(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining)
        forward = self._lm.run(prompt, [i for i in self.target_layer_ids if i != self._last], norm=True)
        assert forward.post_norm is not None
        states = {**forward.layers, self._last: forward.post_norm}
        return DSparkTargetBatch(
            target_hidden_states=torch.cat([states[layer_id] for layer_id in self.target_layer_ids], dim=-1),
            target_last_hidden_states=forward.post_norm,
            input_ids=forward.prompt.input_ids,
            loss_mask=forward.prompt.loss_mask,
            **forward.prompt.packing,
        )
