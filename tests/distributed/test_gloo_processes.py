"""Links between real processes: targets in children, the draft rank in the test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nccl_stream._version import __version__
from nccl_stream.errors import LinkError, LinkTimeoutError
from nccl_stream.refs import FeatureSpec
from nccl_stream.testing.link_suite import WAIT_S, Recorder
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.process_group import open_link

pytestmark = pytest.mark.distributed

CHUNK = 1 << 20
TIMEOUT_S = 60.0

# Children are forked from a server that has imported everything once and has no threads.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "nccl_stream.transport.engine", "nccl_stream.testing.link_suite"])


def client(port):
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))


def child(function, port, rank, pipe, args):
    torch.set_num_threads(1)
    try:
        function(client(port), rank, pipe, *args)
        pipe.send("ok")
    except BaseException:  # noqa: BLE001
        pipe.send(traceback.format_exc())


class Ranks:
    """Target processes and the draft's side of their links."""

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        self.processes = []
        self.pipes = []
        self.engines = []

    def start(self, function, *args):
        here, there = processes.Pipe()
        rank = len(self.processes)
        process = processes.Process(target=child, args=(function, self.store.port, rank, there, args), daemon=True)
        process.start()
        there.close()
        self.processes.append(process)
        self.pipes.append(here)
        return rank

    def engine(self, timeout=TIMEOUT_S):
        engine = TransferEngine("cpu", timeout=timeout, name=f"draft{len(self.engines)}")
        self.engines.append(engine)
        return engine

    def attach(self, engine, rank, draft=0):
        link = open_link(client(self.store.port), prefix(rank, draft), 1, "cpu", TIMEOUT_S, peer=f"target {rank}")
        recorder = Recorder()
        return engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed), recorder

    def hear(self, rank, word):
        assert self.pipes[rank].poll(TIMEOUT_S), f"target {rank} is silent"
        heard = self.pipes[rank].recv()
        assert heard == word, heard

    def close(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for engine in self.engines:
            engine.close(2.0)
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def prefix(target, draft=0):
    return f"link/{target}-{draft}/0"


def target_channel(store, rank, timeout=TIMEOUT_S, draft=0):
    engine = TransferEngine("cpu", timeout=timeout, name="target")
    link = open_link(store, prefix(rank, draft), 0, "cpu", TIMEOUT_S, peer=f"draft {draft}")
    recorder = Recorder()
    return engine, engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed), recorder


def random_sample(specs, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
        .view(spec.dtype)
        .view(spec.shape)
        for name, spec in specs.items()
    }


def flat(tensor):
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def dtype_specs():
    dtypes = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    return {
        f"{dtype}/{kind}": FeatureSpec(shape, dtype)
        for dtype in dtypes
        for kind, shape in (("0-d", ()), ("empty", (2, 0)), ("strided", (5, 3)), ("plain", (7,)))
    }


