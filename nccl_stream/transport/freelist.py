"""The address bookkeeping of an arena: best fit, lowest address first, neighbours merged. Pure, without any lock."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["FreeList"]


class FreeList:
    """Free ranges of ``[0, capacity)``.

    Every operation needs O(log n) comparisons for n free ranges; keeping the sorted list costs one ``memmove``.
    """

    def __init__(self, capacity: int) -> None:
        self.free_bytes = capacity
        self._by_size: list[tuple[int, int]] = [(capacity, 0)] if capacity else []
        self._size_at: dict[int, int] = {0: capacity} if capacity else {}
        self._start_of: dict[int, int] = {capacity: 0} if capacity else {}

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, nbytes: int) -> int | None:
        """Takes the smallest range that fits, among equals the lowest, and returns its start; None if none fits."""
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, size)
        if size > nbytes:
            self._insert(start + nbytes, size - nbytes)
        self.free_bytes -= nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Returns a range that was taken, and merges it with its free neighbours."""
        self.free_bytes += nbytes
        before = self._start_of.get(start)
        if before is not None:
            size = self._size_at[before]
            self._remove(before, size)
            start, nbytes = before, nbytes + size
        after = self._size_at.get(start + nbytes)
        if after is not None:
            self._remove(start + nbytes, after)
            nbytes += after
        self._insert(start, nbytes)

    def ranges(self) -> list[tuple[int, int]]:
        """``(start, nbytes)`` of all free ranges, by address."""
        return sorted(self._size_at.items())

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_of[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_of[start + size]
