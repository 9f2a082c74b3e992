"""The consuming side: leases refs from a queue, materializes them through a store and yields batches."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

from torch.utils.data import IterableDataset

from nccl_stream import _compat
from nccl_stream.batch import FeatureBatch, batch_of
from nccl_stream.batching import Batcher, BatchRule, collate, extent_of
from nccl_stream.chunk_policy import ChunkPolicy
from nccl_stream.errors import (
    ClosedError,
    ConfigError,
    MisuseError,
    PeerLostError,
    ProducerFailedError,
    SchemaError,
    StreamBrokenError,
    StreamLostError,
)
from nccl_stream.queue import Lease
from nccl_stream.refs import FeatureAlgorithm, SampleRef
from nccl_stream.renewal import LeaseRenewer
from nccl_stream.schema import schema_of, validate_ref
from nccl_stream.store import FeatureStore, StoreHandle
from nccl_stream.streamed.batches import StreamedSamples
from nccl_stream.vocab import VOCABULARY_ATTRIBUTE, DraftVocabulary

__all__ = ["FeatureDataLoader"]

logger = logging.getLogger(__name__)

WAITING_LOG_S = 30.0
"""Seconds without a sample after which a waiting loader says so, and again after as long."""


@dataclass(frozen=True)
class _Held:
    """A delivered sample that is not settled yet. Neither padding nor a streamed sample has a handle."""

    lease: Lease
    handle: StoreHandle | None


class FeatureDataLoader(IterableDataset[Any]):
    """Iterates over the batches of a queue.

    A batch is one sample, or several: ``batch_size`` of them, as many as fit ``max_tokens``, or both. They are joined
    along their rows, shorter ones padded on the right without loss or attention, unless ``collate_fn`` does otherwise.
    Only the last batch may have fewer samples than were asked for, besides one of whose samples could not be fetched,
    and one that takes all that the store has room for.

    The samples of a batch are acked, and then their store handles released, on the next pull, so that the trainer can
    use a batch for a whole step. Iteration ends when the queue is closed and nothing is pending or leased any more, by
    anyone: a lease that another consumer fails comes here. A producer that failed is an error, after the samples it had
    made. The number of batches is not known before, so there is no ``len``.

    On a stream whose draft ranks stop together, batches never reach over the end of a round (``StreamConfig.batch_size
    * accumulation`` samples per rank). With ``length_buckets`` the samples of a round are ordered by length before they
    are cut into batches, of which every rank has equally many; with ``max_tokens`` it may have another number than the
    others, so step the optimizer where :attr:`at_round_end` says so.

    While a sample is held, a small daemon thread renews its lease, so a long step loses nothing; a process that dies
    stops renewing. Leaving the context because of an exception gives the samples in hand back instead of acking them:
    those of the last batch count as failed deliveries, the others as never delivered. A trainer that only catches the
    exception around the ``for`` loop should use the loader as a context manager for that reason.

    A streamed sample comes as a whole when its producer has closed it (with ``max_tokens``, alone); or, with a
    ``chunk_policy``, chunk by chunk while it is produced. :attr:`FeatureBatch.place` says which part of the sample
    a batch is. Such a sample counts as one, however many chunks it has: it is acked like others after its final
    chunk (``batch.is_final``), its lease is renewed until then, and a round ends with a final chunk. Ranks have
    different numbers of chunks, so synchronize gradients in the backward pass of final chunks only (``no_sync()``
    for the others). A chunk's tensors are the caller's own. A loop that stops in the middle of a sample gives its
    memory back; the sample comes again if it was retained, and is lost otherwise. A sample that is not streamed
    comes as one final chunk. Producers have to keep as many samples open at a time as a batch or a round takes, or
    they wait for readers that wait for further samples.

    It is an ``IterableDataset``: ``DataLoader(loader, batch_size=None)`` works in this process, and with its default
    ``collate_fn`` yields plain dicts. Leases live in the process that took them, so worker processes are refused.

    Args:
        queue: Where leases come from. :meth:`close` closes it.
        store: Where refs are materialized.
        algorithm: The algorithm whose batches are yielded; EAGLE-3 by default.
        acquire_poll_interval: Longest uninterrupted wait for a ref, in seconds. A ref that comes ends the wait at once.
        ack: ``"next"`` acks a batch on the next pull. ``"step"`` keeps all of them until :meth:`step`, called after
            the optimizer's step, so that a death in the middle of gradient accumulation brings their samples again;
            iteration then also ends while samples are held here, and they are acked by a last :meth:`step`.
        batch_size: Samples per batch; one by default, or no limit where there is a ``max_tokens``.
        collate_fn: Makes the batch of the batch objects of its samples; :func:`nccl_stream.batching.collate` by
            default. Their tensors are valid until the batch is settled.
        max_tokens: Most tokens of a batch, padding included (rows times the longest). A longer sample comes alone.
        length_buckets: Ascending upper bounds of lengths; a batch takes its samples from between two of them. Samples
            that wait for their batch are leased and occupy memory.
        vocabulary: The draft vocabulary of this side. Samples over another one are refused, and so are those that do
            not say over which one they are. Without it nothing is compared.
        chunk_policy: Which pieces of a streamed sample make a batch; an item is a piece. The sample's window must hold
            the longest chunk with its context, and one piece more. Chunks of several samples are not joined.

    Raises:
        ConfigError: (a ``ValueError``) a value that is not positive, another ``ack``, bounds that do not ascend, a
            ``batch_size`` that does not divide the round of the stream, or several samples per batch with a
            ``chunk_policy``.
    """

    def __init__(
        self,
        queue: _compat.RefQueue,
        store: FeatureStore,
        algorithm: FeatureAlgorithm | None = None,
        acquire_poll_interval: float = 0.05,
        *,
        ack: Literal["next", "step"] = "next",
        batch_size: int | None = None,
        collate_fn: Callable[[list[FeatureBatch]], Any] | None = None,
        max_tokens: int | None = None,
        length_buckets: Sequence[int] = (),
        vocabulary: DraftVocabulary | None = None,
        chunk_policy: ChunkPolicy | None = None,
    ) -> None:
        if not acquire_poll_interval > 0:
            raise ConfigError(
                f"acquire_poll_interval must be a positive number of seconds, got {acquire_poll_interval}"
            )
        if ack not in ("next", "step"):
            raise ConfigError(f"ack must be 'next' or 'step', got {ack!r}")
        rule = BatchRule(batch_size, max_tokens, tuple(length_buckets))
        if chunk_policy is not None:
            if rule.most_samples != 1 or rule.max_tokens is not None:
                raise ConfigError(
                    "with a chunk_policy a batch is one chunk of one sample: leave out batch_size, max_tokens"
                )
            if chunk_policy.continue_after_done:
                raise ConfigError("a chunk_policy with continue_after_done never ends a sample")
        self._queue = queue
        self._store = store
        self._algorithm = FeatureAlgorithm.EAGLE3 if algorithm is None else algorithm
        self._poll_interval = acquire_poll_interval
        self._ack_on_next = ack == "next"
        self._vocabulary = vocabulary
        self._warned_of_vocabulary = False
        self._collate: Callable[[list[FeatureBatch]], Any] = collate if collate_fn is None else collate_fn
        # Streams say how many samples a step of this rank consumes; their memory is sized for that.
        self._per_round: int | None = getattr(queue, "samples_per_round", None)
        self._is_aligned: bool = self._per_round is not None and getattr(queue, "is_aligned", False)
        self._check_round(rule)
        cuts_rounds = self._is_aligned and (rule.max_tokens is not None or bool(rule.length_buckets))
        self._lock = threading.Lock()
        # A sample's way: waiting for its batch, in the group that is being fetched, fetched, held until it is settled.
        self._waiting: Batcher[Lease] = Batcher(rule, window=self._per_round if cuts_rounds else None)
        self._group: deque[Lease] = deque()
        # (A chunk that is not its sample's last has nothing to hold: the sample is still being read.)
        self._fetched: list[tuple[_Held | None, FeatureBatch]] = []
        self._held: list[tuple[_Held, ...]] = []
        self._streamed = StreamedSamples(store, chunk_policy)
        self._num_taken = 0
        self._closed = False
        self._pid = os.getpid()
        self._renewer = LeaseRenewer(getattr(queue, "extend", None))
        # A loader that is dropped without close() must not renew for ever. Only signals: it may run on any thread.
        weakref.finalize(self, self._renewer.signal_stop).atexit = False

    def _check_round(self, rule: BatchRule) -> None:
        per_round, size = self._per_round, rule.most_samples
        if per_round is None or size is None:
            return
        if size > per_round or (self._is_aligned and per_round % size):
            raise ConfigError(
                f"batch_size={size} does not go into the {per_round} samples that the stream plans per round and draft "
                f"rank: set StreamConfig(batch_size={size}, accumulation=<batches per optimizer step>) on all ranks"
            )

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids of the samples in hand, oldest first, the one that is being read in chunks last."""
        with self._lock:
            settled_later = [held.lease for batch in self._held for held in batch]
            being_read = self._streamed.reading
            leases = settled_later if being_read is None else [*settled_later, being_read]
            return tuple(lease.ref.sample_id for lease in leases)

    @property
    def at_round_end(self) -> bool:
        """Whether the batches yielded so far end a round, where all draft ranks step; always true without rounds."""
        with self._lock:
            if not self._is_aligned:
                return True
            assert self._per_round is not None
            return not self._waiting and self._streamed.reading is None and self._num_taken % self._per_round == 0

    def __iter__(self) -> FeatureDataLoader:
        self._check_process()
        return self

    def __next__(self) -> Any:
        """Return the next batch; with ``ack="next"``, settle the previous one first. Blocks until there is one.

        Returns:
            The algorithm's batch object, with the samples' ids and attributes, or what ``collate_fn`` made. Its tensors
            are valid until it is settled; copy what you keep for longer.

        Raises:
            StopIteration: The queue is drained, or the loader closed.
            ProducerFailedError: The producing side failed, and what it had produced is consumed.
            MisuseError: (a ``ValueError``) a ref is for another algorithm, and stays in the queue; samples cannot be
                joined, and are failed; with ``ack="step"``, as many samples as the store or a round holds were yielded
                without a :meth:`step`; this is another process than the one that made the loader.
            SchemaError: (a ``ValueError``) a ref breaks its schema; its stored sample is dropped for good, and it
                becomes a dead letter.
            SampleNotFoundError: (a ``KeyError``) a sample is gone from the store; its ref becomes a dead letter. One of
                another store is failed.
            StreamBrokenError: The producer of a streamed sample failed or died; says how far it got. The sample does
                not come again.
            StreamLostError: A streamed sample cannot be read from its beginning any more. It does not come again.
            Exception: What the store or ``collate_fn`` raised; the leases are failed, so the samples come again. Other
                samples of the batch are kept, and come with the next pull.
        """
        self._check_process()
        if self._ack_on_next:
            self._settle()
        elif self._streamed.reading is None and self._per_round is not None and len(self.sample_ids) >= self._per_round:
            raise MisuseError(
                f"{len(self.sample_ids)} samples were yielded without a step(), and the stream's memory is sized for "
                f"{self._per_round} per optimizer step: call loader.step() after each, or raise accumulation in "
                "StreamConfig. (A data loader that Accelerate has prepared pulls ahead: iterate this one directly.)"
            )
        if not self._fetch_batch():
            if not self.sample_ids:
                self._renewer.close()
            raise StopIteration
        with self._lock:
            fetched, self._fetched = self._fetched, []
        try:
            batch = self._collate([batch for _, batch in fetched])
        except BaseException as error:
            self._give_back_fetched(fetched, error)
            raise
        with self._lock:
            if not self._closed:
                if held := tuple(held for held, _ in fetched if held is not None):
                    self._held.append(held)
                return batch
        # Closed by another thread meanwhile: the batch must not be yielded, so it was never delivered.
        self._give_back_fetched(fetched, None)
        self._renewer.close()
        raise StopIteration

    def consume_now(self) -> None:
        """Ack the batch yielded last and release its memory now instead of on the next pull. Idempotent.

        Without effect on a chunk that is not its sample's last.
        """
        if self._streamed.reading is None:
            self._settle(last_only=True)

    def step(self) -> None:
        """Ack and release all batches yielded so far: call it after the optimizer's step. Idempotent."""
        self._settle()

    def close(self) -> None:
        """Settle what is in hand, close the queue and end the iteration. Idempotent.

        With ``ack="next"`` the batch in hand is acked. With ``ack="step"`` samples without a :meth:`step` have not
        reached the weights: they go back to the queue. So do samples that waited for their batch.
        """
        try:
            if self._ack_on_next:
                self._settle()
        finally:
            self._end(None)

    def __enter__(self) -> FeatureDataLoader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self._end(exc)

    def __getstate__(self) -> NoReturn:
        raise MisuseError("a FeatureDataLoader cannot be copied or sent to another process: use num_workers=0")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError(
                "this FeatureDataLoader was made in another process, where its leases live; under "
                "torch.utils.data.DataLoader use num_workers=0 (fetching ahead is the stream's own work)"
            )

    def _give_back_fetched(
        self, fetched: list[tuple[_Held | None, FeatureBatch]], reason: BaseException | None
    ) -> None:
        for held, _ in reversed(fetched):
            if held is not None:
                self._give_back(held.lease, reason)
            elif (lease := self._streamed.reading) is not None:
                self._give_back(lease, reason)

    def _end(self, reason: BaseException | None) -> None:
        """Give everything back (the last batch as failed, if there is a reason) and shut down."""
        with self._lock:
            self._closed = True
            yielded = [[held.lease for held in batch] for batch in self._held]
            unused = [held.lease for held, _ in self._fetched if held is not None]
            unused += [*self._group, *self._waiting.take_all()]
            if (being_read := self._streamed.reading) is not None:
                yielded.append([being_read])
            self._held, self._fetched = [], []
            self._group.clear()
        self._streamed.stop()
        last = yielded.pop() if yielded else []
        back = [(lease, None) for batch in yielded for lease in batch]
        ordered = [*back, *((lease, reason) for lease in last), *((lease, None) for lease in unused)]
        try:
            # Newest first: each goes to the head of the queue, so together they keep their order. Handles are dropped,
            # not released: releasing frees the sample, and it is needed again.
            while ordered:
                self._give_back(*ordered.pop())
        finally:
            self._renewer.close()
            self._queue.close()

    def _give_back(self, lease: Lease, reason: BaseException | None) -> None:
        self._renewer.drop(lease)
        if not self._streamed.close(lease):
            _compat.fail_for_good(self._queue, lease, reason or ClosedError("its reader stopped in the middle"))
        # Only an error can be the sample's fault; an interrupt is not, and must not use up its retry budget.
        elif isinstance(reason, Exception):
            _compat.fail(self._queue, lease, reason)
        else:
            _compat.hand_back(self._queue, lease)

    def _settle(self, *, last_only: bool = False) -> None:
        """Ack and release what is held, oldest first. After an error, what was not reached is still held."""
        while True:
            with self._lock:
                if not self._held:
                    return
                index = -1 if last_only else 0
                held, *rest = self._held[index]
                self._held[index : index + 1 or None] = [tuple(rest)] if rest else []
            self._settle_one(held)
            if last_only and not rest:
                return

    def _settle_one(self, held: _Held) -> None:
        self._renewer.drop(held.lease)
        # Ack first. The other way round, a lease that has expired would come again with its sample gone; for the same
        # reason the handle of a lease that was lost is dropped instead of released.
        live = _compat.ack(self._queue, held.lease)
        if _is_padding(held.lease):
            return  # No delivery stands behind it, so there is nothing to be late for.
        if not live:
            logger.warning(
                "the lease of sample %s had expired before its ack; it may be trained on twice",
                held.lease.ref.sample_id,
            )
            self._streamed.close(held.lease)
        elif not self._streamed.release(held.lease) and held.handle is not None:
            self._store.release(held.handle)

    # -- from the queue to a batch --

    def _fetch_batch(self) -> bool:
        """Fetch the samples of the next batch, waiting for them; False at the end."""
        with self._lock:
            begun = bool(self._group or self._fetched or self._streamed.reading is not None)
        if not begun and not self._gather():
            return False
        while True:
            with self._lock:
                if self._closed:
                    return False
                lease = self._streamed.reading
                if lease is None:
                    if not self._group:
                        return True
                    lease = self._group.popleft()
            try:
                batch, handle = self._materialize(lease)
            except BaseException as error:
                if self._closed and isinstance(error, ClosedError):
                    # It was close() that ended the wait for a piece.
                    self._give_back(lease, None)
                    return False
                self._refuse(lease, error)
                raise
            with self._lock:
                if not self._closed:
                    if not batch.is_final:
                        self._fetched.append((None, batch))
                        return True
                    self._fetched.append((_Held(lease, handle), batch))
                    continue
            self._give_back(lease, None)

    def _refuse(self, lease: Lease, error: BaseException) -> None:
        """The sample could not be materialized."""
        if isinstance(error, KeyError):
            # A sample of another store may be found by another loader; one that is gone, by nobody.
            for_good = lease.ref.store_uri == getattr(self._store, "store_uri", lease.ref.store_uri)
        else:
            for_good = isinstance(error, (SchemaError, StreamBrokenError, StreamLostError))
        if for_good:
            self._drop_for_good(lease, error)
        else:
            self._give_back(lease, error)

    def _gather(self) -> bool:
        """Lease the samples of the next batch; False at the end."""
        while True:
            with self._lock:
                full = not self._is_aligned and self._per_round is not None and len(self._waiting) >= self._per_round
                # More than the memory is sized for must not wait here: the next sample might never fit.
                group = self._waiting.flush() if full else self._waiting.pop()
                if group is not None:
                    self._group.extend(group)
                    return True
            try:
                lease = self._next_lease()
            except (ProducerFailedError, PeerLostError):
                if not self._flush():
                    raise  # Otherwise it is raised again by the next pull.
                return True
            if lease is None:
                return self._flush()
            self._admit(lease)

    def _flush(self) -> bool:
        with self._lock:
            group = self._waiting.flush()
            self._group.extend(group or ())
            return group is not None

    def _admit(self, lease: Lease) -> None:
        """Take a lease in whose ref this loader serves."""
        ref = lease.ref
        self._renewer.hold(lease)
        with self._lock:
            self._num_taken += 1
        try:
            if ref.algorithm is not self._algorithm:
                raise MisuseError(
                    f"this loader serves {self._algorithm.value}, but sample {ref.sample_id!r} is for "
                    f"{ref.algorithm.value}"
                )
            if not _is_padding(lease):
                validate_ref(ref)
            rows, length = extent_of(schema_of(ref.algorithm), ref)
        except BaseException as error:
            with self._lock:
                self._waiting.skip()
            if isinstance(error, SchemaError):
                self._drop_for_good(lease, error)
            else:
                self._give_back(lease, error)
            raise
        with self._lock:
            if not self._closed:
                self._waiting.add(lease, rows, length)
                return
        self._give_back(lease, None)

    def _next_lease(self) -> Lease | None:
        """Wait for a lease; None at the end, and when what waits here had better be used first."""
        started = logged = time.monotonic()
        blocks = False
        while not self._closed:
            lease = self._queue.acquire(self._poll_interval)
            if lease is not None:
                return lease
            if self._at_end():
                return None
            # Only the second look counts: at the first, the last sample may be stored and its ref not queued yet.
            blocked, blocks = blocks, self._blocks_producers()
            if blocked and blocks:
                if self._waiting:
                    return None
                raise MisuseError(
                    f"{len(self.sample_ids)} samples were yielded without a step(), and the store has no room for "
                    "another one: call loader.step() more often, or raise the caps of the store"
                )
            now = time.monotonic()
            if now - logged >= WAITING_LOG_S:
                logged = now
                logger.info(
                    "no sample for %.0f s: queue closed=%s, pending %d, leased %d, of which %d wait here for a "
                    "full batch and %d for their step",
                    now - started,
                    self._queue.is_closed,
                    self._queue.pending_count(),
                    self._queue.outstanding_count(),
                    len(self._waiting),
                    len(self.sample_ids),
                )
                if self._per_round is None and self._waiting and self._store.health().high_watermark_hit:
                    return None  # Producers that nobody here knows of may go by the watermark.
        return None

    def _at_end(self) -> bool:
        if not self._held and not self._waiting:
            return _compat.is_drained(self._queue)
        # What is leased includes our own, which the trainer settles after the iteration.
        return self._queue.is_closed and self._queue.pending_count() == 0

    def _blocks_producers(self) -> bool:
        """Whether producers wait for room that only this loader can make: nothing more would ever come.

        A stream has room for its whole round, and counts on full batches.
        """
        if self._per_round is not None or not _compat.producers_wait(self._queue, self._store):
            return False
        # What waits here can be used. What waits for its step cannot, but others may settle theirs.
        num_held = len(self.sample_ids)
        return bool(self._waiting) or 0 < num_held >= self._queue.outstanding_count()

    def _materialize(self, lease: Lease) -> tuple[FeatureBatch, StoreHandle | None]:
        ref = lease.ref
        if _is_padding(lease):
            device = getattr(self._store, "device", None)
            tensors = schema_of(ref.algorithm).padding(ref, device)
            return batch_of(ref.algorithm, tensors, attributes=ref.attributes), None
        self._check_vocabulary(ref)
        if ref.stream is not None:
            return self._streamed.next_batch(lease), None
        tensors, handle = self._store.get(ref)
        try:
            # A sample may carry more than the batch has fields for; it goes with the sample.
            batch = batch_of(ref.algorithm, tensors, attributes=ref.attributes, sample_ids=(ref.sample_id,))
        except SchemaError:
            self._store.release(handle)  # The ref is dropped for good: nobody else will need the sample.
            raise
        return batch, handle

    def _check_vocabulary(self, ref: SampleRef) -> None:
        if self._vocabulary is not None:
            self._vocabulary.require_same_in(ref)
        elif VOCABULARY_ATTRIBUTE in ref.attributes and not self._warned_of_vocabulary:
            self._warned_of_vocabulary = True
            logger.warning(
                "sample %s is over a draft vocabulary, and nobody compares it with this rank's: give the loader "
                "vocabulary=",
                ref.sample_id,
            )

    def _drop_for_good(self, lease: Lease, error: BaseException) -> None:
        self._renewer.drop(lease)
        self._streamed.close(lease)
        _compat.fail_for_good(self._queue, lease, error)
        if isinstance(error, (KeyError, StreamLostError)):
            return  # Nothing is left of it; or it is somebody else's now.
        try:
            self._store.discard(lease.ref)
        except Exception:
            logger.exception("the sample of the refused ref %s could not be dropped", lease.ref.sample_id)


def _is_padding(lease: Lease) -> bool:
    return bool(getattr(lease, "is_padding", False))
