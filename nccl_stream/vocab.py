"""The draft vocabulary: which of the target's tokens a draft predicts, and the target's distribution over them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.refs import SampleRef
from nccl_stream.schema import schema_of

__all__ = ["VOCABULARY_ATTRIBUTE", "DraftVocabulary", "draft_supervision"]

VOCABULARY_ATTRIBUTE = "draft_vocabulary.sha256"
"""Ref attribute: digest of the vocabulary that ``target_probs`` are over."""


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A choice of the target's tokens, in draft order.

    Attributes:
        selected_token_ids: ``[draft_vocab]`` int64, the target id of each draft token.
        selected_token_mask: ``[vocab]`` bool, true for the selected ids.

    Raises:
        MisuseError: (a ``ValueError``) ids that repeat or lie outside of the vocabulary, or a mask that selects others.
    """

    selected_token_ids: Tensor
    selected_token_mask: Tensor

    def __post_init__(self) -> None:
        ids, mask = self.selected_token_ids, self.selected_token_mask
        if ids.dim() != 1 or ids.dtype is not torch.int64 or ids.numel() == 0:
            raise MisuseError(f"selected_token_ids must be a non-empty int64 [draft_vocab], got {ids.dtype}")
        if mask.dim() != 1 or mask.dtype is not torch.bool:
            raise MisuseError(f"selected_token_mask must be bool [vocab], got {mask.dtype} {tuple(mask.shape)}")
        if int(ids.min()) < 0 or int(ids.max()) >= len(mask):
            raise MisuseError(
                f"selected_token_ids reach from {int(ids.min())} to {int(ids.max())} of {len(mask)} tokens"
            )
        if len(torch.unique(ids)) != len(ids):
            raise MisuseError("selected_token_ids names a token twice")
        if int(mask.sum()) != len(ids) or not bool(mask[ids.to(mask.device)].all()):
            raise MisuseError(f"selected_token_mask selects {int(mask.sum())} tokens, not the {len(ids)} ids given")

    @classmethod
    def from_ids(cls, ids: Tensor, vocab_size: int) -> DraftVocabulary:
        """Make the map of target ids in draft order."""
        ids = ids.to(torch.int64)
        mask = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
        mask[ids[(ids >= 0) & (ids < vocab_size)]] = True
        return cls(ids, mask)

    @classmethod
    def from_counts(cls, counts: Tensor, draft_vocab_size: int) -> DraftVocabulary:
        """Choose the most frequent tokens, in ascending order of their ids; of equally frequent ones the lowest.

        Args:
            counts: ``[vocab]``, how often each target id occurs among supervised tokens.
            draft_vocab_size: how many to choose.
        """
        order = torch.argsort(counts, descending=True, stable=True)
        return cls.from_ids(order[:draft_vocab_size].sort().values, len(counts))

    @classmethod
    def from_tables(cls, t2d: Tensor, d2t: Tensor) -> DraftVocabulary:
        """Read the form that checkpoints have: ``t2d`` bool ``[vocab]``, ``d2t`` the *offset* of each draft token."""
        d2t = d2t.to(torch.int64)
        return cls(d2t + torch.arange(len(d2t), device=d2t.device), t2d.to(torch.bool))

    @property
    def t2d(self) -> Tensor:
        """``[vocab]`` bool, whether the draft has a target token."""
        return self.selected_token_mask

    @property
    def d2t(self) -> Tensor:
        """``[draft_vocab]`` int64, what to add to a draft id to get the target's."""
        return self.selected_token_ids - torch.arange(len(self), device=self.selected_token_ids.device)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the size of the target's vocabulary and of the ids in draft order, in hex."""
        sha = hashlib.sha256(len(self.selected_token_mask).to_bytes(8, "little"))
        sha.update(self.selected_token_ids.cpu().contiguous().numpy().astype("<i8").tobytes())
        return sha.hexdigest()

    def __len__(self) -> int:
        return len(self.selected_token_ids)

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """Return the map on ``device``."""
        if self.selected_token_ids.device == torch.device(device):
            return self
        return DraftVocabulary(self.selected_token_ids.to(device), self.selected_token_mask.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return what :meth:`from_tensors` takes, to be shared with other ranks."""
        return {"selected_token_ids": self.selected_token_ids, "selected_token_mask": self.selected_token_mask}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> DraftVocabulary:
        """Make the map of what :meth:`tensors` returned elsewhere."""
        return cls(tensors["selected_token_ids"], tensors["selected_token_mask"])

    def require_same(self, digest: str, whose: str) -> None:
        """Check that somebody else's map is this one.

        Args:
            digest: the :attr:`digest` of the other map.
            whose: who has it, for the message.

        Raises:
            ConfigError: (a ``ValueError``) it is another one; probabilities over it would be taken for other tokens.
        """
        if digest != self.digest:
            raise ConfigError(
                f"{whose} has a draft vocabulary with digest {digest[:12]}, this rank one of {len(self)} tokens with "
                f"{self.digest[:12]}: both sides must hold the same map, in the same order"
            )

    def require_same_in(self, ref: SampleRef) -> None:
        """Check that what a sample has over a draft vocabulary is over this one. Other samples pass.

        Raises:
            ConfigError: (a ``ValueError``) another width, another digest, or no digest, so that nobody can tell.
        """
        digest, whose = ref.attributes.get(VOCABULARY_ATTRIBUTE), f"the target of sample {ref.sample_id!r}"
        for feature in schema_of(ref.algorithm).features:
            spec = ref.feature_specs.get(feature.name)
            if spec is None or "Vd" not in feature.dims:
                continue
            axis = feature.dims.index("Vd")
            if len(spec.shape) != len(feature.dims) or spec.shape[axis] != len(self):
                raise ConfigError(
                    f"{whose} has {feature.name} of {list(spec.shape)}, this rank a draft vocabulary of {len(self)} "
                    "tokens: both sides must hold the same map"
                )
            if digest is None:
                raise ConfigError(
                    f"{whose} does not say which draft vocabulary its {feature.name} are over, so it cannot be "
                    "compared with this rank's: set it with producer.set_vocab_mapping, or put the samples with the "
                    f"attribute {VOCABULARY_ATTRIBUTE!r}. (NeMo's refs cannot carry it: leave vocabulary= out there.)"
                )
        if digest is not None:
            self.require_same(digest, whose)


def draft_supervision(logits: Tensor, loss_mask: Tensor, vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """Restrict the target's distribution to the draft vocabulary.

    Args:
        logits: ``[batch, seq, vocab]``, any float dtype.
        loss_mask: ``[batch, seq]``, in the same frame.
        vocabulary: on the same device.

    Returns:
        ``[batch, seq, draft_vocab]`` fp32, softmax over the draft vocabulary; and ``[batch, seq, 1]`` bool, whether the
        slot is supervised and the best token of the full vocabulary is in the draft's.
    """
    if logits.shape[-1] != len(vocabulary.selected_token_mask):
        raise MisuseError(
            f"logits over {logits.shape[-1]} tokens, but the draft vocabulary is a choice of "
            f"{len(vocabulary.selected_token_mask)}"
        )
    probabilities = logits[..., vocabulary.selected_token_ids].float().softmax(dim=-1)
    in_draft = vocabulary.selected_token_mask[logits.argmax(dim=-1)]
    return probabilities, (in_draft & (loss_mask != 0)).unsqueeze(-1)
