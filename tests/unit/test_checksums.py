"""Checksums of samples: what is summed, what travels, and what a mismatch costs."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from nccl_stream.coordination.intake import DraftIntake
from nccl_stream.coordination.messages import Announce, Settle
from nccl_stream.errors import LinkError
from nccl_stream.staging import crc32c
from nccl_stream.stores.staged import OwnedBytes
from nccl_stream.stores.tensors import checksum_of
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.transport.layout import SMALL_BYTES
from nccl_stream.wire_header import check_header, make_header
from tests.unit.helpers import make_ref
from tests.unit.test_nccl_store import CONFIG, open_pair, target_store

NAMED = {"gen": 1, "seq": 2, "serial": 3, "delivery": 0}


def config(**more):
    return replace(CONFIG, poison=False, **more)


def test_header_carries_the_checksum_and_only_where_it_is_expected():
    plain, summed = make_header("t0", "s", **NAMED), make_header("t0", "s", **NAMED, checksum=0xDEADBEEF)
    assert check_header(summed, plain, "s", checksummed=True) == 0xDEADBEEF
    assert check_header(plain, plain, "s") is None
    for raw, checksummed in ((plain, True), (summed, False), (summed[:-1], True), (summed + b"\0", True)):
        with pytest.raises(LinkError, match="out of step"):
            check_header(raw, plain, "s", checksummed=checksummed)
    with pytest.raises(LinkError, match="out of step"):
        check_header(make_header("t1", "s", **NAMED, checksum=1), plain, "s", checksummed=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.complex64])
def test_checksum_is_that_of_the_bytes_in_order(dtype):
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape in ((3, 5), (), (0, 4), (7,))]
    raw = b"".join(bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors)
    assert checksum_of(tensors) == crc32c(raw)
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C's definition
    assert checksum_of([]) == 0


@pytest.mark.parametrize("donate", [False, True])
def test_put_sums_the_features_wherever_they_lie(donate):
    large = torch.arange(SMALL_BYTES // 4 + 1, dtype=torch.int32)
    tensors = {**make_sample(num_tokens=5), "small": torch.arange(33).reshape(3, 11).T, "large": large}
    with target_store(checksums=True) as store:
        ref = store.put("s", tensors, "run", donate=donate)
        owned, handle = store.pin(ref)
        assert bool(owned.donated) == donate
        assert owned.checksum == checksum_of([tensor.contiguous() for tensor in tensors.values()])
        store.unpin(handle)


def test_without_verification_nothing_is_summed(monkeypatch):
    def refuse(*_):
        raise AssertionError("a checksum was computed")

    monkeypatch.setattr("nccl_stream.stores.nccl.checksum_of", refuse)
    monkeypatch.setattr("nccl_stream.ranks.incoming_samples.checksum_of", refuse)
    target, draft, server = open_pair(config())
    with draft, target:
        target.queue.put(target.store.put("s", {**make_sample(), "x": torch.arange(10)}, "run"))
        lease = draft.queue.acquire(20.0)
        tensors, _ = draft.store.get(lease.ref)
        assert torch.equal(tensors["x"], torch.arange(10))
        draft.queue.ack(lease)
        draft.queue.close()
    del server


def test_donated_tensor_that_is_written_to_is_a_dead_letter_that_says_so(caplog):
    target, draft, server = open_pair(config(verify_checksums=True, max_failures=1))
    with draft, target:
        donated = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
        ref = target.store.put("mine", {**make_sample(), "x": donated}, "run", donate=True)
        donated[SMALL_BYTES // 2] = 1
        good = target.store.put("good", make_sample(), "run")
        with caplog.at_level(logging.ERROR, "nccl_stream.ranks.incoming_samples"):
            target.queue.put(ref)
            target.queue.put(good)
            lease = draft.queue.acquire(30.0)
            assert lease.ref.sample_id == "good"
            draft.queue.ack(lease)
            target.queue.close()
            target._side.wait_settled()
        [letter] = target.dead_letters()
        assert letter.sample_id == "mine"
        assert letter.failures == 2
        before = [*make_sample().values()]
        found, put = checksum_of([*before, donated]), checksum_of([*before, torch.zeros_like(donated)])
        for delivery in (0, 1):
            expected = f"delivery {delivery}: its owner computed CRC-32C {put:08x}, what arrived has {found:08x}"
            assert any(expected in message for message in caplog.messages)
        assert expected in letter.reason
        assert draft.statistics().local["checksum_failures"] == 2
    del server


def test_ranks_must_agree_on_verification():
    assert config(verify_checksums=True).shared() != config().shared()
    assert OwnedBytes.__dataclass_fields__["checksum"].default is None


class Port:
    """What an intake asks for, all of it granted."""

    def __init__(self):
        self.told, self.yielded_orders = [], []

    def tell(self, owner, message):
        self.told.append(message)

    def check(self, owner, ref):
        return 256

    def reserve(self, nbytes, label):
        return object()

    def receive(self, delivery):
        pass

    def yielded(self, delivery):
        self.yielded_orders.append(delivery.order)

    def free(self, delivery):
        pass


@pytest.mark.parametrize(("last", "yielded"), [(False, []), (True, [1])])
def test_static_order_waits_for_a_corrupt_sample_only_if_it_comes_again(last, yielded):
    port = Port()
    intake = DraftIntake(port, rank=0, num_targets=1, num_drafts=1, static=True)
    intake.owner_joined("t0", 0)
    intake.link_opening("t0", 1)
    intake.link_up("t0", 1)
    for order in (0, 1):
        ref = make_ref(f"s{order}", store_uri="nccl://run/t0", estimated_bytes=256)
        intake.announced("t0", Announce(1, order, order, 0, order, 0, ref.to_wire()))
    first, second = (intake._owners["t0"].transfers[1, order] for order in (0, 1))
    intake.transfer_over(second, ok=True)
    intake.transfer_over(first, ok=True, fault="it is bad", last=last)
    assert port.yielded_orders == yielded
    assert port.told[-1] == Settle([["s0", 0, "corrupt", 1, "it is bad"]])
    if not last:
        ref = make_ref("s0", store_uri="nccl://run/t0", estimated_bytes=256)
        intake.announced("t0", Announce(1, 2, 0, 1, 0, 1, ref.to_wire()))
        intake.transfer_over(intake._owners["t0"].transfers[1, 2], ok=True)
        assert port.yielded_orders == [0, 1]
