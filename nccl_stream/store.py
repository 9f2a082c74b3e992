"""The feature store contract: where tensors live between the target's forward and the draft's step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch

from nccl_stream.errors import MisuseError, SampleNotFoundError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.streamed.sample import OpenFeatureSpec, PieceReader, StreamWriter

__all__ = ["FeatureStore", "StoreHandle", "StoreHealth"]

_handle_id_counter = itertools.count(1)

S = TypeVar("S", bound="FeatureStore")


def _next_handle_id() -> int:
    """Return a handle id that no other handle of this process has."""
    return next(_handle_id_counter)


@dataclass(frozen=True)
class StoreHealth:
    """Snapshot of a store's residency: ints and flags, never a tensor.

    Attributes:
        resident_bytes: bytes held, those of a put in progress included.
        capacity_bytes: the byte cap; 0 when there is none.
        sample_count: samples held.
        high_watermark_hit: ``resident_bytes`` is at or above the high watermark.
        low_watermark_hit: ``resident_bytes`` is at or below the low watermark.
    """

    resident_bytes: int
    capacity_bytes: int
    sample_count: int
    high_watermark_hit: bool
    low_watermark_hit: bool


@dataclass(frozen=True)
class StoreHandle:
    """What :meth:`FeatureStore.get` hands out and :meth:`FeatureStore.release` takes back.

    Every get has a handle of its own; releasing one twice never counts for a sibling.

    Attributes:
        store: the store that issued it.
        sample_id: the sample it holds.
        ref: the ref that was materialized.
        handle_id: identity of this hold.
    """

    store: FeatureStore
    sample_id: str
    ref: SampleRef
    handle_id: int = field(default_factory=_next_handle_id)


class FeatureStore(ABC):
    """Holds samples between producer and consumer. Every method may be called from any thread.

    After :meth:`close`, ``put``, ``get``, ``release`` and ``gc`` raise ``RuntimeError``; :meth:`health` reports an
    empty store.
    """

    @abstractmethod
    def put(
        self,
        sample_id: str,
        tensors: Mapping[str, torch.Tensor],
        run_id: str,
        algorithm: FeatureAlgorithm,
        schema_version: int,
        target_model_version: str,
        draft_weight_version: str,
        num_tokens: int,
        *,
        attributes: Mapping[str, str] | None = None,
    ) -> SampleRef:
        """Store a sample and return its ref. All or nothing: a put that raises leaves no trace.

        Args:
            sample_id: unique among the samples now in the store.
            tensors: feature name to tensor; their order becomes the ref's. The caller keeps ownership and may write
                into them as soon as this returns.
            run_id: copied into the ref.
            algorithm: copied into the ref; decides which features are required.
            schema_version: copied into the ref.
            target_model_version: copied into the ref.
            draft_weight_version: copied into the ref.
            num_tokens: copied into the ref.
            attributes: copied into the ref.

        Raises:
            MisuseError: (``ValueError``) bad or duplicate id, no tensors, a value that is not a plain tensor, missing
                required features.
            CapacityError: (``MemoryError``) a cap would be exceeded; ``can_wait`` tells whether waiting helps.
            ClosedError: (``RuntimeError``) the store is closed.
        """

    @abstractmethod
    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """Materialize a sample.

        A streamed sample is joined: blocks until its producer has closed it, and returns memory of its own. Unless it
        is retained, that uses it up: it cannot be got a second time.

        Args:
            ref: a ref of this store.
            device: where the tensors shall be; None leaves each on the device it was put on.

        Returns:
            The tensors, one per feature in the ref's order, independent of the stored ones, and the handle to give
            to :meth:`release` when they are no longer needed.

        Raises:
            SampleNotFoundError: (``KeyError``) the ref belongs to another store, or the sample is gone.
            SpecMismatchError: (``RuntimeError``) what is stored has another shape or dtype than the ref says.
            StreamBrokenError: the producer of a streamed sample failed or died before its end.
            StreamLostError: pieces of a streamed sample are gone.
            ClosedError: (``RuntimeError``) the store is closed.
        """

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
        """Open a sample that is put in pieces. Does not wait for room.

        The window's bytes are reserved here, as a put's are; appending asks no cap or watermark again, except that of a
        retained sample.

        Args:
            sample_id: unique among the samples now in the store.
            specs: feature to spec, at least one of them an :class:`OpenFeatureSpec`; their order becomes the ref's.
                Features with a plain :class:`FeatureSpec` come once, with the first piece.
            run_id: as for :meth:`put`, like all that is not listed here.
            piece_length: positions of a full piece.
            window: pieces that may be unreleased at a time. A reader needs as many as its longest chunk has pieces,
                and one more to work on a chunk while the next one comes.
            retain: keep all pieces until the sample is consumed, so that it can be read again from its beginning.

        Raises:
            MisuseError: (``ValueError``) bad or duplicate id, specs, sizes or features, or a store without streams.
            CapacityError: (``MemoryError``) a cap would be exceeded; ``can_wait`` tells whether waiting helps.
            ClosedError: (``RuntimeError``) the store is closed.
        """
        raise MisuseError(f"a {type(self).__name__} takes no streamed samples: put sample {sample_id!r} as a whole")

    def open_reader(self, ref: SampleRef) -> PieceReader:
        """Begin to read a streamed sample, from its first piece. Does not wait for it.

        Args:
            ref: the ref of a streamed sample.

        Raises:
            MisuseError: (``ValueError``) the sample is not streamed.
            SampleNotFoundError: (``KeyError``) the ref belongs to another store, or the sample is gone.
            StreamLostError: pieces of it were released to an earlier reader, and it is not retained.
            ClosedError: (``RuntimeError``) the store is closed.
        """
        raise MisuseError(f"a {type(self).__name__} holds no streamed samples such as {ref.sample_id!r}")

    @abstractmethod
    def release(self, handle: StoreHandle) -> None:
        """Give a handle back; the sample is freed when the last one is. Idempotent per handle.

        Raises:
            MisuseError: (``ValueError``) another store issued the handle.
            ClosedError: (``RuntimeError``) the store is closed.
        """

    @abstractmethod
    def health(self) -> StoreHealth:
        """Return the residency from memory; never blocks on I/O or a device."""

    def is_full(self) -> bool:
        """Return whether producers wait for a release, from memory: no put is under way, and the next has no room.

        A loader that collects samples for a batch asks this before it waits for more of them. The default goes by the
        high watermark; a store with other caps than that of bytes should know better.
        """
        return self.health().high_watermark_hit

    @abstractmethod
    def gc(self) -> int:
        """Sweep what crashed consumers left behind and return the number of entries reclaimed. Cheap and repeatable."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything. Idempotent."""

    def discard(self, ref: SampleRef) -> bool:
        """Drop a sample that nobody will consume, whatever its content.

        Returns:
            Whether the sample was there. Its memory is freed once no handle holds it.
        """
        try:
            _, handle = self.get(ref)
        except SampleNotFoundError:
            return False
        self.release(handle)
        return True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
