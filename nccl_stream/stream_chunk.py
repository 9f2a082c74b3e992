"""The values that a :class:`~nccl_stream.stream_buffer.StreamBuffer` hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nccl_stream.errors import MisuseError

__all__ = ["StreamChunk", "StreamChunkInfo", "StreamStatistics", "StreamingEdge", "collate"]


class StreamChunkInfo(NamedTuple):
    """A chunk's place in its stream, without its data.

    Attributes:
        start_offset: index in the stream of the chunk's first item.
        context_items: how many of its leading items were delivered before, or are context by agreement.
        num_items: items in the chunk, context included.
        is_final: no chunk follows.
    """

    start_offset: int
    context_items: int
    num_items: int
    is_final: bool


class StreamingEdge(NamedTuple):
    """A popped chunk as an input edge of the node that consumes it.

    Attributes:
        name: the edge's name.
        next_node: the node that it leads to.
        uuids: the handle of each of the chunk's items.
        chunk: the chunk's place in its stream.
    """

    name: str
    next_node: str
    uuids: list[int]
    chunk: StreamChunkInfo


@dataclass
class StreamChunk:
    """A chunk of data popped from a stream buffer.

    Attributes:
        data: ``{"data": ...}``: tensors as :func:`collate` returns them, handles as a list, None for an empty chunk.
            The consumer must not write into the tensors.
        chunk_index: how many chunks were popped before this one.
        start_offset: index in the stream of the first item.
        is_final: no chunk follows.
        context_items: how many leading items were delivered before, or are context by agreement.
        num_items: items in the chunk, context included.
        released: the items that no later chunk needs. Over the chunks of a stream each item is listed once.
    """

    data: dict[str, Any]
    chunk_index: int
    start_offset: int = 0
    is_final: bool = False
    context_items: int = 0
    num_items: int = 0
    released: list[Any] = field(default_factory=list)

    @property
    def info(self) -> StreamChunkInfo:
        """The chunk's place in its stream."""
        return StreamChunkInfo(self.start_offset, self.context_items, self.num_items, self.is_final)


@dataclass(frozen=True)
class StreamStatistics:
    """What a stream buffer has seen so far.

    Attributes:
        registered_items: items registered.
        registered_pieces: ids registered; more than the items where items have several pieces.
        available_items: items that arrived with all items before them.
        delivered_items: items handed out at least once.
        retained_items: items that arrived and are not released.
        known_ids: ids that a put or a registration is compared with.
        chunks: chunks popped.
        dropped_unknown: puts of ids that were not registered, or were released long ago.
        dropped_repeated: puts of ids that had arrived.
        dropped_late: puts after the end of the stream.
    """

    registered_items: int
    registered_pieces: int
    available_items: int
    delivered_items: int
    retained_items: int
    known_ids: int
    chunks: int
    dropped_unknown: int
    dropped_repeated: int
    dropped_late: int


def collate(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """A chunk's items as its consumer takes them: one item as itself, several stacked along a new first dimension.

    Nobody may write into the result: a single item is the stored tensor, which others may read too.

    Args:
        items: at least one tensor; several must agree in shape.

    Raises:
        MisuseError: no items.
        RuntimeError: tensors that cannot be stacked.
    """
    if not items:
        raise MisuseError("collate needs at least one item")
    return items[0] if len(items) == 1 else torch.stack(list(items))
