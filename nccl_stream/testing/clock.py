"""A clock that stands still until it is told to go on, for everything here that takes a ``clock``."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Stands in for ``time.monotonic``: pass the object itself as ``clock=``.

    Args:
        now: what it shows first, in seconds.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time it shows, in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves on by ``seconds``.

        Raises:
            ValueError: backwards; a monotonic clock never goes there.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self.now += seconds
