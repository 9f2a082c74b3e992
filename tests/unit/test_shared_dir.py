import dataclasses
import errno
import gc
import json
import logging
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch

from nccl_stream.errors import CapacityError, SpecMismatchError
from nccl_stream.queue import SampleRefQueue
from nccl_stream.stores import directory, leftovers, outstanding, residency, sample_file, shared_dir
from nccl_stream.stores.shared_dir import SharedDirFeatureStore
from nccl_stream.testing.store_suite import FeatureStoreConformance, StoreHarness, make_sample, raw_bytes

SIZE = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())
UNCAPPED = {"max_bytes": None, "high_watermark_bytes": None, "low_watermark_bytes": None}


class TestConformance(FeatureStoreConformance):
    @pytest.fixture
    def harness(self, tmp_path):
        with SharedDirFeatureStore(str(tmp_path)) as store:
            yield StoreHarness(store)

    @pytest.fixture
    def capped_store(self, tmp_path):
        return lambda **caps: SharedDirFeatureStore(str(tmp_path), **caps)


class TestConformanceOfTwoInstances(FeatureStoreConformance):
    @pytest.fixture
    def harness(self, tmp_path):
        path = str(tmp_path)
        with SharedDirFeatureStore(path, release_poll_s=0.005) as producer, SharedDirFeatureStore(path) as consumer:
            yield StoreHarness(producer, consumer)

    @pytest.fixture
    def capped_store(self, tmp_path):
        return lambda **caps: SharedDirFeatureStore(str(tmp_path), **caps)


@pytest.fixture
def store(tmp_path):
    with SharedDirFeatureStore(str(tmp_path)) as store:
        yield store


@pytest.fixture
def other(tmp_path):
    with SharedDirFeatureStore(str(tmp_path)) as store:
        yield store


def put(store, sample_id="s", fill=0, **kwargs):
    return store.put(sample_id, make_sample(fill), "run", num_tokens=8, **kwargs)


def consume(store, ref):
    tensors, handle = store.get(ref)
    store.release(handle)
    return tensors


def wait_until(predicate):
    deadline = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- files --


def test_put_makes_one_file_and_the_last_release_leaves_none(store, tmp_path):
    ref = put(store)
    assert os.listdir(tmp_path) == ["s.safetensors"]
    assert ref.store_uri == f"file://{tmp_path}"
    assert ref.estimated_bytes == SIZE
    consume(store, ref)
    assert os.listdir(tmp_path) == []


def test_directory_is_made_and_a_relative_one_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with SharedDirFeatureStore("a/b") as store:
        monkeypatch.chdir("/")
        ref = put(store)
        assert (tmp_path / "a/b/s.safetensors").exists()
        consume(store, ref)


