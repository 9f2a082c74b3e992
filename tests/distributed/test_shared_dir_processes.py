"""A directory shared by real processes: the conformance suite over two of them, and crashes at the worst moments."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import resource
import signal
import time

import pytest
import torch

from nccl_stream.errors import MisuseError
from nccl_stream.refs import SampleRef
from nccl_stream.store import FeatureStore, StoreHandle
from nccl_stream.stores import shared_dir
from nccl_stream.stores.shared_dir import SharedDirFeatureStore
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness, make_sample, raw_bytes

pytestmark = pytest.mark.distributed

WAIT_S = 60.0

# Children are forked from a server that has imported everything once and has no threads.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "nccl_stream.testing.store_suite", "nccl_stream.stores.shared_dir"])


def serve(pipe):
    """Run store calls for the test: one store at a time, its handles by id."""
    torch.set_num_threads(1)
    store, handles = None, {}

    def do(operation, *args):
        nonlocal store
        if operation == "open":
            handles.clear()
            if store is not None:
                store.close()
            store = SharedDirFeatureStore(*args)
            return None
        if operation == "get":
            tensors, handle = store.get(SampleRef.from_wire(args[0]), *args[1:])
            handles[handle.handle_id] = handle
            parts = {name: (tensor.dtype, tensor.shape, raw_bytes(tensor)) for name, tensor in tensors.items()}
            return parts, handle.handle_id
        if operation == "release":
            known = handles.get(args[1])
            return store.release(known or StoreHandle(store, "s", SampleRef.from_wire(args[0]), args[1]))
        return getattr(store, operation)()

    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, do(*request)))
        except Exception as error:  # noqa: BLE001
            pipe.send((False, error))


def tensor_of(dtype, shape, content):
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


class RemoteStore(FeatureStore):
    """The consumer's store, in a child. Calls are serialized, as the pipe needs it."""

    def __init__(self, directory, server):
        self._server = server
        self.call("open", directory)

    def call(self, *request):
        with self._server.lock:
            self._server.pipe.send(request)
            assert self._server.pipe.poll(WAIT_S), "the child does not answer"
            worked, result = self._server.pipe.recv()
        if not worked:
            raise result
        return result

    def put(self, *args, **kwargs):
        raise NotImplementedError

    def get(self, ref, device=None):
        # The wire form, since it is what refs travel as; but the suite's foreign specs must arrive as they are.
        parts, handle_id = self.call("get", ref.to_wire(), device)
        return {name: tensor_of(*part) for name, part in parts.items()}, StoreHandle(
            self, ref.sample_id, ref, handle_id
        )

    def release(self, handle):
        if handle.store is not self:
            raise MisuseError("another store's handle")
        self.call("release", handle.ref.to_wire(), handle.handle_id)

    def gc(self):
        return self.call("gc")

    def health(self):
        return self.call("health")

    def close(self):
        self.call("close")


