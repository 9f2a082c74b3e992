"""The feature store whose samples travel: put on a target rank, got on a draft rank.

On a target it owns samples until they have their outcome; on a draft it hands out views of receive slots. What moves
the bytes in between is not its business: the two ends of the stream call :meth:`NcclFeatureStore.pin` and
:meth:`NcclFeatureStore.unpin`, and provide :class:`Received` samples.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from nccl_stream.config import least_sample_bytes, slot_bound
from nccl_stream.errors import CapacityError, ClosedError, MisuseError, SampleNotFoundError, SpecMismatchError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef, StreamSpec
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.owned_pieces import Outbound, OwnedPieces, OwnedPieceWriter, Unconnected
from nccl_stream.stores.pieces import read_joined, require_stream, stream_ref
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.staged import OwnedBytes, SampleMemory
from nccl_stream.stores.tensors import check_finite, check_tensors, checksum_of, copy_tensor
from nccl_stream.stores.windows import WindowLayout
from nccl_stream.streamed.sample import OpenFeatureSpec, PieceReader, StreamWriter
from nccl_stream.transport.arena import Arena, Slot
from nccl_stream.transport.layout import SlotLayout

ROOM_POLL_S = 0.005
MAX_ID_CHARS = 512  # an id travels in every message about its sample

__all__ = ["Inbound", "NcclFeatureStore", "Received"]


@dataclass
class Received:
    """A delivered sample on a draft: its slot and how to read it."""

    slot: Slot
    layout: SlotLayout


class Inbound(Protocol):
    """Where a draft's store finds what was delivered."""

    def open_sample(self, ref: SampleRef) -> Received:
        """Hold a delivered sample's slot (``slot.hold()``) and return it; raises ``SampleNotFoundError``."""
        ...

    def open_reader(self, ref: SampleRef) -> PieceReader:
        """Begin to read a leased streamed sample; see :meth:`FeatureStore.open_reader`."""
        ...


