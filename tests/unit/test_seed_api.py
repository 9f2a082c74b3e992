"""Every documented name exists here under its path, with the documented parameters, defaults, bases and properties.

The tables below are the documentation of NeMo AutoModel's ``components.speculative.streaming`` and of mstar's
``streaming.stream_buffer``, name by name, with their prefixes replaced by ``nccl_stream``. What we add to a documented
callable is keyword-only and has a default.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import logging
import typing

import pytest

import nccl_stream
from nccl_stream.chunk_policy import FixedChunkPolicy
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.store import FeatureStore

REQUIRED = inspect.Parameter.empty
MADE_ANEW = object()  # a default that is made for each object
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
EXIT = ("exc_type", "exc", "tb")


def required(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, REQUIRED)


def optional(*names: str) -> dict[str, object]:
    return dict.fromkeys(names)


PUT_OF_A_STORE = {
    **required("sample_id", "tensors", "run_id"),
    "algorithm": FeatureAlgorithm.EAGLE3,
    "schema_version": 1,
    "target_model_version": "0",
    "draft_weight_version": "0",
    "num_tokens": 0,
}
GET = {**required("ref"), **optional("device")}

# Callables with their parameters and defaults, in order; a class stands for its constructor.
CALLABLES: dict[str, dict[str, object]] = {
    "refs.FeatureSpec": required("shape", "dtype"),
    "refs.FeatureSpec.__post_init__": {},
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
    "refs.SampleRef.__post_init__": {},
    "refs.SampleRef.feature_names": {},
    "refs.assert_no_tensors": {**required("obj"), "path": "ref"},
    "store.StoreHealth": required(
        "resident_bytes", "capacity_bytes", "sample_count", "high_watermark_hit", "low_watermark_hit"
    ),
    "store.StoreHandle": {**required("store", "sample_id", "ref"), "handle_id": MADE_ANEW},
    "store.FeatureStore": {},
    "store.FeatureStore.put": required("sample_id", "tensors", *PUT_METADATA),
    "store.FeatureStore.get": GET,
    "store.FeatureStore.release": required("handle"),
    "store.FeatureStore.health": {},
    "store.FeatureStore.gc": {},
    "store.FeatureStore.close": {},
    "stores.local.LocalFeatureStore": CAPS,
    "stores.local.LocalFeatureStore.put": PUT_OF_A_STORE,
    "stores.local.LocalFeatureStore.get": GET,
    "stores.local.LocalFeatureStore.release": required("handle"),
    "stores.local.LocalFeatureStore.health": {},
    "stores.local.LocalFeatureStore.gc": {},
    "stores.local.LocalFeatureStore.close": {},
    "stores.shared_dir.SharedDirFeatureStore": {**required("directory"), **CAPS},
    "stores.shared_dir.SharedDirFeatureStore.put": PUT_OF_A_STORE,
    "stores.shared_dir.SharedDirFeatureStore.get": GET,
    "stores.shared_dir.SharedDirFeatureStore.release": required("handle"),
    "stores.shared_dir.SharedDirFeatureStore.health": {},
    "stores.shared_dir.SharedDirFeatureStore.gc": {},
    "stores.shared_dir.SharedDirFeatureStore.close": {},
    "queue.VisibilityTimeout": {"seconds": 30.0},
    "queue.VisibilityTimeout.__post_init__": {},
    "queue.Lease": {
        **required("ref", "deadline", "visibility_timeout"),
        "redelivery_count": 0,
        "lease_id": MADE_ANEW,
    },
    "queue.SampleRefQueue": {
        **required("store"),
        **optional("visibility_timeout", "high_watermark_bytes", "low_watermark_bytes", "on_pause", "on_resume"),
    },
    "queue.SampleRefQueue.ack": required("lease"),
    "queue.SampleRefQueue.acquire": {"poll_interval": 0.05},
    "queue.SampleRefQueue.close": {},
    "queue.SampleRefQueue.fail": required("lease"),
    "queue.SampleRefQueue.outstanding_count": {},
    "queue.SampleRefQueue.pending_count": {},
    "queue.SampleRefQueue.put": required("ref"),
    "queue.SampleRefQueue.put_blocks_until_below": {
        **required("ref"),
        "poll_interval": 0.05,
        **optional("abort_when"),
    },
    "queue.SampleRefQueue.reclaim_expired": {},
    "loader.FeatureDataLoader": {**required("queue", "store"), **optional("algorithm"), "acquire_poll_interval": 0.05},
    "loader.FeatureDataLoader.__enter__": {},
    "loader.FeatureDataLoader.__exit__": required(*EXIT),
    "loader.FeatureDataLoader.__iter__": {},
    "loader.FeatureDataLoader.__next__": {},
    "loader.FeatureDataLoader.consume_now": {},
    "loader.FeatureDataLoader.close": {},
    "producer.FeatureProducer": {
        **required("target_backend", "store", "run_id"),
        **optional("algorithm"),
        "target_model_version": "0",
        "draft_weight_version": "0",
        **optional("sample_id_factory"),
    },
    "producer.FeatureProducer.close": {},
    "producer.FeatureProducer.discard": required("ref"),
    "producer.FeatureProducer.get_input_embeddings": {},
    "producer.FeatureProducer.produce": {**required(*PROMPT), **optional(*PACKING)},
    "producer.FeatureProducer.set_vocab_mapping": required("selected_token_ids", "selected_token_mask"),
    "async_pipeline.PromptSource.__call__": {},
    "async_pipeline.AsyncFeaturePipeline": {
        **required("producer", "queue", "prompt_source"),
        "poll_interval": 0.1,
        "stop_on_exhausted": True,
    },
    "async_pipeline.AsyncFeaturePipeline.__enter__": {},
    "async_pipeline.AsyncFeaturePipeline.__exit__": required(*EXIT),
    "async_pipeline.AsyncFeaturePipeline.join": optional("timeout"),
    "async_pipeline.AsyncFeaturePipeline.start": {},
    "async_pipeline.AsyncFeaturePipeline.stop": {"join_timeout": 10.0},
    "stream_buffer.collate": required("items"),
    "stream_buffer.StreamBuffer": {
        **required("request_id", "edge_name", "from_partition", "policy"),
        **optional("join_dim", "joiner"),
        "walk_tagged": False,
    },
    "stream_buffer.StreamBuffer.has_chunk_ready": optional("consumer_walk"),
    "stream_buffer.StreamBuffer.peek_walk": {},
    "stream_buffer.StreamBuffer.pop_chunk": {},
    "stream_buffer.StreamBuffer.pop_waiting_edge": {},
    "stream_buffer.StreamBuffer.pre_read_register": {**required("tensor_id"), **optional("walk")},
    "stream_buffer.StreamBuffer.pre_read_register_joined": {**required("tensor_ids"), **optional("walk")},
    "stream_buffer.StreamBuffer.prime_context": required("context_items"),
    "stream_buffer.StreamBuffer.put": required("tensor_id", "item"),
    "stream_buffer.StreamBuffer.signal_done": {"num_items": 0},
    "stream_buffer.StreamBuffer.store_uningested_edge": required("streaming_edge"),
    "stream_buffer.StreamChunk": {
        **required("data", "chunk_index"),
        "start_offset": 0,
        "is_final": False,
        "context_items": 0,
        "num_items": 0,
        "released": MADE_ANEW,
    },
    "stream_buffer.StreamChunkInfo": required("start_offset", "context_items", "num_items", "is_final"),
    "stream_buffer.StreamingEdge": required("name", "next_node", "uuids", "chunk"),
}

# Documented behind private constructor parameters, which are no API: keywords here.
KEYWORDS: dict[str, dict[str, object]] = {
    "stream_buffer.StreamBuffer": {"ingested_chunk": None, "producer_done": False, "maybe_ready": True},
}

# From a package that the documented signatures refer to, or that replacing the prefix needs.
NEIGHBOURS: dict[str, dict[str, object]] = {
    "target.Eagle3TargetBatch": {
        **required("aux_hidden_states", *PROMPT),
        **optional("logits", "target_probs", "position_mask", *PACKING),
    },
    "target.Eagle3TargetBackend.generate_batch": {**required(*PROMPT), **optional(*PACKING)},
    "target.Eagle3TargetBackend.get_input_embeddings": {},
    "target.Eagle3TargetBackend.set_vocab_mapping": required("selected_token_ids", "selected_token_mask"),
    "target.Eagle3TargetBackend.close": {},
    "target.HFEagle3TargetModel": {**required("model"), **optional("aux_layer_ids")},
    "eagle3.validate_eagle3_ref": required("ref"),
    "eagle3.eagle3_logits_feature_specs": {
        **required("aux_hidden_states", *PROMPT, "logits"),
        **optional(*PACKING),
    },
}

BASES: dict[str, type] = {
    "refs.FeatureAlgorithm": enum.Enum,
    "stores.local.LocalFeatureStore": FeatureStore,
    "stores.shared_dir.SharedDirFeatureStore": FeatureStore,
    "stream_buffer.StreamChunkInfo": tuple,
    "stream_buffer.StreamingEdge": tuple,
}

# Dataclasses with their fields; all but the chunk are frozen.
DATACLASSES = (
    "refs.FeatureSpec",
    "refs.SampleRef",
    "store.StoreHandle",
    "store.StoreHealth",
    "queue.Lease",
    "queue.VisibilityTimeout",
    "stream_buffer.StreamChunk",
)

PROPERTIES = (
    "queue.SampleRefQueue.is_closed",
    "stores.local.LocalFeatureStore.store_uri",
    "stores.shared_dir.SharedDirFeatureStore.store_uri",
    "stream_buffer.StreamBuffer.producer_done",
    "stream_buffer.StreamBuffer.maybe_ready",
    "stream_buffer.StreamChunk.info",
)

BUFFER_ATTRIBUTES = (
    "request_id",
    "edge_name",
    "from_partition",
    "policy",
    "join_dim",
    "joiner",
    "walk_tagged",
    "ingested_chunk",
    "producer_done",
    "maybe_ready",
)

ABSTRACT = {"close", "gc", "get", "health", "put", "release"}

PACKAGE = {
    "AsyncFeaturePipeline": "async_pipeline",
    "FeatureAlgorithm": "refs",
    "FeatureDataLoader": "loader",
    "FeatureProducer": "producer",
    "FeatureSpec": "refs",
    "FeatureStore": "store",
    "Lease": "queue",
    "LocalFeatureStore": "stores.local",
    "PromptSource": "async_pipeline",
    "SampleRef": "refs",
    "SampleRefQueue": "queue",
    "SharedDirFeatureStore": "stores.shared_dir",
    "StoreHandle": "store",
    "StoreHealth": "store",
    "VisibilityTimeout": "queue",
    "assert_no_tensors": "refs",
}

EVERYTHING = {**CALLABLES, **NEIGHBOURS}


def resolve(path: str) -> typing.Any:
    """Find ``module.attribute...`` below the package, where the module part may itself have dots."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: typing.Any = importlib.import_module("nccl_stream." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = inspect.getattr_static(found, part) if isinstance(found, type) else getattr(found, part)
        return found
    raise AssertionError(f"no module for {path}")