class Server:
    def __init__(self):
        self.pipe, theirs = processes.Pipe()
        self.lock = multiprocessing.Lock()
        self.process = processes.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def close(self):
        self.pipe.close()
        self.process.join(WAIT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


class TestConformanceOfTwoProcesses(FeatureStoreConformance):
    @pytest.fixture
    def harness(self, tmp_path, server):
        with SharedDirFeatureStore(str(tmp_path), release_poll_s=0.005) as producer:
            yield StoreHarness(producer, RemoteStore(str(tmp_path), server), timeout=WAIT_S)

    @pytest.fixture
    def capped_store(self, tmp_path):
        return lambda **caps: SharedDirFeatureStore(str(tmp_path), **caps)


def start(function, *args):
    process = processes.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def join(process):
    process.join(WAIT_S)
    assert process.exitcode is not None
    return process.exitcode


def stop_in(directory, step):
    """Put, and hang at ``step`` until killed."""

    def hang(*_args):
        open(os.path.join(directory, "reached"), "w").close()
        signal.pause()

    if step == "write":
        original = shared_dir.write_sample
        shared_dir.write_sample = lambda file, tensors, owner: (original(file, tensors, owner), hang())
    elif step == "rename":
        shared_dir.os.replace = hang
    store = SharedDirFeatureStore(directory)
    store.put("s", make_sample(5), "run")
    hang()


def killed_at(directory, step):
    process = start(stop_in, str(directory), step)
    deadline = time.monotonic() + WAIT_S
    while not (directory / "reached").exists():
        assert process.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    (directory / "reached").unlink()
    return process


@pytest.mark.parametrize("step", ["write", "rename"])
def test_half_written_file_of_a_killed_producer_is_found_by_gc_but_never_that_of_a_live_one(tmp_path, step):
    process = killed_at(tmp_path, step)
    with SharedDirFeatureStore(str(tmp_path)) as store:
        assert store.leftovers() == []
        assert store.gc() == 0
        process.kill()
        join(process)
        (leftover,) = store.leftovers()
        assert leftover.sample_id is None
        store._next_scan = 0.0
        assert store.gc() == 1
        assert os.listdir(tmp_path) == []
        # The id was never taken.
        store.put("s", make_sample(), "run")


def test_sample_of_a_killed_producer_is_reported_and_can_still_be_read(tmp_path):
    process = killed_at(tmp_path, "after")
    with SharedDirFeatureStore(str(tmp_path)) as store, SharedDirFeatureStore(str(tmp_path / "copy")) as other:
        assert store.leftovers() == []
        process.kill()
        join(process)
        assert [leftover.sample_id for leftover in store.leftovers()] == ["s"]
        ref = other.put("s", make_sample(), "run")
        tensors, handle = store.get(SampleRef.from_wire({**ref.to_wire(), "store_uri": store.store_uri}))
        assert raw_bytes(tensors["logits"]) == raw_bytes(make_sample(5)["logits"])
        store.release(handle)
        assert store.leftovers() == []


def produce(directory, pipe, count):
    # Closes before anything is read, and exits.
    with SharedDirFeatureStore(directory) as store:
        pipe.send([store.put(f"s{index}", make_sample(index), "run").to_wire() for index in range(count)])


def consume(directory, wires, pipe):
    seen = []
    with SharedDirFeatureStore(directory) as store:
        for wire in wires:
            tensors, handle = store.get(SampleRef.from_wire(wire))
            seen.append(int(tensors["input_ids"][0, 0]))
            store.release(handle)
    pipe.send(seen)


def test_samples_outlive_their_producer_and_two_consumers_share_them(tmp_path):
    here, there = processes.Pipe()
    assert join(start(produce, str(tmp_path), there, 10)) == 0
    wires = here.recv()
    consumers = [start(consume, str(tmp_path), wires[index::2], there) for index in range(2)]
    assert [join(consumer) for consumer in consumers] == [0, 0]
    assert sorted(here.recv() + here.recv()) == list(range(10))
    assert os.listdir(tmp_path) == []


def hold_and_die(directory, wire, pipe):
    _, handle = SharedDirFeatureStore(directory).get(SampleRef.from_wire(wire))
    pipe.send(handle.handle_id)
    signal.pause()


def test_consumer_killed_with_a_sample_in_hand_leaves_it_for_the_next(tmp_path):
    here, there = processes.Pipe()
    with SharedDirFeatureStore(str(tmp_path), release_poll_s=0.005) as store:
        ref = store.put("s", make_sample(3), "run")
        victim = start(hold_and_die, str(tmp_path), ref.to_wire(), there)
        here.recv()
        victim.kill()
        join(victim)
        assert store.health().sample_count == 1
        assert join(start(consume, str(tmp_path), [ref.to_wire()], there)) == 0
        assert here.recv() == [3]
        StoreHarness(store, timeout=WAIT_S).assert_empty()


def put_beyond_the_limit(directory, pipe):
    store = SharedDirFeatureStore(directory)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        store.put("big", {**make_sample(), "extra": torch.zeros(8192)}, "run")
    except OSError as error:
        pipe.send((error.errno, os.listdir(directory), store.health().sample_count))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    pipe.send(store.put("big", make_sample(), "run").sample_id)


def test_disk_that_takes_no_more_is_an_os_error_and_nothing_is_left(tmp_path):
    here, there = processes.Pipe()
    assert join(start(put_beyond_the_limit, str(tmp_path), there)) == 0
    assert here.recv() == (errno.EFBIG, [], 0)
    assert here.recv() == "big"


def race_for_ids(directory, count, barrier, pipe):
    won = []
    store = SharedDirFeatureStore(directory, max_samples=None)
    barrier.wait(WAIT_S)
    for index in range(count):
        with contextlib.suppress(ValueError):
            store.put(f"s{index}", make_sample(), "run")
            won.append(index)
    pipe.send(won)
    gc.collect()


def test_processes_that_put_into_one_directory_at_once_end_with_whole_files_only(tmp_path):
    here, there = processes.Pipe()
    barrier = processes.Barrier(2)
    children = [start(race_for_ids, str(tmp_path), 30, barrier, there) for _ in range(2)]
    won = here.recv() + here.recv()
    assert [join(child) for child in children] == [0, 0]
    assert set(won) == set(range(30))
    assert sorted(os.listdir(tmp_path)) == sorted(f"s{index}.safetensors" for index in range(30))
    with SharedDirFeatureStore(str(tmp_path)) as store, SharedDirFeatureStore(str(tmp_path / "x")) as other:
        wire = other.put("s0", make_sample(), "run").to_wire()
        for index in range(30):
            ref = SampleRef.from_wire({**wire, "sample_id": f"s{index}", "store_uri": store.store_uri})
            store.release(store.get(ref)[1])
