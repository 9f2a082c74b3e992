"""The streamed samples that a loader has in hand: from lease to batches, and back to the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from nccl_stream.batch import FeatureBatch, batch_of
from nccl_stream.chunk_policy import ChunkPolicy
from nccl_stream.errors import ClosedError
from nccl_stream.leases import Lease
from nccl_stream.sample_chunks import SampleChunk, read_chunks
from nccl_stream.sample_stream import PieceReader
from nccl_stream.store import FeatureStore
from nccl_stream.stores.pieces import read_joined

__all__ = ["StreamedSamples"]


class StreamedSamples:
    """Readers of the leased samples, from the first batch of each until it is released or closed.

    One thread reads; the others may close.

    Args:
        store: where the samples are.
        policy: which pieces make a batch; None for all of a sample's.
    """

    def __init__(self, store: FeatureStore, policy: ChunkPolicy | None) -> None:
        self._store = store
        self._policy = policy
        self._lock = threading.Lock()
        self._readers: dict[int, PieceReader] = {}
        self._reading: tuple[Lease, Iterator[SampleChunk]] | None = None
        self._closed = False

    @property
    def reading(self) -> Lease | None:
        """The sample of which some batches came and others are still to come."""
        reading = self._reading
        return None if reading is None else reading[0]

    def next_batch(self, lease: Lease) -> FeatureBatch:
        """Return the next batch of a sample; blocks until it is there.

        Args:
            lease: :attr:`reading`, unless that is None.

        Raises:
            ClosedError: closed meanwhile.
            NcclStreamError: what :class:`PieceReader` raises. The sample then has to be closed.
        """
        ref = lease.ref
        reading = self._reading
        if reading is None or reading[0] is not lease:
            reader = self._open(lease)
            if self._policy is None:
                tensors = read_joined(reader)
                return batch_of(ref.algorithm, tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
            reading = lease, read_chunks(reader, self._policy)
        chunk = next(reading[1])
        batch = batch_of(ref.algorithm, chunk.tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
        batch.place = chunk.place
        with self._lock:
            if lease.lease_id not in self._readers:
                raise ClosedError(f"streamed sample {ref.sample_id!r} was given back meanwhile")
            self._reading = None if batch.is_final else reading
        return batch

    def _open(self, lease: Lease) -> PieceReader:
        reader = self._store.open_reader(lease.ref)
        with self._lock:
            if not self._closed:
                self._readers[lease.lease_id] = reader
                return reader
        reader.close()
        raise ClosedError("the loader is closed")

    def release(self, lease: Lease) -> bool:
        """The sample is consumed; returns whether it was in hand."""
        reader = self._take(lease)
        if reader is not None:
            reader.release()
        return reader is not None

    def close(self, lease: Lease) -> bool:
        """The sample is not consumed; returns whether it can be read by somebody else (or was not in hand)."""
        reader = self._take(lease)
        return reader is None or reader.close()

    def stop(self) -> None:
        """Wake the thread that reads, and hand out nothing more. Every sample has still to be closed."""
        with self._lock:
            self._closed = True
            readers = list(self._readers.values())
        for reader in readers:
            reader.close()

    def _take(self, lease: Lease) -> PieceReader | None:
        with self._lock:
            if self._reading is not None and self._reading[0] is lease:
                self._reading = None
            return self._readers.pop(lease.lease_id, None)
