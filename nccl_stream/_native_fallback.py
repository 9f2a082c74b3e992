"""What :mod:`nccl_stream.staging` uses where the compiled core is absent: the same functions, in Python and numpy.

Names, arguments and results are those of ``_native``; see ``_native.pyi``. Slower, above all the checksum, but not
different in what it does.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import math
import mmap
import os
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nccl_stream._crc32c_numpy import crc32c_of

__all__ = [
    "FreeStatus",
    "Pool",
    "PoolCounts",
    "Region",
    "ReserveStatus",
    "copy_bytes",
    "copy_kind",
    "crc32c",
    "crc32c_buffer",
    "crc32c_kind",
    "cuda_compiled",
    "pack",
    "page_bytes",
    "remove_abandoned",
    "unpack",
]

cuda_compiled = False

_DIRECTORY = "/dev/shm"  # where Linux keeps POSIX shared memory
_PREFIX = "nccl_stream."
_CREATE_TRIES = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

Description = tuple[int, int, Sequence[int], Sequence[int]]


class ReserveStatus(enum.Enum):
    OK = 0
    NO_ROOM = 1
    TOO_LARGE = 2
    CLOSED = 3


class FreeStatus(enum.Enum):
    OK = 0
    ALREADY_FREE = 1
    FOREIGN = 2


class PoolCounts(NamedTuple):
    capacity: int
    used: int
    peak_used: int
    slots: int
    free_ranges: int
    largest_free: int
    waiting: int
    reserved: int


class _Waiter:
    def __init__(self, size: int, alignment: int) -> None:
        self.size = size
        self.alignment = alignment
        self.granted: tuple[int, int] | None = None
        self.wake = threading.Event()


class Pool:
    """Best fit, lowest address first, neighbours merged. Those that wait are served in the order in which they came."""

    def __init__(self, capacity: int, alignment: int) -> None:
        self._capacity = capacity
        self._alignment = alignment
        self._lock = threading.Lock()
        self._free = [(0, capacity)]  # (start, size), by start
        self._live: dict[int, tuple[int, int]] = {}  # start: (serial, size)
        self._waiters: deque[_Waiter] = deque()
        self._used = self._peak_used = self._last_serial = 0
        self._closed = False

    def reserve(self, nbytes: int, alignment: int, timeout: float | None) -> tuple[ReserveStatus, int, int]:
        size = max(self._alignment, -(-nbytes // self._alignment) * self._alignment)
        if size > self._capacity:
            return ReserveStatus.TOO_LARGE, 0, 0
        alignment = max(alignment, self._alignment)
        waits = timeout is None or timeout > 0
        with self._lock:
            if self._closed:
                return ReserveStatus.CLOSED, 0, 0
            granted = None if waits and self._waiters else self._take(size, alignment)
            if granted is not None:
                return ReserveStatus.OK, *granted
            if not waits:
                return ReserveStatus.NO_ROOM, 0, 0
            waiter = _Waiter(size, alignment)
            self._waiters.append(waiter)
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            while not waiter.wake.is_set():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                waiter.wake.wait(left if left is None else min(left, threading.TIMEOUT_MAX))
        except BaseException:
            self._withdraw(waiter)
            if waiter.granted is not None:
                self.free(*waiter.granted)
            raise
        self._withdraw(waiter)
        if waiter.granted is not None:
            return ReserveStatus.OK, *waiter.granted
        return (ReserveStatus.CLOSED if waiter.wake.is_set() else ReserveStatus.NO_ROOM), 0, 0

    def free(self, offset: int, serial: int) -> FreeStatus:
        with self._lock:
            if not 0 < serial <= self._last_serial:
                return FreeStatus.FOREIGN
            live = self._live.get(offset)
            if live is None or live[0] != serial:
                return FreeStatus.ALREADY_FREE
            size = self._live.pop(offset)[1]
            self._used -= size
            index = bisect_left(self._free, (offset, 0))
            if index < len(self._free) and self._free[index][0] == offset + size:
                size += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == offset:
                index -= 1
                offset, before = self._free.pop(index)
                size += before
            self._free.insert(index, (offset, size))
            self._serve()
        return FreeStatus.OK

    def statistics(self) -> PoolCounts:
        with self._lock:
            return PoolCounts(
                capacity=self._capacity,
                used=self._used,
                peak_used=self._peak_used,
                slots=len(self._live),
                free_ranges=len(self._free),
                largest_free=max((size for _, size in self._free), default=0),
                waiting=len(self._waiters),
                reserved=self._last_serial,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for waiter in self._waiters:
                waiter.wake.set()

    def _take(self, size: int, alignment: int) -> tuple[int, int] | None:
        """Offset and serial number; the lock is held."""
        fits = [
            (total, start, padding) for start, total in self._free if (padding := -start % alignment) + size <= total
        ]
        if not fits:
            return None
        total, start, padding = min(fits)
        self._free.remove((start, total))
        if padding:
            insort(self._free, (start, padding))
        if rest := total - padding - size:
            insort(self._free, (start + padding + size, rest))
        self._last_serial += 1
        self._live[start + padding] = (self._last_serial, size)
        self._used += size
        self._peak_used = max(self._peak_used, self._used)
        return start + padding, self._last_serial

    def _serve(self) -> None:
        """The lock is held."""
        while self._waiters and not self._closed:
            first = self._waiters[0]
            first.granted = self._take(first.size, first.alignment)
            if first.granted is None:
                return
            self._waiters.popleft()
            first.wake.set()

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve()  # those behind may fit where this one did not


class Region(mmap.mmap):
    """A mapped range of memory, unmapped when its last view is gone. See ``csrc/host/region.hpp`` for the names."""

    _file = -1
    _path = ""
    _creator = 0

    @staticmethod
    def anonymous(nbytes: int, threads: int = 1) -> Region:
        region = Region(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            region.madvise(_POPULATE_WRITE)
        except OSError:
            np.frombuffer(region, np.uint8)[:: mmap.PAGESIZE] = 0
        return region

    @staticmethod
    def create_shared(name: str, nbytes: int) -> Region:
        path = _path_of(name)
        file = _create_file(path)
        try:
            os.posix_fallocate(file, 0, nbytes)
            region = Region(file, nbytes)
        except BaseException:
            _unlink(file, path)
            raise
        region._file, region._path, region._creator = file, path, os.getpid()
        return region

    @staticmethod
    def open_shared(name: str) -> Region:
        file = os.open(_path_of(name), os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(file).st_size
            if nbytes == 0:
                raise OSError(errno.ENODATA, f"shared memory {name!r} has no size yet")
            return Region(file, nbytes)
        finally:
            os.close(file)

    @property
    def address(self) -> int:
        return int(np.frombuffer(self, np.uint8).__array_interface__["data"][0])

    @property
    def nbytes(self) -> int:
        return len(self)

    def unlink(self) -> None:
        file, self._file = self._file, -1
        if file >= 0 and self._creator == os.getpid():
            _unlink(file, self._path)

    def __del__(self) -> None:
        self.unlink()


def _path_of(name: str) -> str:
    if not 1 <= len(os.fsencode(name)) <= 200 or "/" in name or "\0" in name:
        raise OSError(errno.EINVAL, "a name of shared memory has 1 to 200 bytes and no slash")
    return os.path.join(_DIRECTORY, _PREFIX + name)


def _has_name(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(file: int, path: str) -> None:
    if _has_name(file, path):
        os.unlink(path)
    os.close(file)


def _remove_if_abandoned(path: str) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    if not _try_lock(file):
        os.close(file)
        return False
    _unlink(file, path)
    return True


def _create_file(path: str) -> int:
    for _ in range(_CREATE_TRIES):
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if not _remove_if_abandoned(path):
                break
            continue
        if _try_lock(file) and _has_name(file, path):
            return file
        os.close(file)
    raise FileExistsError(errno.EEXIST, f"shared memory {path} belongs to a living process")


def remove_abandoned(prefix: str) -> list[str]:
    start = _PREFIX + prefix
    names = sorted(name for name in os.listdir(_DIRECTORY) if name.startswith(start))
    return [name[len(_PREFIX) :] for name in names if _remove_if_abandoned(os.path.join(_DIRECTORY, name))]


def page_bytes() -> int:
    return mmap.PAGESIZE


def _bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def copy_bytes(dst: int, src: int, nbytes: int, threads: int = 1) -> None:
    ctypes.memmove(dst, src, nbytes)


def copy_kind() -> str:
    return "python"


def _place_all(
    tensors: list[Description],
    offsets: list[int],
    slot: int,
    slot_nbytes: int,
    copy: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None],
) -> None:
    sizes = [math.prod(shape) * itemsize for _, itemsize, shape, _ in tensors]
    end = 0
    for offset, nbytes, index in sorted(zip(offsets, sizes, range(len(sizes)), strict=True)):
        if offset < 0 or offset + nbytes > slot_nbytes or (nbytes and offset < end):
            raise ValueError(
                f"tensor {index} of {nbytes} bytes at offset {offset} lies outside the slot of {slot_nbytes} bytes, "
                f"or overlaps another"
            )
        end = max(end, offset + nbytes)
    for (address, itemsize, shape, strides), offset, nbytes in zip(tensors, offsets, sizes, strict=True):
        if nbytes == 0:
            continue
        extent = (sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1) * itemsize
        dtype = np.dtype((np.void, itemsize))
        steps = [stride * itemsize for stride in strides]
        in_tensor: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=_bytes_at(address, extent), strides=steps)
        in_slot: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=_bytes_at(slot + offset, nbytes))
        copy(in_slot, in_tensor)


def pack(tensors: list[Description], offsets: list[int], slot: int, slot_nbytes: int, threads: int = 1) -> None:
    def into_slot(in_slot: npt.NDArray[Any], in_tensor: npt.NDArray[Any]) -> None:
        in_slot[...] = in_tensor

    _place_all(tensors, offsets, slot, slot_nbytes, into_slot)


def unpack(tensors: list[Description], offsets: list[int], slot: int, slot_nbytes: int, threads: int = 1) -> None:
    def into_tensor(in_slot: npt.NDArray[Any], in_tensor: npt.NDArray[Any]) -> None:
        in_tensor[...] = in_slot

    _place_all(tensors, offsets, slot, slot_nbytes, into_tensor)


def crc32c(address: int, nbytes: int, value: int = 0) -> int:
    return crc32c_of(_bytes_at(address, nbytes), value) if nbytes else value


def crc32c_buffer(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    view = memoryview(data)
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    return crc32c_of(np.frombuffer(view, np.uint8), value) if view.nbytes else value


def crc32c_kind() -> str:
    return "numpy"
