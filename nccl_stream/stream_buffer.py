"""Chunked consumption of a stream whose items arrive one by one, in any order.

A producer *registers* each item, which fixes its place, and the item arrives later through :meth:`StreamBuffer.put`. A
:class:`~nccl_stream.chunk_policy.ChunkPolicy` says how many items make a chunk; the consumer polls
:meth:`StreamBuffer.has_chunk_ready`, or blocks in :meth:`StreamBuffer.wait_chunk_ready`, and takes chunks with
:meth:`StreamBuffer.pop_chunk` until one is final.

Items are tensors or handles of any other type; the buffer never looks into a handle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from nccl_stream._stream_items import Arrival, EdgeQueue, JoinedItem, StreamItems, shorten
from nccl_stream.chunk_policy import ChunkPolicy
from nccl_stream.errors import ClosedError, MisuseError, PeerTimeoutError, ProducerFailedError
from nccl_stream.stream_chunk import StreamChunk, StreamChunkInfo, StreamingEdge, StreamStatistics, collate

__all__ = ["StreamBuffer", "StreamChunk", "StreamChunkInfo", "StreamStatistics", "StreamingEdge", "collate"]

logger = logging.getLogger(__name__)

# Seconds. Far above a transfer or a producer's step; a stream that stands still for so long has lost an item.
DEFAULT_ARRIVAL_TIMEOUT = 600.0
_TAKEN = Arrival.TAKEN


class _Run(NamedTuple):
    """Consecutive items of one walk, from index ``start`` to the start of the next run."""

    walk: str | None
    start: int


class StreamBuffer:
    """The consumer's buffer of one stream: one request, one edge.

    Thread-safe: items may be registered and put by other threads than the one that pops. No method waits, except
    :meth:`wait_chunk_ready`. Joiner, policy and the copies of :func:`collate` run outside the lock that a put needs. A
    call that raises leaves the buffer as it was.

    The buffer owns an item from its put until the chunk that lists it in ``released``. It keeps the items of the
    current window and those that wait, for an earlier item or for the consumer.

    Args:
        request_id: the request, for messages.
        edge_name: the edge, for messages.
        from_partition: who produces, for messages.
        policy: where chunks begin and end.
        join_dim: the dimension along which the pieces of one item are concatenated.
        joiner: makes one item of its pieces; takes precedence over ``join_dim``.
        walk_tagged: items carry the walk they were produced in, and no chunk spans two walks.
        ingested_chunk: the chunk that the consumer took last. The caller's to set; the buffer never touches it.
        producer_done: start as if ``signal_done()`` had been called.
        maybe_ready: the hint's first value.
        arrival_timeout: seconds that the stream may stand still while a registered or promised item is missing; then
            the consumer gets an error that names it. None waits for ever.
        clock: monotonic seconds.

    Raises:
        MisuseError: an ``arrival_timeout`` that is not positive, or a policy that breaks its contract.
    """

    def __init__(
        self,
        request_id: int,
        edge_name: str,
        from_partition: str,
        policy: ChunkPolicy,
        join_dim: int | None = None,
        joiner: Callable[[list[Any]], object] | None = None,
        walk_tagged: bool = False,
        *,
        ingested_chunk: StreamChunkInfo | None = None,
        producer_done: bool = False,
        maybe_ready: bool = True,
        arrival_timeout: float | None = DEFAULT_ARRIVAL_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if arrival_timeout is not None and arrival_timeout <= 0:
            raise MisuseError(f"arrival_timeout must be above 0 seconds, or None: {arrival_timeout}")
        self.request_id = request_id
        self.edge_name = edge_name
        self.from_partition = from_partition
        self.policy = policy
        self.join_dim = join_dim
        self.joiner = joiner
        self.walk_tagged = walk_tagged
        self.ingested_chunk = ingested_chunk
        self._arrival_timeout = arrival_timeout
        self._clock = clock

        # _pop_lock keeps chunks in order and is taken first; _lock stays free for puts while a chunk is copied.
        self._pop_lock = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0

        self._items = StreamItems(self._name, clock)
        self._edges = EdgeQueue()
        self._maybe_ready = maybe_ready
        self._dropped = {Arrival.UNKNOWN: 0, Arrival.REPEATED: 0}
        self._dropped_late = 0

        self._producer_done = producer_done
        self._promised_pieces = 0
        self._failure: BaseException | None = None

        # The runs that are not delivered in full, and the span of the next full chunk of the first one. All indices
        # count from the beginning of the stream. _context holds the first items back as context, until the first pop.
        self._runs: deque[_Run] = deque()
        self._run_start = 0
        self._run_chunks = 0
        self._next = self._span_of_run(delivered=0, chunk_index=0, keep_from=0)
        self._first_stop = self._next[1]
        # While fewer items than this are available, there is neither a chunk nor an end. 0 when that is not known.
        self._needed = 0 if producer_done else self._first_stop
        self._delivered = 0
        self._context = 0
        self._chunks_popped = 0
        self._ended = False
        self._closed = False

    def __repr__(self) -> str:
        return f"StreamBuffer({self._name}, {self._progress()})"

    @property
    def producer_done(self) -> bool:
        """Whether the producer has signalled that it sends no more. Setting it is ``signal_done()``.

        Raises:
            MisuseError: set to False after done was signalled.
        """
        return self._producer_done

    @producer_done.setter
    def producer_done(self, value: bool) -> None:
        if value and not self._producer_done:
            self.signal_done()
        elif self._producer_done and not value:
            raise MisuseError(f"{self._name}: done was signalled, and a stream has one end")

    @property
    def maybe_ready(self) -> bool:
        """A cheap hint, read without a lock: False means that neither a chunk, nor an error, nor an edge waits.

        It may be True wrongly. Every event that could make a chunk ready sets it; a :meth:`has_chunk_ready` that finds
        nothing at all clears it. A caller that clears it itself must do so before it looks, not after.
        """
        return self._maybe_ready or self._until_overdue() <= 0

    @maybe_ready.setter
    def maybe_ready(self, value: bool) -> None:
        self._maybe_ready = value

    # The producer's side.

    def pre_read_register(self, tensor_id: Hashable, walk: str | None = None) -> None:
        """Give the next index of the stream to the item ``tensor_id``.

        Args:
            tensor_id: the id that its put will carry, unique in the stream.
            walk: the walk that produced it. Only used where the buffer is ``walk_tagged``.

        Raises:
            MisuseError: the id is registered already, or more pieces than were promised.
            ClosedError: the stream has ended.
        """
        with self._lock:
            if self._ended or self._promised_pieces:
                self._require_registrable(1)
            self._items.register(tensor_id)
            if self.walk_tagged or not self._runs:
                self._extend_runs(walk)
                self._wake()
                return
            # The same without a call, on the path of every item; as in put().
            self._maybe_ready = True
            if self._num_waiting:
                self._changed.notify_all()

    def pre_read_register_joined(self, tensor_ids: Sequence[Hashable], walk: str | None = None) -> None:
        """Give the next index of the stream to one item that arrives in pieces.

        The item is there when all its pieces are. They are joined in the listed order, in whatever order they arrive.
        Each piece counts towards the total of :meth:`signal_done`.

        Args:
            tensor_ids: the ids of the pieces, at least one.
            walk: as for :meth:`pre_read_register`.

        Raises:
            MisuseError: no ids, an id that is registered already or listed twice, more pieces than were promised, or
                several pieces and neither a joiner nor a join_dim.
            ClosedError: the stream has ended.
        """
        ids = tuple(tensor_ids)
        if not ids:
            raise MisuseError(f"{self._name}: an item needs at least one piece")
        if len(ids) > 1 and self.joiner is None and self.join_dim is None:
            raise MisuseError(f"{self._name}: {len(ids)} pieces need a joiner or a join_dim to become one item")
        with self._lock:
            self._require_registrable(len(ids))
            self._items.register_joined(ids)
            if self.walk_tagged or not self._runs:
                self._extend_runs(walk)
            self._wake()

    def put(self, tensor_id: Hashable, item: Any) -> None:
        """Take an item, or a piece of one, that arrived.

        An id that is unknown, that arrived before, or that comes after the end is dropped and counted, see
        :meth:`statistics`; the buffer then keeps no reference to ``item``. Any number of threads may put.

        Args:
            tensor_id: the id under which it was registered.
            item: a tensor or a handle; the buffer's until it is released.

        Raises:
            Exception: whatever the joiner raises for the last missing piece. That piece then counts as not arrived.
        """
        with self._lock:
            outcome = self._items.offer(tensor_id, item)
            self._maybe_ready = True
            if self._num_waiting:
                self._changed.notify_all()
            if outcome is _TAKEN:
                return
            if isinstance(outcome, Arrival):
                self._drop(tensor_id, outcome)
                return
        self._join(outcome, tensor_id)

    def signal_done(self, num_items: int = 0) -> None:
        """The producer sends nothing after the ``num_items`` pieces it sent in total.

        Args:
            num_items: pieces in all; 0 when the producer does not say: then what is registered is all.

        Raises:
            MisuseError: a negative total, one below what is registered, or another total than before.
        """
        if num_items < 0:
            raise MisuseError(f"{self._name}: num_items must not be negative: {num_items}")
        with self._lock:
            if self._producer_done and num_items != self._promised_pieces:
                raise MisuseError(
                    f"{self._name}: done was signalled with {self._promised_pieces} items, and now with {num_items}"
                )
            if 0 < num_items < self._items.num_pieces:
                raise MisuseError(
                    f"{self._name}: done with {num_items} items, but {self._items.num_pieces} are registered already"
                )
            if not self._producer_done:
                self._producer_done = True
                self._promised_pieces = num_items
                self._items.restart_wait()
            self._wake()

    def signal_failed(self, error: BaseException) -> None:
        """The producer failed: what is missing never comes.

        Full chunks that are there are still handed out; after them :meth:`pop_chunk` raises. There is no final chunk,
        not even if done had been signalled. The first failure counts; one after the end of the stream changes nothing.

        Args:
            error: the cause.
        """
        with self._lock:
            if self._ended or self._failure is not None:
                return
            self._failure = error
            self._wake()
            progress = self._progress()
        logger.info("%s: the producer failed (%s): %r", self._name, progress, error)

    # The consumer's side.

    def prime_context(self, context_items: int) -> None:
        """Treat the first items of the stream as context: the first chunk carries them ahead of its new items.

        Args:
            context_items: how many.

        Raises:
            MisuseError: a negative number, or a chunk was popped before.
        """
        if context_items < 0:
            raise MisuseError(f"{self._name}: context_items must not be negative: {context_items}")
        with self._pop_lock, self._lock:
            if self._chunks_popped:
                raise MisuseError(f"{self._name}: context can only be primed before the first chunk is popped")
            self._context = context_items
            self._next = (0, context_items + self._first_stop)
            self._wake()

    def has_chunk_ready(self, consumer_walk: str | None = None) -> bool:
        """Whether :meth:`pop_chunk` has something to say now: a chunk, or the error that the stream ended in.

        Args:
            consumer_walk: the walk that the consumer is in; a chunk of another walk is not ready for it. None takes
                any.
        """
        with self._lock:
            items = self._items
            if items.available < self._needed and items.available == items.registered:
                # Polled after every item, so told apart cheaply: the chunk is not full, and nothing is owed.
                if not self._edges:
                    self._maybe_ready = False
                return False
            return self._is_ready(consumer_walk)

    def wait_chunk_ready(self, timeout: float, consumer_walk: str | None = None) -> bool:
        """Block until :meth:`has_chunk_ready`, until the end of the stream, or for ``timeout`` seconds.

        Args:
            timeout: seconds.
            consumer_walk: as for :meth:`has_chunk_ready`.

        Returns:
            Whether a chunk, or an error, is ready.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._num_waiting += 1
            try:
                while not (ready := self._is_ready(consumer_walk)) and not self._ended:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        break
                    until_overdue = self._until_overdue()
                    self._changed.wait(min(remaining, until_overdue) if until_overdue > 0 else remaining)
                return ready
            finally:
                self._num_waiting -= 1

    def peek_walk(self) -> str | None:
        """The walk that the next chunk runs under. None when untagged, or when no new item is there."""
        with self._lock:
            return self._runs[0].walk if self._items.available > self._delivered else None

    def pop_chunk(self) -> StreamChunk:
        """Take the next chunk.

        Full chunks come as the policy cuts them. A run that nothing can be added to any more ends with what it has. The
        last chunk of the stream is final, and empty only if everything had been delivered before it.

        Returns:
            The chunk; its ``released`` items are no longer the buffer's.

        Raises:
            ClosedError: the final chunk was popped, or the buffer was closed.
            ProducerFailedError: the producer failed, and no full chunk is left.
            PeerTimeoutError: no chunk is ready and an item is overdue; the message names it.
            MisuseError: no chunk is ready, or the policy broke its contract.
            RuntimeError: the chunk's tensors cannot be stacked.
        """
        with self._pop_lock:
            with self._lock:
                span = self._ready_span()
                if span is None:
                    raise self._why_not_ready()
                start, stop = span
                if start == stop:
                    return self._deliver_nothing(stop)
                items = self._items.between(start, stop)
                is_last = self._ends_stream(stop) or self._ends_run(stop)
            # Stacking may copy gigabytes and the policy may be the caller's: puts go on meanwhile.
            data = _chunk_data(items)
            # A policy that knows the sizes of its chunks has none to follow the last one.
            following = None if is_last else self._span_of_run(stop, self._run_chunks + 1, self._next[0])
            with self._lock:
                return self._deliver(start, stop, following, data)

    def store_uningested_edge(self, streaming_edge: Any) -> None:
        """Keep an edge that its consumer could not take yet.

        A new edge goes to the tail. One that :meth:`pop_waiting_edge` handed out (the same object) goes back to the
        head, ahead of all that came after it.

        Args:
            streaming_edge: a :class:`StreamingEdge`, or any object of the caller's.
        """
        with self._lock:
            self._edges.store(streaming_edge)
            self._wake()

    def pop_waiting_edge(self) -> Any:
        """Take the edge that waits longest. None when none waits."""
        with self._lock:
            return self._edges.pop()

    def close(self) -> list[Any]:
        """Stop early and give everything back. Idempotent. Later puts are dropped, later pops raise.

        Returns:
            The items, and pieces of items, that arrived and were never released.
        """
        with self._pop_lock, self._lock:
            self._closed = self._ended = True
            self._edges.clear()
            self._wake()
            return self._items.clear()

    def statistics(self) -> StreamStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return StreamStatistics(
                registered_items=self._items.registered,
                registered_pieces=self._items.num_pieces,
                available_items=self._items.available,
                delivered_items=self._delivered,
                retained_items=len(self._items),
                known_ids=self._items.num_known,
                chunks=self._chunks_popped,
                dropped_unknown=self._dropped[Arrival.UNKNOWN],
                dropped_repeated=self._dropped[Arrival.REPEATED],
                dropped_late=self._dropped_late,
            )

    # Registration and arrival.

    def _require_registrable(self, num_pieces: int) -> None:
        if self._ended:
            raise ClosedError(f"{self._name} has ended; nothing can be registered any more")
        if 0 < self._promised_pieces < self._items.num_pieces + num_pieces:
            raise MisuseError(
                f"{self._name}: done was signalled with {self._promised_pieces} items, {self._items.num_pieces} are "
                f"registered; {num_pieces} more are too many"
            )

    def _extend_runs(self, walk: str | None) -> None:
        """Note the walk of the item that was just registered."""
        if self._runs and walk == self._runs[-1].walk:
            return
        start = self._items.registered - 1
        self._runs.append(_Run(walk if self.walk_tagged else None, start))
        if len(self._runs) == 2 and self._delivered == start:
            self._enter_next_run()  # the run that this one closes was drained already

    def _join(self, joined: JoinedItem, last_id: Hashable) -> None:
        # A joiner is the caller's code, and a concatenation copies: neither runs under the lock.
        pieces = joined.pieces_in_order()
        try:
            if self.joiner is not None:
                item = self.joiner(pieces)
            elif len(pieces) == 1 or self.join_dim is None:
                item = pieces[0]
            else:
                item = torch.cat(pieces, dim=self.join_dim)
        except BaseException:
            with self._lock:
                self._items.take_back(joined, last_id)
            raise
        with self._lock:
            self._items.complete(joined, item)
            self._wake()

    def _drop(self, tensor_id: Hashable, why: Arrival) -> None:
        if self._ended:
            self._dropped_late += 1
        else:
            self._dropped[why] += 1
        logger.debug("%s: dropped a put of %r: %s", self._name, tensor_id, "late" if self._ended else why.name)

    def _wake(self) -> None:
        is_plain = not (self._producer_done or self._ended or self._failure is not None) and len(self._runs) < 2
        self._needed = self._next[1] if is_plain else 0
        self._maybe_ready = True
        if self._num_waiting:
            self._changed.notify_all()

    # Readiness.

    def _is_ready(self, consumer_walk: str | None) -> bool:
        span = self._ready_span()
        if span is not None:
            # An empty chunk runs under no walk, so it is ready for all.
            walk = self._runs[0].walk if span[0] < span[1] else None
            return consumer_walk is None or walk is None or walk == consumer_walk
        if not self._ended and (self._failure is not None or self._until_overdue() <= 0):
            return True
        if not self._edges:
            self._maybe_ready = False
        return False

    def _ready_span(self) -> tuple[int, int] | None:
        """The chunk that a pop would return now; empty when all is delivered and only the end is still to be told."""
        if self._ended:
            goes_on = self.policy.continue_after_done and not self._closed
            return (self._delivered, self._delivered) if goes_on else None
        items, runs = self._items, self._runs
        another_run_follows = len(runs) > 1
        run_stop = runs[1].start if another_run_follows else items.registered
        stop = self._next[1]
        if stop <= run_stop and stop <= items.available:
            return self._next
        if items.available >= run_stop and (another_run_follows or self._nothing_follows()):
            return (self._next[0] if self._delivered < run_stop else run_stop, run_stop)
        return None

    def _nothing_follows(self) -> bool:
        """Whether what is registered is the whole stream."""
        all_registered = self._producer_done and self._items.num_pieces >= self._promised_pieces
        return all_registered and self._failure is None

    def _until_overdue(self) -> float:
        """Seconds until a missing item is overdue; a long time when nothing is owed."""
        owed = self._items.available < self._items.registered or self._items.num_pieces < self._promised_pieces
        if self._arrival_timeout is None or not owed or self._ended:
            return threading.TIMEOUT_MAX
        return self._items.awaited_since + self._arrival_timeout - self._clock()

    def _why_not_ready(self) -> Exception:
        if self._closed:
            return ClosedError(f"{self._name} is closed")
        if self._ended:
            return ClosedError(f"{self._name}: the final chunk was popped already")
        if self._failure is not None:
            error = ProducerFailedError(f"{self._name}: the producer failed ({self._progress()}): {self._failure!r}")
            error.__cause__ = self._failure
            return error
        if self._until_overdue() <= 0:
            return PeerTimeoutError(
                f"{self._name}: stood still for {self._arrival_timeout} s ({self._progress()}); missing are "
                f"{self._missing()}"
            )
        return MisuseError(f"{self._name}: no chunk is ready ({self._progress()}); ask has_chunk_ready first")

    # Delivery.

    def _span_of_run(self, delivered: int, chunk_index: int, keep_from: int) -> tuple[int, int]:
        """The policy's next span, checked and in indices of the stream."""
        run_start = self._run_start
        start, stop = self.policy.next_span(delivered - run_start, chunk_index)
        start, stop = start + run_start, stop + run_start
        if not keep_from <= start <= delivered < stop:
            raise MisuseError(
                f"{self._name}: {self.policy!r} spans {start} to {stop}, but {delivered} items are delivered and those "
                f"before {keep_from} are released"
            )
        return start, stop

    def _ends_stream(self, stop: int) -> bool:
        return stop == self._items.registered and self._nothing_follows()

    def _ends_run(self, stop: int) -> bool:
        return len(self._runs) > 1 and stop == self._runs[1].start

    def _deliver(self, start: int, stop: int, following: tuple[int, int] | None, data: Any) -> StreamChunk:
        """Move on past ``stop``; ``following`` is where the run goes on, None after its last chunk."""
        if following is None and not (self._ends_stream(stop) or self._ends_run(stop)):  # the producer failed just now
            following = self._span_of_run(stop, self._run_chunks + 1, self._next[0])
        context_items = min(max(self._delivered + self._context - start, 0), stop - start)
        self._context = 0
        self._delivered = stop
        self._run_chunks += 1
        keep_from = stop
        if self._ends_stream(stop):
            self._ended = True
        elif self._ends_run(stop):
            self._enter_next_run()
        else:
            assert following is not None
            self._next = following
            keep_from = following[0]
        return self._chunk(data, start, stop - start, context_items, keep_from)

    def _deliver_nothing(self, position: int) -> StreamChunk:
        self._ended = True
        return self._chunk(None, position, 0, 0, keep_from=position)

    def _chunk(self, data: Any, start: int, num_items: int, context_items: int, keep_from: int) -> StreamChunk:
        released = self._items.release(keep_from)
        is_final = False
        if self._ended:
            self._items.clear()
            is_final = not self.policy.continue_after_done
        chunk_index = self._chunks_popped
        self._chunks_popped = chunk_index + 1
        self._wake()
        return StreamChunk({"data": data}, chunk_index, start, is_final, context_items, num_items, released)

    def _enter_next_run(self) -> None:
        self._runs.popleft()
        self._run_start = self._runs[0].start
        self._run_chunks = 0
        self._next = (self._run_start, self._run_start + self._first_stop)

    # Messages.

    @property
    def _name(self) -> str:
        return f"stream {self.edge_name!r} of request {self.request_id} from {self.from_partition}"

    def _progress(self) -> str:
        return (
            f"{self._delivered} delivered, {self._items.available} of {self._items.registered} registered items "
            f"available, done {'was' if self._producer_done else 'was not'} signalled"
        )

    def _missing(self) -> str:
        names = shorten(self._items.missing_ids())
        unregistered = self._promised_pieces - self._items.num_pieces
        if unregistered <= 0:
            return names
        promised = f"{unregistered} that were promised and never registered"
        return f"{names}, and {promised}" if names else promised


def _chunk_data(items: list[Any]) -> Any:
    return collate(items) if all(map(_is_tensor, items)) else items


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor)
