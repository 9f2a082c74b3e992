"""An EAGLE-3 draft head and its training loss.

The frame is the one the features arrive in. At slot t stand the target's aux hidden states ``g_t``, the input id
``x_{t+1}`` and the target's logits of position t + 1, so the distribution to learn is that of ``x_{t+2}``.

Training-time test unrolls what drafting does later. In step j every slot keeps its own chain: the hidden state that it
produced in step j - 1 takes the place of ``g``, while ids, logits and mask move one more slot to the left. A slot
attends to the target-fed keys of slots up to its own and to the keys that its own chain made, which is what is in the
cache when the draft has run j tokens ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

STEP_DECAY = 0.8  # weight of each further training-time-test step, as in the EAGLE-3 paper's code

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the draft head; ``hidden`` and ``vocabulary`` are the target's."""

    hidden: int
    vocabulary: int
    heads: int
    intermediate: int
    rope_theta: float = 10_000.0
    num_aux: int = 3
    ttt_steps: int = 3


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of ``x [batch, heads, slots, head_dim]`` at ``positions [slots]``."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def shift_left(x: Tensor) -> Tensor:
    """``x [batch, slots, ...]`` one slot to the left, zeros at the end."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


class Eagle3Draft(nn.Module):
    """Fused aux states and token embeddings through one decoder layer to logits.

    Args:
        config: the shape.
        embedding: the target's input embedding ``[vocabulary, hidden]``, copied and frozen.
        head: the target's output projection ``[vocabulary, hidden]``, copied and trained on.
    """

    def __init__(self, config: DraftConfig, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.embed = nn.Embedding.from_pretrained(embedding.detach().float().clone(), freeze=True)
        self.fuse = nn.Linear(config.num_aux * hidden, hidden, bias=False)
        self.token_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.hidden_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, config.vocabulary, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(head)

    def layer(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The decoder layer: ``ids [batch, slots]`` and ``hidden [batch, slots, hidden]`` to the next hidden states.

        ``attend(q, k, v)`` gets rotated ``[batch, heads, slots, head_dim]`` tensors and owns masks and caches.
        """
        batch, slots = ids.shape
        mixed = torch.cat((self.token_norm(self.embed(ids)), self.hidden_norm(hidden)), dim=-1)
        q, k, v = (
            part.view(batch, slots, self.config.heads, -1).transpose(1, 2) for part in self.qkv(mixed).chunk(3, dim=-1)
        )
        q, k = (rotate(part, positions, self.config.rope_theta) for part in (q, k))
        hidden = hidden + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(functional.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., vocabulary]`` from the layer's output."""
        return self.head(self.norm(hidden))

    def forward(
        self,
        aux_hidden_states: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        target_logits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The training-time-test loss.

        Args:
            aux_hidden_states: ``[batch, slots, 3 * hidden]``, unshifted.
            input_ids: ``[batch, slots]``, one to the left.
            attention_mask: ``[batch, slots]``, unshifted; zero is padding.
            loss_mask: ``[batch, slots]``, one to the left; zero is not supervised.
            target_logits: ``[batch, slots, vocabulary]``, one to the left.

        Returns:
            The weighted mean of the steps' soft cross entropies, and the share of supervised slots of step 0 where
            draft and target have the same most likely token (detached).
        """
        target, mask = target_logits.float().softmax(-1), loss_mask.float()
        total, weights = target.new_zeros(()), 0.0
        agreement = target.new_zeros(())
        for step, logits in enumerate(self.unroll(aux_hidden_states, input_ids, attention_mask)):
            supervised = mask.sum().clamp(min=1.0)
            entropy = -(target * logits.log_softmax(-1)).sum(-1)
            total = total + STEP_DECAY**step * (entropy * mask).sum() / supervised
            weights += STEP_DECAY**step
            if step == 0:
                same = (logits.argmax(-1) == target.argmax(-1)).float()
                agreement = ((same * mask).sum() / supervised).detach()
            target, mask = shift_left(target), shift_left(mask)
        return total / weights, agreement

    def unroll(self, aux_hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Iterator[Tensor]:
        """The logits ``[batch, slots, vocabulary]`` of one training-time-test step after the other.

        Those of step j at slot t are for the token j + 2 positions after t.
        """
        hidden, ids = self.fuse(aux_hidden_states.float()), input_ids
        chain = ChainedAttention(attention_mask)
        positions = torch.arange(ids.shape[1], device=ids.device)
        for step in range(self.config.ttt_steps):
            hidden = self.layer(ids, hidden, positions + step, chain)
            yield self.logits(hidden)
            ids = shift_left(ids)


class ChainedAttention:
    """Attention of one training-time-test unroll: each call is the next step."""

    def __init__(self, attention_mask: Tensor) -> None:
        slots = attention_mask.shape[1]
        causal = torch.ones(slots, slots, dtype=torch.bool, device=attention_mask.device).tril()
        own = torch.eye(slots, dtype=torch.bool, device=attention_mask.device)  # no row may be empty: softmax is NaN
        self.allowed = (causal & attention_mask.bool()[:, None, None, :]) | own
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        q = q * q.shape[-1] ** -0.5
        slots = q.shape[2]
        scores = (q @ self.keys[0].mT).masked_fill(~self.allowed, float("-inf"))
        chain = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.cat((scores, *chain), dim=-1).softmax(-1)
        mixed = weights[..., :slots] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., slots + index, None] * value
        return mixed


class CachedAttention:
    """Attention of one decoded sequence over a key-value cache that can be cut back."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def crop(self, length: int) -> None:
        """Forget everything from slot ``length`` on."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = len(self)
        if self.keys is not None and self.values is not None:
            k, v = torch.cat((self.keys, k), dim=2), torch.cat((self.values, v), dim=2)
        self.keys, self.values = k, v
        new = q.shape[2]
        allowed = torch.ones(new, before + new, dtype=torch.bool, device=q.device).tril(before)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
