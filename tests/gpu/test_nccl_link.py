"""The NCCL link over real communicators: the suite that the double passes, and what only a GPU can show."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nccl_stream.refs import FeatureSpec
from nccl_stream.testing.link_suite import WAIT_S, LinkConformance, Recorder
from nccl_stream.transport.arena import POISON_BYTE, Arena
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.nccl_group import NcclLink, _construct
from nccl_stream.transport.process_group import open_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL, which this build of torch lacks"),
]

CHUNK = 1 << 20
# 2.30 is the first NCCL that lets two ranks share a device.
SHARES_A_GPU = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 30)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def open_pair(server, prefix, devices):
    """Both ends in one process, each from a thread of its own."""
    ends = [None, None]

    def run(side):
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60))
        try:
            ends[side] = open_link(store, prefix, side, devices[side], 60.0, peer=("draft 0", "target 0")[side])
        except BaseException as error:  # noqa: BLE001
            ends[side] = error

    threads = [threading.Thread(target=run, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    assert all(ends), "a side did not come up"
    return ends


def attach(engine, link):
    recorder = Recorder()
    return engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed), recorder


@pytest.fixture
def loopback(server):
    """A communicator of one: NCCL lets a rank send to itself when both operations are in one group."""
    from torch.distributed import ProcessGroupNCCL

    device = torch.device("cuda", 0)
    group = ProcessGroupNCCL(dist.PrefixStore("self", server), 0, 1, ProcessGroupNCCL.Options())
    group.eager_connect_single_device(device)
    link = NcclLink(group, 0, device=device, peer="itself")
    yield link
    link.abort()
    link.wait_closed(WAIT_S)


class TestOneRankToItself:
    def exchange(self, link, source, target):
        link.exchange(source, target).wait(WAIT_S)

    @pytest.mark.parametrize("nbytes", [1, 255, 4096, 64 << 20])
    def test_bytes_arrive(self, loopback, nbytes):
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=loopback.device)
        target = torch.zeros_like(source)
        self.exchange(loopback, source, target)
        assert torch.equal(source, target)

    def test_every_dtype_0d_empty_and_strided_is_byte_exact(self, loopback):
        dtypes = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype) and v.itemsize <= 8}, key=str)
        specs = {
            f"{dtype}/{shape}": FeatureSpec(shape, dtype) for dtype in dtypes for shape in ((), (2, 0), (5, 3), (7,))
        }
        layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
        sample = {
            name: torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, device="cuda:0").view(spec.dtype)
            for name, spec in specs.items()
        }
        sample = {name: tensor.view(specs[name].shape) for name, tensor in sample.items()}
        source = torch.zeros(layout.total_bytes, dtype=torch.uint8, device="cuda:0")
        layout.pack(sample, source)
        slot = Arena(layout.total_bytes, "cuda:0").reserve(layout.total_bytes, "all")
        for out, back in zip(layout.wire_buffers(source), layout.wire_buffers(slot.buffer), strict=True):
            self.exchange(loopback, out, back)
        views = layout.views(slot.export())
        for name, tensor in sample.items():
            if tensor.numel():
                assert torch.equal(views[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
                    name
                )

    def test_abort_returns_at_once_and_later_calls_fail(self, loopback):
        loopback.abort()
        with pytest.raises(Exception, match="aborted"):
            loopback.send(torch.zeros(1, dtype=torch.uint8, device=loopback.device))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
class TestTwoGpus(LinkConformance):
    @pytest.fixture
    def pair(self, server):
        ends = open_pair(server, "link/0", ("cuda:0", "cuda:1"))
        yield ends
        for end in ends:
            end.abort()


@pytest.mark.skipif(not SHARES_A_GPU, reason="needs NCCL >= 2.30, the first that lets two ranks share a GPU")
class TestTwoRanksOnOneGpu(LinkConformance):
    @pytest.fixture
    def pair(self, server, monkeypatch):
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        monkeypatch.setenv("NCCL_MAX_CTAS", "4")
        ends = open_pair(server, "link/0", ("cuda:0", "cuda:0"))
        yield ends
        for end in ends:
            end.abort()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pump_mode_moves_samples_between_gpus(server):
    sender, receiver = open_pair(server, "link/1", ("cuda:0", "cuda:1"))
    engines = [TransferEngine(link.device, issue="pump", timeout=WAIT_S, name="pumped") for link in (sender, receiver)]
    (sending, sent), (receiving, received) = attach(engines[0], sender), attach(engines[1], receiver)
    out = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:1")
    sending.send(0, list(torch.full((8 << 20,), 5, dtype=torch.uint8, device="cuda:0").split(CHUNK)))
    receiving.recv(0, list(out.split(CHUNK)))
    while not (sent.done and received.done):
        for engine in engines:
            engine.pump()
    assert bool((out == 5).all())
    for engine in engines:
        assert engine.close(10.0) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_next_receive_waits_for_the_consumers_kernels(server):
    sender, receiver = open_pair(server, "link/2", ("cuda:0", "cuda:1"))
    engines = [TransferEngine(link.device, timeout=WAIT_S, name="e") for link in (sender, receiver)]
    (sending, _), (receiving, received) = attach(engines[0], sender), attach(engines[1], receiver)
    arena = Arena(CHUNK, "cuda:1")
    consumer = torch.cuda.Stream("cuda:1")
    results = []
    for value in range(1, 6):
        slot = arena.reserve(CHUNK, str(value))
        assert slot is not None
        slot.begin_transfer()
        slot.wait_release(receiving.stream)
        receiving.recv(value, [slot.buffer])
        sending.send(value, [torch.full((CHUNK,), value, dtype=torch.uint8, device="cuda:0")])
        received.wait_done(value)
        slot.end_transfer()
        slot.record_release(consumer)
        with torch.cuda.stream(consumer):
            torch.cuda._sleep(200_000_000)  # the kernel that reads comes long after the slot was given back
            results.append(slot.export().amax())
        slot.settle()
    torch.cuda.synchronize()
    assert [int(result) for result in results] == [1, 2, 3, 4, 5]
    for engine in engines:
        engine.close(10.0)


def test_export_shares_device_memory_and_keeps_the_slot():
    arena = Arena(1 << 16, "cuda:0", poison=True)
    slot = arena.reserve(1000, "s")
    tensor = slot.export()
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.data_ptr() == slot.buffer.data_ptr()
    tensor.fill_(3)
    half = tensor[512:].view(torch.int32)
    slot.settle()
    del tensor
    assert arena.reserve(1 << 16, "next") is None
    assert int(half[0]) == 0x03030303
    raw = slot.buffer
    del half
    assert arena.reserve(1 << 16, "next") is not None
    torch.cuda.synchronize()
    assert bool((raw == POISON_BYTE).all())


def test_header_and_views_on_the_device():
    layout = SlotLayout.from_specs({"x": FeatureSpec((3, 5), torch.bfloat16)}, chunk_bytes=CHUNK)
    slot = Arena(layout.total_bytes, "cuda:0").reserve(layout.total_bytes, "s")
    layout.write_header(slot.buffer, b"sample 1")
    layout.pack({"x": torch.ones(5, 3, dtype=torch.bfloat16, device="cuda:0").t()}, slot.buffer)
    assert layout.read_header(slot.buffer) == b"sample 1"
    assert bool((layout.views(slot.export())["x"] == 1).all())


def test_group_construction_leaves_the_environment_as_it_was(server, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    group = _construct(dist.PrefixStore("env", server), 0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    group.abort()
