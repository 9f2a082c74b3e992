"""Staging on a GPU: copies, packing, checksums and the policies, over the real CUDA runtime."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore

from nccl_stream import device_staging
from nccl_stream.config import StreamConfig
from nccl_stream.device_staging import DeviceStager, device_crc32c, device_pack, device_unpack
from nccl_stream.errors import DeviceError
from nccl_stream.refs import FeatureSpec
from nccl_stream.staging import PinnedPool, crc32c
from nccl_stream.stores.preallocated import make_sample_memory
from nccl_stream.testing.nccl_double import connected_links
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, StreamHarness, cut, make_whole
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.layout import SMALL_BYTES, SlotLayout
from nccl_stream.transport.link import HostBytes
from tests.gpu.test_nccl_link import SHARES_A_GPU
from tests.gpu.test_stream import open_stream, run_ranks
from tests.unit.test_device_staging import bytes_of, some_tensor
from tests.unit.test_nccl_store import target_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.skipif(not device_staging.is_available(), reason="the compiled core has no CUDA part"),
    pytest.mark.skipif(
        not device_staging.has_kernels(torch.device("cuda", 0)), reason="the compiled core has no kernels for this GPU"
    ),
]

MIB = 1 << 20
CHUNK = 4 * MIB
GPU = torch.device("cuda", 0)
WAIT_S = 30.0


@pytest.fixture
def stager():
    stager = DeviceStager(GPU, chunk_bytes=CHUNK)
    yield stager
    assert stager.close(WAIT_S)


@pytest.fixture(scope="module")
def pool():
    with PinnedPool(512 * MIB, pin=True) as pool:
        yield pool


def noise(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 255, CHUNK - 1, CHUNK, CHUNK + 1, 64 * MIB + 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_copies_down_and_up_are_byte_exact(stager, pool, nbytes, pinned, shift):
    source = noise(nbytes + shift)
    slot = pool.reserve(nbytes + shift)
    host = slot.buffer if pinned else torch.empty(nbytes + shift, dtype=torch.uint8)
    host.zero_()
    device = source.to(GPU)
    down = stager.copy(host[shift:], device[shift:], after=torch.cuda.current_stream(GPU))
    back = torch.zeros_like(device)
    up = stager.copy(back[shift:], host[shift:], after=torch.cuda.current_stream(GPU), behind=[down])
    up.wait(WAIT_S)
    assert down.done()
    assert torch.equal(host[shift:], source[shift:])
    assert torch.equal(back[shift:].cpu(), source[shift:])
    slot.free()


def test_source_may_be_overwritten_at_once_by_the_stream_that_made_it(stager, pool):
    """The device is kept busy, so that every copy is still to come when the next kernel is queued."""
    stream = torch.cuda.current_stream(GPU)
    source = torch.empty(8 * MIB, dtype=torch.uint8, device=GPU)
    slots = [pool.reserve(8 * MIB) for _ in range(20)]
    torch.cuda._sleep(100_000_000)
    copies = []
    for value, slot in enumerate(slots):
        source.fill_(value)
        copies.append(stager.copy(slot.buffer, source, after=stream, before=stream))
    source.fill_(255)
    for value, (copy, slot) in enumerate(zip(copies, slots, strict=True)):
        copy.wait(WAIT_S)
        assert bool((slot.buffer == value).all()), value
        slot.free()


def elapsed_ms(work):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_copies_run_beside_kernels(stager, pool):
    slot = pool.reserve(256 * MIB)
    source = torch.ones(256 * MIB, dtype=torch.uint8, device=GPU)
    stream = torch.cuda.current_stream(GPU)
    matrix = torch.randn(2048, 2048, device=GPU)

    def copy():
        stager.copy(slot.buffer, source, after=stream, before=stream)

    def compute(times):
        for _ in range(times):
            torch.mm(matrix, matrix)

    def both(times):
        queued = stager.copy(slot.buffer, source, after=stream)
        compute(times)
        stager.copy(slot.buffer[:1], source[:1], before=stream, behind=[queued])

    for warm_up in (copy, lambda: compute(10)):
        elapsed_ms(warm_up)
    copy_ms = min(elapsed_ms(copy) for _ in range(3))
    times = max(1, round(copy_ms / (min(elapsed_ms(lambda: compute(50)) for _ in range(3)) / 50)))
    compute_ms = min(elapsed_ms(lambda: compute(times)) for _ in range(3))
    both_ms = min(elapsed_ms(lambda: both(times)) for _ in range(3))
    # One after the other they would take the sum.
    assert both_ms < 0.8 * (copy_ms + compute_ms), (copy_ms, compute_ms, both_ms)
    slot.free()


def test_graph_that_is_captured_meanwhile_is_not_disturbed(stager, pool):
    """Threads of this package ask for copies, make stagers and reuse memory while the trainer captures a graph."""
    slot = pool.reserve(256 * MIB)
    source = torch.ones(256 * MIB, dtype=torch.uint8, device=GPU)
    value = torch.ones(1000, device=GPU)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(GPU)
    capturing, captured = threading.Event(), threading.Event()
    errors = []
    arena = Arena(1024, GPU)

    def others():
        try:
            capturing.wait(WAIT_S)
            while not captured.is_set():
                copy = stager.copy(slot.buffer, source)
                DeviceStager(GPU, streams=1).close()
                used = arena.reserve(512, "s")
                used.record_release(side)
                used.settle()
                copy.done()
                copy.wait(WAIT_S)
        except Exception as error:  # noqa: BLE001 - shown below, in the test's thread
            errors.append(error)

    asking = threading.Thread(target=others)
    asking.start()
    with torch.cuda.graph(graph):
        capturing.set()
        for _ in range(100):
            value += 1
            time.sleep(0.005)
    captured.set()
    asking.join(WAIT_S)
    assert errors == []
    graph.replay()
    assert torch.equal(value.cpu(), torch.full((1000,), 101.0))
    slot.free()


def test_error_of_the_runtime_names_the_call_and_harms_nothing(stager):
    with pytest.raises(DeviceError, match="cudaSetDevice failed"):
        DeviceStager(f"cuda:{torch.cuda.device_count()}")
    source = noise(1000).to(GPU)
    target = torch.zeros(1000, dtype=torch.uint8)
    stager.copy(target, source, after=torch.cuda.current_stream(GPU)).wait(WAIT_S)
    assert torch.equal(target, source.cpu())
    torch.cuda.synchronize()  # no error was left behind for torch


ALL_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize <= 16}, key=str
)
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@pytest.mark.parametrize("seed", range(8))
def test_packing_kernel_agrees_with_torch_for_all_dtypes_and_strides(seed):
    carriers = [CARRIERS[dtype.itemsize] for dtype in ALL_DTYPES]
    here = [some_tensor(random.Random((seed, n).__hash__()), c, "cpu") for n, c in enumerate(carriers)]
    there = [some_tensor(random.Random((seed, n).__hash__()), c, GPU) for n, c in enumerate(carriers)]
    apart = (1, 16, 256)[seed % 3]
    offsets, end = [], 0
    for tensor in here:
        end = -(-end // apart) * apart
        offsets.append(end)
        end += tensor.nbytes
    expected = torch.full((end + 16,), 0xEE, dtype=torch.uint8)
    for tensor, offset in zip(here, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = bytes_of(tensor)
    slot = torch.full((end + 16,), 0xEE, dtype=torch.uint8, device=GPU)
    stream = torch.cuda.current_stream(GPU)
    typed = [tensor.view(dtype) for tensor, dtype in zip(there, ALL_DTYPES, strict=True)]
    device_pack(typed, slot, offsets, stream=stream)
    assert torch.equal(slot.cpu(), expected)
    back = [torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=GPU)[..., 0] for tensor in there]
    device_unpack(slot, offsets, back, stream=stream)
    for tensor, original in zip(back, here, strict=True):
        assert torch.equal(bytes_of(tensor.cpu()), bytes_of(original))


def test_tensors_may_be_dropped_while_the_packing_kernel_is_still_to_run():
    slot = torch.zeros(8 * MIB, dtype=torch.uint8, device=GPU)
    source = torch.ones(8 * MIB, dtype=torch.uint8, device=GPU)
    side = torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
    device_pack([source], slot, [0], stream=side)
    del source
    others = [torch.full((8 * MIB,), 2, dtype=torch.uint8, device=GPU) for _ in range(4)]
    torch.cuda.synchronize()
    assert bool((slot == 1).all())
    del others


def test_packing_of_large_strided_features_agrees_with_torch():
    hidden = torch.randn(1, 3000, 3, 1024, device=GPU).to(torch.bfloat16)
    tensors = [hidden.transpose(1, 2), hidden[..., ::2], hidden[:, 1:, :, 3:], hidden.permute(3, 2, 1, 0)]
    specs = {str(n): FeatureSpec.of(tensor) for n, tensor in enumerate(tensors)}
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=GPU)
    layout.pack({str(n): tensor for n, tensor in enumerate(tensors)}, slot)
    for n, view in layout.views(slot).items():
        assert torch.equal(view, tensors[int(n)])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4095, 4096, 4097, MIB + 5, 100 * MIB + 1])
@pytest.mark.parametrize("start", [0, 3])
def test_checksum_on_the_device_is_that_of_the_host(nbytes, start):
    data = noise(nbytes + start, seed=nbytes)
    there = data.to(GPU)[start:]
    assert device_crc32c(there) == crc32c(data[start:])
    assert device_crc32c(there, 0x12345678) == crc32c(data[start:], 0x12345678)


def features(value):
    """A sample as a target makes it: on the GPU, some of it strided, some of it small, its mask on the host."""
    large = torch.full((1, 600, 2048), float(value), device=GPU)
    return {
        **{name: tensor.to(GPU) for name, tensor in make_sample(value).items()},
        "loss_mask": torch.ones(1, 8, dtype=torch.int64),
        "large": large,
        "strided": large[:, ::2],
        "transposed": large.transpose(1, 2),
    }


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("staging", ["device", "pinned", "auto"])
def test_samples_keep_their_bytes_under_every_policy(staging, donate):
    config = StreamConfig(staging=staging, max_bytes=256 * MIB, max_sample_bytes=32 * MIB, device_bytes=40 * MIB)
    memory = make_sample_memory(config, GPU)
    kept = []
    torch.cuda._sleep(50_000_000)
    for value in range(8):
        tensors = features(value)
        layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=CHUNK)
        kept.append((value, memory.store(str(value), layout, tensors, donate=donate)))
        if not donate:
            tensors["large"].fill_(-1)
    places = {owned.place for _, owned in kept}
    assert places == {"device": {"device"}, "pinned": {"host"}, "auto": {"device", "host"}}[staging]
    assert staging == "device" or memory.used_bytes["device"] <= 40 * MIB
    for value, owned in kept:
        found = owned.features()
        for name, tensor in features(value).items():
            assert torch.equal(found[name].cpu(), tensor.cpu()), (value, name)
        memory.free(owned)
    assert memory.used_bytes == {"device": 0, "host": 0}
    assert memory.close(WAIT_S)


@pytest.mark.parametrize(("crowded", "donate"), [(False, False), (False, True), (True, False)])
def test_memory_of_a_sample_that_is_still_read_is_written_behind_the_reads(crowded, donate):
    """Reads are queued on another stream than the one that makes samples. Without a slot they have the allocator's."""
    config = StreamConfig(staging="device", max_bytes=16 * MIB, max_sample_bytes=8 * MIB)
    memory = make_sample_memory(config, GPU)
    spec = FeatureSpec((8 * MIB,), torch.uint8)
    layout = SlotLayout.from_specs({"x": spec}, chunk_bytes=CHUNK)
    crowd = [memory.store(name, layout, {"x": torch.zeros(8 * MIB, dtype=torch.uint8)}, donate=False) for name in "abc"]
    if not crowded:
        memory.free(crowd.pop())
    reading = torch.cuda.Stream(GPU)
    found = []
    for value in range(6):
        tensors = {"x": torch.full(spec.shape, value, dtype=torch.uint8, device=GPU)}
        owned = memory.store(str(value), layout, tensors, donate=donate)
        del tensors
        with torch.cuda.stream(reading):
            torch.cuda._sleep(20_000_000)
            found.append(memory.read(owned)["x"])
        assert (owned.slot is None) == crowded
        memory.free(owned)
        del owned
    torch.cuda.synchronize()
    assert [int(tensor.float().mean()) for tensor in found] == list(range(6))
    assert memory.close(WAIT_S)


