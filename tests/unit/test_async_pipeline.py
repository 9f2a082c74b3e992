from __future__ import annotations

import copy
import pickle
import queue as stdlib_queue
import threading

import pytest
import torch

from nccl_stream.async_pipeline import AsyncFeaturePipeline, PromptBatch, PromptSource
from nccl_stream.errors import CapacityError, ConfigError, PeerLostError, ProducerFailedError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import SampleRefQueue
from nccl_stream.stores.local import LocalFeatureStore
from tests.unit.pipeline_support import (
    DEADLINE_S,
    Background,
    DocumentedQueue,
    FakeTarget,
    fill_of,
    packed_prompt,
    prompt,
    prompts,
    sample_bytes,
    wait_until,
)

THREAD = "streaming-async-producer"


class Rig:
    def __init__(self, store: LocalFeatureStore | None = None, target: FakeTarget | None = None) -> None:
        self.store = store or LocalFeatureStore()
        self.queue = SampleRefQueue(self.store)
        self.target = target or FakeTarget()
        self.producer = FeatureProducer(self.target, self.store, run_id="run")

    def pipeline(self, source, **kwargs) -> AsyncFeaturePipeline:
        return AsyncFeaturePipeline(self.producer, self.queue, source, **kwargs)

    def loader(self) -> FeatureDataLoader:
        return FeatureDataLoader(self.queue, self.store)

    @property
    def resident(self) -> int:
        self.store.gc()
        return self.store.health().resident_bytes


@pytest.fixture
def rig() -> Rig:
    return Rig()


def small_store(num_samples: float, *, high: float = 1.0, low: float = 0.0) -> LocalFeatureStore:
    """A store for so many samples of the fake target, watermarks given as multiples of one sample."""
    return LocalFeatureStore(
        max_bytes=int(num_samples * sample_bytes()),
        high_watermark_bytes=int(high * sample_bytes()),
        low_watermark_bytes=int(low * sample_bytes()),
    )


def test_everything_of_an_iterator_arrives_in_order_and_nothing_stays(rig):
    with rig.pipeline(prompts(20)) as pipeline:
        assert [fill_of(batch) for batch in rig.loader()] == list(range(1, 21))
        pipeline.join(DEADLINE_S)
    assert rig.resident == 0
    assert rig.queue.is_drained


def test_source_may_be_a_callable_and_runs_in_the_named_daemon_thread(rig):
    names: set[str] = set()
    daemons: set[bool] = set()
    items = iter([prompt(1), prompt(2), None])

    def source():
        names.add(threading.current_thread().name)
        daemons.add(threading.current_thread().daemon)
        return next(items)

    assert isinstance(source, PromptSource)
    with rig.pipeline(source):
        assert [fill_of(batch) for batch in rig.loader()] == [1, 2]
    assert (names, daemons) == ({THREAD}, {True})


def test_single_tensor_is_attended_and_supervised_everywhere(rig):
    ids = torch.full((2, 5), 3)
    with rig.pipeline(iter([ids])):
        batch = next(rig.loader())
    assert torch.equal(batch.attention_mask, torch.ones(2, 5, dtype=torch.long))
    assert batch.input_ids.shape == (2, 5)


def test_six_tuple_carries_packing(rig):
    with rig.pipeline(iter([packed_prompt([3, 5])])):
        batch = next(rig.loader())
    assert torch.equal(batch.seq_lens, torch.tensor([[3, 5]]))


@pytest.mark.parametrize(
    "item",
    [prompt(1)[:2], (*prompt(1), prompt(1)[0]), list(prompt(1)), "text", {"input_ids": 1}, (1, 2, 3), ()],
    ids=["pair", "four", "list", "str", "dict", "ints", "empty"],
)
def test_anything_else_from_the_source_is_a_type_error_for_both_sides(rig, item):
    pipeline = rig.pipeline(iter([item]))
    pipeline.start()
    with pytest.raises(ProducerFailedError, match="TypeError"):
        list(rig.loader())
    with pytest.raises(TypeError, match="input_ids"):
        pipeline.stop()


@pytest.mark.parametrize("source", [None, 3])
def test_source_that_is_no_source_is_refused(rig, source):
    with pytest.raises(TypeError, match="prompt_source"):
        rig.pipeline(source)


@pytest.mark.parametrize("poll_interval", [0, -1.0])
def test_bad_poll_interval_is_refused(rig, poll_interval):
    with pytest.raises(ConfigError):
        rig.pipeline(iter([]), poll_interval=poll_interval)


