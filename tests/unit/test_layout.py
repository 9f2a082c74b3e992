"""Byte layout of slots."""

from __future__ import annotations

import pytest
import torch

from nccl_stream.errors import MisuseError, WireFormatError
from nccl_stream.refs import FeatureSpec
from nccl_stream.transport.layout import ALIGN_BYTES, HEADER_BYTES, MAX_HEADER_BYTES, SMALL_BYTES, SlotLayout

CHUNK = 1 << 20


def specs_of(tensors):
    return {name: FeatureSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def layout_of(tensors, chunk_bytes=CHUNK):
    return SlotLayout.from_specs(specs_of(tensors), chunk_bytes=chunk_bytes)


def all_dtypes():
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


def random_bytes_as(dtype, shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def as_bytes(tensor):
    return bytes(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_all_dtypes_of_torch_are_covered():
    assert len(all_dtypes()) >= 40


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)], ids=str)
def test_pack_every_dtype_and_shape_is_byte_exact(dtype, shape):
    tensor = random_bytes_as(dtype, shape)
    layout = layout_of({"x": tensor})
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack({"x": tensor}, slot)
    view = layout.views(slot)["x"]
    assert (view.shape, view.dtype) == (tensor.shape, dtype)
    start, expected = layout.offsets["x"], as_bytes(tensor)
    assert bytes(slot[start : start + len(expected)].numpy()) == expected
    assert as_bytes(view) == expected


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_pack_strided_source_is_byte_exact(dtype):
    base = random_bytes_as(dtype, (6, 10))
    layout = SlotLayout.from_specs({"x": FeatureSpec((5, 3), dtype)}, chunk_bytes=CHUNK)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack({"x": base.t()[::2, 1:4]}, slot)
    rows = base.view(torch.uint8).view(6, 10, dtype.itemsize).transpose(0, 1)[::2, 1:4]
    start = layout.offsets["x"]
    assert bytes(slot[start : start + 15 * dtype.itemsize].numpy()) == bytes(rows.contiguous().view(-1).numpy())


def test_pack_bool_bytes_other_than_one_survive():
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool).view(2, 2).t()
    layout = layout_of({"mask": odd})
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack({"mask": odd}, slot)
    assert layout.views(slot)["mask"].view(torch.uint8).tolist() == [[0, 2], [1, 255]]


def test_pack_lazy_conj_and_neg_are_resolved():
    z = torch.randn(4, dtype=torch.complex64)
    lazy = {"conj": z.conj(), "neg": z.conj().imag}
    assert lazy["conj"].is_conj()
    assert lazy["neg"].is_neg()
    layout = layout_of(lazy)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack(lazy, slot)
    views = layout.views(slot)
    assert torch.equal(views["conj"], lazy["conj"].resolve_conj())
    assert torch.equal(views["neg"], -z.imag)
    assert not any(SlotLayout.donatable(tensor) for tensor in lazy.values())


def test_pack_grad_tensor_leaves_autograd_alone():
    tensor = torch.ones(3, requires_grad=True)
    layout = layout_of({"x": tensor})
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack({"x": tensor}, slot)
    view = layout.views(slot)["x"]
    assert view.tolist() == [1, 1, 1]
    assert not view.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")],
    ids=["sparse", "meta"],
)
def test_pack_tensor_without_dense_memory_is_refused(tensor):
    layout = SlotLayout.from_specs({"x": FeatureSpec((3, 3), torch.float32)}, chunk_bytes=CHUNK)
    with pytest.raises(MisuseError, match="'x'"):
        layout.pack({"x": tensor}, torch.zeros(layout.total_bytes, dtype=torch.uint8))


def test_pack_wrong_feature_changes_nothing():
    layout = SlotLayout.from_specs(
        {"a": FeatureSpec((2,), torch.int64), "b": FeatureSpec((2,), torch.int64)}, chunk_bytes=CHUNK
    )
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    good = torch.ones(2, dtype=torch.int64)
    for bad in ({"c": good}, {"b": torch.ones(3, dtype=torch.int64)}, {"b": torch.ones(2, dtype=torch.int32)}):
        with pytest.raises(MisuseError):
            layout.pack({"a": good, **bad}, slot)
    assert not slot.any()
    with pytest.raises(MisuseError, match="bytes"):
        layout.pack({"a": good, "b": good}, slot[:256])


