"""How a sample travels whose length is not known when it is put: in pieces, along one axis of each feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nccl_stream.errors import RefError
from nccl_stream.frozen import FrozenDict

__all__ = ["StreamSpec"]


@dataclass(frozen=True)
class StreamSpec:
    """Makes the ref of a *streamed* sample: its feature specs then describe one full piece.

    Attributes:
        dims: feature to the axis along which its pieces are joined. A feature that is not named travels once, with the
            first piece.
        piece_length: positions of a full piece. Only the last piece of a sample may have fewer, but not zero.
        window: pieces that may be on their way or in use at a time. A consumer reserves memory for as many.
        retain: the owner keeps every piece until the whole sample is consumed, so that it can be delivered anew. It
            then needs memory for the whole sample.

    Raises:
        RefError: (a ``ValueError``) a field breaks its rule.
    """

    dims: Mapping[str, int]
    piece_length: int
    window: int
    retain: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dims, Mapping) or not self.dims:
            raise RefError("StreamSpec.dims must be a mapping of at least one feature to the axis that is open")
        for name, dim in self.dims.items():
            if not isinstance(name, str) or not name:
                raise RefError("StreamSpec.dims must have non-empty str keys")
            if type(dim) is not int or dim < 0:
                raise RefError(f"StreamSpec.dims[{name!r}] must be a non-negative int")
        for what in ("piece_length", "window"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise RefError(f"StreamSpec.{what} must be an int of at least 1")
        if type(self.retain) is not bool:
            raise RefError("StreamSpec.retain must be a bool")
        if type(self.dims) is not FrozenDict:
            object.__setattr__(self, "dims", FrozenDict(self.dims))