def test_prompt_batch_names_its_sample(rig):
    source = [PromptBatch(prompt(1), "0-17"), prompt(2), PromptBatch(packed_prompt([8]), sample_id="0-18")]
    with rig.pipeline(iter(source)):
        loader = rig.loader()
        ids = [loader.sample_ids for _ in loader]
    assert ids == [("0-17",), ("sample-run-1",), ("0-18",)]


def test_prompt_batch_survives_copying_and_pickling():
    batch = PromptBatch(prompt(1), "7-1")
    for again in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert isinstance(again, PromptBatch)
        assert again.sample_id == "7-1"
        assert torch.equal(again[0], batch[0])
    assert PromptBatch(prompt(1)).sample_id is None


def test_producer_runs_ahead_of_the_loader(rig):
    with rig.pipeline(prompts(8)) as pipeline:
        pipeline.join(DEADLINE_S)
        assert rig.queue.pending_count() == 8
        assert len(list(rig.loader())) == 8


def test_start_is_idempotent_while_alive_and_refused_afterwards(rig):
    gate = threading.Event()
    rig.target.on_forward = lambda n: gate.wait(DEADLINE_S)
    pipeline = rig.pipeline(prompts(2))
    before = set(threading.enumerate())
    pipeline.start()
    pipeline.start()
    assert [thread.name for thread in set(threading.enumerate()) - before] == [THREAD]
    gate.set()
    pipeline.join(DEADLINE_S)
    with pytest.raises(RuntimeError, match="single-use"):
        pipeline.start()
    pipeline.stop()
    pipeline.stop()


def test_stopped_before_its_start_it_closes_the_queue_and_cannot_start(rig):
    pipeline = rig.pipeline(prompts(2))
    pipeline.join(0.1)
    pipeline.stop()
    assert list(rig.loader()) == []
    with pytest.raises(RuntimeError, match="single-use"):
        pipeline.start()


def test_exhausted_source_is_asked_again_when_not_told_to_stop(rig):
    source: stdlib_queue.SimpleQueue = stdlib_queue.SimpleQueue()
    polls = threading.Semaphore(0)

    def pull():
        polls.release()
        try:
            return source.get_nowait()
        except stdlib_queue.Empty:
            return None

    pipeline = rig.pipeline(pull, poll_interval=0.001, stop_on_exhausted=False)
    pipeline.start()
    loader = rig.loader()
    for fill in (1, 2):
        for _ in range(3):
            assert polls.acquire(timeout=DEADLINE_S)
        source.put(prompt(fill))
        assert fill_of(next(loader)) == fill
    pipeline.stop()
    assert list(loader) == []


@pytest.mark.parametrize("good", [0, 1, 3])
def test_backends_failure_reaches_the_consumer_after_the_good_samples(good):
    """Field scenarios: a round in which all fail is not a clean end; a failed sample has no placeholder data."""

    def fail_after(number: int) -> None:
        if number > good:
            raise OSError("no GPU left")

    rig = Rig(target=FakeTarget(torch.bfloat16, on_forward=fail_after))
    pipeline = rig.pipeline(prompts(5))
    pipeline.start()
    seen = []
    with pytest.raises(ProducerFailedError, match="no GPU left") as caught:
        seen.extend(fill_of(batch) for batch in rig.loader())
    assert isinstance(caught.value.__cause__, OSError)
    assert seen == list(range(1, good + 1))
    with pytest.raises(OSError, match="no GPU left"):
        pipeline.stop()
    pipeline.stop()
    assert rig.resident == 0


def test_sources_failure_reaches_both_sides(rig):
    def source():
        yield prompt(1)
        raise LookupError("dataset moved")

    pipeline = rig.pipeline(source())
    pipeline.start()
    loader = rig.loader()
    assert fill_of(next(loader)) == 1
    with pytest.raises(ProducerFailedError, match="dataset moved"):
        next(loader)
    with pytest.raises(LookupError):
        pipeline.stop()


def test_context_shows_the_producers_own_error(rig):
    rig.target.on_forward = lambda n: 1 / 0
    with pytest.raises(ZeroDivisionError), rig.pipeline(prompts(1)):
        list(rig.loader())


def test_context_does_not_hide_the_trainers_error(rig, caplog):
    rig.target.on_forward = lambda n: 1 / 0
    with pytest.raises(IndexError), rig.pipeline(prompts(1)) as pipeline:  # noqa: PT012
        pipeline.join(DEADLINE_S)
        raise IndexError("trainer")
    assert "ZeroDivisionError" in caplog.text


