"""Our stores and queues behind NeMo AutoModel's contracts, and NeMo's stores behind ours. No tensor is copied for it.

NeMo's queue, loader, producer and pipeline take a store made by :func:`as_nemo_store`, for example a stream's::

    store, queue = as_nemo_store(stream.store), as_nemo_queue(stream.queue)
    for batch in nemo_streaming.FeatureDataLoader(queue, store): ...

and our queue, loader, producer and pipeline take one of NeMo's through :func:`from_nemo_store`. Only refs and handles
are translated, since NeMo compares them by type. ``nemo_automodel`` is imported on first use; it is no dependency.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

import torch

from nccl_stream.errors import CapacityError, ClosedError, ConfigError, MisuseError, SampleNotFoundError
from nccl_stream.queue import Lease
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.holds import Holds
from nccl_stream.vocab import VOCABULARY_ATTRIBUTE

__all__ = ["as_nemo_queue", "as_nemo_store", "from_nemo_ref", "from_nemo_store", "to_nemo_ref"]

_FIELDS = (
    "sample_id",
    "run_id",
    "store_uri",
    "schema_version",
    "num_tokens",
    "estimated_bytes",
    "target_model_version",
    "draft_weight_version",
)


class _Queue(Protocol):
    """What of our queues, the rank-local one or a stream's, is needed here."""

    @property
    def is_drained(self) -> bool: ...
    def acquire(self, poll_interval: float = ...) -> Lease | None: ...
    def ack(self, lease: Lease) -> None: ...
    def fail(self, lease: Lease) -> None: ...
    def put(self, ref: SampleRef) -> None: ...
    def put_blocks_until_below(
        self, ref: SampleRef, poll_interval: float = ..., abort_when: Callable[[], bool] | None = ...
    ) -> None: ...
    def reclaim_expired(self) -> int: ...
    def pending_count(self) -> int: ...
    def outstanding_count(self) -> int: ...
    def close(self) -> None: ...


@lru_cache(maxsize=1)
def _nemo() -> ModuleType:
    try:
        import nemo_automodel.components.speculative.streaming as streaming
    except ImportError as error:
        raise ConfigError(
            f"nemo_automodel's streaming package cannot be imported ({error}): install nemo-automodel 0.7 or newer, "
            "transformers, accelerate, datasets and pillow"
        ) from error
    streaming.FeatureStore.register(_StoreForNemo)
    module: ModuleType = streaming
    return module


def to_nemo_ref(ref: SampleRef) -> Any:
    """Return NeMo's form of ``ref``. It has no place for ``attributes``, which are left out.

    Raises:
        MisuseError: (``ValueError``) the sample is streamed, which NeMo cannot say.
        ConfigError: (``ValueError``) NeMo is not installed.
    """
    if ref.stream is not None:
        raise MisuseError(f"sample {ref.sample_id!r} is streamed; NeMo's refs are of whole samples only")
    nemo = _nemo()
    return nemo.SampleRef(
        algorithm=nemo.FeatureAlgorithm(ref.algorithm.value),
        feature_keys=dict(ref.feature_keys),
        feature_specs={n: nemo.FeatureSpec(shape=s.shape, dtype=s.dtype) for n, s in ref.feature_specs.items()},
        **{name: getattr(ref, name) for name in _FIELDS},
    )


def from_nemo_ref(ref: Any) -> SampleRef:
    """Return our form of one of NeMo's refs.

    Raises:
        RefError: (``ValueError``) it breaks a rule of :class:`SampleRef` that NeMo does not check.
    """
    return SampleRef(
        algorithm=FeatureAlgorithm(ref.algorithm.value),
        feature_keys=dict(ref.feature_keys),
        feature_specs={name: FeatureSpec(tuple(s.shape), s.dtype) for name, s in ref.feature_specs.items()},
        **{name: getattr(ref, name) for name in _FIELDS},
    )


def as_nemo_store(store: FeatureStore) -> Any:
    """Return ``store`` as one of NeMo's feature stores.

    What it hands out is exactly what ``store`` hands out: on a stream's draft rank, views of the receive memory.
    Closing it closes ``store``.

    Raises:
        ConfigError: (``ValueError``) NeMo is not installed.
    """
    _nemo()
    return store.inner if isinstance(store, _StoreFromNemo) else _StoreForNemo(store)


