"""The feature store contract: where tensors live between the target's forward and the draft's step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch

from nccl_stream.errors import SampleNotFoundError
from nccl_stream.refs import FeatureAlgorithm, SampleRef

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

        Args:
            ref: a ref of this store.
            device: where the tensors shall be; None leaves each on the device it was put on.

        Returns:
            The tensors, one per feature in the ref's order, independent of the stored ones, and the handle to give
            to :meth:`release` when they are no longer needed.

        Raises:
            SampleNotFoundError: (``KeyError``) the ref belongs to another store, or the sample is gone.
            SpecMismatchError: (``RuntimeError``) what is stored has another shape or dtype than the ref says.
            ClosedError: (``RuntimeError``) the store is closed.
        """

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