def test_file_is_readable_by_other_readers_of_the_format(store, tmp_path):
    tensors = {**make_sample(3), "odd": torch.arange(3, dtype=torch.uint8), "half": torch.ones(2, 3).bfloat16()}
    store.put("s", tensors, "run")
    loaded = safetensors.torch.load_file(tmp_path / "s.safetensors")
    assert {n: raw_bytes(t) for n, t in loaded.items()} == {n: raw_bytes(t) for n, t in tensors.items()}
    assert all(loaded[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_file_keeps_every_feature_aligned_to_its_element_size(store, tmp_path):
    odd = {f"odd{index}": torch.zeros(3, dtype=torch.uint8) for index in range(3)}
    store.put("s", {**odd, **make_sample(), "half": torch.zeros(3).half()}, "run")
    with open(tmp_path / "s.safetensors", "rb") as file:
        header = sample_file.read_header(file, "it")
    assert header.data_start % 8 == 0
    sizes = {"U8": 1, "F16": 2, "F32": 4, "I64": 8}
    assert [name for name, feature in header.features.items() if feature[3] % sizes[feature[0]]] == []


def test_file_written_by_another_program_is_read(store, tmp_path):
    ref = put(store, fill=1)
    os.unlink(tmp_path / "s.safetensors")
    safetensors.torch.save_file(make_sample(2), tmp_path / "s.safetensors")
    tensors = consume(store, ref)
    assert {n: raw_bytes(t) for n, t in tensors.items()} == {n: raw_bytes(t) for n, t in make_sample(2).items()}


@pytest.mark.parametrize(
    "sample_id",
    ["../s", "a/b", "/etc/passwd", "..", "a..b", "a\\b", "a\0b", "line\nbreak", "\ud800", "x" * 250],
    ids=repr,
)
def test_id_that_cannot_stay_in_the_directory_is_refused_everywhere(store, tmp_path, sample_id):
    with pytest.raises(ValueError):
        put(store, sample_id)
    ref = put(store)
    with pytest.raises(ValueError):
        store.get(dataclasses.replace(ref, sample_id=sample_id))
    with pytest.raises(ValueError):
        store.discard(dataclasses.replace(ref, sample_id=sample_id))
    assert os.listdir(tmp_path) == ["s.safetensors"]
    assert store.health().sample_count == 1


def test_longest_id_that_makes_a_file_name_is_accepted(store):
    ref = put(store, "é" * 121 + "x")
    assert consume(store, ref).keys() == make_sample().keys()


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "dangling link"])
def test_what_is_no_file_in_place_of_a_sample_is_an_error_at_once_and_stays(store, tmp_path, monkeypatch, kind):
    ref = put(store)
    os.unlink(tmp_path / "s.safetensors")
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo("s.safetensors")
        elif kind == "socket":
            server.bind("s.safetensors")
        elif kind == "directory":
            os.mkdir("s.safetensors")
        else:
            os.symlink("nowhere", "s.safetensors")
        descriptors = len(os.listdir("/proc/self/fd"))
        for call in (store.get, store.discard):
            with pytest.raises(ValueError, match=r"is a link|no plain file"):
                call(ref)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert store.leftovers() == []
        store._outstanding.check()
        assert store.health().sample_count == 0
        with pytest.raises(ValueError, match="already present"):
            put(store)
        assert os.path.lexists("s.safetensors")


def test_link_in_place_of_a_sample_is_not_followed(store, tmp_path, tmp_path_factory):
    ref = put(store)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.safetensors"
    os.rename(tmp_path / "s.safetensors", elsewhere)
    os.symlink(elsewhere, tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="link"):
        store.get(ref)


def test_feature_with_the_name_the_format_reserves_is_refused_and_nothing_is_left(store, tmp_path):
    with pytest.raises(ValueError, match="__metadata__"):
        store.put("s", {**make_sample(), "__metadata__": torch.zeros(1)}, "run")
    assert os.listdir(tmp_path) == []
    assert store.health().sample_count == 0


def test_id_whose_file_somebody_else_put_is_refused_and_their_file_stays(store, other):
    ref = put(store, fill=1)
    with pytest.raises(ValueError, match="already present"):
        put(other, fill=2)
    assert other.health().sample_count == 0
    assert int(consume(other, ref)["input_ids"][0, 0]) == 1


@pytest.mark.parametrize("links", [True, False])
def test_id_that_is_taken_while_its_file_is_written_is_refused_and_the_first_stays(
    store, other, tmp_path, monkeypatch, links
):
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    refs = []

    def write(*args):
        monkeypatch.undo()
        if not links:
            monkeypatch.setattr(os, "link", without_links)
        refs.append(put(other, fill=1))
        sample_file.write_sample(*args)

    monkeypatch.setattr(shared_dir, "write_sample", write)
    with pytest.raises(ValueError, match="already present"):
        put(store, fill=2)
    assert os.listdir(tmp_path) == ["s.safetensors"]
    assert store.health().sample_count == 0
    assert int(consume(store, refs[0])["input_ids"][0, 0]) == 1
    consume(other, put(store, fill=3))


def test_link_that_was_made_but_whose_answer_got_lost_is_a_put(store, tmp_path, monkeypatch):
    # A file server that is asked a second time finds that the name is taken: by the first time.
    link = os.link
    monkeypatch.setattr(os, "link", lambda *args: (link(*args), link(*args)))
    ref = put(store, fill=1)
    assert os.listdir(tmp_path) == ["s.safetensors"]
    assert int(consume(store, ref)["input_ids"][0, 0]) == 1


def test_header_that_no_get_would_read_is_refused_by_put(store, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_file, "MAX_HEADER_BYTES", 2048)
    consume(store, put(store))
    with pytest.raises(ValueError, match=r"header of \d+ bytes"):
        store.put("s", {**make_sample(), "x" * 2048: torch.zeros(1)}, "run")
    assert os.listdir(tmp_path) == []
    assert store.health().sample_count == 0


# -- damage --


