"""Batches of several samples: how they form, what settles them, and what becomes of their samples when things fail."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

from nccl_stream.config import StreamConfig
from nccl_stream.errors import ConfigError, MisuseError, ProducerFailedError, SchemaError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.producer import FeatureProducer
from nccl_stream.queue import SampleRefQueue, VisibilityTimeout
from nccl_stream.ranks.draft_queue import DraftQueue, PaddingLease
from nccl_stream.stores.local import LocalFeatureStore
from tests.unit.pipeline_support import HIDDEN, Background, FakeTarget, packed_prompt, prompt, sample_bytes, wait_until


class Rig:
    """A store, a queue on a clock that only moves by hand, and a producer of samples of any length."""

    def __init__(self, queue_type=SampleRefQueue, store=None, **queue_options) -> None:
        self.store = LocalFeatureStore() if store is None else store
        self.queue = queue_type(self.store, clock=lambda: 0.0, **queue_options)
        self.producer = FeatureProducer(FakeTarget(), self.store, run_id="run", sample_id_factory=str)

    def fill(self, lengths, *, close: bool = True) -> None:
        for length in lengths:
            self.queue.put(self.producer.produce(*prompt(1, length)))
        if close:
            self.queue.close()

    def loader(self, **options) -> FeatureDataLoader:
        return FeatureDataLoader(self.queue, self.store, **options)

    def left(self) -> list[tuple[str, int]]:
        """What is pending, in order, with how often it was delivered in vain."""
        leases = self.queue.acquire_many(100, 0.0)
        return [(lease.ref.sample_id, lease.redelivery_count) for lease in leases]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def ids(batches) -> list[tuple[str, ...]]:
    return [batch.sample_ids for batch in batches]


def test_batches_join_samples_and_the_last_one_has_what_is_left(rig):
    rig.fill([8, 5, 8, 6, 7])
    batches = list(rig.loader(batch_size=2))
    assert ids(batches) == [("1", "2"), ("3", "4"), ("5",)]
    assert [tuple(batch.aux_hidden_states.shape) for batch in batches] == [
        (2, 8, 3 * HIDDEN),
        (2, 8, 3 * HIDDEN),
        (1, 7, 3 * HIDDEN),
    ]
    assert batches[0].attention_mask.sum(1).tolist() == [8, 5]
    assert rig.queue.statistics().acked == 5
    assert rig.store.health().sample_count == 0


def test_batch_is_a_mapping(rig):
    rig.fill([8, 8])
    batch = next(rig.loader(batch_size=2))
    assert torch.equal(batch["input_ids"], batch.input_ids)
    assert set(batch.keys()) == {"aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits"}
    assert dict(**batch).keys() == batch.keys()


def test_packed_samples_of_different_lengths_share_a_batch(rig):
    for lengths in ([3, 5], [4]):
        rig.queue.put(rig.producer.produce(*packed_prompt(lengths)))
    batch = next(rig.loader(batch_size=2))
    assert batch.seq_lens.tolist() == [[3, 5], [8, 0]]
    assert batch.seq_lens.sum(1).tolist() == [batch.input_ids.shape[1]] * 2


def test_all_samples_of_a_batch_are_settled_on_the_next_pull_and_not_before(rig):
    rig.fill([8] * 4)
    loader = rig.loader(batch_size=2)
    next(loader)
    assert loader.sample_ids == ("1", "2")
    assert (rig.queue.statistics().acked, rig.store.health().sample_count) == (0, 4)
    next(loader)
    assert (rig.queue.statistics().acked, rig.store.health().sample_count) == (2, 2)
    loader.consume_now()
    assert (rig.queue.statistics().acked, rig.store.health().sample_count) == (4, 0)
    assert loader.sample_ids == ()


def test_token_budget_and_length_buckets(rig):
    rig.fill([4, 9, 3, 9, 4, 12])
    assert ids(rig.loader(max_tokens=18, length_buckets=[4, 9])) == [("2", "4"), ("1", "3", "5"), ("6",)]


def test_step_settles_every_sample_of_every_batch_since_the_last_one(rig):
    rig.fill([8] * 6)
    loader = rig.loader(batch_size=2, ack="step")
    next(loader), next(loader)
    assert rig.queue.statistics().acked == 0
    loader.step()
    assert rig.queue.statistics().acked == 4
    next(loader)
    assert list(loader) == []
    loader.step()
    assert rig.queue.statistics().acked == 6
    assert rig.queue.is_drained


def test_collate_fn_gets_the_batches_of_the_samples_and_its_result_is_yielded(rig):
    rig.fill([8, 5, 8])
    loader = rig.loader(batch_size=2, collate_fn=lambda samples: [sample.input_ids.shape[1] for sample in samples])
    assert list(loader) == [[8, 5], [8]]


def test_collate_fn_that_raises_fails_the_samples_of_its_batch(rig):
    rig.fill([8] * 3)

    def raises(samples):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(rig.loader(batch_size=2, collate_fn=raises))
    # In their order, as the queue puts what failed at its end.
    assert sorted(rig.left()) == [("1", 1), ("2", 1), ("3", 0)]


def test_sample_that_cannot_be_fetched_is_failed_and_the_others_of_its_batch_are_kept(rig, monkeypatch):
    rig.fill([8] * 3)
    get = rig.store.get

    def broken_for_two(ref, *args, **kwargs):
        if ref.sample_id == "2":
            monkeypatch.setattr(rig.store, "get", get)
            raise OSError("unreadable")
        return get(ref, *args, **kwargs)

    monkeypatch.setattr(rig.store, "get", broken_for_two)
    loader = rig.loader(batch_size=3)
    with pytest.raises(OSError, match="unreadable"):
        next(loader)
    assert ids(loader) == [("1", "3"), ("2",)]
    assert rig.queue.statistics().failed == 1


def test_ref_with_a_bad_schema_is_dropped_and_the_others_of_its_batch_are_kept(rig):
    rig.fill([8], close=False)
    tensors = {name: torch.ones(1, 4) for name in ("aux_hidden_states", "attention_mask", "loss_mask")}
    ref = rig.store.put(
        "bad", {**tensors, "input_ids": torch.ones(1, 4, dtype=torch.long)}, "run", rig.producer._algorithm
    )
    rig.queue.put(ref)
    rig.fill([8])
    loader = rig.loader(batch_size=2)
    with pytest.raises(SchemaError):
        next(loader)
    assert ids(loader) == [("1", "2")]
    assert rig.store.health().sample_count == 0


def test_trainer_that_raises_fails_its_last_batch_only():
    rig = Rig()
    rig.fill([8, 8, 8, 8, 3])
    with pytest.raises(ZeroDivisionError), rig.loader(batch_size=2, ack="step") as loader:  # noqa: PT012
        next(loader)
        next(loader)
        raise ZeroDivisionError
    assert sorted(rig.left()) == [("1", 0), ("2", 0), ("3", 1), ("4", 1), ("5", 0)]


def test_interrupt_gives_back_everything_in_order_and_uncounted(rig):
    rig.fill([8, 3, 8, 8])
    with pytest.raises(KeyboardInterrupt), rig.loader(batch_size=3, length_buckets=[4], ack="step") as loader:  # noqa: PT012
        assert next(loader).sample_ids == ("1", "3", "4")
        raise KeyboardInterrupt
    assert sorted(rig.left()) == [("1", 0), ("2", 0), ("3", 0), ("4", 0)]


def test_samples_that_wait_for_their_batch_go_back_when_another_thread_closes(rig):
    rig.fill([8, 3], close=False)
    loader = rig.loader(batch_size=3)
    waiting = Background(lambda: list(loader))
    wait_until(lambda: rig.queue.outstanding_count() == 2, "both samples leased")
    loader.close()
    assert waiting.result() == []
    assert sorted(rig.left()) == [("1", 0), ("2", 0)]  # the two threads give them back in either order


def test_what_a_failed_producer_had_made_comes_before_its_error(rig):
    rig.fill([8] * 3, close=False)
    rig.queue.close(error=OSError("the target is gone"))
    loader = rig.loader(batch_size=2)
    assert next(loader).sample_ids == ("1", "2")
    assert next(loader).sample_ids == ("3",)
    with pytest.raises(ProducerFailedError, match="the target is gone"):
        next(loader)


def test_store_that_is_full_with_less_than_a_batch_brings_what_there_is():
    size = sample_bytes()
    rig = Rig(store=LocalFeatureStore(max_bytes=2 * size, high_watermark_bytes=2 * size, low_watermark_bytes=size))
    rig.fill([8, 8], close=False)
    assert next(rig.loader(batch_size=4, acquire_poll_interval=0.01)).sample_ids == ("1", "2")


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"max_tokens": 0}, {"length_buckets": [4, 2]}])
def test_options_that_cannot_work_are_refused(rig, options):
    with pytest.raises(ConfigError):
        rig.loader(**options)


class StreamQueue(SampleRefQueue):
    """A queue that, like a stream's, plans rounds."""

    samples_per_round: ClassVar[int] = 4
    is_aligned: ClassVar[bool] = True


