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


def test_second_thread_that_closes_a_reader_has_the_same_answer_while_the_first_is_at_it(monkeypatch):
    """With another one a sample that can be read again would be failed for good."""
    with LocalFeatureStore() as store:
        _, reader = StreamHarness(store).begin("s", window=2)
        stream = reader._stream
        leave, answers = stream.leave, []

        def between(number, reason):
            monkeypatch.setattr(stream, "leave", leave)
            answers.append(reader.close())
            return leave(number, reason)

        monkeypatch.setattr(stream, "leave", between)
        answers.append(reader.close())
        assert answers == [True, True]
        assert reader.close()
