"""The main job's target: any depth of model, with the layers that the command line names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from _target import Target
from _text import ByteTokenizer

transformers = pytest.importorskip("transformers")


def model(num_layers: int) -> transformers.LlamaForCausalLM:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, num_hidden_layers=num_layers, **shape))


@pytest.mark.parametrize("num_layers", [4, 5, 6])
def test_shallow_target_is_told_of_the_option_that_helps(num_layers: int) -> None:
    with pytest.raises(SystemExit, match=f"--aux-layers: a target of {num_layers} layers"):
        Target(model(num_layers), ByteTokenizer())
    target = Target(model(num_layers), ByteTokenizer(), (0, 1, 3))
    assert target.backend("last_hidden_states").aux_layer_ids == [0, 1, 3]


def test_deep_target_needs_no_option() -> None:
    assert Target(model(7), ByteTokenizer()).backend("logits").aux_layer_ids == [1, 2, 3]


@pytest.mark.parametrize("layers", [(0, 0, 1), (0, 1, 6), (-1, 0, 1)])
def test_layers_that_the_target_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(SystemExit, match="--aux-layers"):
        Target(model(6), ByteTokenizer(), layers)


def test_main_job_takes_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import train_draft

    monkeypatch.setattr(sys, "argv", ["train_draft.py", "--aux-layers", "0", "2", "4"])
    assert train_draft.parse_arguments().aux_layers == [0, 2, 4]
    monkeypatch.setattr(sys, "argv", ["train_draft.py"])
    assert train_draft.parse_arguments().aux_layers is None
