"""Feature stores, and the residency accounting they share."""

from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.stores.shared_dir import SharedDirFeatureStore

__all__ = ["LocalFeatureStore", "SharedDirFeatureStore"]
