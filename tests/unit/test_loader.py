from __future__ import annotations

import gc
import threading
from typing import ClassVar

import pytest
import torch

from nccl_stream.errors import ConfigError, ProducerFailedError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import Lease, SampleRefQueue, VisibilityTimeout
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.schema import NORM_ATTRIBUTE
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.target import Eagle3TargetBatch
from tests.unit.pipeline_support import (
    SEQ,
    Background,
    DocumentedQueue,
    FakeTarget,
    fill_of,
    packed_prompt,
    prompt,
    wait_until,
)

PACKING = ("position_ids", "seq_lens", "doc_remaining")


class Rig:
    """A store, a queue on a clock that only moves by hand, and a producer."""

    def __init__(self, **queue_options) -> None:
        self.now = 0.0
        self.store = LocalFeatureStore()
        self.queue = SampleRefQueue(self.store, clock=lambda: self.now, **queue_options)
        self.producer = FeatureProducer(FakeTarget(), self.store, run_id="run")

    def fill(self, count: int, *, close: bool = True) -> list:
        refs = [self.producer.produce(*prompt(fill)) for fill in range(1, count + 1)]
        for ref in refs:
            self.queue.put(ref)
        if close:
            self.queue.close()
        return refs

    @property
    def resident(self) -> int:
        self.store.gc()
        return self.store.health().sample_count


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_batches_come_in_order_and_everything_is_settled_at_the_end(rig):
    rig.fill(4)
    assert [fill_of(batch) for batch in FeatureDataLoader(rig.queue, rig.store)] == [1, 2, 3, 4]
    assert rig.resident == 0
    assert rig.queue.is_drained
    assert rig.queue.statistics().acked == 4


def test_previous_sample_is_acked_and_released_on_the_next_pull(rig):
    rig.fill(2)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    assert (rig.queue.statistics().acked, rig.resident) == (0, 2)
    next(loader)
    assert (rig.queue.statistics().acked, rig.resident) == (1, 1)


def test_packed_batch_has_its_packing_features(rig):
    rig.queue.put(rig.producer.produce(*packed_prompt([3, 5])))
    batch = next(FeatureDataLoader(rig.queue, rig.store))
    assert torch.equal(batch.seq_lens, torch.tensor([[3, 5]]))
    assert batch.position_ids is not None
    assert batch.doc_remaining is not None


@pytest.mark.parametrize("how", ["consume_now", "close", "leave"])
def test_sample_in_hand_is_settled_at_once(rig, how):
    rig.fill(1, close=False)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    action = {
        "consume_now": loader.consume_now,
        "close": loader.close,
        "leave": lambda: loader.__exit__(None, None, None),
    }
    action[how]()
    assert (rig.queue.statistics().acked, rig.resident) == (1, 0)
    action[how]()
    assert rig.queue.statistics().stale == 0
    assert rig.queue.is_closed == (how != "consume_now")


def test_nothing_is_yielded_after_close_and_the_rest_stays_acquirable(rig):
    rig.fill(2)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    loader.close()
    assert list(loader) == []
    assert rig.queue.pending_count() == 1


def test_empty_poll_on_an_open_queue_is_not_the_end(rig):
    loader = FeatureDataLoader(rig.queue, rig.store, acquire_poll_interval=0.001)
    waiting = Background(lambda: fill_of(next(loader)))
    wait_until(lambda: rig.queue.statistics().starved_s > 0.02, "several empty polls")
    assert waiting.running
    rig.fill(1, close=False)
    assert waiting.result() == 1


@pytest.mark.parametrize("documented_only", [False, True])
def test_sample_put_between_an_empty_acquire_and_the_close_is_not_lost(rig, documented_only):
    """The consumer's acquire comes back empty; before it looks again, the last sample is put and the queue closed."""
    queue = DocumentedQueue(rig.queue) if documented_only else rig.queue
    acquire = queue.acquire

    def empty_then_put(poll_interval: float) -> Lease | None:
        queue.acquire = acquire
        rig.fill(1)
        return None

    queue.acquire = empty_then_put
    assert [fill_of(batch) for batch in FeatureDataLoader(queue, rig.store)] == [1]