def from_nemo_store(store: Any) -> FeatureStore:
    """Return one of NeMo's feature stores as one of ours. Closing it closes ``store``.

    NeMo frees a sample with the last handle that is *released*, and does not notice when one is dropped. The adapter
    does: it releases all its handles of a sample when the last one that still lives has been released.
    """
    return store.inner if isinstance(store, _StoreForNemo) else _StoreFromNemo(store)


def as_nemo_queue(queue: _Queue) -> Any:
    """Return one of our queues, or a stream's, as a queue for NeMo's loader and pipeline.

    NeMo's loader ends at an empty poll when the queue says that it is closed, and would lose what was put, or what
    another consumer gives back, in between. So ``is_closed`` here turns true only when nothing can come any more.

    Raises:
        ConfigError: (``ValueError``) NeMo is not installed.
    """
    _nemo()
    return _QueueForNemo(queue)


class _Issued:
    """Our objects by the id of NeMo's that stand for them, for as long as those live."""

    _ATTRIBUTE = "_nccl_stream_object"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, number: int, theirs: object, ours: object) -> None:
        # Theirs are frozen dataclasses. Ours lives as long as theirs, so that our stores notice a dropped handle.
        object.__setattr__(theirs, self._ATTRIBUTE, ours)
        with self._lock:
            self._ours[number] = ours

    def pop(self, number: int) -> Any:
        with self._lock:
            return self._ours.pop(number, None)


class _StoreForNemo:
    """Our store with NeMo's refs and handles; a virtual subclass of NeMo's FeatureStore."""

    def __init__(self, inner: FeatureStore) -> None:
        self.inner = inner
        self._issued = _Issued()

    @property
    def store_uri(self) -> str:
        """The inner store's."""
        return str(getattr(self.inner, "store_uri"))  # noqa: B009 - not part of the contract, but all of ours have it

    def put(
        self,
        sample_id: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        run_id: str,
        algorithm: Any = None,
        schema_version: int = 1,
        target_model_version: str = "0",
        draft_weight_version: str = "0",
        num_tokens: int = 0,
    ) -> Any:
        ref = self.inner.put(
            sample_id,
            tensors,
            run_id=run_id,
            algorithm=FeatureAlgorithm.EAGLE3 if algorithm is None else FeatureAlgorithm(algorithm.value),
            schema_version=schema_version,
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            num_tokens=num_tokens,
        )
        return to_nemo_ref(ref)

    def get(self, ref: Any, device: torch.device | str | None = None) -> tuple[dict[str, torch.Tensor], Any]:
        tensors, ours = self.inner.get(from_nemo_ref(ref), device)
        handle = _nemo().StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        self._issued.add(handle.handle_id, handle, ours)
        return tensors, handle

    def release(self, handle: Any) -> None:
        if handle.store is not self:
            raise MisuseError(f"the handle of sample {handle.sample_id!r} was issued by a different store")
        ours = self._issued.pop(handle.handle_id)
        if ours is not None:
            self.inner.release(ours)

    def gc(self) -> int:
        return self.inner.gc()

    def health(self) -> Any:
        health = self.inner.health()
        return _nemo().StoreHealth(
            resident_bytes=health.resident_bytes,
            capacity_bytes=health.capacity_bytes,
            sample_count=health.sample_count,
            high_watermark_hit=health.high_watermark_hit,
            low_watermark_hit=health.low_watermark_hit,
        )

    def close(self) -> None:
        self.inner.close()


class _QueueForNemo:
    """Our queue with NeMo's refs and leases."""

    def __init__(self, inner: _Queue) -> None:
        self.inner = inner
        self._issued = _Issued()

    @property
    def is_closed(self) -> bool:
        """Closed, with nothing pending or leased."""
        return self.inner.is_drained

    def put(self, ref: Any) -> None:
        self.inner.put(from_nemo_ref(ref))

    def put_blocks_until_below(
        self, ref: Any, *, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None
    ) -> None:
        self.inner.put_blocks_until_below(from_nemo_ref(ref), poll_interval=poll_interval, abort_when=abort_when)

    def acquire(self, *, poll_interval: float = 0.05) -> Any:
        ours = self.inner.acquire(poll_interval)
        if ours is None:
            return None
        if getattr(ours, "is_padding", False):
            self.inner.ack(ours)
            raise ConfigError('NeMo\'s loader cannot take part in a round without a sample: use end="drop" or "ragged"')
        nemo = _nemo()
        lease = nemo.Lease(
            ref=to_nemo_ref(ours.ref),
            deadline=ours.deadline,
            visibility_timeout=nemo.VisibilityTimeout(seconds=ours.visibility_timeout.seconds),
            redelivery_count=ours.redelivery_count,
        )
        self._issued.add(lease.lease_id, lease, ours)
        return lease

    def ack(self, lease: Any) -> None:
        ours = self._issued.pop(lease.lease_id)
        if ours is not None:
            self.inner.ack(ours)

    def fail(self, lease: Any) -> None:
        ours = self._issued.pop(lease.lease_id)
        if ours is not None:
            self.inner.fail(ours)

    def reclaim_expired(self) -> int:
        return self.inner.reclaim_expired()

    def pending_count(self) -> int:
        return self.inner.pending_count()

    def outstanding_count(self) -> int:
        return self.inner.outstanding_count()

    def close(self) -> None:
        self.inner.close()