def test_failure_behind_a_documented_queue_closes_it(rig):
    rig.target.on_forward = lambda n: 1 / 0
    pipeline = AsyncFeaturePipeline(rig.producer, DocumentedQueue(rig.queue), prompts(1))
    pipeline.start()
    assert list(FeatureDataLoader(DocumentedQueue(rig.queue), rig.store)) == []
    with pytest.raises(ZeroDivisionError):
        pipeline.stop()


def test_stop_while_paused_by_the_watermark_leaves_the_bytes_at_their_start_value():
    """Field scenario: an orphan at shutdown."""
    rig = Rig(small_store(10))
    pipeline = rig.pipeline(prompts(10), poll_interval=0.01)
    at_start = rig.resident
    pipeline.start()
    wait_until(lambda: rig.queue.statistics().pauses > 0 and rig.resident == 2 * sample_bytes(), "the pause")
    pipeline.stop()
    assert rig.queue.pending_count() == 1
    assert rig.resident == sample_bytes()
    assert len(list(rig.loader())) == 1
    assert rig.resident == at_start == 0


@pytest.mark.parametrize("cap", ["samples", "bytes"])
def test_stop_while_waiting_for_room_leaves_only_what_is_queued(cap):
    rig = Rig(LocalFeatureStore(max_samples=2) if cap == "samples" else small_store(2.5, high=2.5))
    pipeline = rig.pipeline(prompts(10))
    pipeline.start()
    wait_until(lambda: rig.target.num_forwards == 3, "the third forward")
    pipeline.stop()
    assert len(list(rig.loader())) == 2
    assert rig.resident == 0


@pytest.mark.parametrize("cap", ["samples", "bytes"])
def test_caps_press_back_and_no_forward_is_run_twice(cap):
    rig = Rig(LocalFeatureStore(max_samples=2) if cap == "samples" else small_store(2.5, high=2.5))
    with rig.pipeline(prompts(30)):
        assert [fill_of(batch) for batch in rig.loader()] == list(range(1, 31))
    assert rig.target.num_forwards == 30
    assert rig.resident == 0


def test_more_small_samples_than_the_default_count_cap_arrive():
    rig = Rig(LocalFeatureStore())
    with rig.pipeline(prompts(70)) as pipeline:
        wait_until(lambda: rig.target.num_forwards == 65, "the forward after the cap")
        assert len(list(rig.loader())) == 70
        pipeline.join(DEADLINE_S)


@pytest.mark.parametrize(("high", "low"), [(1.0, 0.5), (0.5, 0.25), (0.002, 0.001)])
def test_samples_larger_than_the_watermarks_do_not_deadlock(high, low):
    rig = Rig(small_store(4, high=high, low=low))
    with rig.pipeline(prompts(10), poll_interval=0.01):
        assert len(list(rig.loader())) == 10
    assert rig.resident == 0


def test_sample_that_can_never_fit_is_an_error_on_both_sides_at_once():
    rig = Rig(small_store(0.9, high=0.5))
    pipeline = rig.pipeline(prompts(3))
    pipeline.start()
    with pytest.raises(ProducerFailedError, match="max_bytes"):
        list(rig.loader())
    with pytest.raises(CapacityError):
        pipeline.stop()
    assert rig.target.num_forwards == 1


def test_loader_that_closes_early_ends_a_blocked_pipeline_without_an_error():
    rig = Rig(small_store(10))
    before = set(threading.enumerate())
    with rig.pipeline(prompts(1000), poll_interval=0.01) as pipeline:
        with rig.loader() as loader:
            next(loader)
        pipeline.join(DEADLINE_S)
        assert not any(thread.name == THREAD for thread in set(threading.enumerate()) - before)
    left = [rig.queue.acquire(0) for _ in range(rig.queue.pending_count())]
    assert rig.resident == len(left) * sample_bytes()


def test_producer_with_unread_samples_ends_without_taking_them_along(rig):
    """Field scenario: data must not die with its producer; readers get it all."""
    pipeline = rig.pipeline(prompts(5))
    pipeline.start()
    pipeline.join(DEADLINE_S)
    pipeline.stop()
    rig.producer.close()
    del pipeline
    assert [fill_of(batch) for batch in rig.loader()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [PeerLostError("the draft side is gone"), ValueError("duplicate")])
def test_put_that_fails_evicts_its_sample_and_is_an_error(rig, monkeypatch, error):
    def put(ref, **kwargs):
        raise error

    monkeypatch.setattr(rig.queue, "put_blocks_until_below", put)
    pipeline = rig.pipeline(prompts(3))
    pipeline.start()
    pipeline.join(DEADLINE_S)
    with pytest.raises(type(error)):
        pipeline.stop()
    assert rig.resident == 0


