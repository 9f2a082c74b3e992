"""The streamed samples that a loader has in hand: from lease to batches, and back to the store."""

from __future__ import annotations

import threading

from nccl_stream.batch import FeatureBatch, batch_of
from nccl_stream.chunk_policy import ChunkPolicy
from nccl_stream.errors import ClosedError
from nccl_stream.leases import Lease
from nccl_stream.store import FeatureStore
from nccl_stream.stores.pieces import read_joined
from nccl_stream.streamed.chunks import ChunkIterator, read_chunks
from nccl_stream.streamed.sample import PieceReader

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
        # By lease. With a policy a reader has its chunks.
        self._readers: dict[int, tuple[PieceReader, ChunkIterator | None]] = {}
        self._reading: Lease | None = None
        self._closed = False

    @property
    def reading(self) -> Lease | None:
        """The sample of which some batches came and others are still to come."""
        return self._reading

    def next_batch(self, lease: Lease) -> FeatureBatch:
        """Return the next batch of a sample; blocks until it is there.

        Args:
            lease: :attr:`reading`, unless that is None.

        Raises:
            ClosedError: closed meanwhile.
            NcclStreamError: what :class:`PieceReader` raises. The sample then has to be closed.
        """
        ref = lease.ref
        reader, chunks = self._open(lease)
        if chunks is None:
            tensors = read_joined(reader)
            return batch_of(ref.algorithm, tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
        chunk = next(chunks)
        batch = batch_of(ref.algorithm, chunk.tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
        batch.place = chunk.place
        with self._lock:
            if lease.lease_id not in self._readers:
                raise ClosedError(f"streamed sample {ref.sample_id!r} was given back meanwhile")
            self._reading = None if batch.is_final else lease
        return batch

    def _open(self, lease: Lease) -> tuple[PieceReader, ChunkIterator | None]:
        opened = self._readers.get(lease.lease_id)
        if opened is not None:
            return opened
        reader = self._store.open_reader(lease.ref)
        chunks = None if self._policy is None else read_chunks(reader, self._policy)
        with self._lock:
            if not self._closed:
                self._readers[lease.lease_id] = reader, chunks
                return reader, chunks
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
        for reader, _ in readers:
            reader.close()

    def _take(self, lease: Lease) -> PieceReader | None:
        with self._lock:
            if self._reading is lease:
                self._reading = None
            reader, chunks = self._readers.pop(lease.lease_id, (None, None))
        if chunks is not None:
            chunks.close()  # a traceback that somebody keeps must not keep receive memory
        return reader
