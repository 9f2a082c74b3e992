"""The contract of streamed samples: one sample whose length is not known when it is put, in pieces.

The producer opens a sample, appends pieces while its chunked prefill (or decode) goes on, and closes it. The ref exists
from the beginning, so a consumer may read the first pieces while later ones are still being computed. Positions count
along the open axis of each feature: piece 0 starts at position 0.

Both sides hold at most a window of pieces. A producer whose window is full waits for its reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch

from nccl_stream.errors import RefError
from nccl_stream.refs import FeatureSpec, SampleRef

__all__ = ["OPEN", "ClosesOrFails", "OpenFeatureSpec", "Piece", "PieceReader", "StreamWriter"]

OPEN = -1
"""Stands in a shape for the size that is not known yet."""

W = TypeVar("W", bound="ClosesOrFails")
R = TypeVar("R", bound="PieceReader")


@dataclass(frozen=True)
class OpenFeatureSpec:
    """Shape and dtype of a feature whose sequence axis is open.

    Attributes:
        shape: like that of a :class:`FeatureSpec`, with :data:`OPEN` (-1) in exactly one place.
        dtype: the stored dtype.

    Raises:
        RefError: (a ``ValueError``) not exactly one open axis, another negative size, or not a dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)) or list(self.shape).count(OPEN) != 1:
            raise RefError(f"OpenFeatureSpec.shape must be a tuple of ints with one {OPEN}, got {self.shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        self.of_length(0)

    @property
    def dim(self) -> int:
        """The open axis."""
        return self.shape.index(OPEN)

    def of_length(self, length: int) -> FeatureSpec:
        """Return the spec of a piece of ``length`` positions."""
        dim = self.dim
        return FeatureSpec((*self.shape[:dim], length, *self.shape[dim + 1 :]), self.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int) -> OpenFeatureSpec:
        """Return the spec of ``tensor`` with axis ``dim`` open."""
        shape = list(tensor.shape)
        shape[dim] = OPEN
        return cls(tuple(shape), tensor.dtype)


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive positions of a streamed sample, on the consumer.

    Attributes:
        index: its number, from 0.
        start: position of its first entry along the open axis.
        length: positions it has; ``piece_length`` in all but the last one.
        tensors: feature to tensor, in the ref's order; features without an open axis in piece 0 only. Views of the
            store's memory: nobody may write into them, and they are valid until :meth:`release`.
    """

    index: int
    start: int
    length: int
    tensors: Mapping[str, torch.Tensor]
    on_release: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """Give the piece's memory back, which lets its producer append another one. Idempotent; never blocks.

        On a GPU the memory is written again only after the work that the current stream holds by now.
        """
        self.on_release()


class ClosesOrFails(ABC):
    """Closes on the way out of a ``with``; with an exception, also one of :meth:`close`, it fails."""

    @abstractmethod
    def close(self) -> int:
        """Nothing follows; returns the number of pieces."""

    @abstractmethod
    def fail(self, error: BaseException | str) -> None:
        """The rest never comes."""

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is not None:
            self.fail(exc)
            return
        try:
            self.close()
        except BaseException as error:
            self.fail(error)
            raise


class StreamWriter(ClosesOrFails):
    """The producer's end of one streamed sample. For one thread at a time.

    As a context manager it closes the sample on the way out; with an exception it fails it. A writer that is dropped
    without either counts as failed.
    """

    @property
    @abstractmethod
    def ref(self) -> SampleRef:
        """The sample's ref, valid at once: put it on the queue before or while the pieces are made."""

    @abstractmethod
    def append(self, tensors: Mapping[str, torch.Tensor], timeout: float | None = None) -> int:
        """Append one piece; blocks while a whole window of pieces is not released by the reader.

        A call that raises leaves the sample as it was.

        Args:
            tensors: every feature with its next positions: equally many in all of them, at least 1 and at most
                ``piece_length``, fewer only in the last piece. Features without an open axis come with the first piece
                and not again. The caller keeps ownership and may write into the tensors as soon as this returns.
            timeout: longest wait in seconds; None waits as long as the sample has, or may get, a reader.

        Returns:
            The number of the piece, from 0.

        Raises:
            MisuseError: (``ValueError``) tensors that do not fit, or a piece after a shorter one.
            CapacityError: (``MemoryError``) a retained sample would exceed a cap of the store.
            PeerTimeoutError: ``timeout`` passed; the same piece may be appended again.
            StreamLostError: its reader stopped or died, and the sample was not retained.
            PeerLostError: nobody is left who could read it.
            ClosedError: (``RuntimeError``) the sample was closed or failed before, or the store is closed.
        """

    @abstractmethod
    def close(self) -> int:
        """The sample is complete. Does not wait for its reader. Idempotent.

        Returns:
            The number of pieces.

        Raises:
            MisuseError: (``ValueError``) nothing was appended; the sample stays open.
            ClosedError: (``RuntimeError``) it was failed before, or the store is closed.
            StreamLostError: as for :meth:`append`.
        """

    @abstractmethod
    def fail(self, error: BaseException | str) -> None:
        """The rest never comes: the reader raises :class:`StreamBrokenError` with the reason after the last piece.

        Idempotent; without effect on a sample that was closed, or whose store is closed. Never blocks.
        """


class PieceReader(ABC):
    """The consumer's end of one streamed sample. For one thread at a time.

    A sample has one reader: a later :meth:`~nccl_stream.store.FeatureStore.open_reader` takes it over. As a context
    manager it releases the sample when it was read to its end without an exception, and is only closed otherwise.
    """

    @property
    @abstractmethod
    def ref(self) -> SampleRef:
        """The sample's ref."""

    @property
    @abstractmethod
    def at_end(self) -> bool:
        """Whether :meth:`next` has returned None."""

    @abstractmethod
    def next(self, timeout: float | None = None) -> Piece | None:
        """Return the next piece, waiting for it; None after the last one, again and again.

        Args:
            timeout: longest wait in seconds; None waits for as long as the producer lives.

        Raises:
            StreamBrokenError: the producer failed or died; says how far it got.
            PeerTimeoutError: ``timeout`` passed; may be called again.
            StreamLostError: another reader took the sample over.
            ClosedError: (``RuntimeError``) the reader or the store is closed.
        """

    @abstractmethod
    def close(self) -> bool:
        """Stop reading and give back what was not released. Idempotent; never blocks.

        May be called from any thread; a :meth:`next` that waits raises :class:`ClosedError`.

        Unless the sample was released before, it counts as not consumed. It can then be read again from its beginning
        if it is retained or none of its pieces has been released; otherwise it is lost: its producer's next append
        raises :class:`StreamLostError`, and so does whoever opens it again.

        Returns:
            Whether the sample can be read again. If not, its lease has no future: fail it for good.
        """

    @abstractmethod
    def release(self) -> None:
        """The sample is consumed, as by ``store.release``: its memory goes back. Closes the reader. Idempotent.

        Where there is a queue, ack the lease first. Without effect after :meth:`close`.
        """

    def __iter__(self) -> Iterator[Piece]:
        """Iterate over the remaining pieces; the caller releases each."""
        while (piece := self.next()) is not None:
            yield piece

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None and self.at_end:
            self.release()
        else:
            self.close()