def parameters_of(path: str) -> list[inspect.Parameter]:
    found = resolve(path)
    # A class whose constructor only object has takes nothing.
    if isinstance(found, type) and found.__init__ is object.__init__ and found.__new__ is object.__new__:
        return []
    return [parameter for parameter in inspect.signature(found).parameters.values() if parameter.name != "self"]


@pytest.mark.parametrize("path", EVERYTHING)
def test_documented_callable_has_its_parameters_in_order_with_their_defaults(path):
    documented = EVERYTHING[path]
    positional = {p.name: p.default for p in parameters_of(path) if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == list(documented)
    for name, default in documented.items():
        if default is MADE_ANEW:
            assert positional[name] is not REQUIRED, name
        else:
            assert positional[name] == default, name
            assert type(positional[name]) is type(default), name


@pytest.mark.parametrize("path", EVERYTHING)
def test_parameter_that_we_add_is_keyword_only_and_has_a_default(path):
    for parameter in parameters_of(path):
        if parameter.name not in EVERYTHING[path]:
            assert parameter.kind is parameter.KEYWORD_ONLY, parameter.name
            assert parameter.default is not REQUIRED, parameter.name


@pytest.mark.parametrize("path", KEYWORDS)
def test_documented_keyword_has_its_default(path):
    defaults = {parameter.name: parameter.default for parameter in parameters_of(path)}
    assert {name: defaults.get(name, REQUIRED) for name in KEYWORDS[path]} == KEYWORDS[path]


@pytest.mark.parametrize("path", BASES)
def test_documented_base(path):
    assert issubclass(resolve(path), BASES[path])


@pytest.mark.parametrize("path", DATACLASSES)
def test_documented_dataclass_has_its_fields_and_cannot_be_changed(path):
    found = resolve(path)
    fields = [field.name for field in dataclasses.fields(found)]
    assert fields[: len(CALLABLES[path])] == list(CALLABLES[path])
    assert found.__dataclass_params__.frozen is (path != "stream_buffer.StreamChunk")


@pytest.mark.parametrize("path", ["stream_buffer.StreamChunkInfo", "stream_buffer.StreamingEdge"])
def test_documented_named_tuple_has_its_fields(path):
    assert list(resolve(path)._fields) == list(CALLABLES[path])


@pytest.mark.parametrize("path", PROPERTIES)
def test_documented_property(path):
    assert isinstance(resolve(path), property)


def test_stream_buffer_has_its_documented_attributes():
    buffer = resolve("stream_buffer.StreamBuffer")(1, "edge", "from", FixedChunkPolicy(2))
    assert [name for name in BUFFER_ATTRIBUTES if not hasattr(buffer, name)] == []


def test_store_contract_is_abstract():
    assert inspect.isabstract(FeatureStore)
    assert FeatureStore.__abstractmethods__ == ABSTRACT


def test_prompt_source_is_a_protocol_and_a_callable_satisfies_it():
    source = resolve("async_pipeline.PromptSource")
    assert issubclass(source, typing.Protocol)
    assert isinstance(lambda: None, source)


def test_algorithms_have_their_documented_names_and_values():
    assert {member.name: member.value for member in FeatureAlgorithm} == {
        "EAGLE3": "eagle3",
        "DFLASH": "dflash",
        "DSPARK": "dspark",
    }


def test_queue_module_has_its_documented_logger():
    assert resolve("queue.logger") is logging.getLogger("nccl_stream.queue")


@pytest.mark.parametrize("name", [name for name, module in PACKAGE.items() if module.startswith("stores.")])
def test_documented_store_is_exported_by_the_package_of_stores(name):
    stores = importlib.import_module("nccl_stream.stores")
    assert name in stores.__all__
    assert getattr(stores, name) is getattr(nccl_stream, name)


@pytest.mark.parametrize("name", PACKAGE)
def test_documented_name_is_exported_by_the_package_and_is_the_one_in_its_module(name):
    assert name in nccl_stream.__all__
    module = importlib.import_module(f"nccl_stream.{PACKAGE[name]}")
    assert getattr(nccl_stream, name) is getattr(module, name)
    assert name in module.__all__
