"""Sending from the host's memory over a device's link: the NCCL double, with copies on an imagined runtime."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nccl_stream import device_staging
from nccl_stream.device_staging import DeviceStager
from nccl_stream.errors import DeviceError, LinkError, MisuseError
from nccl_stream.refs import FeatureSpec
from nccl_stream.staging import open_stager
from nccl_stream.stores.staged import SampleMemory
from nccl_stream.testing.link_suite import WAIT_S, LinkConformance, Recorder
from nccl_stream.testing.nccl_double import connected_links
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.bounce import BounceLink
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.layout import SMALL_BYTES, SlotLayout
from nccl_stream.transport.link import HostBytes

native = pytest.importorskip("nccl_stream._native", reason="the compiled core is not installed")

CHUNK = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_orphans():
    yield
    device_staging._orphans.clear()


class FromTheHost(BounceLink):
    """Everything that it sends waits on the host."""

    def send(self, buf):
        return super().send(HostBytes(buf))


class TestBounceLinkOverDouble(LinkConformance):
    @pytest.fixture
    def pair(self):
        sender, receiver, fabric = connected_links()
        stager = DeviceStager("cpu", runtime=native.FakeRuntime(1, 1, 100))
        yield FromTheHost(sender, stager, chunk_bytes=8 << 20), receiver
        assert fabric.misuse == []
        sender.abort()
        receiver.abort()


class TestBounceLinkAroundPlainTensors(LinkConformance):
    @pytest.fixture
    def pair(self):
        sender, receiver, fabric = connected_links()
        yield BounceLink(sender, None, chunk_bytes=CHUNK), receiver
        assert fabric.misuse == []
        sender.abort()
        receiver.abort()


class TestBounceLinkFromHostToHost(LinkConformance):
    """With the stager that a machine without a GPU has."""

    @pytest.fixture
    def pair(self):
        sender, receiver, fabric = connected_links()
        yield FromTheHost(sender, open_stager("cpu"), chunk_bytes=8 << 20), receiver
        assert fabric.misuse == []
        sender.abort()
        receiver.abort()


@pytest.mark.parametrize("depth", [1, 3])
def test_samples_that_wait_on_the_host_arrive_byte_exact_by_a_few_chunks(depth):
    runtime = native.FakeRuntime(7, 1, 3)
    stream = SimpleNamespace(cuda_stream=runtime.new_stream())
    down, up = (DeviceStager("cpu", chunk_bytes=1 << 18, runtime=runtime) for _ in range(2))
    memory = SampleMemory(
        CPU,
        staging="pinned",
        host_arena=Arena(8 * SMALL_BYTES),
        down=down,
        up=up,
        chunk_bytes=CHUNK,
        current_stream=lambda: stream,
    )
    sender, receiver, fabric = connected_links()
    link = memory.reachable_by(sender)
    engine = TransferEngine("cpu", depth=depth, issue="pump", timeout=WAIT_S, name="e")
    sent, received = Recorder(), Recorder()
    sending = engine.attach(link, on_done=sent.on_done, on_failed=sent.on_failed)
    receiving = engine.attach(receiver, on_done=received.on_done, on_failed=received.on_failed)
    for number in range(6):
        large = torch.full((SMALL_BYTES + 77 * number,), number + 1, dtype=torch.uint8)
        tensors = {"ids": torch.arange(50) + number, "large": large}
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=CHUNK)
        owned = memory.store(str(number), layout, tensors, donate=False)
        runtime.fill(large.data_ptr(), large.nbytes, 0xEE, stream.cuda_stream)
        owned.layout.write_header(owned.buffer, b"header")
        slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        receiving.recv(number, layout.wire_buffers(slot))
        sending.send(number, owned.wire_buffers())
        while len(sent.done) <= number or len(received.done) <= number:
            engine.pump()
        assert layout.read_header(slot) == b"header"
        assert all(torch.equal(view, expected[name]) for name, view in layout.views(slot).items())
        memory.free(owned)
    assert 1 <= len(link._free) <= depth
    assert fabric.misuse == []
    while runtime.step():
        pass
    assert engine.close(5.0) == []
    assert memory.close(5.0)


def test_host_bytes_on_a_link_without_chunks_are_refused():
    sender, _, _ = connected_links()
    with pytest.raises(MisuseError, match="host's memory"):
        sender.send(HostBytes(torch.zeros(4, dtype=torch.uint8)))


def test_message_longer_than_a_chunk_is_refused():
    sender, _, _ = connected_links()
    link = BounceLink(sender, DeviceStager("cpu", runtime=native.FakeRuntime()), chunk_bytes=256)
    with pytest.raises(MisuseError, match="does not fit"):
        link.send(HostBytes(torch.zeros(257, dtype=torch.uint8)))


def test_send_that_fails_leaves_no_copy_in_progress():
    """The chunk is gone with the link: a copy that ran on would write into memory of somebody else."""
    runtime = native.FakeRuntime(0, 1, 1)
    sender, _, _ = connected_links()
    link = BounceLink(sender, DeviceStager("cpu", runtime=runtime), chunk_bytes=CHUNK)
    link.stream = SimpleNamespace(cuda_stream=runtime.new_stream())
    sender.abort()
    with pytest.raises(LinkError, match="aborted"):
        link.send(HostBytes(torch.ones(CHUNK, dtype=torch.uint8)))
    assert bool((link._free[0] == 1).all()), "the copy was still to be done"


def test_copy_that_fails_fails_the_link_and_names_the_call():
    runtime = native.FakeRuntime()
    sender, receiver, _ = connected_links()
    link = BounceLink(sender, DeviceStager("cpu", runtime=runtime), chunk_bytes=CHUNK)
    engine = TransferEngine("cpu", timeout=WAIT_S, name="e")
    recorder = Recorder()
    channel = engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed)
    runtime.fail("memcpy_async", 1, 2)
    channel.send("doomed", [HostBytes(torch.ones(64, dtype=torch.uint8))])
    error, tokens = recorder.wait_failed()
    assert tokens == ["doomed"]
    assert isinstance(error, LinkError)
    assert isinstance(error.__cause__, DeviceError)
    assert "cudaMemcpyAsync failed" in str(error)
    receiver.abort()
    assert engine.close(5.0) == []
