"""Draft-and-verify greedy decoding, to measure what a draft is worth.

The draft proposes ``width`` tokens, the target checks them all in one forward, and the longest prefix that the target
would have chosen itself is kept together with the target's own next token. The output is that of greedy decoding with
the target alone; only the number of target forwards changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _draft import CachedAttention, Eagle3Draft
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """What a number of prompts gave: ``tokens`` made in ``rounds`` target forwards."""

    tokens: int
    rounds: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def mean_length(self) -> float:
        """Tokens per target forward: accepted drafts plus the target's own one."""
        return self.tokens / self.rounds


class VerifyingTarget:
    """A causal LM with its cache, for one sequence."""

    def __init__(self, model: Any, aux_layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._model = model
        self._layers = tuple(aux_layer_ids)
        self._cache = DynamicCache()

    def extend(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Runs ``ids [n]`` after what is cached: greedy choices ``[n]`` and aux states ``[1, n, 3 * hidden]``."""
        out = self._model(input_ids=ids[None], past_key_values=self._cache, use_cache=True, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1] for layer in self._layers], dim=-1)
        return out.logits[0].argmax(-1), aux

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._cache.crop(length)


def propose(draft: Eagle3Draft, cache: CachedAttention, aux: Tensor, ids: Tensor, width: int) -> Tensor:
    """``width`` draft tokens ``[width]``.

    ``aux [1, n, 3 * hidden]`` and ``ids [n]`` are the slots that the target has confirmed since the last call; the
    cache keeps those and forgets what the draft ran ahead.
    """
    begin = len(cache)
    confirmed = begin + ids.numel()
    positions = torch.arange(begin, confirmed, device=ids.device)
    hidden = draft.layer(ids[None], draft.fuse(aux.float()), positions, cache)[:, -1:]
    tokens = []
    for ahead in range(width):
        tokens.append(draft.logits(hidden)[0, -1].argmax(-1))
        if ahead + 1 < width:
            position = torch.tensor([confirmed + ahead], device=ids.device)
            hidden = draft.layer(tokens[-1].view(1, 1), hidden, position, cache)
    cache.crop(confirmed)
    return torch.stack(tokens)


def speculate(
    model: Any, draft: Eagle3Draft, aux_layer_ids: Sequence[int], prompt: Tensor, tokens: int, width: int
) -> tuple[list[int], int]:
    """At least ``tokens`` greedy tokens after ``prompt [n]``, and the number of verifying forwards they took."""
    target, cache = VerifyingTarget(model, aux_layer_ids), CachedAttention()
    choices, aux = target.extend(prompt)
    known = torch.cat((prompt, choices[-1:]))  # every confirmed id; the last one has not been through the target yet
    rounds = 0
    while known.numel() - prompt.numel() - 1 < tokens:
        drafted = propose(draft, cache, aux, known[len(cache) + 1 :], width)
        choices, aux = target.extend(torch.cat((known[-1:], drafted)))
        accepted = int((drafted == choices[:-1]).long().cumprod(0).sum())
        target.crop(known.numel() + accepted)
        aux = aux[:, : accepted + 1]
        known = torch.cat((known, drafted[:accepted], choices[accepted : accepted + 1]))
        rounds += 1
    return known[prompt.numel() :].tolist(), rounds


@torch.no_grad()
def acceptance(
    model: Any,
    draft: Eagle3Draft,
    aux_layer_ids: Sequence[int],
    prompts: Sequence[Tensor],
    tokens: int = 48,
    width: int = 4,
) -> Acceptance:
    """Draft-and-verify over ``prompts``; the first token after a prompt comes from its prefill and is not counted."""
    was_training = draft.training
    draft.eval()
    made, rounds, outputs = 0, 0, []
    for prompt in prompts:
        output, verified = speculate(model, draft, aux_layer_ids, prompt, tokens, width)
        made += len(output) - 1
        rounds += verified
        outputs.append(tuple(output))
    draft.train(was_training)
    return Acceptance(made, rounds, tuple(outputs))


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, tokens: int) -> tuple[int, ...]:
    """What the target alone gives, one token per forward: the reference for :func:`acceptance`'s outputs."""
    target = VerifyingTarget(model, (0,))
    choices, _ = target.extend(prompt)
    output = [choices[-1]]
    while len(output) < tokens:
        choices, _ = target.extend(output[-1].view(1))
        output.append(choices[-1])
    return tuple(int(token) for token in output)