@pytest.mark.parametrize("documented_only", [False, True])
def test_loader_waits_for_a_lease_that_another_consumer_may_fail(rig, documented_only):
    rig.fill(1)
    lease = rig.queue.acquire()
    queue = DocumentedQueue(rig.queue) if documented_only else rig.queue
    loader = FeatureDataLoader(queue, rig.store, acquire_poll_interval=0.001)
    waiting = Background(lambda: [fill_of(batch) for batch in loader])
    wait_until(lambda: rig.queue.statistics().starved_s > 0.02, "several empty polls")
    assert waiting.running
    rig.queue.fail(lease)
    assert waiting.result() == [1]


@pytest.mark.parametrize("documented_only", [False, True])
def test_trainer_that_raises_inside_the_context_gets_the_sample_again(rig, documented_only):
    rig.fill(2)
    queue = DocumentedQueue(rig.queue) if documented_only else rig.queue
    with pytest.raises(ZeroDivisionError), FeatureDataLoader(queue, rig.store) as loader:  # noqa: PT012
        for batch in loader:
            if fill_of(batch) == 2:
                raise ZeroDivisionError
    assert rig.queue.statistics().acked == 1
    assert rig.resident == 1
    lease = rig.queue.acquire()
    assert (lease.ref.sample_id, lease.redelivery_count) == ("sample-run-2", 1)
    assert int(rig.store.get(lease.ref)[0]["input_ids"][0, 0]) == 2
    rig.queue.hand_back(lease)
    assert [fill_of(batch) for batch in FeatureDataLoader(rig.queue, rig.store)] == [2]
    assert rig.resident == 0


def test_interrupt_hands_the_sample_back_without_counting_a_delivery():
    rig = Rig(max_redeliveries=0)
    rig.fill(1)
    with pytest.raises(KeyboardInterrupt), FeatureDataLoader(rig.queue, rig.store) as loader:  # noqa: PT012
        next(loader)
        raise KeyboardInterrupt
    assert rig.queue.dead_letters() == []
    assert rig.queue.acquire().redelivery_count == 0


def test_ack_comes_before_release(rig, monkeypatch):
    events: list[str] = []
    ack_many, release = rig.queue.ack_many, rig.store.release
    monkeypatch.setattr(rig.queue, "ack_many", lambda leases: events.append("ack") or ack_many(leases))
    monkeypatch.setattr(rig.store, "release", lambda handle: events.append("release") or release(handle))
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    loader.consume_now()
    assert events == ["ack", "release"]


def test_lease_that_expired_keeps_its_sample_for_the_next_consumer():
    """Acked too late, the sample is not released: whoever has the ref now must still find its data."""
    rig = Rig(visibility_timeout=VisibilityTimeout(10.0))
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    rig.now = 11.0
    assert rig.queue.reclaim_expired() == 1
    loader.consume_now()
    assert rig.queue.statistics().acked == 0
    assert [fill_of(batch) for batch in FeatureDataLoader(rig.queue, rig.store)] == [1]
    assert rig.resident == 0


def test_lease_is_renewed_while_a_long_step_uses_the_sample(monkeypatch):
    """Field scenario: steps longer than the visibility timeout, and no false expiry."""
    rig = Rig(visibility_timeout=VisibilityTimeout(0.03))
    rig.fill(2)
    renewed = threading.Semaphore(0)
    extend = rig.queue.extend

    def counting_extend(lease: Lease) -> bool:
        live = extend(lease)
        renewed.release()
        return live

    monkeypatch.setattr(rig.queue, "extend", counting_extend)
    with FeatureDataLoader(rig.queue, rig.store, ack="step") as loader:
        next(loader), next(loader)
        for _ in range(5):
            rig.now += 0.025  # the queue's clock; two of these without a renewal would expire the leases
            for _ in range(4):  # whatever the interleaving, two of four calls are for each of the two leases
                assert renewed.acquire(timeout=30)
            assert rig.queue.reclaim_expired() == 0
        loader.step()
    assert rig.queue.statistics().acked == 2


