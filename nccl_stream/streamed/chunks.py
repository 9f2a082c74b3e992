"""A streamed sample, chunk by chunk: what a :class:`~nccl_stream.chunk_policy.ChunkPolicy` makes of its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nccl_stream.chunk_policy import ChunkPolicy
from nccl_stream.errors import MisuseError
from nccl_stream.stores.pieces import require_stream
from nccl_stream.stores.tensors import copy_tensor, join_tensors
from nccl_stream.stream_buffer import StreamBuffer, StreamChunk
from nccl_stream.streamed.place import ChunkPlace
from nccl_stream.streamed.sample import Piece, PieceReader

__all__ = ["ChunkIterator", "SampleChunk", "read_chunks"]


@dataclass(frozen=True, eq=False)
class SampleChunk:
    """Consecutive pieces of a streamed sample as one.

    Attributes:
        tensors: feature to tensor, joined along its open axis, in memory of their own. Features without an open axis
            are in every chunk, as the same tensor.
        place: where in the sample it lies.
    """

    tensors: Mapping[str, torch.Tensor]
    place: ChunkPlace


class ChunkIterator(Iterator[SampleChunk]):
    """Iterates over the chunks of a streamed sample; see :func:`read_chunks`."""

    def __init__(self, reader: PieceReader, policy: ChunkPolicy, *, timeout: float | None = None) -> None:
        stream = require_stream(reader.ref)
        if policy.continue_after_done:
            raise MisuseError(f"{policy!r} never ends a sample: continue_after_done is not for streamed samples")
        self._reader = reader
        self._policy = policy
        self._timeout = timeout
        self._dims = stream.dims
        self._window = stream.window
        self._buffer = StreamBuffer(0, reader.ref.sample_id, "its producer", policy, arrival_timeout=None)
        self._num_pieces = 0
        # The last piece that came, until it is known whether another one follows it: so the last chunk is known to be
        # the last one when it is handed out, and is never empty.
        self._ahead: Piece | None = None
        self._done = False
        self._ended = False
        self._popped: StreamChunk | None = None  # of the buffer, and not handed out
        self._constants: dict[str, torch.Tensor] = {}

    def __next__(self) -> SampleChunk:
        """Return the next chunk; waits for its pieces. May be called again after a ``PeerTimeoutError``.

        Raises:
            StopIteration: the final chunk was handed out.
            MisuseError: (``ValueError``) the policy needs more pieces at a time than the sample's window has.
            NcclStreamError: what :meth:`PieceReader.next` raises.
        """
        if self._ended:
            raise StopIteration
        popped = self._popped
        if popped is None:
            while not self._buffer.has_chunk_ready():
                self._read_piece()
            popped = self._popped = self._buffer.pop_chunk()
        chunk = self._assemble(popped)  # if there is no memory for that now, it can be asked for again
        self._popped = None
        self._ended = self._ended or chunk.place.is_final
        return chunk

    def close(self) -> None:
        """Drop the pieces that wait here, so that nothing keeps their memory. Idempotent, and for any thread.

        They are not released: that, or closing the reader, is up to whoever owns it.
        """
        self._ended = True
        self._ahead = self._popped = None
        self._buffer.close()

    def _read_piece(self) -> None:
        held = self._buffer.statistics().retained_items + (self._ahead is not None)
        if held >= self._window:
            raise MisuseError(
                f"streamed sample {self._reader.ref.sample_id!r} has a window of {self._window} pieces, and all are "
                f"needed for the next chunk of {self._policy!r}: open it with a window of its pieces (context "
                "included) and one more, which says whether the chunk is the last"
            )
        piece = self._reader.next(self._timeout)
        self._done = piece is None
        ahead, self._ahead = self._ahead, piece
        if ahead is not None:
            self._buffer.pre_read_register(ahead.index)
            self._buffer.put(ahead.index, ahead)
        if piece is None:
            self._buffer.signal_done()
        elif piece.index == 0:
            # They outlive their piece.
            self._constants = {n: copy_tensor(t) for n, t in piece.tensors.items() if n not in self._dims}

    def _assemble(self, chunk: StreamChunk) -> SampleChunk:
        pieces: list[Piece] = chunk.data["data"]
        context = pieces[: chunk.context_items]
        place = ChunkPlace(
            chunk_index=chunk.chunk_index,
            start_offset=chunk.start_offset,
            num_items=chunk.num_items,
            context_items=chunk.context_items,
            start_position=pieces[0].start,
            num_positions=sum(piece.length for piece in pieces),
            context_positions=sum(piece.length for piece in context),
            is_final=chunk.is_final,
        )
        tensors = {}
        for name in self._reader.ref.feature_names():
            if name in self._constants:
                tensors[name] = self._constants[name]
            else:
                # A copy of a single piece, too: a view that the caller's loop variable keeps alive while it asks for
                # the next chunk would hold the memory that this one waits for.
                tensors[name] = join_tensors([piece.tensors[name] for piece in pieces], self._dims[name])
        for piece in chunk.released:
            piece.release()
        return SampleChunk(tensors, place)


def read_chunks(reader: PieceReader, policy: ChunkPolicy, *, timeout: float | None = None) -> ChunkIterator:
    """Iterate over the chunks of a streamed sample while it is produced.

    Every chunk is one stretch of the sample; the new parts of all chunks are the whole of it. The last chunk says so
    and is never empty, for which one piece is read ahead. A chunk is a copy, so a piece that no later chunk needs goes
    back to its producer before the chunk is handed out.

    Args:
        reader: at its beginning; stays the caller's to release or close. Its sample's window must hold the pieces of
            the longest chunk and one more.
        policy: says which pieces make a chunk; an item is a piece.
        timeout: longest wait for one piece, in seconds; None waits for as long as the producer lives.

    Raises:
        MisuseError: (``ValueError``) a policy that never ends.
    """
    return ChunkIterator(reader, policy, timeout=timeout)
