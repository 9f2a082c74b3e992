"""The hysteresis of backpressure, and the callbacks that report it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from nccl_stream.errors import ConfigError
from nccl_stream.store import StoreHealth

__all__ = ["HealthCallback", "WatermarkGate"]

logger = logging.getLogger(__name__)

HealthCallback = Callable[[StoreHealth], None]


class WatermarkGate:
    """Opens and closes between a high and a low watermark and remembers which it was in between.

    Args:
        high_watermark_bytes: residency at which the gate closes; None means the health's own flag.
        low_watermark_bytes: residency at which it opens; None means the health's own flag.
        on_pause: called once per closing by :meth:`call_back`.
        on_resume: the same for each opening.

    Raises:
        ConfigError: (``ValueError``) a watermark out of range, or no band between low and high.
    """

    def __init__(
        self,
        *,
        high_watermark_bytes: int | None = None,
        low_watermark_bytes: int | None = None,
        on_pause: HealthCallback | None = None,
        on_resume: HealthCallback | None = None,
    ) -> None:
        if high_watermark_bytes is not None and high_watermark_bytes <= 0:
            raise ConfigError(f"high_watermark_bytes must be positive, got {high_watermark_bytes}")
        if low_watermark_bytes is not None and low_watermark_bytes < 0:
            raise ConfigError(f"low_watermark_bytes must be non-negative, got {low_watermark_bytes}")
        if high_watermark_bytes is not None and (low_watermark_bytes or 0) >= high_watermark_bytes:
            raise ConfigError(
                "low_watermark_bytes must be strictly less than high_watermark_bytes, "
                f"got low={low_watermark_bytes} high={high_watermark_bytes}"
            )
        self._high = high_watermark_bytes
        self._low = low_watermark_bytes
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._lock = threading.Lock()
        self._paused = False
        self._num_pauses = 0
        self._due: deque[tuple[HealthCallback, StoreHealth]] = deque()
        self._calling_back = False

    @property
    def num_pauses(self) -> int:
        """How often the gate has closed."""
        return self._num_pauses

    def judge(self, health: StoreHealth, *, stuck_bytes: int, stuck_samples: int) -> bool:
        """Apply one look at a store and return whether the gate is open.

        Samples are *stuck* when waiting cannot free them. A store that holds nothing else does not close the gate,
        and opens it.
        """
        only_stuck = health.resident_bytes <= stuck_bytes or 0 < health.sample_count <= stuck_samples
        with self._lock:
            if self._paused:
                if only_stuck or self._is_low(health):
                    self._transition(False, health)
            elif self._is_high(health) and not only_stuck:
                self._transition(True, health)
            return not self._paused

    def call_back(self) -> None:
        """Run the callbacks that are due, in the order of their transitions, one at a time and under no lock.

        A thread that finds another one at it leaves its own to that one; so does a callback that re-enters. An
        exception of a callback is logged and goes no further.
        """
        while True:
            with self._lock:
                if self._calling_back or not self._due:
                    return
                self._calling_back = True
                callback, health = self._due.popleft()
            try:
                callback(health)
            except Exception:
                logger.exception("a backpressure callback raised; the queue goes on")
            finally:
                with self._lock:
                    self._calling_back = False

    def _is_high(self, health: StoreHealth) -> bool:
        return health.high_watermark_hit if self._high is None else health.resident_bytes >= self._high

    def _is_low(self, health: StoreHealth) -> bool:
        return health.low_watermark_hit if self._low is None else health.resident_bytes <= self._low

    def _transition(self, paused: bool, health: StoreHealth) -> None:
        self._paused = paused
        self._num_pauses += paused
        logger.info(
            "producers %s: %d of %d bytes resident in %d samples",
            "pause" if paused else "resume",
            health.resident_bytes,
            health.capacity_bytes,
            health.sample_count,
        )
        callback = self._on_pause if paused else self._on_resume
        if callback is not None:
            self._due.append((callback, health))
