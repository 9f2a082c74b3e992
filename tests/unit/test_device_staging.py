"""The GPU part of the compiled core on its imagined runtime: the order of copies, errors of any call, packing, sums."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_stream import device_staging
from nccl_stream.device_staging import DeviceStager, device_crc32c, device_pack, device_unpack
from nccl_stream.errors import ClosedError, DeviceError, MisuseError
from nccl_stream.staging import crc32c
from nccl_stream.transport.arena import Arena

native = pytest.importorskip("nccl_stream._native", reason="the compiled core is not installed")


@pytest.fixture(autouse=True)
def _no_orphans():
    device_staging._orphans.clear()
    yield
    device_staging._orphans.clear()


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
# Calls that one copy of four chunks makes, how often, and the name that an error gives them.
CALLS = [
    ("get_device", 1, "cudaGetDevice"),
    ("event_create", 2, "cudaEventCreateWithFlags"),
    ("event_record", 2, "cudaEventRecord"),
    ("stream_wait_event", 3, "cudaStreamWaitEvent"),
    ("memcpy_async", 4, "cudaMemcpyAsync"),
]


def new_stager(seed=0, *, chunk_bytes=16, streams=3, steps_per_query=1):
    runtime = native.FakeRuntime(seed, 1, steps_per_query)
    return runtime, DeviceStager("cpu", chunk_bytes=chunk_bytes, streams=streams, runtime=runtime)


def new_stream(runtime):
    return SimpleNamespace(cuda_stream=runtime.new_stream())


def flat(nbytes, value=0):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def finish(runtime):
    while runtime.step():
        pass
    assert runtime.pending() == 0, "streams wait for each other"


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 100), min_size=1, max_size=12))
@QUICK
def test_source_is_free_at_once_on_the_stream_that_writes_it(seed, sizes):
    """Every sample is made in the same buffer, copied away, and overwritten by the next one; in any interleaving."""
    runtime, stager = new_stager(seed)
    producer, source = new_stream(runtime), flat(100)
    copies = []
    for value, nbytes in enumerate(sizes, 1):
        runtime.fill(source.data_ptr(), 100, value, producer.cuda_stream)
        target = flat(nbytes)
        copies.append((stager.copy(target, source[:nbytes], after=producer, before=producer), target, value))
    for copy, target, value in copies:
        copy.wait()
        assert copy.done()
        assert torch.equal(target, flat(target.numel(), value))
    assert stager.close()
    finish(runtime)


@given(seed=st.integers(0, 2**32 - 1))
@QUICK
def test_copy_behind_a_copy_brings_what_that_one_brought(seed):
    _, stager = new_stager(seed)
    device, host, bounce = flat(100, 7), flat(100), flat(100)
    down = stager.copy(host, device)
    up = stager.copy(bounce, host, behind=[down])
    up.wait(10.0)
    assert torch.equal(bounce, device)


@given(seed=st.integers(0, 2**32 - 1))
@QUICK
def test_stream_that_goes_on_before_a_copy_sees_its_bytes(seed):
    runtime, stager = new_stager(seed)
    consumer = new_stream(runtime)
    source, target, seen = flat(64, 5), flat(64), flat(64)
    stager.copy(target, source, before=consumer)
    reading = DeviceStager("cpu", chunk_bytes=64, streams=1, runtime=runtime).copy(seen, target, after=consumer)
    reading.wait(10.0)
    assert torch.equal(seen, source)


def test_copies_are_in_progress_side_by_side_and_a_small_one_need_not_wait_for_a_large_one():
    runtime, stager = new_stager(steps_per_query=0, chunk_bytes=8)
    stager.copy(flat(800), flat(800, 1))
    small_target = flat(8)
    small = stager.copy(small_target, flat(8, 2))
    assert not small.done()
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        small.wait(0.01)
    while not small.done():
        assert runtime.step()
    assert runtime.pending() > 50
    assert torch.equal(small_target, flat(8, 2))


def test_memory_of_a_copy_in_progress_stays_when_everybody_else_has_dropped_it():
    runtime, stager = new_stager(steps_per_query=0)
    released = []

    class Owner:
        def __del__(self):
            released.append(True)

    def start():
        class Memory(np.ndarray):
            pass

        memory = np.ones(64, dtype=np.uint8).view(Memory)
        memory.owner = Owner()
        stager.copy(flat(64), torch.frombuffer(memory, dtype=torch.uint8))

    start()
    assert not released
    assert not stager.close(0.01)
    assert not released
    finish(runtime)
    assert stager.close()
    assert released


def test_memory_of_a_stager_that_was_dropped_stays_until_its_copies_are_over():
    runtime, stager = new_stager(steps_per_query=0)
    target = flat(64)
    stager.copy(target, flat(64, 3))
    before = len(device_staging._orphans)
    del stager
    assert len(device_staging._orphans) == before + 1
    finish(runtime)
    assert torch.equal(target, flat(64, 3))
    _, other = new_stager()
    other.copy(flat(1), flat(1))
    assert len(device_staging._orphans) == before


@pytest.mark.parametrize(
    ("call", "name", "nth"), [(call, name, nth) for call, times, name in CALLS for nth in range(1, times + 1)]
)
def test_error_of_any_call_names_it_and_leaves_nothing_in_progress(call, name, nth):
    runtime, stager = new_stager()
    producer = new_stream(runtime)
    other = DeviceStager("cpu", runtime=runtime)
    behind = other.copy(flat(4), flat(4))
    target = flat(64)
    runtime.fail(call, nth, 2)
    with pytest.raises(DeviceError, match=rf"^{name} failed: .* \(2\)$"):
        stager.copy(target, flat(64, 1), after=producer, before=producer, behind=[behind])
    before = target.clone()
    finish(runtime)
    assert torch.equal(target, before), "the copy went on after it had failed"
    good = stager.copy(target, flat(64, 3), after=producer, before=producer)
    good.wait(10.0)
    assert torch.equal(target, flat(64, 3))


def test_error_while_a_copy_runs_comes_out_of_done_and_wait():
    runtime, stager = new_stager()
    copy = stager.copy(flat(64), flat(64, 1))
    runtime.fail("event_query", 1, 700)
    with pytest.raises(DeviceError, match=r"cudaEventQuery failed: .* \(700\)"):
        copy.done()
    runtime.fail("event_query", 1, 700)
    with pytest.raises(DeviceError, match="cudaEventQuery"):
        copy.wait(1.0)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_stager_that_cannot_be_made_leaves_no_stream(nth):
    runtime = native.FakeRuntime()
    runtime.fail("stream_create", nth, 2)
    with pytest.raises(DeviceError, match="cudaStreamCreateWithPriority"):
        DeviceStager("cpu", streams=3, runtime=runtime)
    assert runtime.live() == 0


def test_streams_and_events_end_with_the_stager_and_are_reused_before():
    runtime, stager = new_stager()
    producer = new_stream(runtime)
    for _ in range(50):
        stager.copy(flat(64), flat(64), after=producer, before=producer).wait(10.0)
    assert runtime.live() <= 1 + 3 + 4
    kept = stager.copy(flat(64), flat(64))
    assert stager.close()
    del stager
    assert kept.done()
    del kept
    assert runtime.live() == 1  # the producer's


def test_misuse_is_refused_before_anything_is_queued():
    runtime, stager = new_stager()
    for target, source in (
        (flat(3), flat(4)),
        (torch.zeros(4), flat(16)),
        (flat(4).reshape(2, 2), flat(4)),
        (flat(8)[::2], flat(4)),
    ):
        with pytest.raises(MisuseError):
            stager.copy(target, source)
    assert runtime.pending() == 0
    assert stager.close()
    with pytest.raises(ClosedError):
        stager.copy(flat(1), flat(1))
    for arguments in ({"chunk_bytes": 0}, {"streams": 0}):
        with pytest.raises(MisuseError):
            DeviceStager("cpu", runtime=runtime, **arguments)
    with pytest.raises(MisuseError, match="index"):
        DeviceStager("cuda")


def test_mode_of_captures_is_that_of_the_thread_and_comes_back(monkeypatch):
    modes = [0]  # global: the default

    def exchange(pointer):
        pointer._obj.value, modes[0] = modes[0], pointer._obj.value
        return 0

    monkeypatch.setattr(device_staging, "_exchange_capture_mode", lambda: exchange)
    with device_staging.beside_captures():
        assert modes == [device_staging.CAPTURE_THREAD_LOCAL]
    assert modes == [0]


@pytest.fixture
def where(monkeypatch):
    """``(mode of captures, device)`` of the thread, as an imagined driver and torch have them."""
    modes, devices = [0], [0]

    def exchange(pointer):
        pointer._obj.value, modes[0] = modes[0], pointer._obj.value
        return 0

    @contextlib.contextmanager
    def at(device):
        devices.append(device.index)
        yield
        devices.pop()

    monkeypatch.setattr(device_staging, "_exchange_capture_mode", lambda: exchange)
    monkeypatch.setattr(torch.cuda, "device", at)
    return lambda: (modes[0], devices[-1])


def test_threads_that_ask_and_wait_for_copies_do_so_on_their_device_and_beside_captures(where):
    seen = []
    question = SimpleNamespace(done=lambda: seen.append(where()) or True, wait=lambda _: seen.append(where()) or True)
    copy = device_staging.DeviceCopy(question, torch.device("cuda", 3))
    assert copy.done()
    copy.wait(1.0)
    copy.wait()
    assert seen == [(device_staging.CAPTURE_THREAD_LOCAL, 3)] * 3
    assert where() == (0, 0)


def test_stagers_are_made_on_their_device_and_beside_captures(where, monkeypatch):
    seen = []
    doubles = SimpleNamespace(Stager=lambda *_: seen.append(where()), cuda_runtime=lambda: None)
    monkeypatch.setattr(device_staging, "_native", doubles)
    DeviceStager("cuda:2")
    assert seen == [(device_staging.CAPTURE_THREAD_LOCAL, 2)]


def test_arena_records_its_events_and_asks_for_them_on_its_device_and_beside_captures(where, monkeypatch):
    seen = []
    arena = Arena(512)
    arena.device = torch.device("cuda", 1)
    event = SimpleNamespace(record=lambda _: seen.append(where()), query=lambda: seen.append(where()) or False)
    monkeypatch.setattr(arena, "_new_event", lambda: event)
    slot = arena.reserve(256, "a")
    slot.record_release(object())
    slot.settle()
    arena.reserve(256, "b")
    assert seen == [(device_staging.CAPTURE_THREAD_LOCAL, 1)] * 2


def test_sources_go_with_the_sweep_that_follows_the_end_of_their_copies():
    runtime, stager = new_stager(steps_per_query=0)

    class Memory(np.ndarray):
        pass

    memory = np.ones(64, dtype=np.uint8).view(Memory)
    alive = weakref.ref(memory)
    stager.copy(flat(64), torch.frombuffer(memory, dtype=torch.uint8))
    del memory
    stager.sweep()
    gc.collect()
    assert alive() is not None
    finish(runtime)
    runtime.fail("event_query", 1, 700)
    stager.sweep()  # cannot tell
    gc.collect()
    assert alive() is not None
    stager.sweep()
    gc.collect()
    assert alive() is None
    assert stager.close()
    stager.sweep()


DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32,
    torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def some_tensor(rng, dtype, device="cpu"):
    """A tensor of random bytes with random strides: permuted, sliced, expanded, offset, 0-d, empty."""
    shape = [rng.choice([0, 1, 1, 2, 3, 5, 8, 16]) for _ in range(rng.randint(0, 4))]
    order = rng.sample(range(len(shape)), len(shape))
    steps = [rng.choice([1, 1, 1, 2, 3]) for _ in shape]
    extent = [shape[d] * steps[d] for d in order]
    numel = 1
    for size in extent:
        numel *= size
    shift = rng.choice([0, 0, 1, 3])
    bits = torch.Generator().manual_seed(rng.randrange(1 << 30))
    raw = torch.randint(0, 256, ((numel + shift) * dtype.itemsize,), dtype=torch.uint8, generator=bits)
    raw = raw.to(device)
    base = raw.view(dtype)[shift : shift + numel].view(extent)
    tensor = base[tuple(slice(None, None, steps[d]) for d in order)]
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    return tensor.unsqueeze(0).expand(rng.randint(1, 3), *shape) if rng.random() < 0.2 else tensor


def bytes_of(tensor):
    if tensor.numel() == 0:
        return flat(0)
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    plain = tensor if carrier is None else tensor.view(carrier)
    return torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1)).view(torch.uint8)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 60), apart=st.sampled_from([1, 8, 256]))
@QUICK
def test_packing_is_byte_exact_for_every_dtype_and_stride_and_unpacking_brings_it_back(seed, count, apart):
    rng, runtime = random.Random(seed), native.FakeRuntime(seed)
    stream = new_stream(runtime)
    tensors = [some_tensor(rng, rng.choice(DTYPES)) for _ in range(count)]
    offsets, end = [], 0
    for tensor in tensors:
        end = -(-end // apart) * apart
        offsets.append(end)
        end += tensor.nbytes
    slot = flat(end + 32, 0xEE)
    device_pack(tensors, slot, offsets, stream=stream, runtime=runtime)
    finish(runtime)
    expected = flat(end + 32, 0xEE)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = bytes_of(tensor)
    assert torch.equal(slot, expected)
    assert runtime.calls("launch_strided") == -(-sum(t.nbytes > 0 for t in tensors) // 24)

    back = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    spread = [torch.zeros((*t.shape, 2), dtype=t.dtype)[..., 0] for t in tensors]
    for targets in (back, spread):
        device_unpack(slot, offsets, targets, stream=stream, runtime=runtime)
        finish(runtime)
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(targets, tensors, strict=True))


def test_packing_refuses_what_does_not_fit():
    runtime = native.FakeRuntime()
    stream, slot = new_stream(runtime), flat(64)
    for tensor, offset in ((torch.zeros(16), 4), (torch.zeros(17), 0), (torch.zeros(1), -4)):
        with pytest.raises(MisuseError, match="outside"):
            device_pack([tensor], slot, [offset], stream=stream, runtime=runtime)
    scattered = torch.zeros([3] * 9)[(slice(None, None, 2),) * 9]
    with pytest.raises(MisuseError, match="dimensions"):
        device_pack([scattered], flat(4096), [0], stream=stream, runtime=runtime)
    assert runtime.pending() == 0
    runtime.fail("launch_strided", 1, 9)
    with pytest.raises(DeviceError, match="packing kernel failed"):
        device_pack([torch.zeros(4)], slot, [0], stream=stream, runtime=runtime)


@pytest.mark.parametrize("slot", [flat(64)[::2], torch.zeros(16), flat(64).view(8, 8)])
def test_packing_refuses_a_slot_that_is_not_flat_bytes(slot):
    runtime = native.FakeRuntime()
    stream, tensors = new_stream(runtime), [flat(8, 1)]
    with pytest.raises(MisuseError, match="flat"):
        device_pack(tensors, slot, [0], stream=stream, runtime=runtime)
    with pytest.raises(MisuseError, match="flat"):
        device_unpack(slot, [0], tensors, stream=stream, runtime=runtime)
    assert runtime.pending() == 0


def test_packing_refuses_places_and_tensors_that_would_race_or_lie():
    runtime = native.FakeRuntime()
    stream, slot = new_stream(runtime), flat(64)
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    for tensors, offsets, message in (
        ([flat(8), flat(8)], [0, 7], "overlap"),
        ([flat(8), flat(8)], [8, 8], "overlap"),
        ([flat(8), flat(8), flat(8)], [20, 0, 4], "overlap"),
        ([flat(8), flat(8)], [0], "2 tensors, but 1 offsets"),
        ([conjugated], [0], "resolve_conj"),
        ([conjugated.imag], [0], "resolve_neg"),
        ([torch.eye(2).to_sparse()], [0], "dense"),
    ):
        with pytest.raises(MisuseError, match=message):
            device_pack(tensors, slot, offsets, stream=stream, runtime=runtime)
        with pytest.raises(MisuseError, match=message):
            device_unpack(slot, offsets, tensors, stream=stream, runtime=runtime)
    with pytest.raises(MisuseError, match="expanded"):
        device_unpack(slot, [0], [flat(1).expand(8)], stream=stream, runtime=runtime)
    assert runtime.pending() == 0
    device_pack([flat(0), flat(8), flat(0), flat(8)], slot, [4, 0, 8, 8], stream=stream, runtime=runtime)
    device_pack([flat(1).expand(8)], slot, [0], stream=stream, runtime=runtime)


def test_unpacking_tells_autograd():
    runtime = native.FakeRuntime()
    weight = torch.ones(4, requires_grad=True)
    target = torch.ones(4)
    product = weight * target
    device_unpack(flat(16), [0], [target], stream=new_stream(runtime), runtime=runtime)
    finish(runtime)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_kernels_that_a_device_cannot_run_are_not_used(caplog):
    runtime = native.FakeRuntime()
    assert device_staging._finds_kernels(torch.device("cpu"), runtime)
    runtime.fail("find_kernels", 1, 209)
    assert not device_staging._finds_kernels(torch.device("cpu"), runtime)
    assert "cudaFuncGetAttributes failed" in caplog.text
    assert not device_staging._finds_kernels(torch.device("meta", 7), runtime), "no such device"


@given(data=st.binary(max_size=9_000), value=st.integers(0, 2**32 - 1), start=st.integers(0, 7))
@QUICK
def test_sum_of_segments_is_the_checksum_of_the_whole(data, value, start):
    memory = torch.frombuffer(bytearray(bytes(start) + data), dtype=torch.uint8)[start:] if data else flat(0)
    runtime = native.FakeRuntime()
    assert device_crc32c(memory, value, stream=new_stream(runtime), runtime=runtime) == crc32c(data, value)


def test_checksum_of_many_segments():
    memory = torch.arange(30_001, dtype=torch.int64).view(torch.uint8)
    runtime = native.FakeRuntime()
    assert device_crc32c(memory, stream=new_stream(runtime), runtime=runtime) == crc32c(memory)
