"""Point-to-point feature streaming from target ranks to draft ranks, for speculative-decoding training."""

from nccl_stream.async_pipeline import AsyncFeaturePipeline, PromptBatch, PromptSource
from nccl_stream.config import StreamConfig
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import Lease, SampleRefQueue, VisibilityTimeout
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef, assert_no_tensors
from nccl_stream.session import Stream, connect
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.shared_dir import SharedDirFeatureStore

__all__ = [
    "AsyncFeaturePipeline",
    "FeatureAlgorithm",
    "FeatureDataLoader",
    "FeatureProducer",
    "FeatureSpec",
    "FeatureStore",
    "Lease",
    "LocalFeatureStore",
    "NcclFeatureStore",
    "PromptBatch",
    "PromptSource",
    "SampleRef",
    "SampleRefQueue",
    "SharedDirFeatureStore",
    "StoreHandle",
    "StoreHealth",
    "Stream",
    "StreamConfig",
    "VisibilityTimeout",
    "assert_no_tensors",
    "connect",
]
