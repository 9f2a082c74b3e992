"""Streamed samples in a store of one process."""

import pytest

from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.stream_suite import SampleStreamConformance, StreamHarness


class TestLocalFeatureStoreStreams(SampleStreamConformance):
    @pytest.fixture
    def harness(self):
        with LocalFeatureStore() as store:
            yield StreamHarness(store)

    @pytest.fixture
    def capped_store(self):
        return LocalFeatureStore