def truncate(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_file_cut_short_is_refused_and_stays(store, tmp_path, cut):
    ref = put(store)
    path = tmp_path / "s.safetensors"
    truncate(path, cut if cut >= 0 else path.stat().st_size + cut)
    with pytest.raises(SpecMismatchError, match="cut short"):
        store.get(ref)
    with open(path, "rb") as file, pytest.raises(SpecMismatchError, match="cut short"):
        sample_file.read_header(file, "it")
    assert path.exists()
    assert store.discard(ref)


def header_and_data(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header["logits"].update(data_offsets=[0, 2**70]),
        lambda header: header["logits"].update(data_offsets=[-8, 0]),
        lambda header: header["logits"].update(data_offsets=[8, 0]),
        lambda header: header["logits"].update(data_offsets="08"),
        lambda header: header["logits"].update(data_offsets=[0, 8]),
        lambda header: header["logits"].update(dtype=["F32"]),
        lambda header: header["logits"].update(dtype="I32"),
        lambda header: header["logits"].update(shape=None),
        lambda header: header.update(logits=None),
        lambda header: header.pop("logits"),
        lambda header: header["__metadata__"].update(nccl_stream="{"),
        lambda header: header["__metadata__"].update(nccl_stream="[]"),
        lambda header: header["__metadata__"].update(nccl_stream='{"dtypes": {"logits": 7}}'),
        lambda header: header["__metadata__"].update(nccl_stream='{"dtypes": {"logits": "int32"}}'),
    ],
)
def test_file_with_a_damaged_header_is_refused(store, tmp_path, damage):
    ref = put(store)
    header, data = header_and_data(tmp_path / "s.safetensors")
    damage(header)
    text = json.dumps(header).encode()
    (tmp_path / "s.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(SpecMismatchError):
        store.get(ref)


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_file_that_is_none_of_ours_is_refused(store, tmp_path, content):
    ref = put(store)
    (tmp_path / "s.safetensors").write_bytes(content)
    with pytest.raises(SpecMismatchError):
        store.get(ref)


# -- failures of the file system --


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", ["write", "link", "linked", "claim", "replace", "replaced", "commit", "watch"])
def test_put_that_fails_half_way_leaves_no_trace_and_can_be_repeated(store, tmp_path, monkeypatch, step, error):
    def fail(*_args):
        assert 1 <= len(os.listdir(tmp_path)) <= 2
        raise error

    def fail_after(function):
        return lambda *args: (function(*args), fail())

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(shared_dir, "write_sample", lambda file, *_: (file.write(b"half of it"), fail()))
        elif step in ("claim", "replace", "replaced"):
            patch.setattr(os, "link", without_links)
        if step == "link":
            patch.setattr(os, "link", fail)
        elif step == "linked":
            patch.setattr(os, "link", fail_after(os.link))
        elif step == "claim":
            patch.setattr(directory, "write_sample", fail)
        elif step == "replace":
            patch.setattr(os, "replace", fail)
        elif step == "replaced":
            patch.setattr(os, "replace", fail_after(os.replace))
        elif step == "commit":
            patch.setattr(residency.Reservation, "commit", fail)
        elif step == "watch":
            patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(type(error)):
            put(store)
    assert os.listdir(tmp_path) == []
    assert store.health().sample_count == store.health().resident_bytes == 0
    consume(store, put(store))


def test_file_that_cannot_be_deleted_still_counts_until_gc_can(store, tmp_path, monkeypatch):
    ref = put(store)
    _, handle = store.get(ref)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", no_unlink)
        store.release(handle)
        assert store.health().sample_count == 1
        assert store.gc() == 0
    assert store.gc() == 1
    assert store.gc() == 0
    assert os.listdir(tmp_path) == []
    assert store.health().sample_count == 0


unlink = os.unlink


def no_unlink(path):
    raise PermissionError(path)


def without_links(*_args):
    raise OSError(errno.EPERM, "this file system has no hard links")


class Gate:
    """Holds whoever calls it, between ``entered`` and ``leave``."""

    def __init__(self, function):
        self.function = function
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __call__(self, *args, **kwargs):
        self.entered.set()
        assert self.leave.wait(20)
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("operation", ["put", "get", "release", "gc"])
def test_disk_that_hangs_does_not_hold_up_health_or_other_samples(store, monkeypatch, operation):
    ref = put(store, "a")
    second = put(store, "b")
    _, handle = store.get(ref)
    module, name = {
        "put": (shared_dir, "write_sample"),
        "get": (shared_dir, "read_sample"),
        "release": (os, "unlink"),
        "gc": (os, "scandir"),
    }[operation]
    original = getattr(module, name)
    gate = Gate(original)
    monkeypatch.setattr(module, name, gate)
    action = {
        "put": lambda: put(store, "c"),
        "get": lambda: store.get(ref),
        "release": lambda: store.release(handle),
        "gc": store.gc,
    }[operation]
    thread = threading.Thread(target=action)
    thread.start()
    try:
        assert gate.entered.wait(20)
        monkeypatch.setattr(module, name, original)
        assert store.health().sample_count == 2 + (operation == "put")
        assert store.room_for(1)
        consume(store, second)
        consume(store, put(store, "d"))
    finally:
        gate.leave.set()
        thread.join()


# -- several instances --


def test_release_elsewhere_lowers_the_producers_counters_without_listing_the_directory(store, other, monkeypatch):
    refs = [put(store, f"s{index}") for index in range(3)]
    monkeypatch.setattr(os, "listdir", None)
    monkeypatch.setattr(os, "scandir", None)
    consume(other, refs[1])
    wait_until(lambda: store.health().sample_count == 2)
    assert store.health().resident_bytes == 2 * SIZE
    assert other.health().sample_count == 0
    for ref in (refs[0], refs[2]):
        consume(other, ref)
    wait_until(lambda: store.health().resident_bytes == 0)


def test_release_elsewhere_wakes_a_producer_that_waits_for_room(tmp_path, other):
    with SharedDirFeatureStore(str(tmp_path), max_samples=1, **UNCAPPED) as store:
        ref = put(store)
        with pytest.raises(CapacityError):
            put(store, "t")
        assert not store.wait_for_room(SIZE, 0.0)
        consume(other, ref)
        assert store.wait_for_room(SIZE, 20.0)
        put(store, "t")


def test_put_right_after_a_release_elsewhere_finds_the_room(tmp_path, other):
    with SharedDirFeatureStore(str(tmp_path), max_samples=1, release_poll_s=3600, **UNCAPPED) as store:
        for _ in range(3):
            consume(other, put(store))


def test_release_elsewhere_is_noticed_at_any_number_of_outstanding_files(tmp_path, other, monkeypatch):
    monkeypatch.setattr(outstanding, "CHECKS_PER_PERIOD", 3)
    with SharedDirFeatureStore(str(tmp_path), max_samples=None, release_poll_s=0.001) as store:
        refs = [put(store, f"s{index}") for index in range(10)]
        for left, ref in zip(reversed(range(10)), reversed(refs), strict=True):
            consume(other, ref)
            wait_until(lambda left=left: store.health().sample_count == left)


def test_paused_producer_goes_on_when_another_process_consumes(tmp_path, other):
    with SharedDirFeatureStore(
        str(tmp_path), max_bytes=10 * SIZE, high_watermark_bytes=2 * SIZE, low_watermark_bytes=SIZE
    ) as store:
        paused = threading.Event()
        queue = SampleRefQueue(store, on_pause=lambda health: paused.set())
        queue.put(put(store, "a"))
        queue.put(put(store, "b"))
        thread = threading.Thread(target=queue.put_blocks_until_below, args=(put(store, "c"),), daemon=True)
        thread.start()
        assert paused.wait(20)
        for _ in range(2):
            consume(other, queue.acquire().ref)
        thread.join(20)
        assert not thread.is_alive()


def test_two_consumers_of_one_sample_each_have_their_copy_and_the_first_release_takes_the_file(store, other, tmp_path):
    ref = put(store, fill=4)
    first, first_handle = store.get(ref)
    second, second_handle = other.get(ref)
    other.release(second_handle)
    assert os.listdir(tmp_path) == []
    store.release(first_handle)
    assert raw_bytes(first["logits"]) == raw_bytes(second["logits"]) == raw_bytes(make_sample(4)["logits"])
    wait_until(lambda: store.health().sample_count == 0)


def test_late_release_does_not_touch_the_next_sample_of_the_same_id(store, other, tmp_path):
    ref = put(store, fill=1)
    # As a file system does whose clock counts whole seconds, and which gives a freed inode to the next file.
    os.utime(tmp_path / "s.safetensors", (1, 1))
    _, late = store.get(ref)
    _, early = other.get(ref)
    other.release(early)
    again = put(store, fill=2)
    os.utime(tmp_path / "s.safetensors", (1, 1))
    _, held = store.get(again)
    store.release(late)
    assert store.health().sample_count == 1
    assert int(store.get(again)[0]["input_ids"][0, 0]) == 2
    store.release(held)


def test_next_sample_of_the_same_id_is_not_delivered_for_the_ref_of_the_last_nor_dropped_with_it(store, other):
    ref = put(store, fill=1)
    assert other.discard(ref)
    again = put(other, fill=2)
    wait_until(lambda: store.health().sample_count == 0)
    with pytest.raises(KeyError, match="later one"):
        store.get(ref)
    assert not store.discard(ref)
    assert not other.discard(ref)
    assert other.health().sample_count == 1
    assert int(consume(store, again)["input_ids"][0, 0]) == 2


def test_sample_that_was_only_touched_still_counts(store, tmp_path):
    ref = put(store)
    os.utime(tmp_path / "s.safetensors", (1, 1))
    store._outstanding.check()
    assert store.health().sample_count == 1
    assert store.discard(ref)
    assert store.health().sample_count == 0


def test_handle_with_the_id_of_another_samples_handle_releases_nothing(store):
    _, handle = store.get(put(store))
    store.release(dataclasses.replace(handle, sample_id="t"))
    assert store.health().sample_count == 1
    store.release(handle)
    assert store.health().sample_count == 0


def test_handle_dropped_elsewhere_is_no_release(store, other):
    ref = put(store)
    other.get(ref)
    gc.collect()
    assert other.gc() == 1
    assert other.gc() == 0
    consume(other, ref)
    wait_until(lambda: store.health().sample_count == 0)


def test_handle_dropped_after_its_sibling_was_released_frees_the_sample(store, tmp_path):
    ref = put(store)
    _, first = store.get(ref)
    _, second = store.get(ref)
    store.release(first)
    assert os.listdir(tmp_path) == ["s.safetensors"]
    del second
    gc.collect()
    assert store.gc() == 1
    assert os.listdir(tmp_path) == []
    assert store.health().sample_count == 0


def test_copy_of_a_dropped_handle_can_still_be_released(store, tmp_path):
    ref = put(store)
    _, handle = store.get(ref)
    copy = dataclasses.replace(handle)
    del handle
    gc.collect()
    store.gc()
    store.release(copy)
    assert os.listdir(tmp_path) == []


def test_get_that_fails_holds_nothing(store, tmp_path):
    ref = put(store)
    wrong = dataclasses.replace(ref, feature_specs={**ref.feature_specs, "logits": ref.feature_specs["input_ids"]})
    with pytest.raises(RuntimeError) as info:  # whose traceback keeps alive whatever the get had made
        store.get(wrong)
    consume(store, ref)
    assert os.listdir(tmp_path) == []
    del info


def test_discard_of_somebody_elses_sample_deletes_it(store, other, tmp_path):
    ref = put(store)
    assert other.discard(ref)
    assert not other.discard(ref)
    assert os.listdir(tmp_path) == []
    wait_until(lambda: store.health().sample_count == 0)


# -- end --


def test_close_keeps_what_nobody_has_read_and_another_instance_can_read_it(tmp_path, other):
    store = SharedDirFeatureStore(str(tmp_path))
    ref = put(store, fill=6)
    store.close()
    assert store.health().sample_count == 0
    assert int(consume(other, ref)["input_ids"][0, 0]) == 6


def test_close_deletes_what_nobody_has_read_when_asked_to_and_nothing_of_others(tmp_path, other):
    store = SharedDirFeatureStore(str(tmp_path), delete_unread_on_close=True)
    put(store)
    put(other, "theirs")
    store.close()
    assert os.listdir(tmp_path) == ["theirs.safetensors"]


def test_close_deletes_what_was_released_although_held_and_keeps_what_was_only_got(tmp_path, other):
    store = SharedDirFeatureStore(str(tmp_path))
    refs = [put(store, "mine"), put(store, "mine-unread"), put(other, "theirs"), put(other, "theirs-unread")]
    hold = [(store.get(ref)[1], store.get(ref)[1]) for ref in refs]
    store.release(hold[0][0])
    store.release(hold[2][0])
    assert len(os.listdir(tmp_path)) == 4
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["mine-unread.safetensors", "theirs-unread.safetensors"]


@pytest.mark.parametrize("sweep", [True, False])
def test_close_keeps_a_sample_whose_handle_was_dropped_unreleased(tmp_path, other, sweep):
    store = SharedDirFeatureStore(str(tmp_path))
    ref = put(store, fill=7)
    store.get(ref)
    gc.collect()
    if sweep:
        store.gc()
    store.close()
    assert int(consume(other, ref)["input_ids"][0, 0]) == 7


def test_close_deletes_what_was_released_before_its_other_handle_was_dropped(tmp_path):
    store = SharedDirFeatureStore(str(tmp_path))
    ref = put(store)
    _, first = store.get(ref)
    _, second = store.get(ref)
    store.release(first)
    del second
    gc.collect()
    store.close()
    assert os.listdir(tmp_path) == []


def test_close_tries_once_more_to_delete_what_could_not_be(tmp_path, monkeypatch):
    store = SharedDirFeatureStore(str(tmp_path))
    ref = put(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", no_unlink)
        consume(store, ref)
    assert os.listdir(tmp_path) == ["s.safetensors"]
    store.close()
    assert os.listdir(tmp_path) == []


def test_close_that_cannot_delete_goes_on_and_does_not_raise(tmp_path, monkeypatch):
    store = SharedDirFeatureStore(str(tmp_path), delete_unread_on_close=True)
    put(store, "a")
    put(store, "b")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: no_unlink(path) if path.endswith("a.safetensors") else unlink(path))
        store.close()
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_close_with_delete_unread_spares_what_another_instance_put_under_the_id_since(tmp_path, other):
    store = SharedDirFeatureStore(str(tmp_path), delete_unread_on_close=True, release_poll_s=3600)
    ref = put(store)
    assert other.discard(ref)
    again = put(other, fill=2)
    store.close()
    assert int(consume(other, again)["input_ids"][0, 0]) == 2


@pytest.mark.parametrize("step", ["link", "watch"])
def test_close_during_a_put_leaves_no_file(tmp_path, monkeypatch, step):
    store = SharedDirFeatureStore(str(tmp_path))
    owner, name = (os, "link") if step == "link" else (store._outstanding, "add")
    gate = Gate(getattr(owner, name))
    monkeypatch.setattr(owner, name, gate)
    errors = []

    def run():
        try:
            put(store)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.entered.wait(20)
    store.close()
    gate.leave.set()
    thread.join()
    assert len(errors) == 1
    assert os.listdir(tmp_path) == []


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "shared-dir-releases"]


