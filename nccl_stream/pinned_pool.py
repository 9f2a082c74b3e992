"""A pool of host memory that GPUs can copy from and to at full speed, and that processes of one host can share."""

from __future__ import annotations

import errno
import os
import weakref
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from nccl_stream._core import core
from nccl_stream.errors import CapacityError, ClosedError, ConfigError, MisuseError

__all__ = ["PinnedPool", "PoolSlot", "PoolStatistics", "open_shared", "remove_abandoned"]

_PREFAULT_THREADS = 4  # more do not help: clearing pages is bound by memory bandwidth
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


@dataclass(frozen=True)
class PoolStatistics:
    """A pool at one moment; sizes in bytes.

    Attributes:
        capacity: all memory of the pool.
        used: memory in slots, each rounded up to the pool's alignment.
        peak_used: the most that ``used`` has been.
        slots: how many slots are out.
        free_ranges: how many ranges the free memory is in.
        largest_free: the largest slot that fits now.
        waiting: calls of ``reserve`` that wait for room.
        reserved: slots handed out so far.
        is_pinned: whether the memory is page-locked for a GPU.
    """

    capacity: int
    used: int
    peak_used: int
    slots: int
    free_ranges: int
    largest_free: int
    waiting: int
    reserved: int
    is_pinned: bool


class PoolSlot:
    """A range of a pool's memory. Stays reserved until :meth:`free` is called, also when this object is gone.

    Attributes:
        buffer: ``[nbytes] uint8`` on the CPU; contents undefined. It keeps the memory mapped, but not reserved.
        address: of the first byte.
        offset: the same from the start of the pool, in bytes; for those who map shared memory.
        nbytes: as asked for.
    """

    __slots__ = ("_pool", "_serial", "address", "buffer", "nbytes", "offset")

    def __init__(self, pool: PinnedPool, buffer: torch.Tensor, offset: int, serial: int) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.offset = offset
        self.nbytes = buffer.numel()
        self._pool = pool
        self._serial = serial

    def free(self) -> None:
        """Returns the memory to the pool, for others to write into. Never blocks; works after the pool was closed.

        Raises:
            MisuseError: it was returned before.
        """
        self._pool.free(self)