def test_next_forward_does_not_wait_for_the_copy_of_donated_features():
    """Otherwise it does, as it may overwrite them: what is measured is there to be measured."""
    config = StreamConfig(staging="pinned", max_bytes=600 * MIB, max_sample_bytes=512 * MIB)
    memory = make_sample_memory(config, GPU)
    tensor = torch.ones(512 * MIB, dtype=torch.uint8, device=GPU)
    layout = SlotLayout.from_specs({"x": FeatureSpec.of(tensor)}, chunk_bytes=CHUNK)
    small = torch.zeros(1, device=GPU)

    def put_and_go_on(donate):
        owned = memory.store("s", layout, {"x": tensor}, donate=donate)
        small.add_(1)  # the next forward
        return owned

    times = {}
    for donate in (False, True, False, True):  # the first round warms up
        kept = []
        times[donate] = elapsed_ms(lambda donate=donate, kept=kept: kept.append(put_and_go_on(donate)))
        kept[0].features()
        memory.free(kept.pop())
    assert times[True] < 0.5 * times[False], times
    assert memory.close(WAIT_S)


def test_retained_pieces_beyond_the_window_wait_in_page_locked_memory():
    config = StreamConfig(staging="pinned", max_bytes=32 * MIB, max_sample_bytes=8 * MIB)
    memory = make_sample_memory(config, GPU)
    whole = make_whole(6 * PIECE)
    there = {name: tensor.to(GPU) for name, tensor in whole.items()}
    with target_store(memory=memory) as store:
        writer = StreamHarness(store).open("s", window=2, retain=True)
        for number in range(6):
            writer.append(cut(there, number * PIECE, (number + 1) * PIECE))
            writer._sample.stream.freed = number + 1  # as if its draft had read it
        for number, piece in writer._sample.pieces.items():
            buffer = piece.memory.buffer
            assert buffer.is_cuda if number < 3 else buffer.is_pinned()
            for name, expected in cut(whole, number * PIECE, (number + 1) * PIECE).items():
                assert torch.equal(piece.layout.views(buffer)[name].cpu(), expected), (number, name)
        assert memory.used_bytes["host"] > 0
        assert store.discard(writer.ref)
        assert memory.used_bytes == {"device": 0, "host": 0}
    assert memory.close(WAIT_S)


