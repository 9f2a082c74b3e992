"""A streamed sample in the memory of one process: what its writer and its readers share, and these two."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from nccl_stream.errors import ClosedError, MisuseError, PeerTimeoutError, StreamLostError
from nccl_stream.refs import SampleRef
from nccl_stream.stores.pieces import PieceCount, require_stream
from nccl_stream.stores.tensors import copy_tensor
from nccl_stream.streamed.sample import Piece, PieceReader, StreamWriter

__all__ = ["LocalPieceReader", "LocalStream", "LocalStreamWriter"]


class LocalStream:
    """The pieces of one sample. Every method may be called from any thread.

    Args:
        ref: the sample's ref.
        take_room: called with the bytes of each piece by which a retained sample outgrows its window; raises
            ``CapacityError`` where there is no room.
        on_lost: called once, with this and the reason, when nobody can read the sample any more. Not under the lock.
    """

    def __init__(
        self, ref: SampleRef, *, take_room: Callable[[int], None], on_lost: Callable[[LocalStream, str], None]
    ) -> None:
        self.ref = ref
        self._spec = require_stream(ref)
        self._take_room = take_room
        self._on_lost = on_lost
        # Reentrant: a finalizer of a writer or reader may run in the middle of one of these methods. So finalizers only
        # leave a note.
        self._changed = threading.Condition(threading.RLock())
        self._pieces: dict[int, tuple[int, int, dict[str, torch.Tensor]]] = {}
        self._count = PieceCount(ref)
        self._held_bytes = 0
        self._released = 0  # pieces that the present reader gave back
        self._reader = 0  # number of the present reader
        self._has_reader = False
        self._handed_out: set[int] = set()  # pieces that it has not given back
        self._dropped_readers: deque[int] = deque()
        self._complete = False
        self._failure: str | None = None
        self._lost: str | None = None
        self._lost_told = False
        self._over: Callable[[], Exception] | None = None

    # -- the writer's side --

    def append(self, tensors: Mapping[str, torch.Tensor], timeout: float | None) -> int:
        """See :meth:`StreamWriter.append`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._require_appendable()
            length = self._count.check(tensors)
            while self._count.num_pieces - self._released >= self._spec.window:
                remaining = threading.TIMEOUT_MAX if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    raise PeerTimeoutError(
                        f"streamed sample {self.ref.sample_id!r}: all {self._spec.window} pieces of the window were "
                        f"still unreleased after {timeout} s ({self._released} of {self._count.num_pieces} released, "
                        f"{'there is a' if self._has_reader else 'no'} reader)"
                    )
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                self._require_appendable()
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        copies = {name: copy_tensor(tensors[name]) for name in self.ref.feature_names() if name in tensors}
        if self._spec.retain:
            reserved = max(self._held_bytes, self.ref.estimated_bytes)
            self._take_room(max(0, self._held_bytes + nbytes - reserved))
        with self._changed:
            self._require_appendable()
            index, start = self._count.add(length)
            self._pieces[index] = start, length, copies
            self._held_bytes += nbytes
            self._changed.notify_all()
            return index

    def complete(self) -> int:
        """See :meth:`StreamWriter.close`."""
        with self._changed:
            if not self._complete:
                self._require_appendable()
                if not self._count.num_pieces:
                    raise MisuseError(
                        f"streamed sample {self.ref.sample_id!r} has no piece: append at least one position, or fail it"
                    )
                self._complete = True
                self._changed.notify_all()
            return self._count.num_pieces

    def fail(self, reason: str) -> None:
        """The rest never comes. Safe in a finalizer."""
        with self._changed:
            if not self._complete and self._failure is None:
                self._failure = reason
                self._changed.notify_all()

    # -- the reader's side --

    def enter(self) -> int:
        """Become the reader, from the first piece on; return its number.

        Raises:
            StreamLostError: the first pieces are gone.
        """
        with self._changed:
            # What an earlier reader released is gone for its successor too.
            self._note_dropped_readers()
            self._leave("another reader took its place")
            if self._lost is None:
                self._reader += 1
                self._has_reader = True
                self._changed.notify_all()
                return self._reader
            lost = self._lost
        self.tell_if_lost()
        raise StreamLostError(self.ref.sample_id, lost)

    def next_piece(self, reader: int, count: PieceCount, timeout: float | None) -> Piece | None:
        """See :meth:`PieceReader.next`; ``count`` is how far this reader has got."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._note_dropped_readers()
                if reader == self._reader and not self._has_reader:
                    raise ClosedError(f"the reader of streamed sample {self.ref.sample_id!r} is closed")
                if self._over is not None:
                    raise self._over()
                if reader != self._reader or self._lost is not None:
                    raise StreamLostError(self.ref.sample_id, self._lost or "another reader took it over")
                index = count.num_pieces
                if index < self._count.num_pieces:
                    start, length, tensors = self._pieces[index]
                    count.add(length)
                    self._handed_out.add(index)
                    return Piece(index, start, length, dict(tensors), partial(self._release, reader, index))
                if self._complete:
                    return None
                if self._failure is not None:
                    raise count.broken(self._failure)
                remaining = threading.TIMEOUT_MAX if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    raise PeerTimeoutError(
                        f"streamed sample {self.ref.sample_id!r}: piece {index} did not come within {timeout} s"
                    )
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))

    def leave(self, reader: int, reason: str) -> bool:
        """This reader stops; returns whether there may be another one."""
        with self._changed:
            if reader == self._reader and self._has_reader:
                self._leave(reason)
            can_be_read = self._lost is None and self._over is None
        self.tell_if_lost()
        return can_be_read

    def finish(self, reader: int) -> None:
        """This reader has consumed the sample."""
        with self._changed:
            if reader == self._reader:
                self._has_reader = False
                self._changed.notify_all()

    def drop_reader(self, reader: int) -> None:
        """This reader was garbage-collected. Safe in a finalizer."""
        self._dropped_readers.append(reader)
        with self._changed:
            self._changed.notify_all()

    def tell_if_lost(self) -> None:
        """Call ``on_lost`` if that is due. Not under a lock."""
        with self._changed:
            self._note_dropped_readers()
            due = self._lost is not None and not self._lost_told
            self._lost_told = self._lost_told or due
            lost = self._lost
        if due and lost is not None:
            self._on_lost(self, lost)

    def end(self, error: Callable[[], Exception]) -> None:
        """The sample is not in the store any more: give everything back; whoever still waits for it gets an error."""
        with self._changed:
            if self._over is None:
                self._over = error
            self._pieces.clear()
            self._changed.notify_all()

    # -- with the lock held --

    def _note_dropped_readers(self) -> None:
        while self._dropped_readers:
            if self._dropped_readers.popleft() == self._reader and self._has_reader:
                self._leave("its reader was dropped")

    def _require_appendable(self) -> None:
        self._note_dropped_readers()
        if self._lost is not None:
            raise StreamLostError(self.ref.sample_id, self._lost)
        if self._complete or self._failure is not None:
            state = "closed" if self._complete else f"failed ({self._failure})"
            raise ClosedError(f"streamed sample {self.ref.sample_id!r} was {state} before")
        if self._over is not None:
            raise self._over()

    def _leave(self, reason: str) -> None:
        self._has_reader = False
        if self._released and not self._spec.retain:
            self._lost = self._lost or f"{reason} after {self._released} pieces were released"
            self._pieces.clear()
        self._released = 0
        self._handed_out.clear()
        self._changed.notify_all()

    def _release(self, reader: int, index: int) -> None:
        with self._changed:
            if reader != self._reader or index not in self._handed_out:
                return
            self._handed_out.remove(index)
            self._released += 1
            if not self._spec.retain:
                self._pieces.pop(index, None)
            self._changed.notify_all()


class LocalStreamWriter(StreamWriter):
    """The producer's end of a sample in this process."""

    def __init__(self, stream: LocalStream) -> None:
        self._stream = stream
        weakref.finalize(self, stream.fail, "its writer was dropped without close()").atexit = False

    @property
    def ref(self) -> SampleRef:
        return self._stream.ref

    def append(self, tensors: Mapping[str, torch.Tensor], timeout: float | None = None) -> int:
        try:
            return self._stream.append(tensors, timeout)
        except StreamLostError:
            self._stream.tell_if_lost()
            raise

    def close(self) -> int:
        try:
            return self._stream.complete()
        except StreamLostError:
            self._stream.tell_if_lost()
            raise

    def fail(self, error: BaseException | str) -> None:
        self._stream.fail(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
        self._stream.tell_if_lost()


class LocalPieceReader(PieceReader):
    """The consumer's end of a sample in this process.

    Args:
        stream: the sample.
        on_release: ends the hold on the sample as consumed.
        on_close: ends it as if the sample had never been asked for.
    """

    def __init__(self, stream: LocalStream, on_release: Callable[[], object], on_close: Callable[[], object]) -> None:
        self._stream = stream
        self._on_release = on_release
        self._on_close = on_close
        self._number = stream.enter()
        self._count = PieceCount(stream.ref)
        self._at_end = False
        self._can_be_read = False
        self._released = False
        self._finalizer = weakref.finalize(self, stream.drop_reader, self._number)
        self._finalizer.atexit = False

    @property
    def ref(self) -> SampleRef:
        return self._stream.ref

    @property
    def at_end(self) -> bool:
        return self._at_end

    def next(self, timeout: float | None = None) -> Piece | None:
        piece = self._stream.next_piece(self._number, self._count, timeout)
        self._at_end = piece is None
        return piece

    def close(self, reason: str = "its reader stopped") -> bool:
        # The finalizer tells who is first, if two threads close or release at once.
        if self._finalizer.detach() is not None:
            self._can_be_read = self._stream.leave(self._number, reason)
            self._on_close()
        elif not self._released:
            return self._stream.leave(self._number, reason)  # another thread may be in the middle of that
        return self._can_be_read

    def release(self) -> None:
        if self._finalizer.detach() is not None:
            self._released = True
            self._stream.finish(self._number)
            self._on_release()