@pytest.fixture
def renewers():
    """Returns a function that lists the renewing threads this test has started and that still run."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name == "feature-loader-leases" and t not in before]


def test_renewing_ends_with_the_loader_or_its_last_reference(rig, renewers):
    rig.fill(3, close=False)
    first = FeatureDataLoader(rig.queue, rig.store)
    next(first)
    assert len(renewers()) == 1
    first.close()
    assert renewers() == []
    second = FeatureDataLoader(rig.queue, rig.store)
    next(second)
    assert len(renewers()) == 1
    del second
    gc.collect()
    wait_until(lambda: renewers() == [], "the end of an abandoned loader's thread")


def test_drained_iteration_leaves_no_thread_without_close(rig, renewers):
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store)
    assert len(list(loader)) == 1
    assert renewers() == []


def test_raw_acquire_expires_although_a_loader_lives():
    rig = Rig(visibility_timeout=VisibilityTimeout(0.03))
    rig.fill(2)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    rig.queue.acquire()
    rig.now = 1.0
    assert rig.queue.reclaim_expired() >= 1


def test_ref_of_another_algorithm_raises_and_stays_in_the_queue(rig):
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store, algorithm=FeatureAlgorithm.DFLASH)
    with pytest.raises(ValueError, match=r"dflash.*eagle3"):
        next(loader)
    assert (rig.queue.pending_count(), rig.queue.outstanding_count(), rig.resident) == (1, 0, 1)


def bad_schema_ref(rig: Rig, **changes):
    tensors = FakeTarget().generate_batch(*prompt(1)).features()
    for name in changes.pop("without", ()):
        del tensors[name]
    return rig.store.put("bad", tensors | changes.pop("extra", {}), run_id="run", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"without": ("logits",)},
        {"schema_version": 99},
        {"extra": {"target_probs": torch.zeros(1, SEQ, 2), "position_mask": torch.ones(1, SEQ, 1, dtype=torch.bool)}},
        {"extra": {"seq_lens": torch.tensor([[SEQ]])}},
        {
            "without": ("logits",),
            "extra": {"last_hidden_states": torch.zeros(1, SEQ, 4)},
            "schema_version": 2,
            "attributes": {NORM_ATTRIBUTE: "post"},
        },
    ],
    ids=["no supervision", "version", "two supervisions", "partial packing", "no frame"],
)
def test_ref_with_a_bad_schema_raises_once_and_is_gone_with_its_bytes(rig, changes, monkeypatch):
    gets, get = [], rig.store.get
    # Keeps every handle alive, so that only a release ends it.
    monkeypatch.setattr(rig.store, "get", lambda ref: gets.append(get(ref)) or gets[-1])
    rig.queue.put(bad_schema_ref(rig, **changes))
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store)
    with pytest.raises(ValueError, match=r"supervision|version|pack|frame"):
        next(loader)
    assert (rig.queue.pending_count(), rig.queue.outstanding_count(), rig.resident) == (1, 0, 1)
    assert [fill_of(batch) for batch in loader] == [1]
    assert rig.resident == 0
    assert (rig.queue.statistics().acked, rig.queue.statistics().dead) == (1, 1)
    (letter,) = rig.queue.dead_letters()
    assert (letter.ref.sample_id, letter.is_stored) == ("bad", False)
    assert "SchemaError" in letter.reason


def test_feature_that_is_not_read_is_freed_with_its_sample(rig):
    rig.queue.put(bad_schema_ref(rig, extra={"extra": torch.zeros(1000)}))
    rig.queue.close()
    assert len(list(FeatureDataLoader(rig.queue, rig.store))) == 1
    assert rig.store.health().resident_bytes == 0


def test_store_that_fails_to_get_leaves_the_sample_for_another_try(rig, monkeypatch):
    rig.fill(1)
    get = rig.store.get
    monkeypatch.setattr(rig.store, "get", lambda ref: (_ for _ in ()).throw(OSError("disk")))
    loader = FeatureDataLoader(rig.queue, rig.store)
    with pytest.raises(OSError, match="disk"):
        next(loader)
    assert (rig.queue.pending_count(), rig.queue.outstanding_count()) == (1, 0)
    monkeypatch.setattr(rig.store, "get", get)
    assert [fill_of(batch) for batch in loader] == [1]


@pytest.mark.parametrize("documented_only", [False, True])
def test_sample_that_is_gone_is_an_error_once_whatever_the_budget(rig, documented_only):
    first, _ = rig.fill(2)
    rig.store.discard(first)
    queue = DocumentedQueue(rig.queue) if documented_only else rig.queue
    loader = FeatureDataLoader(queue, rig.store)
    with pytest.raises(KeyError):
        next(loader)
    assert [fill_of(batch) for batch in loader] == [2]
    assert rig.queue.is_drained
    if not documented_only:  # such a queue has no dead letters
        (letter,) = rig.queue.dead_letters()
        assert (letter.ref, letter.is_stored) == (first, False)
        assert "SampleNotFoundError" in letter.reason


def test_sample_of_another_store_is_left_to_who_has_that_store(rig):
    other = LocalFeatureStore()
    rig.queue.put(FeatureProducer(FakeTarget(), other, run_id="run").produce(*prompt(1)))
    rig.queue.close()
    with pytest.raises(KeyError):
        next(FeatureDataLoader(rig.queue, rig.store))
    assert [fill_of(batch) for batch in FeatureDataLoader(rig.queue, other)] == [1]


def test_sample_that_always_fails_ends_among_the_dead_letters_with_its_reason(monkeypatch):
    rig = Rig(max_redeliveries=1)
    rig.fill(1)
    monkeypatch.setattr(rig.store, "get", lambda ref: (_ for _ in ()).throw(OSError("disk")))
    loader = FeatureDataLoader(rig.queue, rig.store)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            next(loader)
    assert list(loader) == []
    (letter,) = rig.queue.dead_letters()
    assert (letter.reason, letter.is_stored) == ("OSError: disk", True)


def test_producers_failure_comes_after_its_samples(rig):
    rig.fill(2, close=False)
    rig.queue.close(error=OSError("target burnt down"))
    loader = FeatureDataLoader(rig.queue, rig.store)
    assert [fill_of(next(loader)) for _ in range(2)] == [1, 2]
    with pytest.raises(ProducerFailedError, match="target burnt down"):
        next(loader)
    assert rig.resident == 0


def test_step_mode_brings_the_samples_of_an_unfinished_accumulation_again(rig):
    """Field scenario: micro-batches acked before their optimizer step are lost when the trainer dies."""
    rig.fill(6)
    loader = FeatureDataLoader(rig.queue, rig.store, ack="step")
    with pytest.raises(ZeroDivisionError), loader:  # noqa: PT012
        for number, _batch in enumerate(loader, start=1):
            if number == 2:
                loader.step()
            if number == 5:
                assert loader.sample_ids == ("sample-run-3", "sample-run-4", "sample-run-5")
                raise ZeroDivisionError
    assert rig.queue.statistics().acked == 2
    again = [fill_of(batch) for batch in FeatureDataLoader(rig.queue, rig.store)]
    assert again == [3, 4, 6, 5]  # only the last one in hand may be at fault: it goes to the tail
    assert rig.resident == 0


def test_step_mode_ends_with_samples_in_hand_and_close_returns_them(rig):
    rig.fill(3)
    loader = FeatureDataLoader(rig.queue, rig.store, ack="step")
    assert [fill_of(batch) for batch in loader] == [1, 2, 3]
    assert rig.queue.statistics().acked == 0
    loader.step()
    loader.step()
    assert (rig.queue.statistics().acked, rig.resident) == (3, 0)
    assert list(loader) == []

    other = Rig()
    other.fill(2)
    with FeatureDataLoader(other.queue, other.store, ack="step") as unstepped:
        assert len(list(unstepped)) == 2
    assert [fill_of(batch) for batch in FeatureDataLoader(other.queue, other.store)] == [1, 2]


def test_padding_lease_becomes_a_harmless_batch_that_touches_no_store(rig, caplog):
    template = bad_schema_ref(rig, extra=dict(zip(PACKING, packed_prompt([5, 3])[3:], strict=True)))
    rig.store.discard(template)

    class PaddingQueue:
        is_drained = False
        acked: ClassVar[list] = []

        def acquire(self, poll_interval):
            lease = Lease(template, 0.0, VisibilityTimeout())
            object.__setattr__(lease, "is_padding", True)
            return lease

        def ack_many(self, leases):
            self.acked.extend(leases)
            return 0  # nothing was delivered, so nothing is live

    queue = PaddingQueue()
    loader = FeatureDataLoader(queue, rig.store)
    batch = next(loader)
    assert batch.attention_mask.all()
    assert not batch.loss_mask.any()
    assert not batch.logits.any()
    assert torch.equal(batch.seq_lens, torch.tensor([[SEQ, 0]]))
    for name, tensor in batch.features().items():
        spec = template.feature_specs[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
    loader.consume_now()
    assert len(queue.acked) == 1
    assert caplog.text == ""


def test_close_from_another_thread_ends_a_waiting_loader(rig):
    loader = FeatureDataLoader(rig.queue, rig.store, acquire_poll_interval=30.0)
    waiting = Background(lambda: list(loader))
    wait_until(lambda: rig.queue._num_waiting_consumers == 1, "the loader's wait")
    loader.close()
    assert waiting.result() == []


def test_sample_that_arrives_while_the_loader_is_closed_is_handed_back(rig, monkeypatch):
    rig.fill(1)
    loader = FeatureDataLoader(rig.queue, rig.store)
    get = rig.store.get
    monkeypatch.setattr(rig.store, "get", lambda ref: loader.close() or get(ref))
    assert list(loader) == []
    assert (rig.queue.pending_count(), rig.queue.outstanding_count(), rig.resident) == (1, 0, 1)
    assert rig.queue.acquire().redelivery_count == 0


def test_failing_ack_still_closes_everything(rig, monkeypatch, renewers):
    rig.fill(1, close=False)
    loader = FeatureDataLoader(rig.queue, rig.store)
    next(loader)
    assert len(renewers()) == 1
    monkeypatch.setattr(rig.queue, "ack_many", lambda leases: (_ for _ in ()).throw(ConnectionError("gone")))
    with pytest.raises(ConnectionError):
        loader.close()
    assert rig.queue.is_closed
    assert renewers() == []


def test_two_loaders_share_a_queue_without_losing_or_doubling(rig):
    rig.fill(40)
    seen = [Background(lambda: [fill_of(b) for b in FeatureDataLoader(rig.queue, rig.store)]) for _ in range(2)]
    assert sorted(seen[0].result() + seen[1].result()) == list(range(1, 41))
    assert (rig.resident, rig.queue.statistics().acked) == (0, 40)


@pytest.mark.parametrize("options", [{"acquire_poll_interval": 0}, {"acquire_poll_interval": -1.0}, {"ack": "never"}])
def test_bad_options_are_refused(rig, options):
    with pytest.raises(ConfigError):
        FeatureDataLoader(rig.queue, rig.store, **options)


def test_yields_the_algorithms_batch_object(rig):
    rig.fill(1)
    assert isinstance(next(FeatureDataLoader(rig.queue, rig.store)), Eagle3TargetBatch)
