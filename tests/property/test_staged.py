"""Where a target's samples wait: the cap, the bytes, and the memory, with host memory in the place of a GPU's."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_stream import device_staging, pinned_pool
from nccl_stream.config import StreamConfig
from nccl_stream.device_staging import DeviceStager
from nccl_stream.errors import ConfigError, DeviceError, MisuseError
from nccl_stream.refs import FeatureSpec
from nccl_stream.staging import Stager, open_stager
from nccl_stream.stores.preallocated import _host_arena, arena_bytes, make_sample_memory
from nccl_stream.stores.staged import Placement, SampleMemory, _small_ranges
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.layout import HEADER_BYTES, SMALL_BYTES, SlotLayout

native = pytest.importorskip("nccl_stream._native", reason="the compiled core is not installed")

CPU = torch.device("cpu")
CHUNK = 1 << 20
LARGEST = 2 * SMALL_BYTES + 8192
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _no_orphans():
    """Copies that an imagined machine never does keep their memory, as they must."""
    yield
    gc.collect()
    device_staging._orphans.clear()


class Machine:
    """A "GPU": memory of the host, streams whose work is done in a random order, and what waits there."""

    def __init__(self, staging, *, seed=0, device_bytes=0, samples=6, steps_per_query=0):
        self.runtime = native.FakeRuntime(seed, 1, steps_per_query)
        self.kept = []  # what queued work writes to
        self.stream = SimpleNamespace(cuda_stream=self.runtime.new_stream())
        stagers = [DeviceStager("cpu", chunk_bytes=1 << 18, streams=2, runtime=self.runtime) for _ in range(2)]
        self.device_arena = Arena(samples * LARGEST)
        self.host_arena = Arena(samples * LARGEST)
        self.memory = SampleMemory(
            CPU,
            staging=staging,
            device_arena=self.device_arena,
            host_arena=self.host_arena,
            device_bytes=device_bytes,
            down=stagers[0],
            up=stagers[1],
            chunk_bytes=CHUNK,
            current_stream=lambda: self.stream,
        )

    def put(self, name, tensors, *, donate=False):
        layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=CHUNK)
        return self.memory.store(name, layout, tensors, donate=donate)

    def overwrite(self, tensors):
        """Queue the kernel that makes the next sample in the same memory."""
        self.kept.append(tensors)
        for tensor in tensors.values():
            if tensor.is_contiguous() and tensor.nbytes >= SMALL_BYTES:
                self.runtime.fill(tensor.data_ptr(), tensor.nbytes, 0xEE, self.stream.cuda_stream)

    def run(self, steps=None):
        while steps != 0 and self.runtime.step():
            steps = None if steps is None else steps - 1


def sample(rng):
    """Small features, and none to two large ones of which some are strided."""
    value = rng.randrange(1, 200)
    tensors = {"ids": torch.full((rng.randint(1, 99),), value), "mask": torch.full((7, 3), value, dtype=torch.uint8).T}
    for n in range(rng.randint(0, 2)):
        strided = rng.random() < 0.3
        rows = torch.full((SMALL_BYTES // 256, 256 * (1 + strided)), value, dtype=torch.uint8)
        tensors[f"large{n}"] = rows[:, ::2] if strided else rows
    return tensors


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    staging=st.sampled_from(["device", "pinned", "auto"]),
    device_bytes=st.integers(0, 4 * LARGEST),
    actions=st.lists(st.sampled_from(["put", "put", "donate", "free", "step"]), min_size=1, max_size=25),
)
@QUICK
def test_samples_keep_their_bytes_and_the_cap_holds_whatever_is_dropped_when(seed, staging, device_bytes, actions):
    rng = random.Random(seed)
    machine = Machine(staging, seed=seed, device_bytes=device_bytes)
    waiting = []
    for number, action in enumerate(actions):
        if action in ("put", "donate") and len(waiting) < 6:
            tensors = sample(rng)
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
            owned = machine.put(str(number), tensors, donate=action == "donate")
            # Header and features share the slot: the one is written when the other may still be on its way.
            owned.layout.write_header(owned.buffer, str(number).encode())
            waiting.append((owned, expected, str(number).encode()))
            if action == "put":
                machine.overwrite(tensors)
                if owned.place == "device":
                    machine.run()  # the device's own copies are no part of what is imagined
        elif action == "free" and waiting:
            owned, _, _ = waiting.pop(rng.randrange(len(waiting)))
            machine.memory.free(owned)  # its copies may still be in progress
        elif action == "step":
            machine.run(rng.randint(1, 40))
        used = {place: sum(o.nbytes for o, _, _ in waiting if o.place == place) for place in ("device", "host")}
        assert machine.memory.used_bytes == used
        assert used["device"] == 0 or staging == "device" or (staging == "auto" and used["device"] <= device_bytes)
        assert used["host"] == 0 or staging != "device"
    machine.run()
    for owned, expected, header in waiting:
        assert same(owned.features(), expected)
        assert owned.layout.read_header(owned.buffer) == header
        machine.memory.free(owned)
    waiting.clear()
    machine.memory.sweep()
    for arena in (machine.device_arena, machine.host_arena):
        assert arena.free_bytes == arena.capacity_bytes
    assert machine.memory.used_bytes == {"device": 0, "host": 0}
    assert machine.memory.close(1.0)


@given(
    staging=st.sampled_from(["device", "pinned", "auto"]),
    cap=st.integers(0, 1000),
    sizes=st.lists(st.tuples(st.integers(0, 600), st.booleans()), max_size=60),
)
@QUICK
def test_auto_fills_the_device_up_to_the_cap_and_goes_back_to_it(staging, cap, sizes):
    placement, here = Placement(staging, cap), []
    for nbytes, gives in sizes:
        on_device = sum(size for place, size in here if place == "device")
        place = placement.take(nbytes)
        assert place == (
            "host" if staging == "pinned" or (staging == "auto" and on_device + nbytes > cap) else "device"
        )
        here.append((place, nbytes))
        if gives:
            placement.give(*here.pop(0))
        assert sum(placement.used.values()) == sum(size for _, size in here)
    for place, nbytes in here:
        placement.give(place, nbytes)
    assert placement.used == {"device": 0, "host": 0}


@given(seed=st.integers(0, 2**32 - 1))
@QUICK
def test_slot_of_a_dropped_sample_is_not_given_out_while_copies_write_into_it(seed):
    machine = Machine("pinned", seed=seed, samples=1)
    first = machine.put("first", {"x": torch.full((2 * SMALL_BYTES,), 1, dtype=torch.uint8)})
    assert first.slot is not None
    machine.memory.free(first)
    second = machine.put("second", {"x": torch.full((2 * SMALL_BYTES,), 2, dtype=torch.uint8)})
    assert second.slot is None, "the slot was given out too early"
    machine.run()
    assert same(second.features(), {"x": torch.full((2 * SMALL_BYTES,), 2, dtype=torch.uint8)})
    third = machine.put("third", {"x": torch.full((2 * SMALL_BYTES,), 3, dtype=torch.uint8)})
    assert third.slot is not None
    machine.run()
    assert same(third.features(), {"x": torch.full((2 * SMALL_BYTES,), 3, dtype=torch.uint8)})


@pytest.mark.parametrize("event", ["sweep", "free"])
def test_memory_of_the_device_goes_when_the_copies_are_over_whether_or_not_more_are_put(event):
    class Memory(np.ndarray):
        pass

    machine = Machine("pinned")
    memory = np.ones(2 * SMALL_BYTES, dtype=np.uint8).view(Memory)
    alive = weakref.ref(memory)
    other = machine.put("other", {"x": torch.arange(5)})
    kept = machine.put("kept", {"x": torch.frombuffer(memory, dtype=torch.uint8)})
    del memory
    machine.run()
    gc.collect()
    assert alive() is not None
    if event == "sweep":
        machine.memory.sweep()
    else:
        machine.memory.free(other)
    gc.collect()
    assert alive() is None
    assert same(kept.features(), {"x": torch.ones(2 * SMALL_BYTES, dtype=torch.uint8)})


@given(
    max_sample=st.integers(1, 300),
    rounds=st.integers(1, 4),
    drafts=st.integers(1, 5),
    slack=st.integers(0, 300),
    cap=st.integers(0, 500) | st.none(),
    staging=st.sampled_from(["pinned", "auto"]),
    rng=st.randoms(use_true_random=False),
)
@QUICK
def test_preallocated_host_memory_holds_everything_that_the_books_admit(
    max_sample, rounds, drafts, slack, cap, staging, rng
):
    """Of a GPU rank; more page-locked memory would hold up the device. Sizes in KiB."""
    config = StreamConfig(
        staging=staging, batch_size=rounds, max_sample_bytes=max_sample << 10, arena_bytes=1 << 40,
        max_bytes=(rounds * drafts * max_sample + slack) << 10, device_bytes=None if cap is None else cap << 10,
    )  # fmt: skip
    config.check_run(num_targets=1, num_drafts=drafts)
    arena = Arena(arena_bytes(config, staging, drafts, on_gpu=True)["host"])
    placement = Placement(staging, config.device_cap)
    held, resident = [], 0
    for _ in range(60):
        nbytes = config.max_sample_bytes if rng.random() < 0.8 else rng.randint(1, config.max_sample_bytes)
        while resident + nbytes > config.resident_cap(drafts):
            place, size, slot = held.pop(rng.randrange(len(held)) if rng.random() < 0.5 else 0)
            placement.give(place, size)
            resident -= size
            if slot is not None:
                slot.settle()
        place = placement.take(nbytes)
        layout = SlotLayout.from_specs({"x": FeatureSpec((nbytes,), torch.uint8)}, chunk_bytes=CHUNK)
        assert layout.total_bytes <= arena.free_bytes or place == "device", "the books admit more than there is"
        held.append((place, nbytes, arena.reserve(layout.total_bytes, "s") if place == "host" else None))
        resident += nbytes


def test_sample_without_a_slot_is_reported_once(caplog):
    caplog.set_level("INFO")
    machine = Machine("pinned", samples=1)
    for n in range(4):
        machine.put(str(n), {"x": torch.zeros(2 * SMALL_BYTES, dtype=torch.uint8)})
    assert [record.args[2] for record in caplog.records if "memory of its own" in record.message] == ["sample 1"]


def test_host_that_page_locks_nothing_is_reported_with_the_setting_that_helps(monkeypatch):
    refusing = SimpleNamespace(lock=lambda address, nbytes: 2, unlock=lambda address: 0)
    monkeypatch.setattr(pinned_pool, "_page_lock_of", lambda pin: refusing if pin else None)
    with pytest.raises(ConfigError, match=r'1048576 bytes.*max_bytes.*staging="device"') as caught:
        _host_arena(1 << 20, pin=True)
    assert "CUDA error 2" in str(caught.value.__cause__)


@pytest.mark.parametrize(("call", "nth"), [("memcpy_async", n) for n in range(1, 8)] + [("event_record", 3)])
def test_put_that_fails_half_way_gives_everything_back(call, nth):
    machine = Machine("pinned", samples=1)
    tensors = {"ids": torch.arange(5), "a": torch.ones(SMALL_BYTES, dtype=torch.uint8)}
    machine.runtime.fail(call, nth, 2)
    try:
        owned = machine.put("s", tensors)
    except DeviceError:
        assert nth <= 5, "there are one small copy and four chunks"
        assert machine.memory.used_bytes == {"device": 0, "host": 0}
        machine.run()
        owned = machine.put("s", tensors)
    else:
        assert nth > 5
    assert owned.slot is not None
    machine.run()
    assert same(owned.features(), tensors)


def test_copy_that_fails_on_its_way_is_an_error_of_whoever_reads_it_and_keeps_its_slot():
    machine = Machine("pinned", samples=1)
    owned = machine.put("s", {"x": torch.arange(5)})
    machine.runtime.fail("event_query", 1, 700)
    with pytest.raises(DeviceError, match="cudaEventQuery"):
        owned.features()
    machine.runtime.fail("event_query", 1, 700)
    machine.memory.free(owned)
    assert not owned.slot.is_returned
    assert machine.memory.used_bytes == {"device": 0, "host": 0}


@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, 256, 300, SMALL_BYTES]), max_size=9), chosen=st.sets(st.integers(0, 8))
)
@QUICK
def test_ranges_of_small_features_hold_them_and_nobody_else(sizes, chosen):
    specs = {str(n): FeatureSpec((size,), torch.uint8) for n, size in enumerate(sizes)}
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    names = {str(n) for n in chosen} & (specs.keys() - set(layout.large))
    covered = bytearray(layout.total_bytes)
    for start, end in _small_ranges(layout, names):
        assert HEADER_BYTES <= start <= end
        covered[start:end] = b"x" * (end - start)
    for name, spec in specs.items():
        offset = layout.offsets[name]
        assert covered[offset : offset + spec.nbytes] == (b"x" if name in names else b"\0") * spec.nbytes


def test_header_is_not_touched_by_the_copy_of_the_features():
    machine = Machine("pinned")
    owned = machine.put("s", {"x": torch.arange(100)})
    owned.layout.write_header(owned.buffer, b"mine")
    machine.run()
    assert owned.layout.read_header(owned.buffer) == b"mine"
    assert torch.equal(owned.buffer[HEADER_BYTES : HEADER_BYTES + 800].view(torch.int64), torch.arange(100))


@pytest.mark.parametrize("staging", ["device", "pinned", "auto"])
def test_memory_of_a_cpu_rank_sends_straight_from_where_it_lies(staging):
    memory = make_sample_memory(StreamConfig(staging=staging, max_bytes=8 << 20, max_sample_bytes=1 << 20), CPU)
    layout = SlotLayout.from_specs({"x": FeatureSpec((100,), torch.int64)}, chunk_bytes=CHUNK)
    owned = memory.store("s", layout, {"x": torch.arange(100)}, donate=False)
    assert owned.place == ("device" if staging == "device" else "host")
    assert owned.slot is not None
    assert all(isinstance(buffer, torch.Tensor) for buffer in owned.wire_buffers())
    link = object()
    assert memory.reachable_by(link) is link
    memory.free(owned)
    assert memory.close(1.0)


@pytest.mark.parametrize("staging", ["pinned", "auto"])
def test_host_to_host_stagers_bring_samples_up_and_down(staging):
    """The interface that the CPU has in the place of a GPU's."""
    down, up = open_stager("cpu"), open_stager("cpu")
    memory = SampleMemory(
        CPU,
        staging=staging,
        host_arena=Arena(4 * LARGEST),
        down=down,
        up=up,
        chunk_bytes=CHUNK,
        current_stream=lambda: None,
    )
    tensors = sample(random.Random(3))
    layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=CHUNK)
    owned = memory.store("s", layout, tensors, donate=False)
    assert owned.place == "host"
    assert owned.is_written()
    assert same(owned.features(), tensors)
    memory.free(owned)
    assert owned.slot.is_returned
    assert memory.close(1.0)
    with pytest.raises(ConfigError, match="no stager for cuda:0"):
        open_stager("cuda:0")
    with pytest.raises(ConfigError, match="open_stager"):
        Stager("cuda:0")


def test_policies_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="staging must be one of"):
        StreamConfig(staging="gpu")
    with pytest.raises(ConfigError, match="device_bytes"):
        StreamConfig(device_bytes=-1)
    with pytest.raises(MisuseError, match="needs memory of the host"):
        SampleMemory(CPU, staging="pinned")
    with pytest.raises(MisuseError, match="needs stagers"):
        SampleMemory(torch.device("cuda", 0), staging="auto", host_arena=Arena(256))
    with pytest.raises(ConfigError, match="CUDA part"):
        make_sample_memory(StreamConfig(staging="pinned"), torch.device("cuda", 0))
    assert StreamConfig(staging="device", device_bytes=5).shared() == StreamConfig().shared()
