"""Where a chunk of a streamed sample lies in it, counted in items (pieces) and in positions."""

from __future__ import annotations

from dataclasses import dataclass

from nccl_stream.errors import MisuseError

__all__ = ["WHOLE", "ChunkPlace"]


@dataclass(frozen=True)
class ChunkPlace:
    """A chunk's place in its sample. Items are the pieces in which the sample travels.

    Attributes:
        chunk_index: chunks of the sample before this one.
        start_offset: index of its first item.
        num_items: items it has, context included.
        context_items: how many of its leading items were in earlier chunks.
        start_position: position of its first entry along the sequence.
        num_positions: positions it has, context included; the size of its tensors along the sequence. None for a
            sample that is not streamed: the tensors know.
        context_positions: how many of its leading positions were in earlier chunks.
        is_final: no chunk of the sample follows.
    """

    chunk_index: int = 0
    start_offset: int = 0
    num_items: int = 1
    context_items: int = 0
    start_position: int = 0
    num_positions: int | None = None
    context_positions: int = 0
    is_final: bool = True

    def supervised(self, lookahead: int = 0) -> slice:
        """Return the positions in this chunk whose loss it should count, so that the chunks count each position once.

        These are the new ones, if the loss at a position needs nothing to its right. One that needs ``lookahead`` more
        positions (an EAGLE-3 draft that is unrolled for n steps needs n - 1) is counted that many positions late, when
        they have come; only at the sample's end are they really missing.

        Args:
            lookahead: positions to the right that the loss at a position depends on.

        Returns:
            A slice along the sequence; it may be empty.

        Raises:
            MisuseError: (``ValueError``) ``lookahead`` is negative, or the chunk's context does not reach back to the
                positions that are due: use at least ``lookahead`` positions of left context, beside those that the
                draft looks back on.
        """
        if type(lookahead) is not int or lookahead < 0:
            raise MisuseError(f"lookahead must be a non-negative int, got {lookahead!r}")
        if self.num_positions is None:
            return slice(0, None)
        due = max(0, self.start_position + self.context_positions - lookahead) - self.start_position
        if due < 0:
            raise MisuseError(
                f"the chunk begins at position {self.start_position}, but the loss of {-due} positions before it was "
                f"left to it, with a lookahead of {lookahead}: give the chunk policy more left context"
            )
        stop = self.num_positions if self.is_final else self.num_positions - lookahead
        return slice(due, max(due, stop))


WHOLE = ChunkPlace()
"""The place of a sample that is not streamed: all of it, at once."""
