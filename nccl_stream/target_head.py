"""The target's frozen final norm and head, on the draft side: makes logits of the last hidden states that are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from nccl_stream.batch import FeatureBatch
from nccl_stream.capture import CausalLM, Prompt, final_norm_of, shift_left
from nccl_stream.checkpoint import read_head
from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE, schema_of
from nccl_stream.vocab import DraftVocabulary, draft_supervision

__all__ = ["HeadSettings", "TargetHead"]

B = TypeVar("B", bound=FeatureBatch)

CHUNK_TOKENS = 1024
"""Slots whose logits are computed at once; bounds the memory beside the result."""

_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TEST_TOKENS = 4


@dataclass(frozen=True)
class HeadSettings:
    """What the weights do not tell.

    Attributes:
        eps: added to the variance in the norm.
        offset: added to the norm's weight; 1 for Gemma and relatives.
        centered: whether the norm subtracts the mean (LayerNorm) or not (RMSNorm).
        scale: factor on the logits.
        softcap: bound that logits approach by a tanh; 0 for none.
    """

    eps: float = 1e-6
    offset: float = 0.0
    centered: bool = False
    scale: float = 1.0
    softcap: float = 0.0


class TargetHead(nn.Module):
    """Turns the target's last hidden states into its logits, without gradients to any weight.

    Its weights are buffers that no optimizer and no checkpoint of an enclosing module sees.

    Args:
        weight: the head, ``[vocab, hidden]``.
        bias: of the head, ``[vocab]``.
        norm_weight: of the final norm, ``[hidden]``; without it only states taken after the norm are accepted.
        norm_bias: of the final norm, ``[hidden]``.
        settings: how they are applied.
        chunk_tokens: slots whose logits are computed at once.

    Raises:
        MisuseError: (a ``ValueError``) weights whose shapes do not fit together.
    """

    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        *,
        settings: HeadSettings | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        if weight.dim() != 2 or chunk_tokens < 1:
            raise MisuseError(f"weight must be [vocab, hidden] and chunk_tokens positive, got {tuple(weight.shape)}")
        vocab, hidden = weight.shape
        for name, tensor, size in (
            ("bias", bias, vocab),
            ("norm_weight", norm_weight, hidden),
            ("norm_bias", norm_bias, hidden),
        ):
            if tensor is not None and tensor.shape != (size,):
                raise MisuseError(f"{name} must be [{size}] with a weight of {[vocab, hidden]}, got {[*tensor.shape]}")
        self.settings = HeadSettings() if settings is None else settings
        self.chunk_tokens = chunk_tokens
        given = {"weight": weight, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
        for name, tensor in given.items():
            self.register_buffer(name, None if tensor is None else tensor.detach(), persistent=False)

    @classmethod
    def from_model(cls, model: nn.Module, *, chunk_tokens: int = CHUNK_TOKENS) -> TargetHead:
        """Take the head of a loaded Hugging Face causal LM; the weights are shared with it, not copied.

        Runs the model on a few tokens to find out how its norm works and to check that the head reproduces it.

        Raises:
            ConfigError: (a ``ValueError``) norm or head is not found, or does something this class does not.
        """
        head, norm = model.get_output_embeddings(), final_norm_of(model)  # type: ignore[operator]
        if head is None or getattr(norm, "weight", None) is None:
            raise ConfigError(f"{type(model).__name__} has no output embeddings, or a final norm without weight")
        ids = torch.arange(_TEST_TOKENS).unsqueeze(0) % len(head.weight)
        forward = CausalLM(model).run(Prompt(ids, torch.ones_like(ids), torch.ones_like(ids)), norm=True, logits=True)
        pre, post, logits = forward.pre_norm, forward.post_norm, forward.logits
        assert pre is not None
        assert post is not None
        assert logits is not None
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", HeadSettings.eps))
        config: Any = getattr(model, "config", None)
        scale, softcap = logit_settings(getattr(config, "get_text_config", lambda: config)())
        candidates = [
            cls(
                head.weight,
                getattr(head, "bias", None),
                norm.weight,  # type: ignore[arg-type]
                getattr(norm, "bias", None),
                settings=HeadSettings(eps, offset, centered, scale, softcap),
                chunk_tokens=chunk_tokens,
            )
            for offset in (0.0, 1.0)
            for centered in (False, True)
        ]
        best = min(candidates, key=lambda candidate: _distance(candidate.normed(pre), post))
        tolerance = _CHECK_TOLERANCE.get(post.dtype, 0.05)
        off = max(_distance(best.normed(pre), post), _distance(best.logits(pre, norm="pre"), logits))
        if not off <= tolerance:
            raise ConfigError(
                f"the final norm or head of {type(model).__name__} does something that TargetHead does not: its logits "
                f"are off by {off:.2g} of their size; stream logits or target_probs instead"
            )
        return best

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        keys: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        settings: HeadSettings | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> TargetHead:
        """Read the head out of a safetensors checkpoint: its two or three tensors alone, by key.

        Args:
            path: folder with ``config.json`` and ``model.safetensors``, or the index of a sharded checkpoint; of the
                shards only those are opened that hold a needed tensor.
            keys: the checkpoint's names of ``weight``, ``bias``, ``norm_weight``, ``norm_bias``, of those that cannot
                be found by their usual names.
            device: where the weights go.
            dtype: their dtype; default: as stored.
            settings: default: what ``config.json`` says.
            chunk_tokens: slots whose logits are computed at once.

        Raises:
            ConfigError: (a ``ValueError``) no such checkpoint, a damaged one, or tensors that cannot be told apart by
                their names.
        """
        found = read_head(Path(path), str(device), keys)
        tensors = {name: tensor.to(dtype) for name, tensor in found.tensors.items()} if dtype else found.tensors
        if settings is None:
            scale, softcap = logit_settings(found.config)
            settings = HeadSettings(found.eps, found.offset, found.centered, scale, softcap)
        return cls(**tensors, settings=settings, chunk_tokens=chunk_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """Return what :meth:`from_tensors` takes, to be shared with other ranks."""
        weights = {name: tensor for name, tensor in self.named_buffers() if tensor is not None}
        values = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in vars(self.settings).items()}
        return weights | values

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, chunk_tokens: int = CHUNK_TOKENS) -> TargetHead:
        """Make a head of what :meth:`tensors` returned elsewhere."""
        weights = {name: tensors.get(name) for name in ("bias", "norm_weight", "norm_bias")}
        values = {name: float(tensors[name]) for name in ("eps", "offset", "scale", "softcap")}
        settings = HeadSettings(**values, centered=bool(tensors["centered"]))
        return cls(tensors["weight"], **weights, settings=settings, chunk_tokens=chunk_tokens)

    def normed(self, hidden_states: Tensor) -> Tensor:
        """Apply the target's final norm to ``[..., hidden]``; computes in fp32 and returns the dtype given."""
        if self.norm_weight is None:
            raise ConfigError("states taken before the final norm need it: this head was made without norm_weight")
        settings, x = self.settings, hidden_states.float()
        if settings.centered:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + settings.eps)
        if settings.offset or settings.centered:
            x = x * (self.norm_weight.float() + settings.offset)
            x = x if self.norm_bias is None else x + self.norm_bias.float()
            return x.to(hidden_states.dtype)
        # Llama and its relatives round before they multiply, Gemma's after.
        return self.norm_weight * x.to(hidden_states.dtype)

    @torch.no_grad()
    def logits(self, hidden_states: Tensor, *, norm: Literal["pre", "post"] = "post") -> Tensor:
        """Make logits of last hidden states.

        Args:
            hidden_states: ``[batch, seq, hidden]``; they are brought to the head's dtype and device.
            norm: whether they were taken before or after the final norm.

        Returns:
            ``[batch, seq, vocab]`` in the head's dtype, in the frame given.
        """
        batch, seq, _ = hidden_states.shape
        result = torch.empty(batch, seq, len(self.weight), dtype=self.weight.dtype, device=self.weight.device)
        for at in range(0, seq, self._step(batch)):
            chunk = slice(at, at + self._step(batch))
            result[:, chunk] = self._chunk(hidden_states[:, chunk], norm)
        return result

    @torch.no_grad()
    def target_probs(
        self,
        hidden_states: Tensor,
        loss_mask: Tensor,
        vocabulary: DraftVocabulary,
        *,
        norm: Literal["pre", "post"] = "post",
    ) -> tuple[Tensor, Tensor]:
        """Make probabilities over the draft vocabulary, never holding the logits of more than a chunk.

        Returns:
            ``target_probs`` and ``position_mask`` as :func:`nccl_stream.vocab.draft_supervision` makes them.
        """
        vocabulary, loss_mask = vocabulary.to(self.weight.device), loss_mask.to(self.weight.device)
        batch, seq, _ = hidden_states.shape
        parts = [
            draft_supervision(
                self._chunk(hidden_states[:, at : at + self._step(batch)], norm),
                loss_mask[:, at : at + self._step(batch)],
                vocabulary,
            )
            for at in range(0, seq, self._step(batch))
        ]
        return torch.cat([probs for probs, _ in parts], dim=1), torch.cat([mask for _, mask in parts], dim=1)

    @torch.no_grad()
    def supervise(self, batch: B, vocabulary: DraftVocabulary | None = None) -> B:
        """Replace a batch's last hidden states by what they stand for; other batches come back as they are.

        Args:
            batch: a batch of an algorithm that allows last hidden states; a chunk of a streamed sample, too.
            vocabulary: makes ``target_probs`` and ``position_mask`` over it instead of full ``logits``.

        Returns:
            A batch with logits (or probabilities) in the algorithm's frame.

        Raises:
            ConfigError: (a ``ValueError``) the batch's states are in a frame from which that cannot be made; in place,
                for EAGLE-3, in a chunk that is not its sample's last.
        """
        hidden = batch.get("last_hidden_states")
        if hidden is None:
            return batch
        norm: Any = batch.attributes[NORM_ATTRIBUTE]
        shifts = "logits" in schema_of(batch.algorithm).shifted
        if batch.attributes[FRAME_ATTRIBUTE] == "unshifted":
            if shifts and not batch.is_final:
                raise ConfigError(
                    f"the chunk at position {batch.place.start_position} of sample {''.join(batch.sample_ids)!r} has "
                    "last hidden states in place, and the distribution of its last slot comes from the position after "
                    f"it, which is in the next chunk: open the sample with {FRAME_ATTRIBUTE}=shifted"
                )
            hidden = shift_left(hidden) if shifts else hidden
        elif not shifts:
            raise ConfigError(f"{batch.algorithm.value} takes its last hidden states unshifted; these are shifted")
        made: dict[str, Tensor]
        if vocabulary is None:
            made = {"logits": self.logits(hidden, norm=norm)}
        else:
            probs, mask = self.target_probs(hidden, batch["loss_mask"], vocabulary, norm=norm)
            made = {"target_probs": probs, "position_mask": mask}
        if shifts and batch.is_final:
            for tensor in made.values():
                tensor[:, -1:] = 0  # the slot that the shift freed, at the sample's end: zero in every encoding
        result: B = replace(batch, last_hidden_states=None, **made)  # type: ignore[type-var]
        result.sample_ids, result.place = batch.sample_ids, batch.place
        result.attributes = {
            name: value for name, value in batch.attributes.items() if name not in (NORM_ATTRIBUTE, FRAME_ATTRIBUTE)
        }
        return result

    def _step(self, batch: int) -> int:
        return max(1, self.chunk_tokens // batch)

    def _chunk(self, hidden_states: Tensor, norm: str) -> Tensor:
        if norm not in ("pre", "post"):
            raise MisuseError(f"norm must be 'pre' or 'post', got {norm!r}")
        hidden = hidden_states.to(self.weight.device)
        if norm == "pre":
            hidden = self.normed(hidden)
        logits = functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.settings.scale != 1.0:
            logits = logits * self.settings.scale
        if self.settings.softcap:
            logits = torch.tanh(logits / self.settings.softcap) * self.settings.softcap
        return logits


def logit_settings(config: Any) -> tuple[float, float]:
    """Return what a target's configuration (an object or a mapping) does to its logits: the factor and the soft cap."""

    def read(name: str, default: float) -> float:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else float(value)

    scale = read("logit_scale", 1.0) * read("lm_head_multiplier", 1.0) / read("logits_scaling", 1.0)
    return scale, read("final_logit_softcapping", 0.0)


def _distance(got: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((got.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
