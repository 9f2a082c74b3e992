"""Packing against torch, for every dtype and for strides of every kind; copies of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_stream.errors import MisuseError
from nccl_stream.staging import copy_bytes, pack, unpack

pytestmark = pytest.mark.usefixtures("core")
both_cores = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])

DTYPES = sorted(
    {
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype) and not name.startswith(("q", "bits"))
    },
    key=str,
)
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns, NaNs and impossible bools included."""
    count = 1
    for size in shape:
        count *= size
    return random_bytes(count * dtype.itemsize, seed).view(dtype).view(shape)


def contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What torch makes of it."""
    plain = tensor.detach().view(CARRIERS[tensor.dtype.itemsize])
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor made by permuting, slicing and expanding a dense one."""
    dtype = draw(
        st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
    )
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 33, 40]), max_size=4)))
    tensor = tensor_of(shape, dtype, draw(st.integers(0, 99)))
    if tensor.dim():
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        for dim in range(tensor.dim()):
            step = draw(st.sampled_from([1, 1, 2, 3]))
            start = draw(st.integers(0, 2))
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(min(start, tensor.shape[dim]), None, step)
            tensor = tensor[tuple(index)]
            if tensor.shape[dim] == 1 and draw(st.booleans()):
                sizes = list(tensor.shape)
                sizes[dim] = draw(st.integers(1, 4))
                tensor = tensor.expand(sizes)
    return tensor


def laid_out(tensors: list[torch.Tensor], gap: int) -> tuple[list[int], int]:
    offsets, end = [], gap
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() * tensor.itemsize + gap
    return offsets, end


@both_cores
@given(
    tensors=st.lists(strided_tensors(), max_size=5), gap=st.sampled_from([0, 1, 64]), threads=st.sampled_from([1, 3])
)
def test_pack_any_strides_equals_torch_and_touches_nothing_else(
    tensors: list[torch.Tensor], gap: int, threads: int
) -> None:
    offsets, nbytes = laid_out(tensors, gap)
    slot = random_bytes(nbytes, 7)
    expected = slot.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat = contiguous_bytes(tensor)
        expected[offset : offset + flat.numel()] = flat
    pack(tensors, slot, offsets, threads=threads)
    assert torch.equal(slot, expected)


