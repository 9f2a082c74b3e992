"""A read-only mapping fit for frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["FrozenDict"]

V = TypeVar("V")


class FrozenDict(Mapping[str, V], Generic[V]):
    """Read-only mapping with str keys that keeps insertion order, compares equal to a dict, hashes, pickles and copies.

    ``types.MappingProxyType`` offers the first two only.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, V] | None = None) -> None:
        self._data: dict[str, V] = dict(data or {})

    def __getitem__(self, key: str) -> V:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __hash__(self) -> int:
        return hash(frozenset(self._data.items()))

    def __repr__(self) -> str:
        return repr(self._data)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self._data),))
