"""Work on GPU memory that the compiled core does: copies nobody waits for, packing, checksums.

Only where :func:`is_available`. A runtime other than CUDA's can be given for tests: the compiled core has an imagined
one, ``FakeRuntime``, with the order of streams and events and with errors on demand.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from nccl_stream import _core
from nccl_stream.errors import ClosedError, DeviceError, MisuseError

__all__ = [
    "DeviceCopy",
    "DeviceStager",
    "Stream",
    "aside",
    "at_device",
    "beside_captures",
    "device_crc32c",
    "device_pack",
    "device_unpack",
    "has_kernels",
    "is_available",
    "on_stream",
]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20  # 0.1 ms on PCIe 4: what a copy may have to wait for another one's
STREAMS = 4
CLOSE_S = 10.0
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h
MAX_DIMS = 8  # of a tensor that the packing kernel takes, after merging what is contiguous; csrc/cuda/strided.hpp

T = TypeVar("T")
_native: Any = _core.native

# Copies of stagers that were dropped without close(): the device does not stop for that, so their memory must stay.
_orphans: deque[tuple[DeviceCopy, torch.Tensor, torch.Tensor]] = deque()


class Stream(Protocol):
    """What is needed of a ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int: ...


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the compiled core has its CUDA part and this process sees a GPU: what copies need."""
    return _core.cuda_compiled() and _native.device_count() > 0


@lru_cache(maxsize=64)
def has_kernels(device: torch.device) -> bool:
    """Whether this GPU can run the compiled core's kernels; older generations than it was built for cannot."""
    return is_available() and _finds_kernels(device, _native.cuda_runtime())


def _finds_kernels(device: torch.device, runtime: Any) -> bool:
    try:
        with at_device(device):
            _call(_native.find_kernels, runtime, device.index or 0)
    except DeviceError as error:
        logger.warning("torch packs on %s, and checksums are computed on the host: %s", device, error)
        return False
    return True


@lru_cache(maxsize=1)
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver
        return None


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """What the calling thread does meanwhile does not disturb the CUDA graphs that other threads capture.

    By default an event queried by any thread breaks every capture of the process (pytorch#104487), and raises.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(CAPTURE_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # which leaves there what was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream, and its device, the current one; with :func:`beside_captures`.

    ``torch.cuda.stream`` alone would switch back to the former device in a way that makes a CUDA context there: in a
    thread that never chose a device some hundred MB on the first GPU, whatever GPU the stream is on.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), beside_captures():
        yield


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def aside(device: torch.device) -> AbstractContextManager[None]:
    """For work on memory that no stream uses any more: on the current one it would wait for what the trainer queued."""
    return on_stream(_side_stream(device)) if device.type == "cuda" else nullcontext()


@contextlib.contextmanager
def at_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one, for a call into CUDA from any thread; with :func:`beside_captures`.

    The core would set the device itself, but leave a context on the former one.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), beside_captures():
        yield


def _call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call into the compiled core; its errors become the package's."""
    try:
        return function(*args, **kwargs)
    except _native.CudaError as error:
        raise DeviceError(str(error)) from error


