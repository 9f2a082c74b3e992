"""Tensors shared through a real TCPStore."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nccl_stream import sharing
from nccl_stream.config import StreamConfig
from nccl_stream.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    ControlStoreError,
    MisuseError,
    PeerLostError,
    PeerTimeoutError,
    WireFormatError,
)
from nccl_stream.refs import dtype_from_name
from nccl_stream.sharing import SharedTensors
from nccl_stream.vocab import DraftVocabulary
from tests.unit.pipeline_support import Background

MANIFEST = "run/shared/head/manifest"


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def rank(store, number=0, prefix="run", max_bytes=1 << 30):
    label = f"target rank {number}"
    return SharedTensors(store, prefix, owner=f"inc{number}", label=label, timeout=60.0, max_bytes=max_bytes)


def nobody() -> str:
    return "target rank 0 (host pid 1)"


def fetch(store, name="head", timeout=30.0):
    return rank(store, 9).fetch(name, timeout, nobody)


def test_tensors_of_every_form_come_back_bit_equal_in_order(store, monkeypatch):
    monkeypatch.setattr(sharing, "PIECE_BYTES", 64)
    tensors = {
        "bf16": torch.randn(7, 9).to(torch.bfloat16),
        "strided": torch.arange(60).reshape(6, 10).t(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "one piece exactly": torch.arange(64, dtype=torch.uint8),
        "fp8": torch.randn(5).to(dtype_from_name("float8_e4m3fn")),
        "grad": torch.randn(3, requires_grad=True),
    }
    digest = rank(store).publish("head", tensors)
    got = fetch(store)
    assert list(got) == list(tensors)
    for name, tensor in got.items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), tensors[name].detach().reshape(-1).view(torch.uint8))
    assert not got["grad"].requires_grad
    assert len(digest) == 64
    got["bool"].fill_(False)  # a copy of this reader's own
    assert fetch(store)["bool"].any()


def test_no_value_in_the_store_is_larger_than_a_piece(store, monkeypatch):
    sizes = []
    rank(store).publish("head", {"a": torch.zeros(3 * sharing.PIECE_BYTES // 4 + 1)})
    for key in (f"run/shared/head/inc0/{i}" for i in range(4)):
        sizes.append(len(store.get(key)))
    assert sizes == [sharing.PIECE_BYTES] * 3 + [4]


def test_reader_that_comes_first_waits(store):
    reader = Background(lambda: fetch(store))
    assert reader.running
    rank(store).publish("head", {"a": torch.arange(3)})
    assert reader.result()["a"].tolist() == [0, 1, 2]


def test_wait_ends_with_the_targets_name_or_with_what_makes_it_vain(store):
    with pytest.raises(PeerTimeoutError, match=r"target rank 0 \(host pid 1\).*share\('head'"):
        fetch(store, timeout=0.0)

    def all_gone() -> str:
        raise PeerLostError("every target is gone")

    with pytest.raises(PeerLostError, match="gone"):
        rank(store, 9).fetch("head", 30.0, all_gone)


def test_targets_that_share_the_same_agree_and_others_are_refused(store):
    first, second = rank(store), rank(store, 1)
    tensors = DraftVocabulary.from_ids(torch.tensor([3, 1]), 5).tensors()
    digest = first.publish("vocabulary", tensors)
    assert second.publish("vocabulary", tensors) == digest == first.publish("vocabulary", tensors)
    assert not store.check(["run/shared/vocabulary/inc1/0"])
    other = DraftVocabulary.from_ids(torch.tensor([1, 3]), 5).tensors()
    with pytest.raises(ConfigError, match=r"target rank 1.*target rank 0"):
        second.publish("vocabulary", other)
    assert DraftVocabulary.from_tensors(fetch(store, "vocabulary")).selected_token_ids.tolist() == [3, 1]


@pytest.mark.parametrize("same", [True, False])
def test_target_that_loses_the_race_takes_its_pieces_back(store, same, monkeypatch):
    first, second = rank(store), rank(store, 1)
    check, raced = SharedTensors._same_as_there, []

    def first_is_faster(self, client, name, digest):
        if self is second and not raced:
            raced.append(first.publish("head", {"a": torch.arange(3)}))
            return False  # what it saw before the other one published
        return check(self, client, name, digest)

    monkeypatch.setattr(SharedTensors, "_same_as_there", first_is_faster)
    if same:
        assert second.publish("head", {"a": torch.arange(3)}) == raced[0]
    else:
        with pytest.raises(ConfigError, match="something else"):
            second.publish("head", {"a": torch.arange(4)})
    assert not store.check(["run/shared/head/inc1/0"])
    assert fetch(store)["a"].tolist() == [0, 1, 2]


def test_earlier_life_of_the_run_is_not_met(store):
    rank(store, prefix="epoch1").publish("head", {"a": torch.arange(3)})
    with pytest.raises(PeerTimeoutError):
        rank(store, prefix="epoch2").fetch("head", 0.0, nobody)


def test_more_than_the_limit_is_refused_before_anything_is_written(store):
    target = rank(store, max_bytes=100)
    with pytest.raises(CapacityError, match="limit is 100") as caught:
        target.publish("head", {"a": torch.zeros(26)})
    assert not caught.value.can_wait
    assert store.num_keys() <= 1  # the store's own
    target.publish("head", {"a": torch.zeros(20)})
    target.publish("head", {"a": torch.zeros(20)})
    with pytest.raises(CapacityError, match="80 shared before"):
        target.publish("norm", {"a": torch.zeros(6)})
    target.publish("norm", {"a": torch.zeros(5)})


def test_reader_refuses_more_than_its_limit_by_the_manifest_alone(store):
    rank(store).publish("head", {"a": torch.zeros(26), "b": torch.zeros(0)})
    store.delete_key("run/shared/head/inc0/0")  # it must not come to the pieces
    with pytest.raises(WireFormatError, match=r"104 bytes.*103 \(StreamConfig\.max_shared_bytes"):
        rank(store, 9, max_bytes=103).fetch("head", 30.0, nobody)


def test_default_limit_carries_the_head_of_an_8b_target():
    qwen3_8b = 151_936 * 4096 * 2  # bf16
    assert StreamConfig().max_shared_bytes > 2 * qwen3_8b  # and its embedding
    assert "max_shared_bytes" in StreamConfig().shared()  # a draft reads what a target may write
    assert sharing.PIECE_BYTES <= 4 << 20


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, 7])
def test_names_that_could_leave_the_prefix_are_refused(store, name):
    with pytest.raises(MisuseError, match="shared name"):
        rank(store).publish(name, {"a": torch.zeros(1)})
    with pytest.raises(MisuseError, match="shared name"):
        fetch(store, name)


@pytest.mark.parametrize("tensors", [{}, {"a": [1.0]}, {"": torch.zeros(1)}, {"a": torch.zeros(1, device="meta")}])
def test_values_that_are_not_dense_tensors_are_refused(store, tensors):
    with pytest.raises(MisuseError):
        rank(store).publish("head", tensors)


@pytest.mark.parametrize("damage", [b"\x01" * 24, b"short"])
def test_damaged_piece_is_noticed(store, damage):
    rank(store).publish("head", {"a": torch.arange(3)})
    store.set("run/shared/head/inc0/0", damage)
    with pytest.raises(ChecksumError):
        fetch(store)
    store.delete_key("run/shared/head/inc0/0")
    with pytest.raises(ChecksumError, match="lacks piece"):
        fetch(store)


def manifest(**changes):
    return {"v": 1, "owner": "o", "label": "l", "tensors": [["a", "int64", [1]]], "sha256": "0" * 64} | changes


@pytest.mark.parametrize(
    "text",
    [
        "\x80\x04K\x01.",
        "[]",
        json.dumps(manifest(v=2)),
        json.dumps(manifest(extra=1)),
        json.dumps(manifest(owner=3)),
        json.dumps(manifest(owner="x" * 600)),
        json.dumps(manifest(tensors={})),
        json.dumps(manifest(tensors=[["a", "int64"]])),
        json.dumps(manifest(tensors=[["a", "object", [1]]])),
        json.dumps(manifest(tensors=[["a", "int64", [-1]]])),
        json.dumps(manifest(tensors=[["a", "int64", [True]]])),
        json.dumps(manifest(tensors=[["a", "int64", [1] * 17]])),
        json.dumps(manifest(tensors=[["a", "int64", [2**28]]])),
        json.dumps(manifest(tensors=[["a", "int64", [1]], ["a", "int64", [1]]])),
        json.dumps(manifest(tensors=[[str(i), "int64", [0]] for i in range(1025)])),
    ],
)
def test_hostile_manifest_is_a_named_error(store, text):
    store.set(MANIFEST, text)
    with pytest.raises(WireFormatError):
        fetch(store)


def test_store_that_is_gone_is_a_named_error(store):
    client = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=60))
    target = SharedTensors(client, "run", owner="i", label="l", timeout=1.0, max_bytes=100)

    class Broken:
        def set_timeout(self, _timeout):
            pass

        def check(self, _keys):
            raise dist.DistNetworkError("connection was closed")

    target._client = lambda: Broken()
    with pytest.raises(ControlStoreError, match=r"'head'.*connection was closed"):
        target.publish("head", {"a": torch.zeros(1)})
