"""Counting the tensor memory that torch allocates, on whatever thread."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import torch
from torch._C._profiler import _ExperimentalConfig

__all__ = ["TensorAllocations"]


class TensorAllocations:
    """Context manager that counts the operations by which torch allocates tensor memory, over all threads.

    Every allocation that torch makes for an operator's result goes through one of the ``aten::empty*`` operators;
    views, ``frombuffer`` and in-place operations do not.

    Attributes:
        by_operator: how often each of them ran; filled on exit.
    """

    def __init__(self) -> None:
        self.by_operator: Counter[str] = Counter()
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(self.by_operator.values())

    def __enter__(self) -> TensorAllocations:
        self._profiler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._profiler.__exit__(exc_type, exc, tb)  # type: ignore[no-untyped-call]
        for event in self._profiler.events() or ():  # type: ignore[no-untyped-call]
            if event.name.startswith("aten::empty") or event.name in ("aten::resize_", "aten::clone"):
                self.by_operator[event.name] += 1
