"""The main job's draft head: its training frame, and that draft-and-verify decoding changes nothing but the speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from _draft import STEP_DECAY, CachedAttention, DraftConfig, Eagle3Draft

HIDDEN, VOCABULARY, SLOTS, STEPS = 16, 23, 9, 3


def new_draft(seed: int = 0) -> Eagle3Draft:
    torch.manual_seed(seed)
    config = DraftConfig(hidden=HIDDEN, vocabulary=VOCABULARY, heads=2, intermediate=24, ttt_steps=STEPS)
    return Eagle3Draft(config, torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY, HIDDEN))


def features(seed: int = 1, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "aux_hidden_states": torch.randn(batch, SLOTS, 3 * HIDDEN, generator=generator),
        "input_ids": torch.randint(0, VOCABULARY, (batch, SLOTS), generator=generator),
        "attention_mask": torch.ones(batch, SLOTS, dtype=torch.int64),
        "loss_mask": torch.ones(batch, SLOTS, dtype=torch.int64),
        "target_logits": torch.randn(batch, SLOTS, VOCABULARY, generator=generator),
    }


@pytest.mark.parametrize("slot", [0, 3, SLOTS - STEPS])
def test_unrolled_steps_equal_drafting_ahead_from_that_slot(slot: int) -> None:
    draft, given = new_draft(), features(batch=1)
    unrolled = list(draft.unroll(given["aux_hidden_states"], given["input_ids"], given["attention_mask"]))
    cache, ids = CachedAttention(), given["input_ids"]
    fused = draft.fuse(given["aux_hidden_states"][:, : slot + 1])
    hidden = draft.layer(ids[:, : slot + 1], fused, torch.arange(slot + 1), cache)[:, -1:]
    for step in range(STEPS):
        torch.testing.assert_close(draft.logits(hidden)[0, 0], unrolled[step][0, slot])
        position = slot + step + 1
        if step + 1 < STEPS:
            hidden = draft.layer(ids[:, position : position + 1], hidden, torch.tensor([position]), cache)


def test_loss_ignores_unsupervised_and_shifted_out_slots() -> None:
    draft, given = new_draft(), features()
    given["loss_mask"][:, SLOTS // 2 :] = 0
    loss, _ = draft(**given)
    given["target_logits"][:, SLOTS // 2 :] = 99.0 * torch.randn(2, SLOTS - SLOTS // 2, VOCABULARY)
    again, _ = draft(**given)
    assert loss.item() == again.item()


def test_loss_of_a_draft_that_knows_the_targets_logits_is_their_entropy() -> None:
    """Step j of slot t is held against the target's logits at slot t + j, so a draft that repeats them is perfect."""
    draft, given = new_draft(), features()
    given["loss_mask"][:, -1] = 0
    known = given["target_logits"]
    draft.unroll = lambda *_: (known.roll(-step, dims=1) for step in range(STEPS))  # type: ignore[method-assign]
    loss, agreement = draft(**given)
    entropies = torch.distributions.Categorical(logits=known).entropy()[:, :-1]
    means = [entropies[:, step:].mean() for step in range(STEPS)]
    weights = [STEP_DECAY**step for step in range(STEPS)]
    torch.testing.assert_close(loss, sum(m * w for m, w in zip(means, weights, strict=True)) / sum(weights))
    assert agreement.item() == 1.0


def test_padding_batch_gives_zero_and_no_nan() -> None:
    draft, given = new_draft(), features()
    given = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    given["attention_mask"] += 1
    loss, _ = draft(**given)
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.isfinite(p.grad).all() for p in draft.parameters() if p.grad is not None)


def test_padded_keys_are_not_attended_to() -> None:
    draft, given = new_draft(), features(batch=1)
    given["attention_mask"][:, :2] = 0
    first = list(draft.unroll(given["aux_hidden_states"], given["input_ids"], given["attention_mask"]))
    given["aux_hidden_states"][:, :2] = 5.0
    second = list(draft.unroll(given["aux_hidden_states"], given["input_ids"], given["attention_mask"]))
    assert all(torch.isfinite(logits).all() for logits in first)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[:, 2:], b[:, 2:])


def new_target() -> object:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("width", [1, 4])
def test_draft_and_verify_gives_the_targets_own_greedy_text(width: int) -> None:
    model = new_target()
    import _decode

    prompts = [torch.randint(0, VOCABULARY, (length,)) for length in (7, 4)]
    result = _decode.acceptance(model, new_draft(), (1, 2, 3), prompts, tokens=24, width=width)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        assert output == _decode.greedy(model, prompt, len(output))
    assert result.tokens == sum(len(output) - 1 for output in result.outputs) >= 48
    assert 1.0 <= result.mean_length <= width + 1


@pytest.mark.parametrize(("right", "expected"), [(0, 1), (2, 3), (4, 5)])
def test_acceptance_length_counts_right_drafts_and_the_targets_own_token(
    right: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_target()
    import _decode

    prompt = torch.randint(0, VOCABULARY, (7,))
    plain = torch.tensor(_decode.greedy(model, prompt, 60))
    genuine = _decode.propose

    def propose(draft: Eagle3Draft, cache: CachedAttention, aux: torch.Tensor, ids: torch.Tensor, width: int):  # type: ignore[no-untyped-def]
        genuine(draft, cache, aux, ids, width)
        begin = len(cache) + 1 - prompt.numel()
        tokens = plain[begin : begin + width].clone()
        tokens[right:] = (tokens[right:] + 1) % VOCABULARY
        return tokens

    monkeypatch.setattr(_decode, "propose", propose)
    result = _decode.acceptance(model, new_draft(), (1, 2, 3), [prompt], tokens=30, width=4)
    assert result.outputs[0] == tuple(plain[: len(result.outputs[0])].tolist())
    assert result.mean_length == expected
