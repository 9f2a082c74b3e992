"""Feature store in the memory of one process, for colocated runs and tests."""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Mapping

import torch

from nccl_stream.errors import ClosedError, MisuseError, SampleNotFoundError, SpecMismatchError, StreamLostError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.local_stream import LocalPieceReader, LocalStream, LocalStreamWriter
from nccl_stream.stores.pieces import read_joined, require_stream, stream_ref
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.tensors import check_tensors, copy_tensor
from nccl_stream.streamed.sample import OpenFeatureSpec

__all__ = ["LocalFeatureStore"]

MIB = 1024 * 1024
REMEMBERED_LOST = 1024
"""Lost streams whose reason is remembered, so that a late reader hears it rather than that nothing is known."""


class LocalFeatureStore(FeatureStore):
    """Holds samples in process memory. Every method may be called from any thread; copies run outside the lock.

    Args:
        max_samples: cap on samples held at once; None for no cap.
        max_bytes: cap on resident bytes; None for no cap. At least one of the two is needed.
        high_watermark_bytes: at or above this, producers pause; None means ``max_bytes``.
        low_watermark_bytes: at or below this, they resume; None means 0. Strictly below the high one.

    Raises:
        ConfigError: (``ValueError``) no cap, a cap that is not positive, or watermarks without a band between them.
    """

    def __init__(
        self,
        max_samples: int | None = 64,
        max_bytes: int | None = 256 * MIB,
        high_watermark_bytes: int | None = 192 * MIB,
        low_watermark_bytes: int | None = 64 * MIB,
    ) -> None:
        self._uri = f"mem://{uuid.uuid4().hex}"
        self._residency: Residency[dict[str, torch.Tensor] | LocalStream] = Residency(
            max_samples=max_samples,
            max_bytes=max_bytes,
            high_watermark_bytes=high_watermark_bytes,
            low_watermark_bytes=low_watermark_bytes,
            name="LocalFeatureStore",
            on_free=self._end_stream,
        )
        self._streams_lock = threading.Lock()
        self._streams: weakref.WeakSet[LocalStream] = weakref.WeakSet()
        self._lost: OrderedDict[str, str] = OrderedDict()

    @property
    def store_uri(self) -> str:
        """URI of this instance; no other instance, past or present, has it."""
        return self._uri

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
    ) -> SampleRef:
        """Store copies of ``tensors``; see :meth:`FeatureStore.put`."""
        check_tensors(sample_id, tensors)
        specs = {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}
        ref = SampleRef(
            sample_id=sample_id,
            run_id=run_id,
            store_uri=self._uri,
            feature_keys={name: f"{sample_id}/{name}" for name in specs},
            feature_specs=specs,
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            estimated_bytes=sum(spec.nbytes for spec in specs.values()),
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes or {},
        )
        with self._residency.reserve(sample_id, ref.estimated_bytes) as reservation:
            reservation.commit({name: copy_tensor(tensor) for name, tensor in tensors.items()})
        return ref

    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """Return independent copies; see :meth:`FeatureStore.get`."""
        target = None if device is None else torch.device(device)
        handle, stored = self._attach(ref)
        try:
            if isinstance(stored, LocalStream):
                tensors = self._join(ref, target)
            else:
                _check_specs(ref, stored)
                tensors = {name: copy_tensor(stored[name], target) for name in ref.feature_names()}
        except BaseException:
            self._residency.detach(handle)
            raise
        return tensors, handle

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
    ) -> LocalStreamWriter:
        """Open a sample whose pieces are copied as they come; see :meth:`FeatureStore.open_stream`.

        A retained sample counts with all its pieces towards the caps, once it has outgrown its window. The store does
        not know who will read: a writer whose ref reaches nobody waits until the sample is discarded, or the store
        closed.
        """
        ref = stream_ref(
            sample_id,
            specs,
            piece_length=piece_length,
            window=window,
            retain=retain,
            run_id=run_id,
            store_uri=self._uri,
            key_prefix=f"{sample_id}/",
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes,
        )
        with self._residency.reserve(sample_id, ref.estimated_bytes) as reservation:
            stream = LocalStream(ref, take_room=reservation.grow, on_lost=self._drop_lost)
            reservation.commit(stream)
        with self._streams_lock:
            self._lost.pop(sample_id, None)
            self._streams.add(stream)
        return LocalStreamWriter(stream)

    def open_reader(self, ref: SampleRef) -> LocalPieceReader:
        """See :meth:`FeatureStore.open_reader`; pieces are handed out without a copy."""
        require_stream(ref)
        handle, stored = self._attach(ref)
        try:
            if not isinstance(stored, LocalStream):
                raise SpecMismatchError(f"sample {ref.sample_id!r} was put as a whole: get it")
            return LocalPieceReader(
                stored,
                on_release=lambda: self._residency.release(handle),
                on_close=lambda: self._residency.detach(handle),
            )
        except BaseException:
            self._residency.detach(handle)
            raise

    def _attach(self, ref: SampleRef) -> tuple[StoreHandle, dict[str, torch.Tensor] | LocalStream]:
        if ref.store_uri != self._uri:
            raise SampleNotFoundError(
                f"the ref's store {ref.store_uri!r} does not match this store's URI {self._uri!r}"
            )
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        try:
            stored = self._residency.attach(handle)
        except SampleNotFoundError:
            reason = self._lost.get(ref.sample_id)
            if ref.stream is None or reason is None:
                raise
            raise StreamLostError(ref.sample_id, reason) from None
        if isinstance(stored, LocalStream) and stored.ref != ref:
            self._residency.detach(handle)
            raise SpecMismatchError(f"sample {ref.sample_id!r}: the ref says {ref}, stored is {stored.ref}")
        return handle, stored

    def _join(self, ref: SampleRef, device: torch.device | None) -> dict[str, torch.Tensor]:
        reader = self.open_reader(ref)
        try:
            return read_joined(reader, device)
        finally:
            reader.close("it was got as a whole")

    def _drop_lost(self, stream: LocalStream, reason: str) -> None:
        sample_id = stream.ref.sample_id
        with self._streams_lock:
            self._lost[sample_id] = reason
            while len(self._lost) > REMEMBERED_LOST:
                self._lost.popitem(last=False)
        # With a closed store everything is gone, and a sample that was discarded may have a namesake by now.
        with contextlib.suppress(ClosedError, SampleNotFoundError):
            if self._residency.payload(sample_id) is stream:
                self._residency.discard(sample_id)

    def _end_stream(self, stored: dict[str, torch.Tensor] | LocalStream) -> None:
        if not isinstance(stored, LocalStream):
            return
        sample_id = stored.ref.sample_id
        if self._residency.is_closed:
            stored.end(lambda: ClosedError(f"streamed sample {sample_id!r}: this LocalFeatureStore is closed"))
        else:
            stored.end(lambda: StreamLostError(sample_id, "it was released or discarded before its end"))

    def release(self, handle: StoreHandle) -> None:
        """See :meth:`FeatureStore.release`."""
        if not isinstance(handle, StoreHandle):
            raise MisuseError(f"release needs a StoreHandle, got {type(handle).__name__}")
        if handle.store is not self:
            raise MisuseError(f"the handle of sample {handle.sample_id!r} was issued by a different store")
        self._residency.release(handle)

    def discard(self, ref: SampleRef) -> bool:
        """See :meth:`FeatureStore.discard`; copies nothing."""
        return ref.store_uri == self._uri and self._residency.discard(ref.sample_id)

    def room_for(self, nbytes: int) -> bool:
        """Whether a sample of ``nbytes`` would be accepted now."""
        return self._residency.room_for(nbytes)

    def is_full(self) -> bool:
        """See :meth:`FeatureStore.is_full`."""
        return self._residency.is_full()

    def wait_for_room(self, nbytes: int, timeout: float) -> bool:
        """Block up to ``timeout`` seconds until a sample of ``nbytes`` would be accepted; see :class:`Residency`."""
        return self._residency.wait_for_room(nbytes, timeout)

    def health(self) -> StoreHealth:
        """See :meth:`FeatureStore.health`."""
        return self._residency.health()

    def gc(self) -> int:
        """End the holds of handles that were dropped without a release; their samples stay for the next consumer.

        A streamed sample stays if it can be read from its beginning, see :meth:`PieceReader.close`.
        """
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.tell_if_lost()
        return self._residency.sweep()

    def close(self) -> None:
        """See :meth:`FeatureStore.close`."""
        self._residency.close()


def _check_specs(ref: SampleRef, stored: Mapping[str, torch.Tensor]) -> None:
    if ref.stream is not None:
        raise SpecMismatchError(f"sample {ref.sample_id!r} was put as a whole, the ref says that it is streamed")
    for name, spec in ref.feature_specs.items():
        if name not in stored:
            raise SpecMismatchError(f"sample {ref.sample_id!r} has no feature {name!r}; stored: {sorted(stored)}")
        found = FeatureSpec.of(stored[name])
        if found != spec:
            raise SpecMismatchError(
                f"sample {ref.sample_id!r}, feature {name!r}: the ref says {spec}, stored is {found}"
            )
