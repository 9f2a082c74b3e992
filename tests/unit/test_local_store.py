import pytest

from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness


class TestLocalFeatureStoreConformance(FeatureStoreConformance):
    @pytest.fixture
    def harness(self):
        with LocalFeatureStore() as store:
            yield StoreHarness(store)

    @pytest.fixture
    def capped_store(self):
        return LocalFeatureStore
