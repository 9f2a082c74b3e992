"""Where the samples of a target rank wait for their drafts: on the device, or in page-locked memory of the host.

The memory of a GPU must not fill with samples that wait. What goes to the host leaves by copies that nobody waits for:
they are ordered on the device, before the kernels that overwrite the source and before the send that reads the copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nccl_stream.config import Staging
from nccl_stream.device_staging import DeviceStager
from nccl_stream.errors import DeviceError, MisuseError
from nccl_stream.staging import StagedCopy, Stager
from nccl_stream.stores.owned_pieces import OwnedPieces, PieceMemory
from nccl_stream.stores.tensors import copy_tensor
from nccl_stream.transport.arena import Arena, Slot
from nccl_stream.transport.bounce import BounceLink
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.link import HostBytes, Link

__all__ = ["OwnedBytes", "Place", "Placement", "SampleMemory"]

logger = logging.getLogger(__name__)

Place = Literal["device", "host"]

COPY_TIMEOUT_S = 60.0  # a copy of a sample takes milliseconds; this long means that the device hangs


@dataclass(eq=False)
class OwnedBytes:
    """A sample's memory on its owner: one slot in wire layout, and the features that were donated instead of copied.

    Attributes:
        layout: where each feature lies.
        buffer: the slot's memory, or memory of its own where no slot was free.
        donated: large features that stay where the caller made them.
        slot: to be settled when the sample is over; None where no slot was free.
        place: where the buffer is.
        climbs: whether it is in host memory while links send from a device.
        nbytes: bytes of its features.
        copies: copies into the buffer that may still be in progress.
        checksum: CRC-32C of the features as they were put; None where nobody verifies it.
    """

    layout: SlotLayout
    buffer: torch.Tensor
    donated: Mapping[str, torch.Tensor]
    slot: Slot | None
    place: Place = "device"
    climbs: bool = False
    nbytes: int = 0
    copies: tuple[StagedCopy, ...] = ()
    checksum: int | None = None

    def features(self) -> dict[str, torch.Tensor]:
        """The features, as views of this memory, in feature order. Blocks until they are there.

        Raises:
            DeviceError: a copy failed, or does not end.
        """
        for copy in self.copies:
            try:
                copy.wait(COPY_TIMEOUT_S)
            except TimeoutError as error:
                raise DeviceError(f"a copy to the host did not end within {COPY_TIMEOUT_S:g} s") from error
        features = {}
        for name, spec in self.layout.specs.items():
            offset = self.layout.offsets[name]
            features[name] = (
                self.donated[name]
                if name in self.donated
                else self.buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            )
        return features

    def wire_buffers(self) -> list[torch.Tensor | HostBytes]:
        """The messages of the sample, flat bytes in wire order; ``HostBytes`` if a link fetches them from the host."""
        buffers = self.layout.wire_buffers(self.buffer, self.donated or None)
        return [HostBytes(buffer, self.copies) for buffer in buffers] if self.climbs else list(buffers)

    def is_written(self) -> bool:
        """Whether no copy writes into the buffer any more; False when nobody can tell."""
        try:
            return all(copy.done() for copy in self.copies)
        except DeviceError:
            return False


@dataclass
class Placement:
    """Which samples wait on the device, and what that takes of it.

    Attributes:
        staging: ``"device"``: all of them; ``"pinned"``: none; ``"auto"``: as long as they fit the cap.
        device_bytes: the cap; ignored otherwise.
        used: bytes of each place.
    """

    staging: Staging
    device_bytes: int
    used: dict[Place, int] = field(default_factory=lambda: {"device": 0, "host": 0})

    def take(self, nbytes: int) -> Place:
        """Decide for a sample of this size, and count it."""
        fits = self.used["device"] + nbytes <= self.device_bytes
        place: Place = "device" if self.staging == "device" or (self.staging == "auto" and fits) else "host"
        self.used[place] += nbytes
        return place

    def hold(self, place: Place, nbytes: int) -> None:
        """Count what must be there, whatever the cap."""
        self.used[place] += nbytes

    def give(self, place: Place, nbytes: int) -> None:
        """A sample that was counted there is over."""
        if nbytes > self.used[place]:
            raise AssertionError(f"{nbytes} bytes leave the {place}, where {self.used[place]} are")
        self.used[place] -= nbytes


class SampleMemory:
    """The memory of a target rank's samples. Thread-safe.

    Args:
        device: where samples are made and links send from.
        staging: see :class:`Placement`.
        device_arena: preallocated memory there; None: each sample gets memory of its own.
        host_arena: preallocated memory of the host; for ``"pinned"`` and ``"auto"``.
        device_bytes: cap of ``"auto"``.
        down, up: copies from the device to the host and back; None where the device is the CPU.
        chunk_bytes: the longest message of a link.
        current_stream: the calling thread's, on which sources are made and overwritten, and samples read; for tests.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        staging: Staging = "device",
        device_arena: Arena | None = None,
        host_arena: Arena | None = None,
        device_bytes: int = 0,
        down: Stager | DeviceStager | None = None,
        up: Stager | DeviceStager | None = None,
        chunk_bytes: int = 0,
        current_stream: Callable[[], Any] | None = None,
    ) -> None:
        if staging != "device" and host_arena is None:
            raise MisuseError(f"staging={staging!r} needs memory of the host")
        if staging != "device" and device.type != "cpu" and (down is None or up is None):
            raise MisuseError(f"staging={staging!r} on {device} needs stagers")
        self._device = device
        self._arenas: dict[Place, Arena | None] = {"device": device_arena, "host": host_arena}
        self._down, self._up = down, up
        self._chunk_bytes = chunk_bytes
        self._current_stream: Callable[[], Any] = current_stream or (
            lambda: torch.cuda.current_stream(device) if device.type == "cuda" else None
        )
        self._lock = threading.Lock()
        self._placement = Placement(staging, device_bytes)
        # Samples that were dropped while copies still wrote into their slots.
        self._unwritten: list[OwnedBytes] = []
        self._overflowed: set[Place] = set()

    @property
    def used_bytes(self) -> dict[Place, int]:
        """Bytes of the samples that wait in each place, donated ones and windows of streamed ones included."""
        with self._lock:
            return dict(self._placement.used)

    def store(
        self, sample_id: str, layout: SlotLayout, tensors: Mapping[str, torch.Tensor], *, donate: bool
    ) -> OwnedBytes:
        """Bring a sample to where it shall wait.

        When this returns, the current stream may overwrite the sources. On the device the sample is complete; in host
        memory it may still be on its way there.

        Args:
            sample_id: for messages.
            layout: of the sample.
            tensors: its features, on any device.
            donate: large contiguous features of this device need no copy on it.

        Raises:
            DeviceError: a CUDA call failed.
        """
        self.sweep()
        nbytes = sum(spec.nbytes for spec in layout.specs.values())
        with self._lock:
            place = self._placement.take(nbytes)
        try:
            if place == "host" and self._down is not None:
                owned = self._bring_to_host(self._down, sample_id, layout, tensors, donate=donate)
            else:
                owned = self._keep(place, sample_id, layout, tensors, donate=donate)
        except BaseException:
            with self._lock:
                self._placement.give(place, nbytes)
            raise
        owned.place, owned.nbytes = place, nbytes
        return owned

    def read(self, owned: OwnedBytes, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Copies of a sample's features on ``device``; None: where samples are made.

        They may be queued on the current stream still when this returns. The sample may be freed all the same: its
        memory goes to nobody else before that stream has come to them.

        Raises:
            DeviceError: a copy of the sample failed, or does not end.
        """
        device, features, stream = self._device if device is None else device, owned.features(), self._current_stream()
        if owned.slot is not None:
            owned.slot.record_release(stream)
        for tensor in (*owned.donated.values(), *(() if owned.slot is not None else (owned.buffer,))):
            if tensor.is_cuda:  # the allocator gives it to nobody else before
                tensor.record_stream(stream)
        return {name: copy_tensor(tensor, device) for name, tensor in features.items()}

    @property
    def device(self) -> torch.device:
        """Where samples are made and links send from."""
        return self._device

    @property
    def pieces_arena(self) -> Arena | None:
        """Memory for windows of samples that travel in pieces: of the device, whatever the policy."""
        return self._arenas[self._window_place]

    @property
    def _window_place(self) -> Place:
        return "device" if self._arenas["device"] is not None or self._device.type != "cpu" else "host"

    def take_window(self, num_bytes: int, nbytes: int, label: str) -> tuple[Slot | None, Callable[[], None]]:
        """See :class:`PieceRoom`."""
        arena = self.pieces_arena
        fits = arena is not None and nbytes <= arena.capacity_bytes
        slot = arena.reserve(nbytes, label) if arena is not None and fits else None
        with self._lock:
            self._placement.hold(self._window_place, num_bytes)
        return slot, self._uncount(self._window_place, num_bytes)

    def take_piece(self, num_bytes: int, nbytes: int, label: str) -> PieceMemory:
        """See :class:`PieceRoom`. In the place where a sample of this size would wait now."""
        with self._lock:
            place = self._placement.take(num_bytes)
        uncount = self._uncount(place, num_bytes)
        try:
            slot, buffer = self._reserve(place, nbytes, label)
        except BaseException:
            uncount()
            raise
        return PieceMemory(buffer, slot, place == "host" and self._up is not None, uncount)

    def _uncount(self, place: Place, nbytes: int) -> Callable[[], None]:
        counted = [nbytes]

        def uncount() -> None:
            with self._lock:
                if counted:
                    self._placement.give(place, counted.pop())

        return uncount

    def free(self, owned: OwnedBytes | OwnedPieces) -> None:
        """A sample is over. Does not block."""
        if isinstance(owned, OwnedPieces):
            owned.close()
            return
        with self._lock:
            self._placement.give(owned.place, owned.nbytes)
        self._let_go(owned)
        self.sweep()

    def sweep(self) -> None:
        """Let go of what copies that are over by now kept: slots of dropped samples, sources. Does not block."""
        for stager in (self._down, self._up):
            if stager is not None:
                stager.sweep()
        with self._lock:
            waiting, self._unwritten = self._unwritten, []
        for owned in waiting:
            self._let_go(owned)

    def reachable_by(self, link: Link) -> Link:
        """The link that sends from wherever samples wait."""
        return link if self._up is None else BounceLink(link, self._up, chunk_bytes=self._chunk_bytes)

    def close(self, timeout: float) -> bool:
        """Give out no more memory, and let copies end. Idempotent.

        Args:
            timeout: seconds.

        Returns:
            Whether the copies have ended.
        """
        for arena in self._arenas.values():
            if arena is not None:
                arena.close()
        try:
            closed = [stager.close(timeout / 2) for stager in (self._down, self._up) if stager is not None]
            return all(closed)
        except DeviceError as error:
            logger.error("closing the copies of samples: %s", error)
            return False

    # -- the two ways ------------------------------------------------------------------------------------------------

    def _reserve(self, place: Place, nbytes: int, label: str) -> tuple[Slot | None, torch.Tensor]:
        arena = self._arenas[place]
        slot = None if arena is None else arena.reserve(nbytes, label)
        if slot is not None:
            return slot, slot.buffer
        # Room by count of bytes, but not in one piece: a buffer of its own rather than a producer that gets stuck.
        device = self._device if place == "device" else torch.device("cpu")
        # Copies from and to pageable memory would hold up their callers, the thread that serves the links among them.
        pin = device.type == "cpu" and self._device.type == "cuda"
        if arena is not None and place not in self._overflowed:
            self._overflowed.add(place)
            logger.log(
                logging.WARNING if pin else logging.INFO,
                "no room for %d bytes in one piece in what is preallocated on the %s: %s gets memory of its own"
                "%s. Later ones are not reported",
                nbytes, place, label, ", and page-locking it holds up the GPU" if pin else "",
            )  # fmt: skip
        return None, torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)

    def _keep(
        self, place: Place, sample_id: str, layout: SlotLayout, tensors: Mapping[str, torch.Tensor], *, donate: bool
    ) -> OwnedBytes:
        """The sample is complete when this returns."""
        donated = {name: tensors[name].detach() for name in layout.large if donate and self._lies_here(tensors[name])}
        whole = not donated or len(donated) < len(layout.large)
        slot, buffer = self._reserve(place, layout.total_bytes if whole else layout.packed_bytes, f"sample {sample_id}")
        try:
            copied = {name: tensor for name, tensor in tensors.items() if name not in donated}
            stream = self._current_stream()
            if slot is not None:
                slot.wait_release(stream)
            layout.pack(copied, buffer)
            if self._device.type == "cuda":
                stream.synchronize()
        except BaseException:
            if slot is not None:
                slot.settle()
            raise
        return OwnedBytes(layout, buffer, donated, slot)

    def _bring_to_host(
        self,
        stager: Stager | DeviceStager,
        sample_id: str,
        layout: SlotLayout,
        tensors: Mapping[str, torch.Tensor],
        *,
        donate: bool,
    ) -> OwnedBytes:
        """The sample is on its way when this returns."""
        slot, buffer = self._reserve("host", layout.total_bytes, f"sample {sample_id}")
        owned = OwnedBytes(layout, buffer, {}, slot, climbs=True)
        try:
            self._copy_down(stager, owned, tensors, donate=donate)
        except BaseException:
            self._let_go(owned)  # some of it may be on its way already
            raise
        return owned

    def _copy_down(
        self, stager: Stager | DeviceStager, owned: OwnedBytes, tensors: Mapping[str, torch.Tensor], *, donate: bool
    ) -> None:
        """Queue the copies of a sample, and note each in ``owned`` as soon as it is under way."""
        layout, stream = owned.layout, self._current_stream()
        here = {name for name, tensor in tensors.items() if tensor.device == self._device}
        # What is on the host already goes into its place at once. By way of the device it would wait for it.
        layout.pack({name: tensors[name] for name in tensors.keys() - here}, owned.buffer)
        small = here - set(layout.large)
        if small:
            packed = torch.empty(layout.packed_bytes, dtype=torch.uint8, device=self._device)
            layout.pack({name: tensors[name] for name in small}, packed)
            for start, end in _small_ranges(layout, small):
                owned.copies += (stager.copy(owned.buffer[start:end], packed[start:end], after=stream),)
        for name in here & set(layout.large):
            tensor = tensors[name]
            stays = self._lies_here(tensor)
            flat = (tensor.detach() if stays else copy_tensor(tensor)).view(-1).view(torch.uint8)
            offset = layout.offsets[name]
            copy = stager.copy(
                owned.buffer[offset : offset + flat.numel()],
                flat,
                after=stream,
                before=stream if stays and not donate else None,
            )
            owned.copies += (copy,)

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's own memory could travel."""
        return tensor.device == self._device and SlotLayout.donatable(tensor)

    def _let_go(self, owned: OwnedBytes) -> None:
        if owned.is_written():
            _settle(owned)
            return
        with self._lock:
            self._unwritten.append(owned)


def _small_ranges(layout: SlotLayout, names: Set[str]) -> list[tuple[int, int]]:
    """``(start, end)`` of where these small features lie in a slot, neighbours as one range, nothing else in them."""
    ranges: list[tuple[int, int]] = []
    follows = False
    for name, spec in layout.specs.items():  # small features lie in this order, from the header on
        if name in layout.large:
            continue
        start = layout.offsets[name]
        if name in names:
            ranges.append((ranges.pop()[0] if follows else start, start + spec.nbytes))
        follows = name in names
    return ranges


def _settle(owned: OwnedBytes) -> None:
    if owned.slot is not None:
        owned.slot.settle()
