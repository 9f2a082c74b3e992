"""A directory shared by real processes: the conformance suite over two of them, and crashes at the worst moments."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import multiprocessing
import os
import resource
import signal
import tempfile
import time

import pytest
import safetensors.torch
import torch

from nccl_stream.errors import MisuseError
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.queue import SampleRefQueue
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


def without_links(*_args):
    raise OSError(errno.EOPNOTSUPP, "this file system has no hard links")


def stop_in(directory, step):
    """Put, and hang at ``step`` until killed."""

    def hang(*_args):
        open(os.path.join(directory, "reached"), "w").close()
        signal.pause()

    if step == "write":
        original = shared_dir.write_sample
        shared_dir.write_sample = lambda *args: (original(*args), hang())
    elif step == "link":
        os.link = hang
    elif step == "linked":
        os.link = lambda *args, link=os.link: (link(*args), hang())
    elif step == "claimed":
        os.link, os.replace = without_links, hang
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


@pytest.mark.parametrize("step", ["write", "link", "claimed"])
def test_half_written_file_of_a_killed_producer_is_found_by_gc_but_never_that_of_a_live_one(tmp_path, step):
    process = killed_at(tmp_path, step)
    with SharedDirFeatureStore(str(tmp_path)) as store:
        assert store.leftovers() == []
        assert store.gc() == 0
        process.kill()
        join(process)
        found = store.leftovers()
        assert [leftover.sample_id for leftover in found] == [None] * (1 + (step == "claimed"))
        store._next_scan = 0.0
        assert store.gc() == len(found)
        assert os.listdir(tmp_path) == []
        # The id was never taken.
        store.put("s", make_sample(), "run")


def test_name_that_a_killed_producer_had_just_given_stays_a_whole_sample(tmp_path):
    process = killed_at(tmp_path, "linked")
    with SharedDirFeatureStore(str(tmp_path)) as store:
        process.kill()
        join(process)
        assert [leftover.sample_id for leftover in store.leftovers()] == [None, "s"]
        store._next_scan = 0.0
        assert store.gc() == 1
        assert os.listdir(tmp_path) == ["s.safetensors"]
        with pytest.raises(MisuseError, match="already present"):
            store.put("s", make_sample(), "run")
        loaded = safetensors.torch.load_file(tmp_path / "s.safetensors")
        assert raw_bytes(loaded["logits"]) == raw_bytes(make_sample(5)["logits"])


def test_sample_of_a_killed_producer_is_reported_and_can_still_be_read(tmp_path):
    process = killed_at(tmp_path, "after")
    with SharedDirFeatureStore(str(tmp_path)) as store, SharedDirFeatureStore(str(tmp_path / "copy")) as other:
        assert store.leftovers() == []
        process.kill()
        join(process)
        assert [leftover.sample_id for leftover in store.leftovers()] == ["s"]
        ref = other.put("s", make_sample(), "run")
        # A ref that knows no more than the file's name: the one of the killed producer is gone with it.
        ref = dataclasses.replace(
            ref, store_uri=store.store_uri, feature_keys={name: name for name in ref.feature_keys}
        )
        tensors, handle = store.get(ref)
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


def race_for_ids(directory, fill, count, links, barrier, pipe):
    if not links:
        os.link = without_links
    won = []
    store = SharedDirFeatureStore(directory, max_samples=None)
    for index in range(count):
        barrier.wait(WAIT_S)
        with contextlib.suppress(MisuseError):
            won.append((index, fill, store.put(f"s{index}", make_sample(fill), "run").to_wire()))
    pipe.send((won, store.health().sample_count))


@pytest.mark.parametrize("links", [True, False])
def test_processes_that_put_the_same_ids_at_once_win_one_each_and_refs_deliver_the_winners(tmp_path, links):
    here, there = processes.Pipe()
    barrier = processes.Barrier(2)
    children = [start(race_for_ids, str(tmp_path), fill, 60, links, barrier, there) for fill in (1, 2)]
    results = [here.recv(), here.recv()]
    assert [join(child) for child in children] == [0, 0]
    assert sorted(os.listdir(tmp_path)) == sorted(f"s{index}.safetensors" for index in range(60))
    assert sorted(index for won, _ in results for index, _, _ in won) == list(range(60))
    assert all(len(won) == count for won, count in results)
    with SharedDirFeatureStore(str(tmp_path)) as store:
        for won, _ in results:
            for _, fill, wire in won:
                tensors, handle = store.get(SampleRef.from_wire(wire))
                assert raw_bytes(tensors["logits"]) == raw_bytes(make_sample(fill)["logits"])
                store.release(handle)


def fail_in_training(directory, pipe):
    with SharedDirFeatureStore(directory) as store:
        queue = SampleRefQueue(store)
        for index in range(2):
            queue.put(store.put(f"s{index}", make_sample(index), "run"))
        with FeatureDataLoader(queue, store) as loader:
            for step, batch in enumerate(loader):
                pipe.send(batch.sample_ids)
                if step:
                    raise ZeroDivisionError


def test_sample_that_a_failed_trainer_handed_back_outlives_the_store(tmp_path):
    here, there = processes.Pipe()
    assert join(start(fail_in_training, str(tmp_path), there)) == 1
    assert [here.recv(), here.recv()] == [("s0",), ("s1",)]
    assert os.listdir(tmp_path) == ["s1.safetensors"]


def release_in_two_steps(directory, wire, pipe):
    store = SharedDirFeatureStore(directory)
    _, handle = store.get(SampleRef.from_wire(wire))
    unlink = os.unlink

    def wait_and_unlink(path):
        pipe.send("about to delete")
        pipe.recv()
        unlink(path)

    os.unlink = wait_and_unlink
    store.release(handle)
    pipe.send("released")


def test_release_that_was_held_up_does_not_delete_the_next_sample_of_the_id(tmp_path):
    here, there = processes.Pipe()
    with SharedDirFeatureStore(str(tmp_path)) as store, SharedDirFeatureStore(str(tmp_path)) as other:
        ref = store.put("s", make_sample(1), "run")
        _, handle = other.get(ref)
        slow = start(release_in_two_steps, str(tmp_path), ref.to_wire(), there)
        assert here.recv() == "about to delete"
        other.release(handle)
        again = None
        with contextlib.suppress(MisuseError):
            again = store.put("s", make_sample(2), "run")
        here.send("go on")
        assert here.recv() == "released"
        assert join(slow) == 0
        again = again or store.put("s", make_sample(2), "run")
        other.gc()
        tensors, handle = other.get(again)
        assert raw_bytes(tensors["logits"]) == raw_bytes(make_sample(2)["logits"])
        other.release(handle)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("who", ["discard", "release", "the producer's discard"])
def test_sample_of_a_consumer_killed_in_its_release_counts_until_somebody_else_ends_it(tmp_path, who):
    here, there = processes.Pipe()
    with (
        SharedDirFeatureStore(str(tmp_path), release_poll_s=0.005) as store,
        SharedDirFeatureStore(str(tmp_path)) as other,
    ):
        ref = store.put("s", make_sample(1), "run")
        victim = start(release_in_two_steps, str(tmp_path), ref.to_wire(), there)
        assert here.recv() == "about to delete"
        victim.kill()
        join(victim)
        store._outstanding.check()
        assert store.health().sample_count == 1
        assert store.leftovers() == []
        tensors, handle = other.get(ref)
        assert raw_bytes(tensors["logits"]) == raw_bytes(make_sample(1)["logits"])
        if who == "release":
            other.release(handle)
        else:
            assert (store if who == "the producer's discard" else other).discard(ref)
        assert os.listdir(tmp_path) == []
        StoreHarness(store, timeout=WAIT_S).assert_empty()


def release_while_another_does(directory, wire, pipe):
    store = SharedDirFeatureStore(directory)
    _, handle = store.get(SampleRef.from_wire(wire))
    pipe.send("got")
    pipe.recv()
    store.release(handle)
    pipe.send("released")
    pipe.recv()
    pipe.send(store.gc())


def test_release_that_met_a_consumer_killed_in_its_own_is_done_by_gc(tmp_path):
    ours, theirs = processes.Pipe()
    here, there = processes.Pipe()
    with SharedDirFeatureStore(str(tmp_path), release_poll_s=0.005) as store:
        ref = store.put("s", make_sample(1), "run")
        second = start(release_while_another_does, str(tmp_path), ref.to_wire(), theirs)
        assert ours.recv() == "got"
        victim = start(release_in_two_steps, str(tmp_path), ref.to_wire(), there)
        assert here.recv() == "about to delete"
        ours.send("go on")
        assert ours.recv() == "released"
        assert os.listdir(tmp_path) == ["s.safetensors"]
        victim.kill()
        join(victim)
        ours.send("go on")
        assert ours.recv() == 1
        assert join(second) == 0
        assert os.listdir(tmp_path) == []
        StoreHarness(store, timeout=WAIT_S).assert_empty()


@pytest.fixture
def open_directory():
    # Not below tmp_path, whose parents nobody but this user may enter.
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield path


def consume_without_the_right_to_delete(directory, wire, pipe):
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("nccl_stream").addHandler(handler)
    with SharedDirFeatureStore(directory) as store:
        tensors, handle = store.get(SampleRef.from_wire(wire))
        store.release(handle)
        for _ in range(3):
            store._next_scan = 0.0
            pipe.send(store.gc())
        try:
            store.put("t", make_sample(), "run")
        except PermissionError:
            pipe.send(store.health().sample_count)
    pipe.send((raw_bytes(tensors["logits"]), len(records)))


def test_consumer_that_may_not_delete_reads_and_says_so_once_and_nothing_is_lost(open_directory):
    here, there = processes.Pipe()
    with SharedDirFeatureStore(open_directory) as store:
        ref = store.put("s", make_sample(4), "run")
        os.chmod(open_directory, 0o555)
        assert join(start(consume_without_the_right_to_delete, open_directory, ref.to_wire(), there)) == 0
        assert [here.recv() for _ in range(4)] == [0, 0, 0, 0]
        assert here.recv() == (raw_bytes(make_sample(4)["logits"]), 1)
        assert os.listdir(open_directory) == ["s.safetensors"]
        assert store.health().sample_count == 1
        os.chmod(open_directory, 0o755)
        assert store.discard(ref)


def put_after_a_fork(directory, pipe):
    store = SharedDirFeatureStore(directory, release_poll_s=0.005)
    store.put("parents", make_sample(), "run")
    with store._outstanding._changed:  # or else the child might find it held for ever
        pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pipe.send(store.put("childs", make_sample(), "run").to_wire())
    StoreHarness(store, timeout=WAIT_S).eventually(lambda: store.health().sample_count == 1, "the release is noticed")
    os._exit(0)


def test_forked_child_that_puts_notices_releases_too(tmp_path):
    here, there = processes.Pipe()
    child = start(put_after_a_fork, str(tmp_path), there)
    with SharedDirFeatureStore(str(tmp_path)) as store:
        store.release(store.get(SampleRef.from_wire(here.recv()))[1])
    assert join(child) == 0
