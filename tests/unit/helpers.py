"""Refs for the contract tests."""

import torch

from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef

CORE = ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask")


def make_ref(sample_id="s", **overrides):
    names = overrides.pop("names", (*CORE, "logits"))
    fields = {
        "sample_id": sample_id,
        "run_id": "run",
        "store_uri": "mem://somewhere",
        "feature_keys": {name: f"{sample_id}/{name}" for name in names},
        "feature_specs": {name: FeatureSpec((2, 8), torch.float32) for name in names},
        "algorithm": FeatureAlgorithm.EAGLE3,
        "schema_version": 1,
        "num_tokens": 16,
        "estimated_bytes": 320,
        "target_model_version": "0",
        "draft_weight_version": "0",
    }
    return SampleRef(**{**fields, **overrides})