def test_peer_error_during_shutdown_is_not_mistaken_for_a_clean_stop(rig, monkeypatch):
    def put(ref, **kwargs):
        rig.queue.close()
        raise PeerLostError("fenced")

    monkeypatch.setattr(rig.queue, "put_blocks_until_below", put)
    pipeline = rig.pipeline(prompts(3))
    pipeline.start()
    pipeline.join(DEADLINE_S)
    with pytest.raises(PeerLostError):
        pipeline.stop()
    assert rig.resident == 0


def test_stop_during_a_forward_publishes_nothing(rig):
    entered, leave = threading.Event(), threading.Event()

    def block(number: int) -> None:
        entered.set()
        assert leave.wait(DEADLINE_S)

    rig.target.on_forward = block
    pipeline = rig.pipeline(prompts(3))
    pipeline.start()
    assert entered.wait(DEADLINE_S)
    stopping = Background(pipeline.stop)
    wait_until(lambda: pipeline._stop_event.is_set(), "the request to stop")
    leave.set()
    stopping.result()
    assert rig.target.num_forwards == 1
    assert rig.resident == 0
    assert list(rig.loader()) == []


def test_thread_that_does_not_end_in_time_is_left_to_itself_and_logged(rig, caplog):
    entered, leave = threading.Event(), threading.Event()
    rig.target.on_forward = lambda n: entered.set() or leave.wait(DEADLINE_S)
    pipeline = rig.pipeline(prompts(1))
    pipeline.start()
    assert entered.wait(DEADLINE_S)
    pipeline.stop(join_timeout=0.01)
    assert THREAD in caplog.text
    leave.set()
    pipeline.join(DEADLINE_S)
    assert rig.resident == 0


def test_last_sample_survives_the_race_of_put_and_close_with_an_empty_acquire():
    """Many short runs: the consumer mostly finds the queue empty when the producer puts its last sample and closes."""
    for _ in range(200):
        rig = Rig()
        loader = FeatureDataLoader(rig.queue, rig.store, acquire_poll_interval=1e-6)
        with rig.pipeline(prompts(2)):
            assert [fill_of(batch) for batch in loader] == [1, 2]


def test_producer_written_for_the_documented_signature_alone_works(rig):
    class Documented:
        def produce(self, input_ids, attention_mask, loss_mask, position_ids=None, seq_lens=None, doc_remaining=None):
            return rig.producer.produce(input_ids, attention_mask, loss_mask)

        def discard(self, ref):
            rig.producer.discard(ref)

    with AsyncFeaturePipeline(Documented(), rig.queue, prompts(3)):
        assert len(list(rig.loader())) == 3


def unsupervised(fill: int) -> tuple[torch.Tensor, ...]:
    """A prompt of whose labels only the first token's is supervised, which EAGLE-3 never predicts."""
    ids, attention, loss = prompt(fill)
    loss[:, 1:] = 0
    return ids, attention, loss


def test_prompts_with_nothing_to_learn_are_skipped_and_counted_where_asked(rig):
    source = [unsupervised(1), prompt(2), unsupervised(3), prompt(4), torch.zeros(1, 1, dtype=torch.long)]
    with rig.pipeline(iter(source), skip_unsupervised=True) as pipeline:
        assert [fill_of(batch) for batch in rig.loader()] == [2, 4]
    assert (pipeline.num_skipped, rig.target.num_forwards, rig.resident) == (3, 2, 0)


def test_every_prompt_is_run_by_default(rig):
    with rig.pipeline(iter([unsupervised(1), prompt(2)])) as pipeline:
        assert [fill_of(batch) for batch in rig.loader()] == [1, 2]
    assert (pipeline.num_skipped, rig.target.num_forwards) == (0, 2)


def test_pipeline_of_skipped_prompts_alone_ends(rig):
    with rig.pipeline(iter([unsupervised(n) for n in range(50)]), skip_unsupervised=True) as pipeline:
        assert list(rig.loader()) == []
    assert (pipeline.num_skipped, rig.target.num_forwards) == (50, 0)


def test_producer_that_cannot_tell_what_to_skip_is_refused(rig):
    class Documented:
        def produce(self, input_ids, attention_mask, loss_mask):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="skip_unsupervised"):
        AsyncFeaturePipeline(Documented(), rig.queue, iter([]), skip_unsupervised=True)
