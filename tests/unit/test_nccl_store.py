"""The NCCL store against the store contract: alone on a target, and over a whole stream in one process."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import nccl_stream
from nccl_stream.config import StreamConfig
from nccl_stream.errors import CapacityError, ClosedError, MisuseError, SampleNotFoundError
from nccl_stream.leases import Lease
from nccl_stream.refs import SampleRef
from nccl_stream.store import FeatureStore
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.owned_pieces import OwnedPieces
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.staged import OwnedBytes, SampleMemory
from nccl_stream.testing.clock import FakeClock
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness, make_sample
from nccl_stream.transport.arena import Arena

MIB = 1 << 20


def target_store(
    max_samples: int | None = 64,
    max_bytes: int | None = 16 * MIB,
    high_watermark_bytes: int | None = 12 * MIB,
    low_watermark_bytes: int | None = 4 * MIB,
    max_sample_bytes: int = 8 * MIB,
    memory: SampleMemory | None = None,
    **more: Any,
) -> NcclFeatureStore:
    memory = SampleMemory(torch.device("cpu"), device_arena=Arena(32 * MIB)) if memory is None else memory
    residency: Residency[OwnedBytes | OwnedPieces] = Residency(
        max_samples=max_samples,
        max_bytes=max_bytes,
        high_watermark_bytes=high_watermark_bytes,
        low_watermark_bytes=low_watermark_bytes,
        name="NcclFeatureStore",
        on_free=memory.free,
    )
    return NcclFeatureStore(
        "nccl://test/t0",
        torch.device("cpu"),
        max_sample_bytes=max_sample_bytes,
        chunk_bytes=MIB,
        residency=residency,
        memory=memory,
        soft_cap_bytes=max_bytes or 1 << 40,
        **more,
    )


class TestTargetAlone(FeatureStoreConformance):
    @pytest.fixture
    def harness(self) -> Iterator[StoreHarness]:
        with target_store() as store:
            yield StoreHarness(store)

    @pytest.fixture
    def capped_store(self) -> Callable[..., FeatureStore]:
        return target_store


class StreamHarness(StoreHarness):
    """A target and a draft rank of one stream, both in this process."""

    def __init__(self, target: Any, draft: Any) -> None:
        super().__init__(target.store, draft.store)
        self.target, self.draft = target, draft
        self.leases: dict[str, Lease] = {}
        self.lock = threading.Lock()

    def transfer(self, ref: SampleRef) -> SampleRef:
        with self.lock:  # two threads would lease each other's samples
            self.target.queue.put(ref)
            lease = self.draft.queue.acquire(20.0)
        assert lease is not None
        self.leases[lease.ref.sample_id] = lease
        return lease.ref

    def settle(self, ref: SampleRef) -> None:
        self.draft.queue.ack(self.leases.pop(ref.sample_id))


def open_pair(config: StreamConfig) -> tuple[Any, Any, TCPStore]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    streams: dict[str, Any] = {}
    errors: list[BaseException] = []

    def join(role: Any) -> None:
        try:
            streams[role] = nccl_stream.connect(
                f"tcp://127.0.0.1:{server.port}",
                run_id="pair",
                role=role,
                rank=0,
                num_targets=1,
                num_drafts=1,
                config=config,
            )
        except BaseException as exc:  # noqa: BLE001 - shown below, in the test's thread
            errors.append(exc)

    threads = [threading.Thread(target=join, args=(role,)) for role in ("target", "draft")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    return streams["target"], streams["draft"], server


CONFIG = StreamConfig(
    max_sample_bytes=8 * MIB,
    arena_bytes=48 * MIB,
    max_bytes=16 * MIB,
    end="ragged",
    device="cpu",
    connect_timeout=60.0,
    poison=True,
)


SHARED: list[tuple[Any, Any, TCPStore]] = []  # one stream for many tests, made anew when a test has used it up


def close_shared() -> None:
    for target, draft, _ in SHARED:
        draft.close()
        target.close()
    SHARED.clear()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    close_shared()


@pytest.fixture
def pair() -> Iterator[StreamHarness]:
    if not SHARED:
        SHARED.append(open_pair(CONFIG))
    target, draft, _ = SHARED[0]
    harness = StreamHarness(target, draft)
    yield harness
    gc.collect()
    idle = (
        target.store.health().sample_count == 0 and draft.queue.pending_count() == draft.queue.outstanding_count() == 0
    )
    if target.store.is_closed or draft.store.is_closed or not idle or draft.store.health().resident_bytes:
        close_shared()


class TestOverAStream(FeatureStoreConformance):
    @pytest.fixture
    def harness(self, pair: StreamHarness) -> StreamHarness:
        return pair

    def test_get_result_written_into_does_not_reach_the_store(self, harness: StoreHarness) -> None:
        """Two gets of one delivery share memory, by design; what is delivered anew does not (see below)."""
        ref = harness.send("shared", make_sample(fill=1))
        first, one = harness.consumer.get(ref)
        second, two = harness.consumer.get(ref)
        assert first["logits"].data_ptr() == second["logits"].data_ptr()
        harness.consumer.release(one)
        assert torch.equal(second["logits"], make_sample(fill=1)["logits"])
        harness.finish(ref, two)


@pytest.mark.parametrize("sample_id", ["../up", "a/b", "a\\b", "..", ".", "nul\0", "x" * 513, "", 7])
def test_put_of_a_path_like_or_bad_id_is_refused(sample_id: Any) -> None:
    with target_store() as store:
        with pytest.raises(MisuseError):
            store.put(sample_id, make_sample(), "run")
        assert store.health().sample_count == 0


def test_put_of_nan_is_refused_only_when_asked_to_check() -> None:
    sample = make_sample()
    sample["logits"][0, 0, 0] = float("nan")
    with target_store() as store:
        store.put("fine", sample, "run")
    with target_store(check_finite=True) as store:
        with pytest.raises(MisuseError, match="logits"):
            store.put("nan", sample, "run")
        store.put("good", make_sample(), "run")


def test_put_larger_than_configured_says_what_would_do() -> None:
    with target_store() as store:
        big = {**make_sample(), "logits": torch.zeros(1, 8, MIB)}
        with pytest.raises(CapacityError, match="max_sample_bytes=") as caught:
            store.put("big", big, "run")
        assert not caught.value.can_wait


def many_small(count: int) -> dict[str, torch.Tensor]:
    return {**make_sample(), **{f"x{i}": torch.full((1,), float(i)) for i in range(count)}}


def test_put_of_so_many_features_that_no_slot_holds_them_says_what_would_do() -> None:
    with target_store(max_sample_bytes=8192) as store:
        store.put("few", many_small(200), "run")
        with pytest.raises(CapacityError, match=r"1005 features .* max_sample_bytes=(\d+)") as caught:
            store.put("many", many_small(1000), "run")
        assert not caught.value.can_wait
        assert store.health().sample_count == 1
    told = re.search(r"max_sample_bytes=(\d+)", str(caught.value))
    assert told is not None
    with target_store(max_sample_bytes=int(told[1])) as store:
        store.put("many", many_small(1000), "run")
    with target_store(max_sample_bytes=int(told[1]) - 1) as store, pytest.raises(CapacityError):
        store.put("many", many_small(1000), "run")


def test_sample_of_as_many_features_as_put_takes_arrives(pair: StreamHarness) -> None:
    sample = many_small(600)
    assert sum(tensor.nbytes for tensor in sample.values()) < 4096
    with pytest.raises(CapacityError):  # with room for that many bytes alone
        target_store(max_sample_bytes=4096).put("many", sample, "run")
    ref = pair.send("many", sample)
    tensors, handle = pair.consumer.get(ref)
    assert all(torch.equal(tensors[name], sample[name]) for name in sample)
    pair.finish(ref, handle)


def test_target_that_leaves_says_what_died_and_what_nobody_took(caplog: pytest.LogCaptureFixture) -> None:
    target, draft, server = open_pair(StreamConfig(**{**vars(CONFIG), "max_failures": 0}))
    target.queue.put(target.store.put("poison", make_sample(), "run"))
    lease = draft.queue.acquire(20.0)
    assert lease is not None
    draft.queue.fail(lease, reason="cannot be learned from")
    StreamHarness(target, draft).eventually(lambda: bool(target.dead_letters()), "the budget is spent")
    target.queue.put(target.store.put("left over", make_sample(), "run"))
    draft.close()
    target.close()
    assert "1 of 2 samples are dead letters: poison (cannot be learned from)" in caplog.text
    assert "leaves with 1 of 2 samples untaken: left over" in caplog.text
    assert "no sample of it came" not in caplog.text
    del server


def test_draft_whose_stream_ended_without_a_sample_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target, draft, server = open_pair(CONFIG)
    target.queue.close()
    while draft.queue.acquire(1.0) is None and not draft.queue.is_drained:
        pass
    draft.close()
    target.close()
    assert "the stream ended, and no sample of it came to this rank" in caplog.text
    assert "dead letters" not in caplog.text
    assert "untaken" not in caplog.text
    del server


def test_donated_features_are_sent_from_where_they_lie(pair: StreamHarness) -> None:
    sample = {**make_sample(), "logits": torch.randn(1, 8, 65536)}
    ref = pair.producer.put("donated", sample, "run", donate=True)  # type: ignore[call-arg]
    owned, handle = pair.target.store.pin(ref)
    assert owned.donated["logits"].data_ptr() == sample["logits"].data_ptr()
    assert "input_ids" not in owned.donated
    tensors, got = pair.consumer.get(pair.transfer(ref))
    for name, tensor in sample.items():
        assert torch.equal(tensors[name], tensor)
    pair.finish(ref, got)
    pair.target.store.unpin(handle)


def test_source_overwritten_after_put_arrives_with_the_old_values(pair: StreamHarness) -> None:
    sample = make_sample(fill=3)
    expected = {name: tensor.clone() for name, tensor in sample.items()}
    ref = pair.put("overwritten", sample)
    for tensor in sample.values():
        tensor.zero_()
    tensors, handle = pair.consumer.get(pair.transfer(ref))
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    pair.finish(ref, handle)


def test_tensor_held_across_many_samples_keeps_its_values(pair: StreamHarness) -> None:
    first = pair.send("held", make_sample(fill=1, num_tokens=64, hidden=512))
    tensors, handle = pair.consumer.get(first)
    kept = tensors["aux_hidden_states"][:, 3:]
    expected = kept.clone()
    del tensors
    pair.finish(first, handle)
    for i in range(100):
        ref = pair.send(f"s{i}", make_sample(fill=100 + i, num_tokens=64, hidden=512))
        _, handle = pair.consumer.get(ref)
        pair.finish(ref, handle)
    assert torch.equal(kept, expected)
    memory = pair.draft.store.health().resident_bytes
    del kept, _
    gc.collect()
    pair.eventually(lambda: pair.draft.store.health().resident_bytes < memory, "the slot returned")


def test_failed_delivery_with_touched_bytes_comes_again_byte_equal(pair: StreamHarness) -> None:
    sample = make_sample(fill=9)
    before = pair.target.statistics()["redelivered"]
    ref = pair.send("touched", sample)
    tensors, handle = pair.consumer.get(ref)
    tensors["logits"].fill_(-1.0)  # a consumer that writes into what it was given
    pair.draft.queue.fail(pair.leases.pop("touched"))
    pair.consumer.release(handle)
    again = pair.draft.queue.acquire(20.0)
    assert again is not None
    assert again.ref == ref
    fresh, handle = pair.consumer.get(again.ref)
    assert torch.equal(fresh["logits"], sample["logits"])
    pair.draft.queue.ack(again)
    pair.consumer.release(handle)
    pair.assert_empty()
    assert pair.target.statistics()["redelivered"] == before + 1


def test_sample_that_is_always_failed_becomes_a_dead_letter_with_its_reason(pair: StreamHarness) -> None:
    before = len(pair.target.dead_letters())
    pair.target.queue.put(pair.put("poison", make_sample()))
    for _ in range(CONFIG.max_failures + 1):
        lease = pair.draft.queue.acquire(20.0)
        assert lease is not None
        pair.draft.queue.fail(lease, reason="cannot be learned from")
    pair.eventually(lambda: len(pair.target.dead_letters()) > before, "the budget is spent")
    letter = pair.target.dead_letters()[-1]
    assert (letter.sample_id, letter.reason) == ("poison", "cannot be learned from")
    assert pair.draft.queue.acquire(0.2) is None
    pair.assert_empty()


def test_late_ack_of_an_expired_lease_changes_nothing() -> None:
    target, draft, server = open_pair(StreamConfig(**{**vars(CONFIG), "lease": 0.3}))
    harness = StreamHarness(target, draft)
    clock = draft._side.leases.table._clock = FakeClock()
    try:
        target.queue.put(harness.put("slow", make_sample()))
        old = draft.queue.acquire(20.0)
        assert old is not None
        clock.advance(0.5)
        harness.eventually(lambda: draft.queue.pending_count() == 1, "the lease expired")
        new = draft.queue.acquire(20.0)
        assert new is not None
        assert new.redelivery_count == 1
        assert draft.queue.ack_many([old]) == 0
        assert draft.queue.ack_many([new]) == 1
        harness.assert_empty()
        assert target.statistics()["acked"] == 1
    finally:
        draft.close()
        target.close()
        del server


def test_each_side_refuses_what_belongs_to_the_other(pair: StreamHarness) -> None:
    with pytest.raises(MisuseError, match="target ranks"):
        pair.draft.store.put("x", make_sample(), "run")
    with pytest.raises(MisuseError, match="draft ranks"):
        pair.target.queue.acquire(0.0)
    ref = pair.put("mine", make_sample())
    with pytest.raises(SampleNotFoundError):
        pair.draft.store.get(ref)
    with pytest.raises(MisuseError):
        pair.draft.queue.put(ref)
    pair.target.store.discard(ref)


def test_draft_that_was_stopped_tells_its_targets_before_it_leaves() -> None:
    """They would offer it what it refuses again and again."""
    target, draft, server = open_pair(CONFIG)
    harness = StreamHarness(target, draft)
    with draft._side.cond:
        draft._side.stop("enough")  # the word that went to the target is late
    assert draft.queue.acquire(0.0) is None
    assert draft.queue.is_drained
    harness.eventually(lambda: target.queue.consumers_gone, "the target knows")
    with pytest.raises(ClosedError, match="no draft rank is left"):
        target.queue.put(harness.put("late", make_sample()))
    assert target._side.books().redelivered == 0
    draft.close()
    target.close()
    del server


def test_everything_after_close_says_so() -> None:
    target, draft, server = open_pair(CONFIG)
    draft.close()
    target.close()
    for call in (
        lambda: target.store.put("x", make_sample(), "run"),
        lambda: target.prompts([torch.ones(4)]),
        lambda: draft.process_group(),
        lambda: draft.store.gc(),
    ):
        with pytest.raises(ClosedError):
            call()
    draft.close()
    target.close()
    del server