class _StoreFromNemo(FeatureStore):
    """NeMo's store with our refs, handles and errors."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._holds: Holds[str] = Holds()
        self._lock = threading.Lock()
        self._theirs: dict[str, list[Any]] = {}
        self._is_full = False  # since a put was refused, until one succeeds or a sample is freed
        self._closed = False

    @property
    def store_uri(self) -> str:
        """The inner store's."""
        return str(self.inner.store_uri)

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
        """See :meth:`FeatureStore.put`. NeMo's refs have no attributes, so a sample that needs them is refused.

        The digest of a draft vocabulary, which is only there to be compared, is left out.
        """
        lost = sorted(set(attributes or ()) - {VOCABULARY_ATTRIBUTE})
        if lost:
            raise MisuseError(f"sample {sample_id!r}: NeMo's refs cannot carry attributes {lost}")
        try:
            ref = self.inner.put(
                sample_id,
                tensors,
                run_id=run_id,
                algorithm=_nemo().FeatureAlgorithm(algorithm.value),
                schema_version=schema_version,
                target_model_version=target_model_version,
                draft_weight_version=draft_weight_version,
                num_tokens=num_tokens,
            )
        except CapacityError:
            raise
        except MemoryError as error:
            health = self.inner.health()
            nbytes = sum(FeatureSpec.of(tensor).nbytes for tensor in tensors.values())
            can_wait = not health.capacity_bytes or nbytes <= health.capacity_bytes
            self._is_full = can_wait
            raise CapacityError(str(error), can_wait=can_wait) from error
        self._is_full = False
        return from_nemo_ref(ref)

    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """See :meth:`FeatureStore.get`; the tensors are the ones that NeMo's store returns."""
        self._check_open("get")
        try:
            tensors, theirs = self.inner.get(to_nemo_ref(ref), device)
        except KeyError as error:
            raise SampleNotFoundError(str(error.args[0]) if error.args else ref.sample_id) from error
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        with self._lock:
            self._theirs.setdefault(ref.sample_id, []).append(theirs)
        self._holds.add(handle, ref.sample_id)
        return tensors, handle

    def release(self, handle: StoreHandle) -> None:
        """See :meth:`FeatureStore.release`."""
        if not isinstance(handle, StoreHandle):
            raise MisuseError(f"release needs a StoreHandle, got {type(handle).__name__}")
        if handle.store is not self:
            raise MisuseError(f"the handle of sample {handle.sample_id!r} was issued by a different store")
        self._check_open("release")
        self._free(self._holds.release(handle))

    def gc(self) -> int:
        """See :meth:`FeatureStore.gc`."""
        self._check_open("gc")
        count, free = self._holds.sweep()
        self._free(free)
        return count + int(self.inner.gc())

    def health(self) -> StoreHealth:
        """See :meth:`FeatureStore.health`."""
        health = self.inner.health()
        return StoreHealth(
            health.resident_bytes,
            health.capacity_bytes,
            health.sample_count,
            health.high_watermark_hit,
            health.low_watermark_hit,
        )

    def is_full(self) -> bool:
        """See :meth:`FeatureStore.is_full`. NeMo does not say how many samples its store may hold."""
        return self._is_full or self.health().high_watermark_hit

    def close(self) -> None:
        """Close NeMo's store. Idempotent."""
        self._closed = True
        self._holds.clear()
        with self._lock:
            self._theirs.clear()
        self.inner.close()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: this store is closed")

    def _free(self, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            with self._lock:
                theirs = self._theirs.pop(sample_id, [])
            for handle in theirs:
                self.inner.release(handle)
                self._is_full = False
