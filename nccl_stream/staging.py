"""Host memory at memory speed: a pool of page-locked slots, packing, copies, and a checksum.

The work is done by a compiled core (``csrc/``), without the GIL. Where that is absent the same functions run in Python
and numpy, after one warning in the log. Everything here takes CPU tensors, except for what says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from nccl_stream._core import core, cuda_compiled, is_compiled
from nccl_stream.device_staging import DeviceStager, Stream, is_available, is_expanded
from nccl_stream.errors import ClosedError, ConfigError, MisuseError
from nccl_stream.pinned_pool import PinnedPool, PoolSlot, PoolStatistics, open_shared, remove_abandoned

__all__ = [
    "PinnedPool",
    "PoolSlot",
    "PoolStatistics",
    "DeviceStager",
    "StagedCopy",
    "Stager",
    "copy_bytes",
    "crc32c",
    "cuda_compiled",
    "is_compiled",
    "open_shared",
    "open_stager",
    "pack",
    "remove_abandoned",
    "unpack",
]

_uint8, _strided = torch.uint8, torch.strided  # looked up for every tensor
BytesLike: TypeAlias = bytes | bytearray | memoryview


def crc32c(data: torch.Tensor | BytesLike, value: int = 0) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of the data. Releases the GIL.

    Args:
        data: ``[n] uint8`` on the CPU, contiguous; or bytes.
        value: the checksum of what comes before the data, so that pieces can be taken one by one.

    Raises:
        MisuseError: another kind of data, or ``value`` is not a 32-bit checksum.
    """
    if value and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 0xFFFFFFFF):
        raise MisuseError(f"a checksum to continue is an integer of 32 bits, got {value!r}")
    if isinstance(data, torch.Tensor):
        _check_flat("crc32c", data)
        checksum: int = core().crc32c(data.data_ptr(), data.numel(), value)
        return checksum
    try:
        checksum = core().crc32c_buffer(data, value)
    except (TypeError, BufferError) as error:
        raise MisuseError(f"crc32c takes a flat uint8 tensor or bytes, got {type(data).__name__}: {error}") from error
    return checksum


def copy_bytes(dst: torch.Tensor, src: torch.Tensor, *, threads: int = 1) -> None:
    """Copies all of ``src`` to ``dst``; returns when it is done. Releases the GIL.

    Large copies write past the processor's cache, which is faster and leaves the cache to others.

    Args:
        dst: ``[n] uint8`` on the CPU, contiguous.
        src: the same; the two do not overlap.
        threads: how many may share the work, the caller's included. Small copies stay with one.

    Raises:
        MisuseError: another kind of tensor, unequal sizes, overlapping memory, or fewer than one thread.
    """
    _check_flat("copy_bytes: dst", dst)
    _check_flat("copy_bytes: src", src)
    if threads != 1:
        _check_threads(threads)
    nbytes = src.numel()
    if dst.numel() != nbytes:
        raise MisuseError(f"copy_bytes: src has {nbytes} bytes, dst {dst.numel()}")
    to, start = dst.data_ptr(), src.data_ptr()
    if -nbytes < to - start < nbytes:
        raise MisuseError(f"copy_bytes: src and dst share memory ({nbytes} bytes, {to - start} bytes apart)")
    core().copy_bytes(to, start, nbytes, threads)


def pack(tensors: Sequence[torch.Tensor], slot: torch.Tensor, offsets: Sequence[int], *, threads: int = 1) -> None:
    """Copies tensors into a slot, each contiguous at its offset, byte for byte; returns when done. Releases the GIL.

    Args:
        tensors: dense CPU tensors of any dtype, shape and strides, also empty, 0-d and expanded ones. They share no
            memory with the slot. Lazy conjugations and negations are carried out.
        slot: ``[n] uint8`` on the CPU, contiguous.
        offsets: where each tensor begins, in bytes from the start of the slot; free of any alignment.
        threads: how many may share the work, the caller's included. Small amounts stay with one.

    Raises:
        MisuseError: a tensor of another kind, a place outside the slot, two places that overlap, or fewer than one
            thread. Nothing was copied.
    """
    _check_flat("pack: slot", slot)
    _check_threads(threads)
    described = []
    kept = []  # temporaries that must outlive the copy
    for tensor in tensors:
        if (
            not (isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is _strided)
            or tensor.is_quantized
        ):
            raise _not_dense("pack", tensor)
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
            kept.append(tensor)
        described.append((tensor.data_ptr(), tensor.itemsize, tensor.shape, tensor.stride()))
    _place("pack", core().pack, described, slot, offsets, threads)