def test_thread_exists_only_from_the_first_put_to_close(tmp_path):
    store = SharedDirFeatureStore(str(tmp_path))
    assert watchers() == []
    put(store)
    assert len(watchers()) == 1
    store.close()
    assert watchers() == []


def test_store_dropped_without_close_takes_its_thread_along(tmp_path):
    store = SharedDirFeatureStore(str(tmp_path))
    put(store)
    (thread,) = watchers()
    del store
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("arguments", [{"directory": ""}, {"release_poll_s": 0}, {"release_poll_s": float("nan")}])
def test_arguments_that_cannot_work_raise_value_error(tmp_path, arguments):
    with pytest.raises(ValueError):
        SharedDirFeatureStore(**{"directory": str(tmp_path), **arguments})


# -- leftovers; those of real crashes are in the tests with several processes --


def dead_owner(pid=2**22 + 1):
    host = leftovers.this_owner().split("-")[0]
    return f"{host}-{pid}-1"


def leave_temporary(tmp_path, owner, age=0.0):
    path = tmp_path / f".put-{owner}-{'0' * 16}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize(
    ("owner", "age", "goes"),
    [
        (dead_owner(), 0.0, True),
        (dead_owner(pid=1), 0.0, True),  # pid 1 lives, but started at another time
        (leftovers.this_owner(), 7200.0, False),
        ("0" * 12 + "-1-1", 0.0, False),
        ("0" * 12 + "-1-1", 7200.0, True),
    ],
    ids=["dead", "pid-reused", "alive", "other-host", "other-host-old"],
)
def test_gc_deletes_half_written_files_of_dead_writers_only(store, tmp_path, owner, age, goes):
    path = leave_temporary(tmp_path, owner, age)
    assert [leftover.sample_id for leftover in store.leftovers()] == [None] * goes
    store._next_scan = 0.0
    assert store.gc() == int(goes)
    assert path.exists() is not goes


