"""After warm-up the receive path allocates no tensor memory, for any mix of sequence lengths."""

from __future__ import annotations

import torch

from nccl_stream.refs import FeatureSpec
from nccl_stream.testing.link_suite import Recorder
from nccl_stream.testing.nccl_double import connected_links
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.layout import SlotLayout

CHUNK = 1 << 16


def allocations_during(work):
    """Bytes of every tensor allocation that ``work`` makes on this thread."""
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        work()
    events = profile.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def layouts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for length in torch.randint(1, 2000, (count,), generator=generator).tolist():
        specs = {
            "hidden_states": FeatureSpec((1, length, 96), torch.bfloat16),
            "input_ids": FeatureSpec((1, length), torch.int64),
            "loss_mask": FeatureSpec((1, length), torch.bool),
        }
        yield SlotLayout.from_specs(specs, chunk_bytes=CHUNK)


def test_counter_sees_an_allocation():
    assert allocations_during(lambda: torch.empty(1000, dtype=torch.uint8)) == [1000]


def test_receive_path_allocates_nothing_for_mixed_lengths():
    sender, receiver, _ = connected_links()
    engine = TransferEngine("cpu", issue="pump", timeout=20.0, name="e")
    recorder = Recorder()
    receiving = engine.attach(receiver, on_done=recorder.on_done, on_failed=recorder.on_failed)
    sending = engine.attach(sender, on_done=lambda _: None, on_failed=recorder.on_failed)
    arena = Arena(2 << 20)
    payload = torch.full((2 << 20,), 7, dtype=torch.uint8)
    next(layouts(1, seed=0)).write_header(payload, b"sample")
    held = []

    def receive_all(plans):
        for number, layout in enumerate(plans):
            slot = arena.reserve(layout.total_bytes, str(number))
            if slot is None:
                held.pop(0)
                slot = arena.reserve(layout.total_bytes, str(number))
            slot.begin_transfer()
            sending.send(number, [payload[:nbytes] for _, nbytes in layout.chunks])
            receiving.recv(number, layout.wire_buffers(slot.buffer))
            while not recorder.done or recorder.done[-1] != number:
                engine.pump()
            slot.end_transfer()
            assert layout.read_header(slot.buffer) == b"sample"
            slot.hold()
            held.append(layout.views(slot.export()))
            slot.drop()
            slot.settle()
            if len(held) > 2:
                held.pop(0)

    receive_all(layouts(5, seed=1))
    plans = list(layouts(100, seed=2))
    assert allocations_during(lambda: receive_all(plans)) == []
    held.clear()
    assert arena.free_bytes == arena.largest_free_bytes == arena.capacity_bytes
    engine.close(1.0)