class RaggedQueue(StreamQueue):
    is_aligned = False


@pytest.mark.parametrize(("queue_type", "size"), [(StreamQueue, 3), (StreamQueue, 8), (RaggedQueue, 5)])
def test_batch_size_that_does_not_go_into_the_round_is_refused(queue_type, size):
    with pytest.raises(ConfigError, match="StreamConfig"):
        Rig(queue_type).loader(batch_size=size)
    Rig(queue_type).loader(batch_size=2)


def test_batches_end_with_the_round():
    rig = Rig(StreamQueue)
    rig.fill([8, 8, 8, 8, 8, 8, 8, 8])
    loader = rig.loader(max_tokens=24)
    assert [(batch.sample_ids, loader.at_round_end) for batch in loader] == [
        (("1", "2", "3"), False),
        (("4",), True),
        (("5", "6", "7"), False),
        (("8",), True),
    ]


def test_round_is_ordered_by_length_into_as_many_batches_as_on_every_rank():
    rig = Rig(StreamQueue)
    rig.fill([9, 3, 8, 4])
    loader = rig.loader(batch_size=2, length_buckets=[4])
    assert [(batch.sample_ids, loader.at_round_end) for batch in loader] == [(("2", "4"), False), (("3", "1"), True)]


def test_samples_that_wait_never_exceed_what_the_memory_of_a_stream_is_sized_for():
    rig = Rig(RaggedQueue)
    rig.fill([1, 3, 5, 7, 1], close=False)
    loader = rig.loader(batch_size=4, length_buckets=[2, 4, 6])
    assert next(loader).sample_ids == ("1",)
    assert rig.queue.outstanding_count() == 4