def test_layout_small_features_share_messages_large_ones_get_their_own():
    specs = {
        "aux": FeatureSpec((3, SMALL_BYTES), torch.uint8),
        "ids": FeatureSpec((100,), torch.int64),
        "scalar": FeatureSpec((), torch.float32),
        "head": FeatureSpec((SMALL_BYTES // 2,), torch.bfloat16),
    }
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    assert list(layout.offsets) == list(specs)
    assert layout.large == ("aux", "head")
    assert layout.offsets["ids"] == HEADER_BYTES
    assert layout.offsets["scalar"] == HEADER_BYTES + 1024
    assert layout.packed_bytes == layout.offsets["aux"] == HEADER_BYTES + 1024 + 256
    assert layout.chunks[0] == (0, HEADER_BYTES + 1024 + 4)
    assert [nbytes for _, nbytes in layout.chunks[1:]] == [CHUNK] * 4
    assert layout.total_bytes == HEADER_BYTES + 1280 + 4 * SMALL_BYTES


def test_layout_thousand_features_are_one_message():
    layout = SlotLayout.from_specs({f"f{i}": FeatureSpec((3,), torch.int16) for i in range(1000)}, chunk_bytes=CHUNK)
    assert len(layout.chunks) == 1
    assert layout.total_bytes == HEADER_BYTES + 1000 * ALIGN_BYTES


def test_layout_is_cached_by_names_order_shapes_dtypes_and_chunk():
    a, b = FeatureSpec((2,), torch.int64), FeatureSpec((3,), torch.int64)
    first = SlotLayout.from_specs({"a": a, "b": b}, chunk_bytes=CHUNK)
    assert SlotLayout.from_specs({"a": FeatureSpec([2], torch.int64), "b": b}, chunk_bytes=CHUNK) is first
    assert SlotLayout.from_specs({"b": b, "a": a}, chunk_bytes=CHUNK) is not first
    assert SlotLayout.from_specs({"a": a, "b": b}, chunk_bytes=CHUNK * 2) is not first


@pytest.mark.parametrize("chunk_bytes", [0, -256, 100, True])
def test_layout_bad_chunk_size_is_refused(chunk_bytes):
    with pytest.raises(MisuseError, match="chunk_bytes"):
        SlotLayout.from_specs({}, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("header", [b"", b"\x00", b"abc", bytes(range(254))])
def test_header_round_trip(header):
    slot = torch.full((HEADER_BYTES,), 255, dtype=torch.uint8)
    layout = layout_of({})
    layout.write_header(slot, header)
    assert layout.read_header(slot) == header


def test_header_too_long_or_never_written_is_refused():
    layout = layout_of({})
    with pytest.raises(MisuseError):
        layout.write_header(torch.zeros(256, dtype=torch.uint8), bytes(MAX_HEADER_BYTES + 1))
    with pytest.raises(WireFormatError):
        layout.read_header(torch.full((256,), 255, dtype=torch.uint8))


def test_wire_buffers_from_slot_are_its_chunks():
    tensors = {"big": random_bytes_as(torch.int16, (3, SMALL_BYTES)), "small": torch.arange(9)}
    layout = layout_of(tensors)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack(tensors, slot)
    buffers = layout.wire_buffers(slot)
    assert [(b.data_ptr() - slot.data_ptr(), b.numel()) for b in buffers] == list(layout.chunks)


def test_wire_buffers_donated_feature_is_sent_from_where_it_lies():
    tensors = {"big": random_bytes_as(torch.bfloat16, (2, SMALL_BYTES)), "small": torch.arange(9)}
    layout = layout_of(tensors)
    staging = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    layout.pack({"small": tensors["small"]}, staging)
    layout.write_header(staging, b"hello")
    buffers = layout.wire_buffers(staging, tensors)
    assert buffers[1].data_ptr() == tensors["big"].data_ptr()
    received = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for (offset, nbytes), buffer in zip(layout.chunks, buffers, strict=True):
        received[offset : offset + nbytes] = buffer
    assert layout.read_header(received) == b"hello"
    views = layout.views(received)
    assert all(as_bytes(views[name]) == as_bytes(tensors[name]) for name in tensors)


def test_wire_buffers_unfit_donation_or_small_slot_is_refused():
    big = random_bytes_as(torch.uint8, (2, SMALL_BYTES))
    layout = layout_of({"big": big})
    staging = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    with pytest.raises(MisuseError, match="contiguous"):
        layout.wire_buffers(staging, {"big": torch.zeros(SMALL_BYTES, 2, dtype=torch.uint8).t()})
    with pytest.raises(MisuseError, match="spec says"):
        layout.wire_buffers(staging, {"big": big.view(-1)})
    with pytest.raises(MisuseError, match="at least"):
        layout.wire_buffers(staging)


def test_views_of_unfit_slot_are_refused():
    layout = layout_of({"x": torch.zeros(4)})
    for slot in (
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros(512, dtype=torch.int8),
        torch.zeros(1024, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(MisuseError):
            layout.views(slot)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize("written_in_inference_mode", [False, True])
def test_slot_is_written_in_any_mode_of_autograd(made_in_inference_mode, written_in_inference_mode, monkeypatch):
    """A target puts under ``torch.inference_mode()``; the thread that sends writes the header without it."""
    monkeypatch.setattr(SlotLayout, "_goes_together", staticmethod(lambda *_: False))  # as from another device
    layout = layout_of({"x": torch.ones(3)})
    with torch.inference_mode(made_in_inference_mode):
        slot = torch.empty(layout.total_bytes, dtype=torch.uint8)
    with torch.inference_mode(written_in_inference_mode):
        layout.pack({"x": torch.ones(3, requires_grad=True)}, slot)
        layout.write_header(slot, b"sample 1")
    assert layout.read_header(slot) == b"sample 1"
    assert layout.views(slot)["x"].tolist() == [1.0, 1.0, 1.0]
