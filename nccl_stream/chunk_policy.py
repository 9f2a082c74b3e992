"""Where the chunks of a stream begin and end.

A policy is a pure rule: from how much of a run was delivered it says which items the next chunk spans. It keeps no
state, so one instance serves any number of streams at the same time; what was delivered is known to the
:class:`~nccl_stream.stream_buffer.StreamBuffer` alone. The buffer also decides what a policy cannot know: whether the
items are there, and what happens at the end of a run.

A policy of one's own is one class with one method::

    @dataclass(frozen=True)
    class GrowingChunkPolicy(ChunkPolicy):
        first: int

        def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
            return delivered, delivered + self.first * 2**chunk_index
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from nccl_stream.errors import MisuseError

__all__ = ["ChunkPolicy", "FixedChunkPolicy", "LeftContextChunkPolicy", "SlidingWindowChunkPolicy"]


class ChunkPolicy(ABC):
    """Says which items the next chunk spans.

    Attributes:
        continue_after_done: when true, a stream has no final chunk; after its last item it yields empty chunks for as
            long as the consumer asks.
    """

    continue_after_done: bool = False

    @abstractmethod
    def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
        """The items ``start`` to ``stop`` (exclusive) of the next chunk, counted from the beginning of its run.

        The chunk is ready once ``stop`` items of the run are available.

        Must be pure: the same arguments give the same span, and nothing is changed. Called once per chunk, by the
        thread that pops.

        Args:
            delivered: how many items of the run were delivered, so the index of the first new one.
            chunk_index: how many chunks of the run were popped.

        Returns:
            ``(start, stop)`` with ``start <= delivered < stop``. Over the chunks of a run ``start`` never decreases:
            the items before it are given up.
        """


@dataclass(frozen=True)
class FixedChunkPolicy(ChunkPolicy):
    """Chunks of exactly ``chunk_size`` items that do not overlap.

    Args:
        chunk_size: items per chunk, at least 1.
        continue_after_done: see :class:`ChunkPolicy`.

    Raises:
        MisuseError: a size below 1.
    """

    chunk_size: int
    continue_after_done: bool = False

    def __post_init__(self) -> None:
        _require_at_least("chunk_size", self.chunk_size, 1)

    def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
        return delivered, delivered + self.chunk_size


@dataclass(frozen=True)
class SlidingWindowChunkPolicy(ChunkPolicy):
    """Windows of ``window`` items; each begins ``stride`` items after the one before.

    Args:
        window: items per chunk, at least 1.
        stride: new items per chunk after the first, ``1 <= stride <= window``.

    Raises:
        MisuseError: a size outside these bounds.
    """

    window: int
    stride: int

    def __post_init__(self) -> None:
        _require_at_least("window", self.window, 1)
        _require_at_least("stride", self.stride, 1)
        if self.stride > self.window:
            raise MisuseError(f"stride must be at most window ({self.window}), or items are skipped: {self.stride}")

    def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
        if delivered == 0:
            return 0, self.window
        return max(0, delivered - self.window + self.stride), delivered + self.stride


@dataclass(frozen=True)
class LeftContextChunkPolicy(ChunkPolicy):
    """Chunks of ``chunk`` new items behind up to ``left_context`` items that were delivered before.

    A causal model that looks back ``left_context`` items computes the same outputs from these chunks as from the whole
    stream, once the outputs of the leading context items are dropped.

    Args:
        chunk: new items per chunk, at least 1.
        left_context: repeated items per chunk, at least 0; it may exceed ``chunk``.

    Raises:
        MisuseError: a size outside these bounds.
    """

    chunk: int
    left_context: int

    def __post_init__(self) -> None:
        _require_at_least("chunk", self.chunk, 1)
        _require_at_least("left_context", self.left_context, 0)

    def next_span(self, delivered: int, chunk_index: int) -> tuple[int, int]:
        return max(0, delivered - self.left_context), delivered + self.chunk


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise MisuseError(f"{name} must be a whole number of at least {minimum}: {value!r}")