def test_round_without_a_step_is_an_error_and_not_a_standstill():
    rig = Rig(StreamQueue)
    rig.fill([8] * 8)
    loader = rig.loader(batch_size=2, ack="step")
    next(loader), next(loader)
    with pytest.raises(MisuseError, match=r"step\(\)"):
        next(loader)
    loader.step()
    assert next(loader).sample_ids == ("5", "6")


def test_stream_tells_the_loader_its_rounds():
    config = StreamConfig(batch_size=2, accumulation=3)
    ragged = StreamConfig(batch_size=2, end="ragged")
    assert [
        (queue.samples_per_round, queue.is_aligned)
        for queue in (DraftQueue(SimpleNamespace(config=c)) for c in (config, ragged))
    ] == [(6, True), (2, False)]


def test_padding_fills_the_batch_of_a_round_and_has_no_id():
    rig = Rig(StreamQueue)
    rig.fill([5], close=False)
    acquire, template = rig.queue.acquire, rig.producer.produce(*prompt(1, 8))

    def acquire_or_padding(poll_interval):
        return acquire(0.0) or PaddingLease(template, 0.0, VisibilityTimeout())

    rig.queue.acquire = acquire_or_padding
    loader = rig.loader(batch_size=2)
    batch = next(loader)
    assert batch.sample_ids == ("1",)
    assert batch.loss_mask.sum(1).tolist() == [5, 0]
    assert batch.attention_mask.sum(1).tolist() == [5, 8]
    assert next(loader).sample_ids == ()
    assert rig.queue.statistics().acked == 1


# -- under torch's DataLoader ----------------------------------------------------------------------------------------


def test_number_of_batches_is_not_known(rig):
    with pytest.raises(TypeError):
        len(rig.loader())
    with pytest.raises(TypeError):
        len(DataLoader(rig.loader(), batch_size=None))


def test_torch_data_loader_yields_every_batch_and_pulls_none_ahead(rig):
    rig.fill([8, 5, 8])
    acked = []
    for batch in DataLoader(rig.loader(batch_size=2), batch_size=None, num_workers=0):
        assert isinstance(batch, dict)
        acked.append((len(batch["input_ids"]), rig.queue.statistics().acked))
    assert acked == [(2, 0), (1, 2)]
    assert rig.queue.is_drained


def test_torch_data_loader_with_workers_is_refused_by_name(rig):
    rig.fill([8])
    with pytest.raises(MisuseError, match="num_workers=0"):
        list(DataLoader(rig.loader(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert rig.left() == [("1", 0)]


def pull(loader, pipe):
    try:
        next(loader)
    except MisuseError as error:
        pipe.send(str(error))
    os._exit(0)


def test_forked_process_cannot_pull(rig):
    rig.fill([8])
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=pull, args=(rig.loader(), there))
    process.start()
    there.close()
    assert here.poll(30)
    assert "another process" in here.recv()
    process.join()


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy])
def test_loader_cannot_be_copied(rig, how):
    with pytest.raises(MisuseError, match="num_workers=0"):
        how(rig.loader())