@both_cores
@given(tensors=st.lists(strided_tensors(), max_size=5), threads=st.sampled_from([1, 3]))
def test_unpack_any_strides_restores_what_was_packed(tensors: list[torch.Tensor], threads: int) -> None:
    tensors = [tensor for tensor in tensors if 0 not in tensor.stride() or tensor.numel() < 2]
    offsets, nbytes = laid_out(tensors, 3)
    slot = random_bytes(nbytes, 7)
    pack(tensors, slot, offsets)
    before = slot.clone()
    backings = [torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in tensors]
    originals = [contiguous_bytes(backing) for backing in backings]
    for tensor in tensors:
        tensor.view(CARRIERS[tensor.dtype.itemsize]).zero_()
    unpack(slot, offsets, tensors, threads=threads)
    for backing, original in zip(backings, originals, strict=True):
        assert torch.equal(contiguous_bytes(backing), original)
    assert torch.equal(slot, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_every_dtype_transposed_and_back_is_byte_exact(dtype: torch.dtype) -> None:
    tensor = tensor_of((37, 6, 50), dtype)[1:, ::2].permute(2, 0, 1)
    flat = contiguous_bytes(tensor)
    slot = torch.zeros(flat.numel() + 5, dtype=torch.uint8)
    pack([tensor], slot, [5])
    assert torch.equal(slot[5:], flat)
    back = tensor_of((37, 6, 50), dtype, 1)[1:, ::2].permute(2, 0, 1)
    unpack(slot, [5], [back])
    assert torch.equal(contiguous_bytes(back), flat)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_pack_large_tensors_with_threads_equals_torch(threads: int) -> None:
    tensors = [
        random_bytes(9_000_001),
        tensor_of((1500, 1100), torch.bfloat16).t(),
        tensor_of((700, 3, 512), torch.float32)[:, 1],
        tensor_of((), torch.int64),
        tensor_of((1_200_000, 3), torch.bfloat16)[:, :2],
    ]
    offsets, nbytes = laid_out(tensors, 256)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    pack(tensors, slot, offsets, threads=threads)
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat = contiguous_bytes(tensor)
        assert torch.equal(slot[offset : offset + flat.numel()], flat)
    backs = [torch.zeros_like(tensor, memory_format=torch.preserve_format) for tensor in tensors]
    unpack(slot, offsets, backs, threads=threads)
    for back, tensor in zip(backs, tensors, strict=True):
        assert torch.equal(contiguous_bytes(back), contiguous_bytes(tensor))


def test_pack_lazy_conjugate_and_negation_are_carried_out() -> None:
    values = torch.tensor([[1 + 2j, 3 - 4j], [5 + 6j, 7 - 8j]])
    conjugated, negated = values.t().conj(), values.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    slot = torch.zeros(32 + 16, dtype=torch.uint8)
    pack([conjugated, negated], slot, [0, 32])
    assert torch.equal(slot[:32].view(torch.complex64).view(2, 2), conjugated.resolve_conj())
    assert torch.equal(slot[32:].view(torch.float32).view(2, 2), negated.resolve_neg())


def test_pack_parameter_needs_no_detach_and_unpack_is_seen_by_autograd() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    slot = torch.zeros(36, dtype=torch.uint8)
    pack([weight], slot, [0])
    assert torch.equal(slot.view(torch.float32), weight.detach().view(-1))

    saved = torch.randn(9)
    result = (weight.view(-1) * saved).sum()
    unpack(slot, [0], [saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    with torch.inference_mode():
        inference = torch.zeros(9)
        unpack(slot, [0], [inference])
    assert torch.equal(inference, weight.detach().view(-1))


FLAT = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "slot", "offsets", "threads"),
    [
        ([torch.zeros(16)], FLAT, [1], 1),
        ([torch.zeros(16)], FLAT, [-1], 1),
        ([torch.zeros(16)], FLAT, [1 << 62], 1),
        ([torch.zeros(0)], FLAT, [65], 1),
        ([torch.zeros(4), torch.zeros(4)], FLAT, [0, 15], 1),
        ([torch.zeros(4), torch.zeros(4)], FLAT, [16, 16], 1),
        ([torch.zeros(8), torch.zeros(1)], FLAT, [0, 8], 1),
        ([torch.zeros(4)], FLAT, [], 1),
        ([], FLAT, [0], 1),
        ([torch.zeros(4)], FLAT, [0], 0),
        ([torch.zeros(4)], FLAT, [0], True),
        ([torch.zeros(4)], FLAT.view(8, 8), [0], 1),
        ([torch.zeros(4)], FLAT[::2], [0], 1),
        ([torch.zeros(4)], FLAT.view(torch.int8), [0], 1),
        ([torch.zeros(4)], FLAT.to("meta"), [0], 1),
        ([torch.zeros(4)], b"slot", [0], 1),
        ([torch.zeros(4, device="meta")], FLAT, [0], 1),
        ([torch.zeros(4).to_sparse()], FLAT, [0], 1),
        ([[0.0]], FLAT, [0], 1),
    ],
)
def test_pack_and_unpack_wrong_argument_is_misuse_and_copies_nothing(
    tensors: list[torch.Tensor], slot: torch.Tensor, offsets: list[int], threads: int
) -> None:
    FLAT.fill_(7)
    with pytest.raises(MisuseError, match=r"^pack: |^threads"):
        pack(tensors, slot, offsets, threads=threads)
    with pytest.raises(MisuseError, match=r"^unpack: |^threads"):
        unpack(slot, offsets, tensors, threads=threads)
    assert FLAT.eq(7).all()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1).expand(4), torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, 1).expand(2, 3)]
)
def test_unpack_into_shared_or_lazy_elements_is_misuse(tensor: torch.Tensor) -> None:
    with pytest.raises(MisuseError, match="clone"):
        unpack(torch.zeros(64, dtype=torch.uint8), [0], [tensor])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, (1 << 20) + 1, 9_000_001, 20_000_000])
def test_copy_bytes_any_size_and_alignment_is_exact(nbytes: int, threads: int) -> None:
    for dst_skip, src_skip in ((0, 0), (1, 3), (63, 64)):
        src = random_bytes(nbytes + src_skip)[src_skip:]
        dst = torch.zeros(nbytes + dst_skip + 64, dtype=torch.uint8)
        copy_bytes(dst[dst_skip : dst_skip + nbytes], src, threads=threads)
        assert torch.equal(dst[dst_skip : dst_skip + nbytes], src)
        assert not dst[:dst_skip].any()
        assert not dst[dst_skip + nbytes :].any()


@pytest.mark.parametrize(
    ("dst", "src"),
    [
        (FLAT[:32], FLAT[32:63]),
        (FLAT[:32], FLAT[31:63]),
        (FLAT, FLAT),
        (FLAT[::2], torch.zeros(32, dtype=torch.uint8)),
        (FLAT, torch.zeros(64, dtype=torch.int8)),
        (torch.zeros(64), FLAT),
        (FLAT.to("meta"), torch.zeros(64, dtype=torch.uint8)),
        (bytearray(64), FLAT),
    ],
)
def test_copy_bytes_wrong_argument_is_misuse(dst: torch.Tensor, src: torch.Tensor) -> None:
    with pytest.raises(MisuseError, match="copy_bytes"):
        copy_bytes(dst, src)
