"""A loader that collects more samples than the store holds: the producers wait for it, so it must not wait for them."""

from __future__ import annotations

import threading

import pytest

from nccl_stream.async_pipeline import AsyncFeaturePipeline
from nccl_stream.errors import CapacityError, MisuseError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import SampleRefQueue
from nccl_stream.store import FeatureStore
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.stores.shared_dir import SharedDirFeatureStore
from tests.unit.pipeline_support import (
    DEADLINE_S,
    Background,
    DocumentedQueue,
    FakeTarget,
    prompt,
    prompts,
    sample_bytes,
    wait_until,
)

SIZE = sample_bytes()
POLL_S = 0.005


@pytest.fixture(params=["local", "shared_dir"])
def make_store(request, tmp_path):
    opened = []

    def make(**caps):
        one = LocalFeatureStore(**caps) if request.param == "local" else SharedDirFeatureStore(str(tmp_path), **caps)
        opened.append(one)
        return one

    yield make
    for store in opened:
        store.close()


def run(store, count, *, queue=None, **options):
    """Pull everything that a pipeline of ``count`` prompts makes; the sample ids of each batch."""
    queue = SampleRefQueue(store) if queue is None else queue
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    with AsyncFeaturePipeline(producer, queue, prompts(count), poll_interval=POLL_S):
        loader = FeatureDataLoader(queue, store, acquire_poll_interval=POLL_S, **options)
        return Background(lambda: [batch.sample_ids for batch in loader]).result()


def count_polls(queue):
    """Return a function that waits for so many further calls of ``queue.acquire``."""
    polls = threading.Semaphore(0)
    acquire = queue.acquire

    def counted(poll_interval):
        polls.release()
        return acquire(poll_interval)

    def await_polls(count):
        for _ in range(count):
            assert polls.acquire(timeout=DEADLINE_S)

    queue.acquire = counted
    return await_polls


def of_size(sizes):
    number, batches = 0, []
    for size in sizes:
        batches.append(tuple(str(number + offset) for offset in range(1, size + 1)))
        number += size
    return batches


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"max_tokens": 1000}, {"batch_size": 5, "length_buckets": [4]}])
def test_batch_of_more_samples_than_the_store_holds_comes_with_those_it_holds(make_store, options):
    assert run(make_store(max_samples=4), 10, **options) == of_size([4, 4, 2])


def test_batch_that_fills_the_store_exactly_comes_whole(make_store):
    assert run(make_store(max_samples=4), 10, batch_size=4) == of_size([4, 4, 2])


def test_sample_that_does_not_fit_below_the_high_watermark_ends_the_batch(make_store):
    caps = {"max_bytes": int(2.8 * SIZE), "high_watermark_bytes": int(2.1 * SIZE), "low_watermark_bytes": SIZE}
    assert run(make_store(**caps), 6, batch_size=3) == of_size([2, 2, 2])


def test_watermark_that_holds_back_only_until_somebody_waits_leaves_batches_whole(make_store):
    caps = {"high_watermark_bytes": SIZE, "low_watermark_bytes": 0}
    assert run(make_store(**caps), 6, batch_size=3) == of_size([3, 3])


def test_slow_target_beyond_the_high_watermark_leaves_batches_whole():
    store = LocalFeatureStore(high_watermark_bytes=SIZE, low_watermark_bytes=0)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    queue.put(producer.produce(*prompt(1)))
    loader = FeatureDataLoader(queue, store, batch_size=2, acquire_poll_interval=POLL_S)
    await_polls = count_polls(queue)
    pulled = Background(lambda: next(loader).sample_ids)
    await_polls(10)
    queue.put(producer.produce(*prompt(2)))
    assert pulled.result() == ("1", "2")


def test_queue_that_holds_producers_back_whoever_waits_gets_what_there_is():
    store = LocalFeatureStore(high_watermark_bytes=2 * SIZE, low_watermark_bytes=SIZE)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    for fill in (1, 2):
        queue.put(producer.produce(*prompt(fill)))
    loader = FeatureDataLoader(DocumentedQueue(queue), store, batch_size=3, acquire_poll_interval=POLL_S)
    assert Background(lambda: next(loader).sample_ids).result() == ("1", "2")


def test_producer_of_somebodys_own_that_tries_again_and_again_is_noticed(make_store):
    store = make_store(max_bytes=int(2.5 * SIZE), high_watermark_bytes=None, low_watermark_bytes=None)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)

    def produce():
        for fill in range(1, 6):
            while True:
                try:
                    queue.put(producer.produce(*prompt(fill), sample_id=str(fill)))
                    break
                except CapacityError:
                    pass
        queue.close()

    background = Background(produce)
    loader = FeatureDataLoader(queue, store, batch_size=3, acquire_poll_interval=POLL_S)
    assert Background(lambda: [batch.sample_ids for batch in loader]).result() == of_size([2, 2, 1])
    background.result()


def test_store_with_the_contract_alone_goes_by_its_high_watermark():
    store = LocalFeatureStore(high_watermark_bytes=2 * SIZE, low_watermark_bytes=SIZE)
    assert [FeatureStore.is_full(store), store.is_full()] == [False, False]
    producer = FeatureProducer(FakeTarget(), store, run_id="run")
    for fill in (1, 2):
        producer.produce(*prompt(fill))
    assert [FeatureStore.is_full(store), store.is_full()] == [True, False]


def test_store_full_of_samples_without_a_step_is_an_error_and_not_a_standstill(make_store):
    store = make_store(max_samples=4)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    with AsyncFeaturePipeline(producer, queue, prompts(6), poll_interval=POLL_S):
        loader = FeatureDataLoader(queue, store, ack="step", acquire_poll_interval=POLL_S)
        for _ in range(4):
            next(loader)
        with pytest.raises(MisuseError, match=r"step\(\)"):
            Background(lambda: next(loader)).result()
        assert loader.sample_ids == ("1", "2", "3", "4")
        loader.step()
        assert Background(lambda: [batch.sample_ids for batch in loader]).result() == [("5",), ("6",)]
        loader.step()
    assert queue.statistics().acked == 6


def test_samples_that_wait_for_their_batch_come_before_that_error(make_store):
    store = make_store(max_samples=3)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    with AsyncFeaturePipeline(producer, queue, prompts(4), poll_interval=POLL_S):
        loader = FeatureDataLoader(queue, store, ack="step", batch_size=2, acquire_poll_interval=POLL_S)
        assert [next(loader).sample_ids, Background(lambda: next(loader)).result().sample_ids] == of_size([2, 1])
        with pytest.raises(MisuseError, match=r"step\(\)"):
            Background(lambda: next(loader)).result()
        loader.step()
        assert next(loader).sample_ids == ("4",)


def test_samples_that_another_consumer_holds_are_waited_for(make_store):
    store = make_store(max_samples=3)
    queue = SampleRefQueue(store)
    producer = FeatureProducer(FakeTarget(), store, run_id="run", sample_id_factory=str)
    with AsyncFeaturePipeline(producer, queue, prompts(4), poll_interval=POLL_S):
        other = FeatureDataLoader(queue, store)
        next(other)
        loader = FeatureDataLoader(queue, store, ack="step", acquire_poll_interval=POLL_S)
        next(loader), next(loader)
        wait_until(store.is_full, "the fourth sample is refused")
        await_polls = count_polls(queue)
        pulled = Background(lambda: next(loader).sample_ids)
        await_polls(10)
        assert pulled.running
        other.consume_now()
        assert pulled.result() == ("4",)
