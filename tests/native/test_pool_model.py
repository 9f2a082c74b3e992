"""The pool against a model that keeps a plain list of what is out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from nccl_stream import _core
from nccl_stream.errors import CapacityError, ClosedError, MisuseError
from nccl_stream.staging import PinnedPool, PoolSlot

UNIT = 64


def round_up(nbytes: int, unit: int = UNIT) -> int:
    return -(-nbytes // unit) * unit


class PoolMachine(RuleBasedStateMachine):
    native: object = None
    slots = Bundle("slots")
    freed = Bundle("freed")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_core, "native", self.native)
        self.out: dict[int, int] = {}  # offset: size, rounded up
        self.contents: dict[int, int] = {}
        self.handed_out = 0
        self.peak = 0
        self.closed = False

    @initialize(units=st.integers(1, 60))
    def open(self, units: int) -> None:
        self.capacity = units * UNIT
        # Asked for with less, the capacity is rounded up to the alignment and no further.
        self.pool = PinnedPool(self.capacity - UNIT + 1, alignment=UNIT, pin=False)

    def gaps(self) -> list[tuple[int, int]]:
        """(size, offset) of the free ranges."""
        edges = [(0, 0), *sorted(self.out.items()), (self.capacity, 0)]
        return [
            (stop - start - size, start + size)
            for (start, size), (stop, _) in itertools.pairwise(edges)
            if stop > start + size
        ]

    @rule(target=slots, nbytes=st.integers(0, 12 * UNIT), alignment=st.sampled_from([None, None, 1, 128, 256, 1024]))
    def reserve(self, nbytes: int, alignment: int | None) -> PoolSlot | None:
        size = max(UNIT, round_up(nbytes))
        align = max(UNIT, alignment or 0)
        fitting = sorted(gap for gap in self.gaps() if round_up(gap[1], align) + size <= gap[1] + gap[0])
        if self.closed:
            with pytest.raises(ClosedError):
                self.pool.reserve(nbytes, alignment=alignment)
            return None
        if not fitting:
            with pytest.raises(CapacityError) as caught:
                self.pool.reserve(nbytes, alignment=alignment)
            assert caught.value.can_wait == (size <= self.capacity)
            return None
        slot = self.pool.reserve(nbytes, alignment=alignment)
        assert slot.nbytes == slot.buffer.numel() == nbytes
        assert slot.address == slot.buffer.data_ptr() or nbytes == 0
        assert nbytes == 0 or slot.address % align == 0
        if align == UNIT:
            assert slot.offset == fitting[0][1]  # best fit, lowest address
        assert any(start <= slot.offset and slot.offset + size <= start + room for room, start in fitting)
        slot.buffer.fill_(self.handed_out % 251)
        self.contents[slot.offset] = self.handed_out % 251
        self.out[slot.offset] = size
        self.handed_out += 1
        self.peak = max(self.peak, sum(self.out.values()))
        return slot

    @rule(target=freed, slot=consumes(slots))
    def free(self, slot: PoolSlot | None) -> PoolSlot | None:
        if slot is not None:
            assert slot.buffer.eq(self.contents[slot.offset]).all()
            slot.free()
            del self.out[slot.offset]
        return slot

    @rule(slot=freed)
    def free_twice(self, slot: PoolSlot | None) -> None:
        if slot is not None:
            with pytest.raises(MisuseError, match="before"):
                slot.free()

    @rule()
    def close(self) -> None:
        if self.handed_out > 8:
            self.pool.close()
            self.closed = True

    @invariant()
    def statistics_are_exact(self) -> None:
        if not hasattr(self, "pool"):
            return
        now, gaps = self.pool.statistics(), self.gaps()
        assert now.capacity == self.capacity
        assert now.used == sum(self.out.values())
        assert now.peak_used == self.peak
        assert now.slots == len(self.out)
        assert now.free_ranges == len(gaps)
        assert now.largest_free == max((size for size, _ in gaps), default=0)
        assert now.reserved == self.handed_out
        assert (now.waiting, now.is_pinned) == (0, False)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
        self.patch.undo()


class CompiledPoolMachine(PoolMachine):
    native = _core.native


TestPythonPool = PoolMachine.TestCase
TestPythonPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCompiledPool = CompiledPoolMachine.TestCase
TestCompiledPool.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestCompiledPool = pytest.mark.skipif(not _core.is_compiled(), reason="no compiled core")(TestCompiledPool)
