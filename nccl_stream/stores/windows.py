"""How the window of a streamed sample lies in memory: the same on its owner and where it is received."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nccl_stream.refs import FeatureSpec, SampleRef
from nccl_stream.stores.pieces import piece_specs, require_stream
from nccl_stream.transport.layout import SlotLayout

__all__ = ["WindowLayout"]


class WindowLayout:
    """Sizes and layouts of the pieces of one streamed sample. Each piece is laid out like a sample of its own.

    Args:
        ref: of a streamed sample.
        layout_of: the slot layout of a sample with these specs.

    Attributes:
        total_bytes: memory of a whole window. The first piece may be larger than the others, since it has the features
            that travel once; all others are equal, so that the memory does not fall to pieces.
    """

    def __init__(self, ref: SampleRef, layout_of: Callable[[Mapping[str, FeatureSpec]], SlotLayout]) -> None:
        self._ref = ref
        self._layout_of = layout_of
        self._stream = require_stream(ref)
        self._layouts: dict[tuple[bool, int], SlotLayout] = {}
        self.total_bytes = self.slot_bytes(0) + (self._stream.window - 1) * self.slot_bytes(1)

    def layout(self, index: int, length: int) -> SlotLayout:
        """The layout of a piece with ``length`` positions."""
        key = index == 0, length
        if key not in self._layouts:  # two at most are needed again and again: the first piece's and the others'
            self._layouts[key] = self._layout_of(piece_specs(self._ref, index, length))
        return self._layouts[key]

    def slot_bytes(self, index: int) -> int:
        """Memory that a piece gets, whatever its length."""
        return self.layout(min(index, 1), self._stream.piece_length).total_bytes

    def wire_buffers(self, index: int, length: int, slot: torch.Tensor) -> list[torch.Tensor]:
        """The messages of a piece, as flat byte views of its memory; nothing is copied.

        A piece lies in one go on both ends, and nothing of it was donated. So it travels as it lies, gaps included: an
        operation of its own for its header and small features would cost more than they do.
        """
        layout = self.layout(index, length)
        return [
            slot[start : min(start + layout.chunk_bytes, layout.total_bytes)]
            for start in range(0, layout.total_bytes, layout.chunk_bytes)
        ]