def test_gc_reports_unread_samples_of_dead_producers_once_and_keeps_them(store, other, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(shared_dir, "this_owner", dead_owner)
        ref = put(other, "orphan")
    put(other, "fine")
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        store._next_scan = 0.0
        assert store.gc() == 0
    size = os.path.getsize(os.path.join(store._directory, "orphan.safetensors"))
    messages = [record.getMessage() for record in caplog.records if "orphan" in record.getMessage()]
    assert messages == [f"sample orphan ({size} bytes) in {store._directory} is unread and its producer is gone"]
    assert [leftover.sample_id for leftover in store.leftovers()] == ["orphan"]
    consume(store, ref)
    assert store.leftovers() == []


def test_gc_deletes_the_half_written_file_of_a_writer_that_is_dead_but_not_waited_for(store, tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        host = leftovers.this_owner().split("-")[0]
        path = leave_temporary(tmp_path, f"{host}-{process.pid}-{leftovers._start_time(process.pid)}")
        assert store.leftovers() == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        store._next_scan = 0.0
        assert store.gc() == 1
    assert not path.exists()


@pytest.mark.parametrize("clock", ["this host's", "the file server's"])
def test_gc_trusts_no_single_clock_about_the_age_of_another_hosts_file(store, tmp_path, monkeypatch, clock):
    path = leave_temporary(tmp_path, "0" * 12 + "-1-1", 0.0)
    if clock == "this host's":
        ahead = time.time() + 7200
        monkeypatch.setattr(leftovers.time, "time", lambda: ahead)
    else:
        os.utime(tmp_path, (time.time() + 7200,) * 2)
    assert store.leftovers() == []
    assert store.gc() == 0
    assert path.exists()


def test_gc_goes_on_after_a_file_that_it_cannot_delete_and_says_so_once(store, tmp_path, monkeypatch, caplog):
    stuck = leave_temporary(tmp_path, dead_owner())
    other = leave_temporary(tmp_path, dead_owner(pid=2**22 + 2))
    monkeypatch.setattr(os, "unlink", lambda path: no_unlink(path) if path == str(stuck) else unlink(path))
    for _ in range(3):
        store._next_scan = 0.0
        store.gc()
    assert stuck.exists()
    assert not other.exists()
    assert len([record for record in caplog.records if stuck.name in record.getMessage()]) == 1


def test_gc_from_several_threads_tries_each_file_again_and_none_fails(store, tmp_path, monkeypatch):
    refs = [put(store, f"s{index}") for index in range(50)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", no_unlink)
        for ref in refs:
            consume(store, ref)
    with ThreadPoolExecutor(8) as pool:
        counts = [future.result() for future in [pool.submit(store.gc) for _ in range(8)]]
    assert os.listdir(tmp_path) == []
    assert sum(counts) == 50


def test_gc_called_often_scans_seldom(store, monkeypatch):
    scans = []
    scan = store._scan

    def slow_scan():
        scans.append(1)
        time.sleep(0.05)
        return scan()

    monkeypatch.setattr(store, "_scan", slow_scan)
    started = time.monotonic()
    for _ in range(100):
        store.gc()
    assert len(scans) <= 1 + (time.monotonic() - started) / (0.05 * shared_dir.SCAN_SHARE)


def test_scan_reads_each_header_once_and_survives_foreign_files(store, tmp_path, monkeypatch):
    put(store)
    (tmp_path / "notes.safetensors").write_text("not a sample")
    (tmp_path / "folder.safetensors").mkdir()
    reads = []
    (tmp_path / "theirs.safetensors").write_bytes(safetensors.torch.save({"x": torch.zeros(1)}))
    original = leftovers._writer_of
    monkeypatch.setattr(leftovers, "_writer_of", lambda path: reads.append(path) or original(path))
    assert store.leftovers() == []
    assert store.leftovers() == []
    assert sorted(map(os.path.basename, reads)) == ["notes.safetensors", "s.safetensors", "theirs.safetensors"]


def test_header_of_unreasonable_length_is_not_read(tmp_path):
    path = tmp_path / "big"
    path.write_bytes((sample_file.MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    truncate(path, sample_file.MAX_HEADER_BYTES + 100)
    with open(path, "rb") as file, pytest.raises(SpecMismatchError):
        sample_file.read_header(file, "it")