def test_sample_on_the_host_goes_out_through_chunks_of_the_device():
    """The link is NCCL's double on this GPU: one device is enough."""
    config = StreamConfig(staging="pinned", max_bytes=128 * MIB, max_sample_bytes=32 * MIB, chunk_bytes=CHUNK)
    memory = make_sample_memory(config, GPU)
    sender, receiver, fabric = connected_links(device=GPU)
    link = memory.reachable_by(sender)
    tensors = features(7)
    layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=CHUNK)
    owned = memory.store("s", layout, tensors, donate=False)
    layout.write_header(owned.buffer, b"header")
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=GPU)
    for out, arriving in zip(owned.wire_buffers(), layout.wire_buffers(slot), strict=True):
        assert isinstance(out, HostBytes)
        receiving = receiver.recv(arriving)
        link.send(out).wait(WAIT_S)
        receiving.wait(WAIT_S)
        torch.cuda.synchronize()  # the double says that it is done when it has queued its copy
    assert fabric.misuse == []
    assert layout.read_header(slot) == b"header"
    for name, view in layout.views(slot).items():
        assert torch.equal(view.cpu(), tensors[name].cpu()), name
    memory.free(owned)
    assert memory.close(WAIT_S)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not SHARES_A_GPU, reason="needs two CUDA devices, or NCCL >= 2.30 to share one"
)
@pytest.mark.parametrize(
    ("staging", "verify"), [("device", True), ("pinned", True), ("pinned", False), ("auto", False)]
)
def test_whole_stream_under_every_policy(staging, verify, monkeypatch):
    devices = ("cuda:0", "cuda:1")
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        monkeypatch.setenv("NCCL_MAX_CTAS", "4")
        devices = ("cuda:0", "cuda:0")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    samples = 40
    more = {"staging": staging, "device_bytes": 12 * MIB, "verify_checksums": verify}

    def target():
        with open_stream(server.port, "target", devices[0], **more) as stream:
            for i in range(samples):
                sample = {name: tensor.to(devices[0]) for name, tensor in make_sample(i, 64 + i, 2048).items()}
                ref = stream.store.put(f"s{i}", sample, "gpu")
                for tensor in sample.values():
                    tensor.zero_()
                stream.queue.put_blocks_until_below(ref)
            stream.queue.close()

    def draft():
        with open_stream(server.port, "draft", devices[1], **more) as stream:
            seen = set()
            while not stream.queue.is_drained:
                lease = stream.queue.acquire(1.0)
                if lease is None:
                    continue
                tensors, handle = stream.store.get(lease.ref)
                fill = int(tensors["input_ids"][0, 0])
                for name, tensor in make_sample(fill, 64 + fill, 2048).items():
                    assert torch.equal(tensors[name].cpu(), tensor), (name, fill)
                seen.add(fill)
                stream.queue.ack(lease)
                stream.store.release(handle)
                del tensors
            assert seen == set(range(samples))
            assert stream.statistics().local["checksum_failures"] == 0

    run_ranks(target, draft)


def test_sizes_of_these_tests_are_what_they_claim():
    assert features(0)["strided"].nbytes >= SMALL_BYTES
    assert features(0)["input_ids"].nbytes < SMALL_BYTES