class PinnedPool:
    """One reservation of host memory, handed out in slots. All methods may be called by any thread.

    The memory is page-locked where there is a GPU, and its pages are in place before the first use in any case. It is
    unmapped when the pool and every tensor over it are gone.

    Args:
        capacity_bytes: size, rounded up to ``alignment`` and to nothing else.
        alignment: of every slot, in bytes; a power of two up to the page size.
        pin: page-lock the memory: ``"auto"`` where there is a GPU, or always, or never.
        shared_memory: a name, under which other processes of this host map the same memory with :func:`open_shared`.
            The name is taken away by :meth:`close`; what a crash left behind under it is replaced.

    Raises:
        CapacityError: the system does not have that much memory.
        ConfigError: ``pin=True`` where memory cannot be page-locked.
        MisuseError: a size, alignment or name that cannot be, or the name is in use by a living process.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        alignment: int = 256,
        pin: bool | Literal["auto"] = "auto",
        shared_memory: str | None = None,
    ) -> None:
        native = core()
        _check_size("capacity_bytes", capacity_bytes, 1)
        self._page_bytes: int = native.page_bytes()
        self._alignment = self._check_alignment(alignment)
        if pin not in (True, False, "auto"):
            raise MisuseError(f'pin must be True, False or "auto", got {pin!r}')
        capacity = -(-capacity_bytes // alignment) * alignment
        register = _page_lock_of(pin)
        try:
            if shared_memory is None:
                self._region = native.Region.anonymous(capacity, min(_PREFAULT_THREADS, os.cpu_count() or 1))
            else:
                self._region = native.Region.create_shared(shared_memory, capacity)
        except (OSError, ValueError, OverflowError) as error:
            raise _named(error, f"a pool of {capacity} bytes") from error
        try:
            self._is_pinned = register is not None and _page_lock(self._region, register)
            self._memory: torch.Tensor | None = torch.frombuffer(self._region, dtype=torch.uint8)
            self._pool = native.Pool(capacity, alignment)
        except BaseException:
            self._region.unlink()
            raise
        if shared_memory is not None:
            # For a pool that is never closed; runs at exit too.
            weakref.finalize(self, self._region.unlink)
        self._free_status = native.FreeStatus
        self._reserve_status = native.ReserveStatus

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, nbytes: int, *, alignment: int | None = None, timeout: float | None = 0.0) -> PoolSlot:
        """A slot of exactly ``nbytes``.

        Args:
            nbytes: 0 is allowed.
            alignment: of the slot's address in bytes, a power of two up to the page size; the pool's own at least.
            timeout: how long to wait for room in seconds: 0 not at all, None for ever. Those that wait are served in
                the order in which they came, and do not hold the GIL.

        Raises:
            CapacityError: no room now or within the time (``can_wait`` is True), or not even in the empty pool.
            ClosedError: the pool is closed, or was closed during the wait.
            MisuseError: a size, alignment or timeout that cannot be.
        """
        _check_size("nbytes", nbytes, 0)
        alignment = self._alignment if alignment is None else self._check_alignment(alignment)
        if timeout is not None and not timeout >= 0:
            raise MisuseError(f"timeout must be None or at least 0 seconds, got {timeout!r}")
        memory = self._memory
        if memory is None:
            raise ClosedError("reserve: the pool is closed")
        if nbytes > memory.numel():
            raise self._too_large(nbytes)
        status, offset, serial = self._pool.reserve(nbytes, alignment, timeout)
        if status == self._reserve_status.OK:
            try:
                return PoolSlot(self, memory[offset : offset + nbytes], offset, serial)
            except BaseException:
                self._pool.free(offset, serial)
                raise
        if status == self._reserve_status.CLOSED:
            raise ClosedError("reserve: the pool is closed")
        if status == self._reserve_status.TOO_LARGE:
            raise self._too_large(nbytes)
        now = self.statistics()
        waited = f" within {timeout:g} s" if timeout else ""
        raise CapacityError(
            f"no room for {nbytes} bytes{waited}: {now.used} of {now.capacity} bytes are in {now.slots} slots, the "
            f"largest free range has {now.largest_free}; free slots, or make the pool larger",
        )

    def free(self, slot: PoolSlot) -> None:
        """The same as ``slot.free()``.

        Raises:
            MisuseError: the slot is another pool's, or was returned before.
        """
        if not isinstance(slot, PoolSlot) or slot._pool is not self:
            raise MisuseError(f"free: {slot!r} is no slot of this pool")
        status = self._pool.free(slot.offset, slot._serial)
        if status != self._free_status.OK:
            raise MisuseError(f"free: the slot of {slot.nbytes} bytes at offset {slot.offset} was returned before")

    def statistics(self) -> PoolStatistics:
        """What is in use now. Works after :meth:`close`."""
        counts = self._pool.statistics()
        return PoolStatistics(
            capacity=counts.capacity,
            used=counts.used,
            peak_used=counts.peak_used,
            slots=counts.slots,
            free_ranges=counts.free_ranges,
            largest_free=counts.largest_free,
            waiting=counts.waiting,
            reserved=counts.reserved,
            is_pinned=self._is_pinned,
        )

    def close(self) -> None:
        """Refuses further reservations, wakes those that wait, and takes the name of shared memory away. Idempotent."""
        self._pool.close()
        self._region.unlink()
        self._memory = None

    def _check_alignment(self, alignment: int) -> int:
        _check_size("alignment", alignment, 1)
        if alignment & (alignment - 1) or alignment > self._page_bytes:
            raise MisuseError(f"alignment must be a power of two up to {self._page_bytes}, got {alignment}")
        return alignment

    def _too_large(self, nbytes: int) -> CapacityError:
        capacity = self.statistics().capacity
        return CapacityError(f"{nbytes} bytes do not fit into a pool of {capacity} bytes at all", can_wait=False)


def open_shared(name: str) -> torch.Tensor:
    """The memory of another process's :class:`PinnedPool` with this name, ``[capacity] uint8`` on the CPU.

    Slots are found by their offset and size. The memory stays mapped as long as a tensor over it is alive, also after
    the other process has ended.

    Raises:
        MisuseError: no such name, or one that cannot be.
    """
    try:
        return torch.frombuffer(core().Region.open_shared(name), dtype=torch.uint8)
    except (OSError, ValueError, TypeError) as error:
        raise _named(error, f"shared memory {name!r}") from error


def remove_abandoned(prefix: str) -> list[str]:
    """Takes away the shared memory of pools whose processes are gone, and returns its names.

    Args:
        prefix: what the names begin with. Only names that pools have made are looked at.
    """
    return list(core().remove_abandoned(prefix))


def _check_size(what: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise MisuseError(f"{what} must be an integer of at least {least}, got {value!r}")


def _named(error: Exception, what: str) -> Exception:
    code = getattr(error, "errno", None)
    if code in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG) or isinstance(error, OverflowError):
        return CapacityError(f"{what}: the system does not have the memory ({error})", can_wait=False)
    if code == errno.EEXIST:
        return MisuseError(f"{what}: {error}; choose another name, or end that process")
    if code in (errno.EINVAL, errno.ENOENT, errno.ENODATA) or not isinstance(error, OSError):
        return MisuseError(f"{what}: {error}")
    return ConfigError(f"{what}: {error}")


class _PageLock(Protocol):
    def lock(self, address: int, nbytes: int) -> int: ...
    def unlock(self, address: int) -> int: ...


class _TorchPageLock:
    """Through the CUDA runtime that torch has loaded, which may be asked for from any build of this package."""

    def lock(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def unlock(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def _page_lock_of(pin: bool | Literal["auto"]) -> _PageLock | None:
    if pin is False:
        return None
    if torch.cuda.is_available():
        return _TorchPageLock()
    if pin is True:
        raise ConfigError('pin=True: torch sees no GPU that memory could be page-locked for; use pin="auto"')
    return None


def _page_lock(region: Any, page_lock: _PageLock) -> bool:
    address = region.address
    status = page_lock.lock(address, region.nbytes)
    if status:
        raise ConfigError(f"page-locking {region.nbytes} bytes failed with CUDA error {status}; use less, or pin=False")
    # Before the memory is unmapped, that is when the last tensor over it is gone; at exit the system does it.
    weakref.finalize(region, page_lock.unlock, address).atexit = False
    return True