class NcclFeatureStore(FeatureStore):
    """Point-to-point feature store of one rank. Made by ``connect``; ``stream.store`` is one.

    On a target rank ``put`` copies the features into preallocated memory (or takes donated ones over) and the sample
    stays until its outcome; ``get`` returns copies of this rank's own samples. On a draft rank ``get`` returns views of
    the receive slot, without a copy; the memory is not used again while any of them, or anything derived from them, is
    alive. ``put`` on a draft rank and ``get`` of a foreign ref are refused.

    Args:
        uri: identity of the owner whose samples this store holds (target) or of this rank (draft).
        device: where samples lie.
        residency: accounting of a target rank's samples; None on a draft.
        memory: where a target rank's samples wait; None on a draft.
        arena: a draft rank's receive memory.
        inbound: where a draft rank's deliveries are; None on a target.
        outbound: told of what happens to streamed samples on a target rank.
        max_sample_bytes: largest sample a put may bring.
        chunk_bytes: largest transfer operation; part of the layout.
        soft_cap_bytes: residency above which a put is refused unless ``starving()`` says that a draft lacks samples.
        soft_cap_samples: the same for the number of samples; None for no such cap.
        starving: see above.
        pause: lets up to so many seconds pass, and does meanwhile what else waits to be done by this thread.
        check_alive: raises what ended this process's part of the stream; nothing is put, or waited for, afterwards.
        on_dropped: called when a draft's handle was garbage-collected unreleased; may run inside a finalizer, so it
            must neither lock nor block. :meth:`collect_dropped` then ends its hold.
        check_finite: refuse samples whose floating-point features hold NaN or infinite values; costs a pass over them.
        checksums: compute every sample's CRC-32C at put, for its drafts to verify; costs a pass over it.
    """

    def __init__(
        self,
        uri: str,
        device: torch.device,
        *,
        max_sample_bytes: int,
        chunk_bytes: int,
        residency: Residency[OwnedBytes | OwnedPieces] | None = None,
        memory: SampleMemory | None = None,
        arena: Arena | None = None,
        inbound: Inbound | None = None,
        outbound: Outbound | None = None,
        soft_cap_bytes: int = 0,
        soft_cap_samples: int | None = None,
        starving: Callable[[], bool] = lambda: False,
        pause: Callable[[float], None] = time.sleep,
        check_alive: Callable[[], None] = lambda: None,
        on_dropped: Callable[[], None] = lambda: None,
        check_finite: bool = False,
        checksums: bool = False,
    ) -> None:
        self._uri = uri
        self._device = device
        self._max_sample_bytes = max_sample_bytes
        self._chunk_bytes = chunk_bytes
        self._residency = residency
        self._memory = memory
        self._arena = arena
        self._inbound = inbound
        self._outbound: Outbound = Unconnected() if outbound is None else outbound
        self._soft_cap = soft_cap_bytes
        self._soft_cap_samples = soft_cap_samples
        self._starving = starving
        self._pause = pause
        self._check_alive = check_alive
        self._open_handles: dict[int, tuple[Slot, weakref.finalize[..., StoreHandle]]] = {}
        self._dropped: deque[int] = deque()
        self._on_dropped = on_dropped
        self._check_finite = check_finite
        self._checksums = checksums
        self._closed = False
        self.room_waited_s = 0.0

    @property
    def store_uri(self) -> str:
        """``nccl://run/epoch/incarnation``; no other store, past or present, has it."""
        return self._uri

    @property
    def is_closed(self) -> bool:
        """Whether the stream is closed."""
        return self._closed

    @property
    def device(self) -> torch.device:
        """Where samples are made or received."""
        return self._device

    @property
    def memory(self) -> SampleMemory:
        """Where this target rank's samples wait.

        Raises:
            MisuseError: this is a draft rank.
        """
        if self._memory is None:
            raise MisuseError("a draft rank has no memory for samples of its own")
        return self._memory

    def layout_of(self, specs: Mapping[str, FeatureSpec]) -> SlotLayout:
        """The slot layout both ends derive from a sample's specs."""
        return SlotLayout.from_specs(specs, chunk_bytes=self._chunk_bytes)

    # -- target side -------------------------------------------------------------------------------------------------

    def put(
        self,
        sample_id: str,
        tensors: Mapping[str, torch.Tensor],
        run_id: str,
        algorithm: FeatureAlgorithm = FeatureAlgorithm.EAGLE3,
        schema_version: int = 1,
        target_model_version: str = "0",
        draft_weight_version: str = "0",
        num_tokens: int = 0,
        *,
        attributes: Mapping[str, str] | None = None,
        donate: bool = False,
    ) -> SampleRef:
        """Store a sample on this target rank; see :meth:`FeatureStore.put`.

        Does not wait for room. Afterwards the caller may overwrite the tensors: on a GPU, by work that it queues on the
        stream that is current now, or that waits for it.

        Args:
            donate: large contiguous features already on :attr:`device` are not copied there; the caller must not write
                into them again.

        Raises:
            MisuseError: (``ValueError``) bad id or tensors, or this is a draft rank.
            CapacityError: (``MemoryError``) a cap would be exceeded; ``can_wait`` tells whether waiting helps.
            ClosedError: (``RuntimeError``) the stream is closed.
            NcclStreamError: what ended this process's part of the stream (store lost, fenced, ...).
            DeviceError: (``RuntimeError``) a CUDA call failed.
        """
        residency = self._require_target("put")
        _check_id(sample_id)
        check_tensors(sample_id, tensors)
        if self._check_finite:
            check_finite(sample_id, tensors)
        specs = {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}
        nbytes = sum(spec.nbytes for spec in specs.values())
        ref = SampleRef(
            sample_id=sample_id,
            run_id=run_id,
            store_uri=self._uri,
            feature_keys={name: name for name in specs},
            feature_specs=specs,
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            estimated_bytes=nbytes,
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes or {},
        )
        ref.to_json()  # a ref that cannot be announced is refused here, on the side that is at fault
        layout = self.layout_of(specs)
        if layout.total_bytes > slot_bound(self._max_sample_bytes) and nbytes <= self._max_sample_bytes:
            raise CapacityError(
                f"sample {sample_id!r} has {len(specs)} features of {nbytes} bytes in all, which take "
                f"{layout.total_bytes} with headers and alignment; drafts count on at most "
                f"{slot_bound(self._max_sample_bytes)}: join small features, or set "
                f"max_sample_bytes={least_sample_bytes(layout.total_bytes)} or more",
                can_wait=False,
            )
        self._check_size(sample_id, nbytes)
        with residency.reserve(sample_id, nbytes) as reservation:
            owned = self._store(sample_id, layout, tensors, donate=donate)
            try:
                reservation.commit(owned)
            except BaseException:
                self.memory.free(owned)
                raise
        return ref

    def open_stream(
        self,
        sample_id: str,
        specs: Mapping[str, FeatureSpec | OpenFeatureSpec],
        run_id: str,
        algorithm: FeatureAlgorithm = FeatureAlgorithm.EAGLE3,
        schema_version: int = 1,
        target_model_version: str = "0",
        draft_weight_version: str = "0",
        num_tokens: int = 0,
        *,
        piece_length: int,
        window: int,
        retain: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> StreamWriter:
        """Open a sample on this target rank that is put in pieces; see :meth:`FeatureStore.open_stream`.

        Put its ref on the queue before more than a window of pieces is appended. Draft ranks that take rounds together
        need a sample each: open as many samples at once as the drafts need for a round, or the one that has its sample
        waits for the others, and its producer for it.

        Raises:
            MisuseError: (``ValueError``) bad id, specs or sizes, or this is a draft rank.
            CapacityError: (``MemoryError``) no room for its window; ``can_wait`` tells whether waiting helps.
            ClosedError: (``RuntimeError``) the stream is closed.
        """
        residency = self._require_target("open_stream")
        _check_id(sample_id)
        ref = stream_ref(
            sample_id,
            specs,
            piece_length=piece_length,
            window=window,
            retain=retain,
            run_id=run_id,
            store_uri=self._uri,
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes,
        )
        ref.to_json()  # as for put
        windows = WindowLayout(ref, self.layout_of)
        most = slot_bound(self._max_sample_bytes)
        if windows.total_bytes > most:
            raise CapacityError(
                f"the window of sample {sample_id!r} takes {windows.total_bytes} bytes with headers and alignment, for "
                f"{ref.estimated_bytes} bytes of features; drafts count on at most {most}: use fewer pieces, longer "
                "ones, or raise max_sample_bytes",
                can_wait=False,
            )
        self._check_size(sample_id, ref.estimated_bytes)
        with residency.reserve(sample_id, ref.estimated_bytes) as reservation:
            sample = OwnedPieces(ref, windows, self.memory, reservation.grow)
            try:
                reservation.commit(sample)
            except BaseException:
                self.memory.free(sample)
                raise
        with self._outbound.cond:
            self._outbound.opened(sample)
        return OwnedPieceWriter(
            sample,
            self._outbound,
            lambda: self._closed,
            checksums=self._checksums,
            finite=self._check_finite,
        )

    def _check_size(self, sample_id: str, nbytes: int) -> None:
        if nbytes > self._max_sample_bytes:
            raise CapacityError(
                f"sample {sample_id!r} has {nbytes} bytes, the stream was configured for at most "
                f"{self._max_sample_bytes}: set max_sample_bytes={nbytes} or more",
                can_wait=False,
            )
        if nbytes > self._soft_cap:
            raise CapacityError(
                f"sample {sample_id!r} has {nbytes} bytes, this rank may hold {self._soft_cap}: raise max_bytes",
                can_wait=False,
            )
        if not self.room_for(nbytes):
            raise CapacityError(
                f"sample {sample_id!r} of {nbytes} bytes does not fit now: {self.health().resident_bytes} bytes are "
                "waiting for their outcome"
            )

    def _store(
        self, sample_id: str, layout: SlotLayout, tensors: Mapping[str, torch.Tensor], *, donate: bool
    ) -> OwnedBytes:
        owned = self.memory.store(sample_id, layout, tensors, donate=donate)
        try:
            if self._checksums:
                owned.checksum = checksum_of(owned.features().values())
        except BaseException:
            self.memory.free(owned)
            raise
        return owned

    def room_for(self, nbytes: int) -> bool:
        """Whether a put of ``nbytes`` would be accepted now."""
        if self._residency is None:
            return False
        health = self._residency.health()
        below = self._soft_cap_samples is None or health.sample_count < self._soft_cap_samples
        soft = below and health.resident_bytes + nbytes <= self._soft_cap
        return (soft or self._starving()) and self._residency.room_for(nbytes)

    def wait_for_room(self, nbytes: int, timeout: float) -> bool:
        """Block up to ``timeout`` seconds until a put of ``nbytes`` would be accepted; returns whether it would.

        Raises:
            ClosedError: (``RuntimeError``) the stream is closed.
            NcclStreamError: what ended this process's part of the stream: no room will ever come.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._require_target("wait_for_room")
            if self.room_for(nbytes):
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            # Room comes from acks and from drafts that run dry; the second is not the residency's to signal.
            started = time.monotonic()
            self._pause(min(ROOM_POLL_S, remaining))
            self.room_waited_s += time.monotonic() - started

    def pin(self, ref: SampleRef) -> tuple[OwnedBytes | OwnedPieces, StoreHandle]:
        """Hold a resident sample for delivery; the handle keeps it until :meth:`unpin`.

        Raises:
            MisuseError: the ref belongs to another store.
            SpecMismatchError: it describes something else than what is stored, which its reader could not receive.
        """
        residency = self._require_target("put on the queue")
        if ref.store_uri != self._uri:
            raise MisuseError(f"sample {ref.sample_id!r} belongs to {ref.store_uri!r}, not to this rank's store")
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        owned = residency.attach(handle)
        try:
            if isinstance(owned, OwnedPieces):
                _check_specs(ref, owned.ref.feature_specs, owned.ref.stream)
            else:
                _check_specs(ref, owned.layout.specs)
        except BaseException:
            residency.detach(handle)
            raise
        return owned, handle

    def unpin(self, handle: StoreHandle) -> None:
        """The sample has its outcome and no transfer reads it: free it."""
        if self._residency is not None and not self._residency.is_closed:
            self._residency.release(handle)

    def discard(self, ref: SampleRef) -> bool:
        """Drop a sample of this target rank that was not queued; see :meth:`FeatureStore.discard`."""
        if self._residency is None or ref.store_uri != self._uri:
            return False
        return self._residency.discard(ref.sample_id)

    # -- draft side and both -----------------------------------------------------------------------------------------

    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """Materialize a sample; see :meth:`FeatureStore.get`.

        Never waits, except for a streamed sample: whatever else a draft has leased has arrived. On a draft without
        ``device`` (or with the slot's own device) the tensors are views of the receive slot; two gets of one delivery
        share memory. A streamed sample is joined in memory of its own.
        """
        self._check_open("get")
        wanted = None if device is None else torch.device(device)
        if self._residency is not None:
            return self._get_own(ref, wanted)
        assert self._inbound is not None
        if ref.stream is not None:
            reader = self.open_reader(ref)
            try:
                tensors = read_joined(reader, wanted)
            except BaseException:
                reader.close()
                raise
            reader.release()
            return tensors, StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        received = self._inbound.open_sample(ref)
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        finalizer = weakref.finalize(handle, self._handle_dropped, handle.handle_id)
        finalizer.atexit = False
        self._open_handles[handle.handle_id] = received.slot, finalizer
        try:
            if self._device.type == "cuda":
                received.slot.record_release(torch.cuda.current_stream(self._device))
            tensors = received.layout.views(received.slot.export())
            if wanted is not None and wanted != self._device:
                tensors = {name: copy_tensor(tensor, wanted) for name, tensor in tensors.items()}
        except BaseException:
            self._drop_handle(handle.handle_id)
            raise
        return tensors, handle

    def _get_own(self, ref: SampleRef, device: torch.device | None) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        assert self._residency is not None
        if ref.store_uri != self._uri:
            raise SampleNotFoundError(f"sample {ref.sample_id!r} belongs to {ref.store_uri!r}, not to {self._uri!r}")
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        owned = self._residency.attach(handle)
        try:
            if isinstance(owned, OwnedPieces):
                raise MisuseError(f"sample {ref.sample_id!r} is streamed: it is read on draft ranks")
            _check_specs(ref, owned.layout.specs)
            features = self.memory.read(owned, device)
            return {name: features[name] for name in ref.feature_names()}, handle
        except BaseException:
            self._residency.detach(handle)
            raise

    def open_reader(self, ref: SampleRef) -> PieceReader:
        """Begin to read a leased streamed sample on a draft rank; see :meth:`FeatureStore.open_reader`.

        Pieces are views of receive memory. While it is read its lease is renewed. A retained sample of which pieces
        were released is read again after its lease was given back: it is then delivered anew.

        Raises:
            MisuseError: (``ValueError``) the sample is not streamed, or this is a target rank.
            SampleNotFoundError: (``KeyError``) it is not leased here.
            StreamLostError: pieces of it were released to an earlier reader.
            ClosedError: (``RuntimeError``) the stream is closed.
        """
        self._check_open("open_reader")
        if self._inbound is None:
            raise MisuseError("open_reader is for draft ranks; this is a target rank, which puts")
        require_stream(ref)
        return self._inbound.open_reader(ref)

    def release(self, handle: StoreHandle) -> None:
        """See :meth:`FeatureStore.release`. On a draft the slot returns once its delivery is settled too."""
        self._check_open("release")
        if not isinstance(handle, StoreHandle):
            raise MisuseError(f"release needs a StoreHandle, got {type(handle).__name__}")
        if handle.store is not self:
            raise MisuseError(f"the handle of sample {handle.sample_id!r} was issued by a different store")
        if self._residency is not None:
            self._residency.release(handle)
        else:
            self._drop_handle(handle.handle_id)

    def _handle_dropped(self, handle_id: int) -> None:
        # Runs wherever the interpreter drops the last reference: only an append is safe here.
        self._dropped.append(handle_id)
        self._on_dropped()

    def collect_dropped(self) -> int:
        """End the holds of handles that were dropped without a release; returns how many there were."""
        count = 0
        while self._dropped:
            count += self._drop_handle(self._dropped.popleft())
        return count

    def _drop_handle(self, handle_id: int) -> bool:
        """End a hold; False when it had ended already."""
        held = self._open_handles.pop(handle_id, None)
        if held is None:
            return False
        slot, finalizer = held
        finalizer.detach()
        if self._device.type == "cuda":
            slot.record_release(torch.cuda.current_stream(self._device))
        slot.drop()
        return True

    def health(self) -> StoreHealth:
        """See :meth:`FeatureStore.health`. On a draft: the receive arena, which has no watermarks."""
        if self._residency is not None:
            health = self._residency.health()
            return StoreHealth(
                health.resident_bytes,
                self._soft_cap,
                health.sample_count,
                health.high_watermark_hit,
                health.low_watermark_hit,
            )
        assert self._arena is not None
        used = self._arena.capacity_bytes - self._arena.free_bytes
        return StoreHealth(used, self._arena.capacity_bytes, len(self._arena.holders()), False, True)

    def gc(self) -> int:
        """See :meth:`FeatureStore.gc`: ends the holds of handles that were dropped without a release."""
        self._check_open("gc")
        return self.collect_dropped() if self._residency is None else self._residency.sweep()

    def close(self) -> None:
        """Drop everything. Called by the stream; idempotent. Tensors that are still held keep their memory."""
        self._closed = True
        if self._residency is not None:
            self._residency.close()
        if self._arena is not None:
            self._arena.close()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: the stream is closed")

    def _require_target(self, operation: str) -> Residency[OwnedBytes | OwnedPieces]:
        self._check_open(operation)
        if self._residency is None:
            raise MisuseError(f"{operation} is for target ranks; this is a draft rank, which receives")
        self._check_alive()
        return self._residency


def _check_id(sample_id: str) -> None:
    if not isinstance(sample_id, str) or not 0 < len(sample_id) <= MAX_ID_CHARS:
        raise MisuseError(f"sample_id must be a str of 1 to {MAX_ID_CHARS} characters, got {sample_id!r:.80}")
    if sample_id in (".", "..") or any(char in "/\\" or ord(char) < 32 for char in sample_id):
        raise MisuseError(f"sample_id {sample_id!r} looks like a path; ids are names without separators")


def _check_specs(ref: SampleRef, stored: Mapping[str, FeatureSpec], stream: StreamSpec | None = None) -> None:
    if dict(ref.feature_specs) != dict(stored) or ref.stream != stream:
        raise SpecMismatchError(f"sample {ref.sample_id!r}: the ref's specs differ from what is stored")