def strided(tensor):
    """The same values at other strides; through bytes, since torch cannot copy every dtype."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    whole = tensor.view(carrier[tensor.dtype.itemsize])
    padded = torch.zeros(2 * whole.shape[1], whole.shape[0], dtype=whole.dtype)
    padded[::2] = whole.t()
    return padded.view(tensor.dtype)[::2].t()


def send_every_dtype(store, rank, pipe):
    specs = dtype_specs()
    sample = random_sample(specs, 5)
    sample = {name: strided(t) if name.endswith("/strided") else t for name, t in sample.items()}
    assert any(not t.is_contiguous() for t in sample.values())
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    layout.pack(sample, slot)
    engine, channel, recorder = target_channel(store, rank)
    channel.send("all", layout.wire_buffers(slot))
    recorder.wait_done(1)
    channel.close()
    assert engine.close(WAIT_S) == []


def test_every_dtype_0d_empty_and_strided_arrives_byte_exact(ranks):
    rank = ranks.start(send_every_dtype)
    specs = dtype_specs()
    expected = random_sample(specs, 5)
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    slot = Arena(layout.total_bytes).reserve(layout.total_bytes, "all")
    channel, recorder = ranks.attach(ranks.engine(), rank)
    channel.recv("all", layout.wire_buffers(slot.buffer))
    recorder.wait_done(1)
    views = layout.views(slot.export())
    assert list(views) == list(specs)
    for name, view in views.items():
        assert (view.shape, view.dtype) == (specs[name].shape, specs[name].dtype)
        assert torch.equal(flat(view), flat(expected[name])), name
    ranks.hear(rank, "ok")


def thousand_specs():
    specs = {f"feature {i}": FeatureSpec((i % 7, 3), torch.float16) for i in range(1000)}
    specs["large"] = FeatureSpec((3 << 20,), torch.int16)
    return specs


def send_thousand(store, rank, pipe):
    specs = thousand_specs()
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    engine, channel, recorder = target_channel(store, rank)
    for seed in range(3):
        sample = random_sample(specs, seed)
        staging = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
        layout.pack({name: tensor for name, tensor in sample.items() if name != "large"}, staging)
        layout.write_header(staging, f"sample {seed}".encode())
        channel.send(seed, layout.wire_buffers(staging, sample))
    recorder.wait_done(3)
    channel.close()
    assert engine.close(WAIT_S) == []


def test_thousand_features_and_a_donated_one_arrive(ranks):
    rank = ranks.start(send_thousand)
    specs = thousand_specs()
    layout = SlotLayout.from_specs(specs, chunk_bytes=CHUNK)
    assert len(layout.chunks) == 7
    arena = Arena(3 * layout.total_bytes)
    channel, recorder = ranks.attach(ranks.engine(), rank)
    slots = [arena.reserve(layout.total_bytes, str(seed)) for seed in range(3)]
    for seed, slot in enumerate(slots):
        channel.recv(seed, layout.wire_buffers(slot.buffer))
    recorder.wait_done(3)
    for seed, slot in enumerate(slots):
        assert layout.read_header(slot.buffer) == f"sample {seed}".encode()
        views = layout.views(slot.buffer)
        for name, tensor in random_sample(specs, seed).items():
            assert torch.equal(flat(views[name]), flat(tensor)), name


def send_fills(store, rank, pipe, drafts, count, nbytes):
    ends = [target_channel(store, rank, draft=draft) for draft in range(drafts)]
    for token in range(count):
        for draft, (_, channel, _) in enumerate(ends):
            channel.send(token, [torch.full((nbytes,), fill(rank, draft, token), dtype=torch.uint8)])
    for engine, channel, recorder in ends:
        recorder.wait_done(count)
        channel.close()
        assert engine.close(WAIT_S) == []


def fill(target, draft, token):
    return (97 * target + 31 * draft + 7 * token) % 251


@pytest.mark.parametrize(("targets", "drafts"), [(2, 2), (3, 1)])
def test_equal_shapes_from_several_targets_never_swap(ranks, targets, drafts):
    count, nbytes = 30, 50_000
    for _ in range(targets):
        ranks.start(send_fills, drafts, count, nbytes)
    engines = [ranks.engine() for _ in range(drafts)]
    received = {}
    for target in range(targets):
        for draft, engine in enumerate(engines):
            channel, recorder = ranks.attach(engine, target, draft)
            buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
            for token, buffer in enumerate(buffers):
                channel.recv(token, [buffer])
            received[target, draft] = recorder, buffers
    for (target, draft), (recorder, buffers) in received.items():
        recorder.wait_done(count)
        for token, buffer in enumerate(buffers):
            assert bool((buffer == fill(target, draft, token)).all()), (target, draft, token)


def send_endlessly(store, rank, pipe, nbytes):
    _, channel, recorder = target_channel(store, rank)
    payload = torch.full((nbytes,), 17, dtype=torch.uint8)
    for token in range(10_000):
        channel.send(token, list(payload.split(CHUNK)))
    pipe.send("sending")
    with recorder._changed:
        recorder._changed.wait_for(lambda: recorder.failures)
    pipe.send(type(recorder.failures[0][0]).__name__)


def send_some_and_stay(store, rank, pipe, count, nbytes):
    _, channel, _ = target_channel(store, rank)
    payload = torch.full((nbytes,), 17, dtype=torch.uint8)
    for token in range(count):
        channel.send(token, [payload])
    pipe.send("sending")
    threading.Event().wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("sent", "asked", "nbytes"),
    [(2, 5, 1 << 12), (200, 200, 48 << 20)],
    ids=["between messages", "in the middle of a message"],
)
def test_killed_peer_fails_its_link_at_once(ranks, sent, asked, nbytes):
    rank = ranks.start(send_some_and_stay, sent, nbytes)
    channel, recorder = ranks.attach(ranks.engine(), rank)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    ranks.hear(rank, "sending")
    for token in range(asked):
        channel.recv(token, [slot])
    recorder.wait_done(2)
    os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    error, tokens = recorder.wait_failed()
    assert isinstance(error, LinkError)
    assert not isinstance(error, LinkTimeoutError), "noticed only by the deadline"
    assert "target 0" in str(error)
    assert tokens == list(range(len(recorder.done), asked))


def test_idle_link_whose_peer_was_killed_fails_when_used(ranks):
    rank = ranks.start(send_endlessly, 1 << 12)
    channel, recorder = ranks.attach(ranks.engine(), rank)
    ranks.hear(rank, "sending")
    ranks.processes[rank].kill()
    ranks.processes[rank].join()
    channel.recv("late", [torch.zeros(1 << 12, dtype=torch.uint8)])
    error, tokens = recorder.wait_failed()
    assert not isinstance(error, LinkTimeoutError)
    assert tokens == ["late"]


def test_stopped_peer_times_out_by_name_while_others_go_on(ranks):
    stopped = ranks.start(send_endlessly, 8 << 20)
    lively = ranks.start(send_fills, 1, 40, 1 << 20)
    stopped_channel, stopped_record = ranks.attach(ranks.engine(timeout=1.5), stopped)
    lively_channel, lively_record = ranks.attach(ranks.engine(), lively)
    ranks.hear(stopped, "sending")
    os.kill(ranks.processes[stopped].pid, signal.SIGSTOP)
    slot = torch.zeros(8 << 20, dtype=torch.uint8)
    for token in range(3):
        stopped_channel.recv(token, list(slot.split(CHUNK)))
    buffers = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(40)]
    for token, buffer in enumerate(buffers):
        lively_channel.recv(token, [buffer])
    lively_record.wait_done(40)
    assert all(bool((buffer == fill(lively, 0, token)).all()) for token, buffer in enumerate(buffers))
    error, tokens = stopped_record.wait_failed()
    assert isinstance(error, LinkTimeoutError)
    assert "target 0" in str(error)
    assert tokens[-1] == 2
    os.kill(ranks.processes[stopped].pid, signal.SIGCONT)


def test_abort_with_a_stopped_peer_needs_nobodys_help(ranks):
    rank = ranks.start(send_endlessly, 32 << 20)
    channel, recorder = ranks.attach(ranks.engine(), rank)
    ranks.hear(rank, "sending")
    slot = torch.zeros(32 << 20, dtype=torch.uint8)
    channel.recv(0, list(slot.split(CHUNK)))
    recorder.wait_done(1)
    channel.recv(1, list(slot.split(CHUNK)))
    os.kill(ranks.processes[rank].pid, signal.SIGSTOP)
    channel.abort()
    with recorder._changed:
        assert recorder._changed.wait_for(lambda: recorder.failures, WAIT_S)
    assert recorder.failures[0][1] in ([1], [])
    assert ranks.engines[0].close(5.0) == []
    os.kill(ranks.processes[rank].pid, signal.SIGCONT)


def test_abort_in_mid_transfer_then_reuse_of_the_slot_is_clean(ranks):
    aborted = ranks.start(send_endlessly, 64 << 20)
    other = ranks.start(send_fills, 1, 4, 64 << 20)
    arena = Arena(64 << 20, poison=True)
    other_channel, other_record = ranks.attach(ranks.engine(), other)
    channel, recorder = ranks.attach(ranks.engine(), aborted)
    ranks.hear(aborted, "sending")
    slot = arena.reserve(64 << 20, "doomed")
    slot.begin_transfer()
    first_chunk = slot.buffer[:CHUNK]
    channel.recv("doomed", list(slot.buffer.split(CHUNK)))
    while not bool((first_chunk[-4096:] == 17).all()):
        pass
    channel.abort()
    _, tokens = recorder.wait_failed()
    assert recorder.done + tokens == ["doomed"]  # it may all have come before the abort
    slot.end_transfer()
    slot.settle()
    for token in range(4):
        slot = arena.reserve(64 << 20, str(token))
        other_channel.recv(token, list(slot.buffer.split(64 << 20)))
        other_record.wait_done(token + 1)
        assert bool((slot.buffer == fill(other, 0, token)).all()), token
        slot.settle()
    ranks.hear(aborted, "LinkError")


def refuse_to_come(store, rank, pipe):
    pipe.send("here")
    threading.Event().wait(WAIT_S)


def test_peer_that_never_opens_its_side_is_an_error_within_the_deadline(ranks):
    rank = ranks.start(refuse_to_come)
    ranks.hear(rank, "here")
    with pytest.raises(LinkTimeoutError, match="target 0"):
        open_link(client(ranks.store.port), prefix(rank), 1, "cpu", 0.5, peer="target 0")


def die_while_opening(store, rank, pipe):
    store.set(f"{prefix(rank)}/versions/0", store_versions())
    pipe.send("half open")
    with contextlib.suppress(OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def store_versions():
    version = str(torch.__version__).split("+")[0]
    return f'{{"device": "cpu", "nccl_stream": "{__version__}", "torch": "{version}"}}'


def test_peer_that_dies_half_way_through_opening_is_an_error_within_the_deadline(ranks):
    rank = ranks.start(die_while_opening)
    ranks.hear(rank, "half open")
    with pytest.raises(LinkError, match="target 0"):
        open_link(client(ranks.store.port), prefix(rank), 1, "cpu", 1.0, peer="target 0")
