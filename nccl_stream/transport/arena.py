"""Receive memory: one allocation, cut into slots that return only when nobody can see them any more.

A slot returns to the arena when its delivery is settled, no handle and no transfer holds it, and no tensor that was
made from an export is alive. On a GPU the next owner's receive additionally waits for the work that the consumers'
streams had queued when the slot returned.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from nccl_stream.device_staging import at_device
from nccl_stream.errors import CapacityError, ClosedError, MisuseError
from nccl_stream.staging import PinnedPool, PoolSlot
from nccl_stream.transport.freelist import FreeList
from nccl_stream.transport.layout import ALIGN_BYTES

__all__ = ["Arena", "Slot"]

POISON_BYTE = 0xA5  # as bf16 about -2.9e-16, as an int64 index far out of range: visible either way


class Stream(Protocol):
    """What the arena needs of a ``torch.cuda.Stream``."""

    def wait_event(self, event: Any) -> None: ...


class Event(Protocol):
    """What the arena needs of a ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...


class _Memory(Protocol):
    """The bytes of an arena, and which of them are free. Not thread-safe by itself."""

    def take(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """A range's start and buffer, or None when there is no room now."""
        ...

    def give(self, start: int, nbytes: int) -> None: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int: ...


class _OneTensor:
    """Memory of a device, or that somebody else has given: one tensor, with the books kept here."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._free = FreeList(tensor.numel())

    def take(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        start = self._free.take(nbytes)
        return None if start is None else (start, self._tensor[start : start + nbytes])

    def give(self, start: int, nbytes: int) -> None:
        self._free.give(start, nbytes)

    @property
    def free_bytes(self) -> int:
        return self._free.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._free.largest_free_bytes


class _PoolMemory:
    """Memory of the host: a pool, whose slots are the ranges."""

    def __init__(self, capacity: int, pin: bool) -> None:
        self._pool = PinnedPool(capacity, alignment=ALIGN_BYTES, pin="auto" if pin else False)
        self._slots: dict[int, PoolSlot] = {}

    def take(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        try:
            slot = self._pool.reserve(nbytes)
        except CapacityError:
            return None
        self._slots[slot.offset] = slot
        return slot.offset, slot.buffer

    def give(self, start: int, nbytes: int) -> None:
        self._slots.pop(start).free()

    @property
    def free_bytes(self) -> int:
        now = self._pool.statistics()
        return now.capacity - now.used

    @property
    def largest_free_bytes(self) -> int:
        return self._pool.statistics().largest_free


class _HostExport(np.ndarray):
    """A buffer over a slot's host memory. A subclass because plain arrays cannot be referenced weakly by value."""


class _DeviceExport:
    """A slot's device memory, as torch reads it through the CUDA array interface."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer  # keeps the arena's memory alive for as long as a view lives
        self.__cuda_array_interface__ = {
            "shape": (buffer.numel(),),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


class Slot:
    """A region of an arena. Made by :meth:`Arena.reserve`; all methods may be called from any thread.

    Attributes:
        buffer: ``[nbytes] uint8`` view of the region for the transport itself. It does not count as a user's view.
        nbytes: size, the request rounded up to ``ALIGN_BYTES``.
        label: who asked for it, for messages.
    """

    def __init__(self, arena: Arena, start: int, buffer: torch.Tensor, label: str, pending: Sequence[Event]) -> None:
        self.buffer = buffer
        self.nbytes = buffer.numel()
        self.label = label
        self._arena = arena
        self._start = start
        self._pending = pending
        self._streams: list[Any] = []
        self._handles = 0
        self._transfers = 0
        self._views = 0
        self._settled = False
        self._returned = False
        self._was_exported = False

    def export(self) -> torch.Tensor:
        """A ``[nbytes] uint8`` tensor over the slot for the user.

        The memory is not used again until this tensor and every tensor derived from it (slices, dtype views, numpy
        arrays, autograd's saved tensors) are gone. May be called several times.

        Raises:
            MisuseError: the slot has returned to its arena.
        """
        with self._arena._locked():
            self._check_alive("export")
            self._views += 1
            self._was_exported = True
        try:
            return self._arena._export(self)
        except BaseException:
            self._arena._dead_views.append(self)
            raise

    def begin_transfer(self) -> None:
        """A transfer may touch the memory from now on.

        Raises:
            MisuseError: the slot has returned to its arena.
        """
        with self._arena._locked():
            self._check_alive("begin_transfer")
            self._transfers += 1

    def end_transfer(self) -> None:
        """One transfer is over for good: finished, or aborted and quiesced.

        Raises:
            MisuseError: there was none.
        """
        with self._arena._locked():
            if self._transfers == 0:
                raise MisuseError(f"slot {self.label!r}: end_transfer without begin_transfer")
            self._transfers -= 1
            returned = self._arena._return_if_free(self)
        self._arena._notify(returned)

    def hold(self) -> None:
        """Adds a handle.

        Raises:
            MisuseError: the slot has returned to its arena.
        """
        with self._arena._locked():
            self._check_alive("hold")
            self._handles += 1

    def drop(self) -> None:
        """Removes a handle.

        Raises:
            MisuseError: there was none.
        """
        with self._arena._locked():
            if self._handles == 0:
                raise MisuseError(f"slot {self.label!r}: drop without hold")
            self._handles -= 1
            returned = self._arena._return_if_free(self)
        self._arena._notify(returned)

    def settle(self) -> None:
        """The delivery has its outcome (acked, or given back). Idempotent."""
        with self._arena._locked():
            self._settled = True
            returned = self._arena._return_if_free(self)
        self._arena._notify(returned)

    @property
    def is_returned(self) -> bool:
        """Whether the memory went back to the arena."""
        with self._arena._locked():
            return self._returned

    @property
    def was_exported(self) -> bool:
        """Whether a user could have written into the memory since it was received."""
        with self._arena._locked():
            return self._was_exported

    def record_release(self, stream: Stream | None) -> None:
        """Remembers ``stream`` as one that reads the slot, with work that may still be queued. None on the CPU.

        What was received needs no waiting for: a transfer is over when the device has finished it.
        The event that the next receive waits for is recorded when the slot returns, so it covers also what a view that
        outlived the handle still queued there.
        """
        if stream is None:
            return
        with self._arena._locked():
            if not any(known == stream for known in self._streams):
                self._streams.append(stream)

    def wait_release(self, stream: Stream | None) -> None:
        """Makes ``stream`` wait for whatever the memory's former owners had queued. Never blocks the host."""
        if stream is not None:
            for event in self._pending:
                stream.wait_event(event)

    def _check_alive(self, operation: str) -> None:
        if self._returned:
            raise MisuseError(f"slot {self.label!r}: {operation} after the slot returned to its arena")

    def _why(self) -> str:
        parts = []
        if not self._settled:
            parts.append("delivery not settled")
        for count, noun in ((self._handles, "handle"), (self._views, "live export"), (self._transfers, "transfer")):
            if count:
                parts.append(f"{count} {noun}{'s' if count > 1 else ''}")
        return ", ".join(parts)


class Arena:
    """One ``uint8`` allocation handed out in slots. Thread-safe; no method blocks for memory.

    On the CPU the memory is a :class:`PinnedPool`, whose pages are in place from the start.

    Args:
        capacity_bytes: size, rounded down to ``ALIGN_BYTES``. Nothing more is ever allocated.
        device: where the memory lies.
        pin: on the CPU: page-lock the memory if there is a GPU, for the current one's copies.
        poison: overwrite a slot with ``POISON_BYTE`` when it returns, so that a use after free is seen. For debugging.
        on_free: called whenever memory may have become free. It can be called from a finalizer, on any thread and in
            the middle of any code of that thread, even code that holds a lock: it must not take locks nor block.
            ``queue.SimpleQueue.put`` is safe there, ``threading.Event.set`` is not.
        memory: ``[>= capacity_bytes] uint8``, contiguous, on ``device``, at an address that is a multiple of
            ``ALIGN_BYTES``: cut up this, such as the slot of another arena, instead of allocating. Whoever gives it
            must not let it be used otherwise before all slots have returned.

    Raises:
        MisuseError: the capacity is below one slot, or the memory is not like that.
        CapacityError: the host does not have that much memory.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
        pin: bool = False,
        on_free: Callable[[], None] | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        capacity = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        if capacity <= 0:
            raise MisuseError(f"an arena needs at least {ALIGN_BYTES} bytes, got {capacity_bytes}")
        self.device = torch.device(device)
        self.capacity_bytes = capacity
        self._memory: _Memory
        if memory is not None:
            self._memory = _OneTensor(self._check_memory(memory))
        elif self.device.type == "cpu":
            self._memory = _PoolMemory(capacity, pin)
        else:
            raw = torch.empty(capacity + ALIGN_BYTES, dtype=torch.uint8, device=self.device)
            if self.device.type == "cuda":
                # The allocator gives what its last owner's kernels on this stream may still use; links use others.
                torch.cuda.current_stream(self.device).synchronize()
            skip = -raw.data_ptr() % ALIGN_BYTES
            self._memory = _OneTensor(raw[skip : skip + capacity])
        self._poison = poison
        self._on_free = on_free
        self._lock = threading.Lock()
        self._live: dict[int, Slot] = {}
        self._dead_views: deque[Slot] = deque()
        self._pending: list[tuple[int, int, Event]] = []
        self._closed = False

    def _check_memory(self, memory: torch.Tensor) -> torch.Tensor:
        capacity = self.capacity_bytes
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise MisuseError(f"an arena cuts flat contiguous bytes, got {memory.dtype} {tuple(memory.shape)}")
        if memory.device != self.device or memory.numel() < capacity or memory.data_ptr() % ALIGN_BYTES:
            raise MisuseError(
                f"an arena of {capacity} bytes on {self.device} needs that many there, {ALIGN_BYTES}-byte aligned; got "
                f"{memory.numel()} at {memory.data_ptr():#x} on {memory.device}"
            )
        return memory[:capacity]

    def reserve(self, nbytes: int, label: str) -> Slot | None:
        """A slot of at least ``nbytes``, or None when there is no room now. Never blocks.

        Raises:
            CapacityError: the arena could not hold it even when empty (``can_wait`` is False).
            ClosedError: the arena is closed.
            MisuseError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise MisuseError(f"cannot reserve {nbytes} bytes")
        size = max(ALIGN_BYTES, -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        with self._locked():
            if self._closed:
                raise ClosedError(f"reserve for {label!r}: the arena is closed")
            if size > self.capacity_bytes:
                raise CapacityError(
                    f"{label!r} needs {size} bytes, the arena has {self.capacity_bytes}; "
                    f"configure an arena of at least {size} bytes",
                    can_wait=False,
                )
            taken = self._memory.take(size)
            if taken is None:
                return None
            start, buffer = taken
            slot = Slot(self, start, buffer, label, self._claim_events(start, size))
            self._live[start] = slot
            return slot

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot."""
        with self._locked():
            return self._memory.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest slot that could be reserved now."""
        with self._locked():
            return self._memory.largest_free_bytes

    def holders(self) -> list[tuple[str, int, str]]:
        """``(label, nbytes, why)`` of every slot that is out, by address; ``why`` names what keeps it."""
        with self._locked():
            return [(slot.label, slot.nbytes, slot._why()) for _, slot in sorted(self._live.items())]

    def close(self) -> None:
        """Refuses further reservations. Idempotent. The memory itself lives until the last tensor over it is gone."""
        with self._lock:
            self._closed = True

    def _locked(self) -> _Locked:
        return _Locked(self)

    def _drain(self) -> bool:
        """Takes in the views that have died; the lock is held."""
        returned = False
        while True:
            try:
                slot = self._dead_views.popleft()
            except IndexError:
                return returned
            slot._views -= 1
            returned |= self._return_if_free(slot)

    def _export(self, slot: Slot) -> torch.Tensor:
        exporter: Any
        if self.device.type == "cpu":
            exporter = slot.buffer.numpy().view(_HostExport)
            tensor = torch.frombuffer(exporter, dtype=torch.uint8)
        else:
            exporter = _DeviceExport(slot.buffer)
            tensor = torch.as_tensor(exporter, device=self.device)
        finalizer = weakref.finalize(exporter, _view_died, self._dead_views, slot, self._on_free)
        finalizer.atexit = False
        return tensor

    def _return_if_free(self, slot: Slot) -> bool:
        """The lock is held."""
        if slot._returned or not slot._settled or slot._handles or slot._transfers or slot._views:
            return False
        slot._returned = True
        del self._live[slot._start]
        if slot._streams:
            with at_device(self.device):
                self._record_release(slot)
        if self._poison:
            self._overwrite(slot)
        self._memory.give(slot._start, slot.nbytes)
        return True

    def _record_release(self, slot: Slot) -> None:
        for stream in slot._streams:
            event = self._new_event()
            if event is not None:
                event.record(stream)
                self._pending.append((slot._start, slot._start + slot.nbytes, event))

    def _overwrite(self, slot: Slot) -> None:
        if self.device.type == "cpu":
            slot.buffer.fill_(POISON_BYTE)
            return
        # Behind the consumers' work, and in front of the next receive: the fill is one more former owner.
        stream = torch.cuda.current_stream(self.device)
        end = slot._start + slot.nbytes
        for start, stop, event in self._pending:
            if start < end and slot._start < stop:
                stream.wait_event(event)  # type: ignore[arg-type]
        slot.buffer.fill_(POISON_BYTE)
        filled = self._new_event()
        if filled is not None:
            filled.record(stream)
            self._pending.append((slot._start, end, filled))

    def _claim_events(self, start: int, size: int) -> list[Event]:
        """Events that the new owner of a range must wait for; the lock is held.

        They stay in the list until they have happened: part of their range may go to yet another slot.
        """
        if self._pending:
            with at_device(self.device):
                self._pending = [entry for entry in self._pending if not entry[2].query()]
        return [event for first, stop, event in self._pending if first < start + size and start < stop]

    def _new_event(self) -> Event | None:
        return torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _notify(self, returned: bool) -> None:
        if returned and self._on_free is not None:
            self._on_free()


class _Locked:
    """The arena's lock, with the dead views taken in on entry."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._arena._lock.acquire()
        self._arena._drain()

    def __exit__(self, *_: object) -> None:
        self._arena._lock.release()


def _view_died(dead_views: deque[Slot], slot: Slot, on_free: Callable[[], None] | None) -> None:
    # Runs wherever the interpreter drops the last reference, possibly inside our own lock: only appends are allowed.
    dead_views.append(slot)
    if on_free is not None:
        on_free()