class DeviceCopy:
    """A copy on its way. Any thread may ask it.

    Whoever drops it does not stop the copy, and the memory on both sides stays until it is over.
    """

    def __init__(self, native: Any, device: torch.device) -> None:
        self._native = native
        self._device = device

    def done(self) -> bool:
        """Whether the bytes are in place and neither side is touched any more. Does not block.

        Raises:
            DeviceError: the device reports an error.
        """
        with at_device(self._device):
            return bool(_call(self._native.done))

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is over.

        Raises:
            TimeoutError: it was not within ``timeout`` seconds.
            DeviceError: the device reports an error.
        """
        with at_device(self._device):
            over = _call(self._native.wait, -1.0 if timeout is None else max(0.0, timeout))
        if not over:
            raise TimeoutError(f"the copy was not over within {timeout:g} s")


class DeviceStager:
    """Copies between host and GPU on streams of their own. Only ``close`` waits for the device.

    Args:
        device: ``cuda:N``.
        chunk_bytes: large copies go in such pieces.
        streams: how many copies may be in progress side by side.
        runtime: for tests; then the memory is the host's.

    Raises:
        DeviceError: streams cannot be made.
        MisuseError: a bad argument.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        streams: int = STREAMS,
        runtime: Any = None,
    ) -> None:
        self.device = torch.device(device)
        if chunk_bytes < 1 or streams < 1:
            raise MisuseError(f"a stager needs chunk_bytes > 0 and streams > 0, got {chunk_bytes} and {streams}")
        if runtime is None and (self.device.type != "cuda" or self.device.index is None):
            raise MisuseError(f"a stager works for a CUDA device with its index, got {device}")
        self._lock = threading.Lock()
        self._in_progress: deque[tuple[DeviceCopy, torch.Tensor, torch.Tensor]] = deque()
        self._closed = False
        finalizer = weakref.finalize(self, _orphans.extend, self._in_progress)
        finalizer.atexit = False
        runtime = _native.cuda_runtime() if runtime is None else runtime
        with at_device(self.device):
            self._native = _call(_native.Stager, runtime, self.device.index or 0, chunk_bytes, streams)

    def copy(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        *,
        after: Stream | None = None,
        before: Stream | None = None,
        behind: Sequence[Any] = (),
    ) -> DeviceCopy:
        """Queue a copy and return. What it is ordered by is the device's business, not the host's.

        Args:
            destination: ``[n] uint8``, contiguous. Host memory should be page-locked; else the call may block.
            source: the same, of equal size.
            after: the copy starts behind the work that this stream has queued.
            before: work that is queued on this stream from now on starts behind the copy: with the stream that writes
                the source, the source may be overwritten there at once.
            behind: the copy starts behind these other :class:`DeviceCopy`.

        Raises:
            MisuseError: tensors that are not like that; nothing was queued.
            ClosedError: the stager is closed.
            DeviceError: a CUDA call failed; the message names it, and nothing of the copy is in progress.
        """
        for tensor in (destination, source):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_meta:
                raise MisuseError(
                    f"a stager copies flat uint8 tensors, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                )
        if destination.numel() != source.numel():
            raise MisuseError(f"a copy of {source.numel()} bytes does not fit {destination.numel()} bytes")
        with self._lock:
            if self._closed:
                raise ClosedError("copy: the stager is closed")
            self._forget()
            with at_device(self.device):
                native = _call(
                    self._native.copy,
                    destination.data_ptr(),
                    source.data_ptr(),
                    source.numel(),
                    after=None if after is None else after.cuda_stream,
                    before=None if before is None else before.cuda_stream,
                    behind=[copy._native for copy in behind],
                )
            copy = DeviceCopy(native, self.device)
            # Neither side may go to somebody else meanwhile, whatever the caller does with its references.
            self._in_progress.append((copy, destination, source))
            return copy

    def sweep(self) -> None:
        """Let go of the memory of copies that are over. Never blocks; any thread may call it."""
        if not self._lock.acquire(blocking=False):
            return  # whoever holds it does the same
        try:
            if not self._closed:
                self._forget()
        except DeviceError:
            pass  # nobody can tell any more what is over; the next copy raises
        finally:
            self._lock.release()

    def _forget(self) -> None:
        """The lock is held."""
        while self._in_progress and self._in_progress[0][0].done():
            self._in_progress.popleft()
        _forget_orphans()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Take no more copies and wait for those in progress, at most ``timeout`` seconds. Idempotent.

        Returns:
            Whether they are over; if not, their memory stays.

        Raises:
            DeviceError: the device reports an error.
        """
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + timeout
        while self._in_progress:
            try:
                self._in_progress[0][0].wait(deadline - time.monotonic())
            except TimeoutError:
                return False
            self._in_progress.popleft()
        return True


def _forget_orphans() -> None:
    """Let go of the memory of dropped stagers' copies that are over. From any thread."""
    for _ in range(len(_orphans)):
        try:
            orphan = _orphans.popleft()
        except IndexError:  # another thread was here
            return
        try:
            over = orphan[0].done()
        except DeviceError:
            over = False  # nobody can tell any more
        if not over:
            _orphans.append(orphan)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of the tensor share memory because it was expanded."""
    return tensor.numel() > 0 and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _check_slot(slot: torch.Tensor) -> None:
    if slot.dtype != torch.uint8 or slot.dim() != 1 or not slot.is_contiguous() or slot.is_meta:
        raise MisuseError(f"a slot is flat, contiguous uint8 memory, got {slot.dtype} {tuple(slot.shape)}")


def _check_dense(tensor: torch.Tensor, slot: torch.Tensor) -> None:
    if tensor.device != slot.device:
        raise MisuseError(f"the slot is on {slot.device}, a tensor on {tensor.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise MisuseError(
            f"only dense tensors can be moved, without lazy conj or neg bits, got {tensor.layout} {tensor.dtype}; "
            "resolve_conj() and resolve_neg() first"
        )


def _move(
    tensors: Sequence[torch.Tensor],
    slot: torch.Tensor,
    offsets: Sequence[int],
    gather: bool,
    stream: Stream,
    runtime: Any,
) -> None:
    _check_slot(slot)
    if len(tensors) != len(offsets):
        raise MisuseError(f"{len(tensors)} tensors, but {len(offsets)} offsets")
    described, flats, places = [], [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        _check_dense(tensor, slot)
        if not gather and is_expanded(tensor):
            raise MisuseError(f"cannot write into an expanded tensor: {tuple(tensor.shape)}, strides {tensor.stride()}")
        if offset < 0 or offset + tensor.nbytes > slot.numel():
            raise MisuseError(f"a tensor of {tensor.nbytes} bytes at {offset} is outside of {slot.numel()} bytes")
        if tensor.nbytes:
            places.append((offset, offset + tensor.nbytes))
        described.append((tensor.data_ptr(), tensor.dtype.itemsize, list(tensor.shape), list(tensor.stride())))
        flats.append(slot.data_ptr() + offset)
    for (_, end), (start, _) in pairwise(sorted(places)):
        if start < end:
            raise MisuseError(f"the places of two tensors overlap: one ends at {end}, the next begins at {start}")
    for tensor in (*tensors, slot):
        if tensor.is_cuda:  # or its memory could go to somebody else before the kernel has run
            tensor.record_stream(stream)  # type: ignore[arg-type]
    runtime = _native.cuda_runtime() if runtime is None else runtime
    try:
        with at_device(slot.device):
            _call(_native.device_move, runtime, slot.device.index or 0, described, flats, gather, stream.cuda_stream)
    except ValueError as error:
        raise MisuseError(f"these tensors cannot be moved by the packing kernel: {error}") from error


def device_pack(
    tensors: Sequence[torch.Tensor], slot: torch.Tensor, offsets: Sequence[int], *, stream: Stream, runtime: Any = None
) -> None:
    """Copy tensors of any dtype and strides into a slot, each contiguous at its offset; one kernel for 24 of them.

    Queues work on ``stream`` and returns. Memory of torch's allocator may be dropped then: nobody else gets it before
    the stream has come to it. Other memory, such as an arena's, its owner must keep until then.

    Args:
        tensors: on the slot's device. After merging what is contiguous, up to 8 dimensions may be left.
        slot: ``[n] uint8``, contiguous.
        offsets: bytes.
        stream: where the kernel runs; for CUDA tensors a ``torch.cuda.Stream``.
        runtime: for tests.

    Raises:
        MisuseError: a slot of another kind; a tensor elsewhere, not dense, with a lazy conj or neg bit, that does not
            fit, or with too many dimensions; two places that overlap. Nothing was queued.
        DeviceError: a CUDA call failed.
    """
    _move(tensors, slot, offsets, True, stream, runtime)


def device_unpack(
    slot: torch.Tensor, offsets: Sequence[int], tensors: Sequence[torch.Tensor], *, stream: Stream, runtime: Any = None
) -> None:
    """The way back: as :func:`device_pack`, out of the slot into the tensors. Autograd learns that they have changed.

    Raises:
        MisuseError: as for :func:`device_pack`, or a tensor that is expanded.
        DeviceError: a CUDA call failed.
    """
    _move(tensors, slot, offsets, False, stream, runtime)
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def device_crc32c(
    data: torch.Tensor, value: int = 0, *, stream: torch.cuda.Stream | None = None, runtime: Any = None
) -> int:
    """CRC-32C of bytes on a GPU, going on from ``value``. Blocks until the stream has come to it.

    Args:
        data: ``[n] uint8``, contiguous.
        value: the checksum of what came before.
        stream: default: the current one of the data's device.
        runtime: for tests.

    Raises:
        DeviceError: a CUDA call failed.
    """
    stream = torch.cuda.current_stream(data.device) if stream is None else stream
    used = _native.cuda_runtime() if runtime is None else runtime
    with on_stream(stream) if data.is_cuda else nullcontext():  # on which the sum is read, too
        raw = torch.empty(1, dtype=torch.int32, device=data.device)
        address = (data.data_ptr(), data.numel(), raw.data_ptr())
        _call(_native.device_crc32c, used, data.device.index or 0, *address, stream.cuda_stream)
        while runtime is not None and runtime.step():
            pass
        total = int(raw.item()) & 0xFFFFFFFF
    return int(_native.crc32c_finish(total, data.numel(), value))
