"""The documented names exist, with the documented parameters; what is public says so in ``__all__``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import nccl_stream

REQUIRED = inspect.Parameter.empty
MIB = 1024 * 1024
CAPS = {
    "max_samples": 64,
    "max_bytes": 256 * MIB,
    "high_watermark_bytes": 192 * MIB,
    "low_watermark_bytes": 64 * MIB,
}
PUT_METADATA = ("run_id", "algorithm", "schema_version", "target_model_version", "draft_weight_version", "num_tokens")
PROMPT = ("input_ids", "attention_mask", "loss_mask")
PACKING = ("position_ids", "seq_lens", "doc_remaining")


def required(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, REQUIRED)


def optional(*names: str) -> dict[str, object]:
    return dict.fromkeys(names)


# Path to parameters and defaults; ... stands for a default that is made anew for each object.
DOCUMENTED: dict[str, dict[str, object]] = {
    "refs.FeatureSpec": required("shape", "dtype"),
    "refs.SampleRef": required(
        "sample_id",
        "run_id",
        "store_uri",
        "feature_keys",
        "feature_specs",
        "algorithm",
        "schema_version",
        "num_tokens",
        "estimated_bytes",
        "target_model_version",
        "draft_weight_version",
    ),
    "refs.SampleRef.feature_names": {},
    "refs.assert_no_tensors": {**required("obj"), "path": "ref"},
    "store.StoreHealth": required(
        "resident_bytes", "capacity_bytes", "sample_count", "high_watermark_hit", "low_watermark_hit"
    ),
    "store.StoreHandle": {**required("store", "sample_id", "ref"), "handle_id": ...},
    "store.FeatureStore.put": required("sample_id", "tensors", *PUT_METADATA),
    "store.FeatureStore.get": {**required("ref"), **optional("device")},
    "store.FeatureStore.release": required("handle"),
    "store.FeatureStore.health": {},
    "store.FeatureStore.gc": {},
    "store.FeatureStore.close": {},
    "stores.local.LocalFeatureStore": CAPS,
    "stores.local.LocalFeatureStore.put": {
        **required("sample_id", "tensors", "run_id"),
        "algorithm": nccl_stream.FeatureAlgorithm.EAGLE3,
        "schema_version": 1,
        "target_model_version": "0",
        "draft_weight_version": "0",
        "num_tokens": 0,
    },
    "queue.VisibilityTimeout": {"seconds": 30.0},
    "queue.Lease": {
        **required("ref", "deadline", "visibility_timeout"),
        "redelivery_count": 0,
        "lease_id": ...,
    },
    "queue.SampleRefQueue": {
        **required("store"),
        **optional("visibility_timeout", "high_watermark_bytes", "low_watermark_bytes", "on_pause", "on_resume"),
    },
    "queue.SampleRefQueue.ack": required("lease"),
    "queue.SampleRefQueue.fail": required("lease"),
    "queue.SampleRefQueue.acquire": {"poll_interval": 0.05},
    "queue.SampleRefQueue.put": required("ref"),
    "queue.SampleRefQueue.put_blocks_until_below": {
        **required("ref"),
        "poll_interval": 0.05,
        **optional("abort_when"),
    },
    "queue.SampleRefQueue.reclaim_expired": {},
    "queue.SampleRefQueue.close": {},
    "queue.SampleRefQueue.pending_count": {},
    "queue.SampleRefQueue.outstanding_count": {},
    "loader.FeatureDataLoader": {**required("queue", "store"), **optional("algorithm"), "acquire_poll_interval": 0.05},
    "loader.FeatureDataLoader.consume_now": {},
    "loader.FeatureDataLoader.close": {},
    "producer.FeatureProducer": {
        **required("target_backend", "store", "run_id"),
        **optional("algorithm"),
        "target_model_version": "0",
        "draft_weight_version": "0",
        **optional("sample_id_factory"),
    },
    "producer.FeatureProducer.produce": {**required(*PROMPT), **optional(*PACKING)},
    "producer.FeatureProducer.discard": required("ref"),
    "producer.FeatureProducer.get_input_embeddings": {},
    "producer.FeatureProducer.set_vocab_mapping": required("selected_token_ids", "selected_token_mask"),
    "producer.FeatureProducer.close": {},
    "async_pipeline.PromptSource.__call__": {},
    "async_pipeline.AsyncFeaturePipeline": {
        **required("producer", "queue", "prompt_source"),
        "poll_interval": 0.1,
        "stop_on_exhausted": True,
    },
    "async_pipeline.AsyncFeaturePipeline.start": {},
    "async_pipeline.AsyncFeaturePipeline.stop": {"join_timeout": 10.0},
    "async_pipeline.AsyncFeaturePipeline.join": optional("timeout"),
    "target.Eagle3TargetBatch": {
        **required("aux_hidden_states", *PROMPT),
        **optional("logits", "target_probs", "position_mask", *PACKING),
    },
    "target.Eagle3TargetBackend.generate_batch": {**required(*PROMPT), **optional(*PACKING)},
    "target.Eagle3TargetBackend.set_vocab_mapping": required("selected_token_ids", "selected_token_mask"),
    "target.HFEagle3TargetModel": {**required("model"), **optional("aux_layer_ids")},
}

TOP_LEVEL = (
    "AsyncFeaturePipeline",
    "FeatureAlgorithm",
    "FeatureDataLoader",
    "FeatureProducer",
    "FeatureSpec",
    "FeatureStore",
    "Lease",
    "LocalFeatureStore",
    "PromptSource",
    "SampleRef",
    "SampleRefQueue",
    "StoreHandle",
    "StoreHealth",
    "VisibilityTimeout",
    "assert_no_tensors",
)

# Packages that only hold modules.
PLAIN_PACKAGES = {f"nccl_stream.{name}" for name in ("coordination", "stores", "testing", "transport")}


def resolve(path: str) -> object:
    """Find ``module.attribute...`` below the package, where the module part may itself have dots."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module("nccl_stream." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"no module for {path}")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_callable_has_its_parameters_and_new_ones_are_keyword_only_with_defaults(path):
    parameters = [p for p in inspect.signature(resolve(path)).parameters.values() if p.name != "self"]
    documented = DOCUMENTED[path]
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == list(documented)
    for name, default in documented.items():
        if default is ...:
            assert positional[name] is not REQUIRED, name
        else:
            assert positional[name] == default, name
    for parameter in parameters:
        if parameter.name not in documented:
            assert parameter.kind is parameter.KEYWORD_ONLY, parameter.name
            assert parameter.default is not REQUIRED, parameter.name


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_documented_name_is_exported_by_the_package(name):
    assert name in nccl_stream.__all__
    assert getattr(nccl_stream, name).__module__.startswith("nccl_stream.")


def test_algorithms_have_their_wire_names():
    assert [member.value for member in nccl_stream.FeatureAlgorithm] == ["eagle3", "dflash", "dspark"]


@pytest.mark.parametrize("flag", ["is_closed", "is_drained"])
def test_state_of_the_queue_is_a_property(flag):
    assert isinstance(inspect.getattr_static(nccl_stream.SampleRefQueue, flag), property)


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(nccl_stream.__path__, prefix="nccl_stream.")
    return [nccl_stream, *(importlib.import_module(module.name) for module in found)]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_module_says_what_is_public_and_has_it(module):
    if module.__name__ in PLAIN_PACKAGES:
        assert not hasattr(module, "__all__")
        return
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    missing = [name for name in exported if not hasattr(module, name)]
    assert missing == []
