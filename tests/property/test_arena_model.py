"""The arena against a model that knows nothing but which bytes are in use."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from nccl_stream.transport.arena import POISON_BYTE, Arena

CAPACITY = 32 * 256


class Model:
    """One slot: where it lies, what keeps it, and what its bytes must be."""

    def __init__(self, slot, start, value):
        self.slot = slot
        self.span = (start, start + slot.nbytes)
        self.value = value
        self.handles = self.transfers = 0
        self.views = []
        self.settled = False

    @property
    def kept(self):
        return not self.settled or self.handles or self.transfers or self.views


class ArenaMachine(RuleBasedStateMachine):
    slots = Bundle("slots")

    def __init__(self):
        super().__init__()
        self.arena = Arena(CAPACITY, poison=True, on_free=self.count)
        whole = self.arena.reserve(CAPACITY, "whole")
        self.base = whole.buffer.data_ptr()
        self.notified = 0
        whole.settle()
        assert self.notified == 1
        self.notified = 0
        self.live = []
        self.counter = 0

    def count(self):
        self.notified += 1

    def free_spans(self):
        spans, at = [], 0
        for start, end in sorted(model.span for model in self.live):
            if start > at:
                spans.append((at, start))
            at = end
        if at < CAPACITY:
            spans.append((at, CAPACITY))
        return spans

    def settle_model(self, model):
        """Drops a model that nothing keeps any more, and checks that its memory was poisoned and announced."""
        if model in self.live and not model.kept:
            self.live.remove(model)
            assert model.slot.is_returned
            assert bool((model.slot.buffer == POISON_BYTE).all())

    @rule(target=slots, nbytes=st.integers(0, CAPACITY // 2))
    def reserve(self, nbytes):
        size = max(256, -(-nbytes // 256) * 256)
        fitting = [(end - start, start) for start, end in self.free_spans() if end - start >= size]
        slot = self.arena.reserve(nbytes, f"slot {self.counter}")
        if not fitting:
            assert slot is None
            return None
        start = slot.buffer.data_ptr() - self.base
        assert start == min(fitting)[1], "not the best fit with the lowest address"
        self.counter += 1
        slot.buffer.fill_(self.counter % 100)
        model = Model(slot, start, self.counter % 100)
        self.live.append(model)
        return model

    @rule(model=slots)
    def hold(self, model):
        if model in self.live:
            model.slot.hold()
            model.handles += 1

    @rule(model=slots)
    def drop(self, model):
        if model in self.live and model.handles:
            model.slot.drop()
            model.handles -= 1
            self.settle_model(model)

    @rule(model=slots)
    def begin_transfer(self, model):
        if model in self.live:
            model.slot.begin_transfer()
            model.transfers += 1

    @rule(model=slots)
    def end_transfer(self, model):
        if model in self.live and model.transfers:
            model.slot.end_transfer()
            model.transfers -= 1
            self.settle_model(model)

    @rule(model=slots)
    def settle(self, model):
        if model is not None:
            model.slot.settle()
            if model in self.live:
                model.settled = True
                self.settle_model(model)

    @rule(model=slots)
    def export(self, model):
        if model in self.live:
            model.views.append(model.slot.export())

    @rule(model=slots, offset=st.integers(0, 31))
    def derive(self, model, offset):
        if model in self.live and model.views:
            model.views.append(model.views[-1][offset:].view(torch.int8))

    @precondition(lambda self: any(model.views for model in self.live))
    @rule(model=slots, index=st.integers(0, 5))
    def forget_view(self, model, index):
        if model in self.live and model.views:
            before = self.notified
            kept = len(model.views)
            del model.views[index % kept]
            if not model.views:
                assert self.notified > before, "the last view died and nobody was told"
            self.settle_model(model)

    @rule(model=consumes(slots))
    def forget_model(self, model):
        """The caller loses the slot object itself; what it kept stays kept."""

    @invariant()
    def sums_agree(self):
        spans = self.free_spans()
        assert self.arena.free_bytes == sum(end - start for start, end in spans)
        assert self.arena.largest_free_bytes == max((end - start for start, end in spans), default=0)
        assert self.arena._memory._pool.statistics().free_ranges == len(spans)
        assert [label for label, _, _ in self.arena.holders()] == [
            model.slot.label for model in sorted(self.live, key=lambda model: model.span)
        ]

    @invariant()
    def nothing_in_use_was_touched(self):
        for model in self.live:
            assert bool((model.slot.buffer == model.value).all())


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