def unpack(slot: torch.Tensor, offsets: Sequence[int], tensors: Sequence[torch.Tensor], *, threads: int = 1) -> None:
    """Copies what :func:`pack` put into a slot back into tensors; returns when done. Releases the GIL.

    Args:
        slot: ``[n] uint8`` on the CPU, contiguous.
        offsets: where the contents of each tensor begin, in bytes from the start of the slot.
        tensors: dense CPU tensors of any dtype, shape and strides, whose elements do not share memory. Autograd learns
            that they have changed.
        threads: as for :func:`pack`.

    Raises:
        MisuseError: as for :func:`pack`, or a tensor that is expanded, conjugated or negated lazily. Nothing was
            copied.
    """
    _check_flat("unpack: slot", slot)
    _check_threads(threads)
    described = []
    for tensor in tensors:
        if (
            not (isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is _strided)
            or tensor.is_quantized
        ):
            raise _not_dense("unpack", tensor)
        shape, strides = tensor.shape, tensor.stride()
        if tensor.is_neg() or tensor.is_conj() or (0 in strides and is_expanded(tensor)):
            raise MisuseError(
                f"unpack: cannot write into a tensor that is expanded, conjugated or negated lazily: {tuple(shape)} "
                f"{tensor.dtype}, strides {strides}; clone() it first"
            )
        described.append((tensor.data_ptr(), tensor.itemsize, shape, strides))
    _place("unpack", core().unpack, described, slot, offsets, threads)
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _place(
    operation: str,
    function: Callable[..., None],
    described: list[tuple[int, int, torch.Size, tuple[int, ...]]],
    slot: torch.Tensor,
    offsets: Sequence[int],
    threads: int,
) -> None:
    offsets = list(offsets)
    if len(offsets) != len(described):
        raise MisuseError(f"{operation}: {len(described)} tensors, but {len(offsets)} offsets")
    if offsets and min(offsets) < 0:
        raise MisuseError(f"{operation}: an offset is negative: {min(offsets)}")
    try:
        function(described, offsets, slot.data_ptr(), slot.numel(), threads)
    except ValueError as error:
        raise MisuseError(f"{operation}: {error}") from None


def _check_flat(what: str, tensor: torch.Tensor) -> None:
    try:
        if tensor.dtype is _uint8 and tensor.dim() == 1 and tensor.is_cpu and tensor.is_contiguous():
            return
    except AttributeError:
        pass
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"{what}: a flat uint8 tensor is needed, got {type(tensor).__name__}")
    raise MisuseError(
        f"{what}: a flat contiguous uint8 tensor on the CPU is needed, got {tensor.dtype} {tuple(tensor.shape)} on "
        f"{tensor.device}"
    )


def _not_dense(operation: str, tensor: torch.Tensor) -> MisuseError:
    if not isinstance(tensor, torch.Tensor):
        return MisuseError(f"{operation}: only tensors can be copied, got {type(tensor).__name__}")
    return MisuseError(
        f"{operation}: only dense CPU tensors can be copied, got {tensor.layout} {tensor.dtype} on {tensor.device}"
    )


def _check_threads(threads: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise MisuseError(f"threads must be a positive integer, got {threads!r}")


class StagedCopy(Protocol):
    """A copy that may still be under way."""

    def done(self) -> bool:
        """Whether the bytes are in place. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the bytes are in place.

        Raises:
            TimeoutError: they were not within ``timeout`` seconds.
        """
        ...


class _DoneCopy:
    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return


class Stager:
    """Copies slots from host to host, in the calling thread; with the interface of a :class:`DeviceStager`.

    Args:
        device: the CPU; for a GPU see :func:`open_stager`.
        threads: how many threads may share a copy.

    Raises:
        ConfigError: another device.
    """

    def __init__(self, device: torch.device | str = "cpu", *, threads: int = 1) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise ConfigError(
                f"this stager copies on the CPU; open_stager({str(self.device)!r}) has one for the device"
            )
        _check_threads(threads)
        self._threads = threads
        self._is_closed = False

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        *,
        after: Stream | None = None,
        before: Stream | None = None,
        behind: Sequence[StagedCopy] = (),
    ) -> StagedCopy:
        """Copies ``source`` to ``destination``, both ``[n] uint8`` and contiguous; it is over on return.

        Args:
            destination: where to.
            source: where from.
            after: only a device has streams; ignored.
            before: the same.
            behind: waits for these copies first.

        Raises:
            ClosedError: the stager is closed.
            MisuseError: as for :func:`copy_bytes`.
        """
        if self._is_closed:
            raise ClosedError("copy: the stager is closed")
        for copy in behind:
            copy.wait()
        copy_bytes(destination, source, threads=self._threads)
        return _DoneCopy()

    def sweep(self) -> None:
        """Nothing is ever in progress, and nothing kept."""

    def close(self, timeout: float = 0.0) -> bool:
        """Refuses further copies. Idempotent. Nothing can be in progress: always True."""
        self._is_closed = True
        return True


def open_stager(device: torch.device | str) -> Stager | DeviceStager:
    """A stager between the host's memory and that of ``device``.

    Raises:
        ConfigError: the device is a GPU, and the compiled core has no CUDA part or sees none.
        MisuseError: a GPU without its index.
        DeviceError: a CUDA call failed.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return Stager(device)
    if device.type != "cuda" or not is_available():
        raise ConfigError(f"no stager for {device}: the compiled core has no CUDA part, or this process sees no GPU")
    return DeviceStager(device)
