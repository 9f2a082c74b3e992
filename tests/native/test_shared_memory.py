"""Pools in shared memory, between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nccl_stream.errors import CapacityError, MisuseError
from nccl_stream.staging import PinnedPool, crc32c, open_shared, remove_abandoned

pytestmark = [pytest.mark.usefixtures("core"), pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")]
TIMEOUT_S = 60.0


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def start(script: str, *arguments: str, core: str) -> subprocess.Popen[str]:
    """A real process that prints a line when it is ready and then reads its input to the end."""
    head = "import os, sys\nfrom nccl_stream import _core\n" + ("_core.native = None\n" if core == "python" else "")
    body = "from nccl_stream.staging import *\n" + textwrap.dedent(script)
    process = subprocess.Popen(
        [sys.executable, "-c", head + body, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _started.append(process)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=TIMEOUT_S)
    return process.returncode


CREATOR = """
    pool = PinnedPool(1 << 20, shared_memory=sys.argv[1])
    slot = pool.reserve(100_000)
    slot.buffer.fill_(9)
    print("ready", slot.offset, flush=True)
    sys.stdin.read()
    pool.close()
"""


def test_open_shared_sees_what_the_other_process_writes_and_the_other_way_round(name: str, core: str) -> None:
    with PinnedPool(3 << 20, shared_memory=name) as pool:
        pool.reserve(4096)
        slot = pool.reserve(1 << 20)
        slot.buffer.copy_(torch.arange(1 << 20) % 251)
        expected = crc32c(slot.buffer)
        reader = start(
            """
            memory = open_shared(sys.argv[1])
            start, stop = int(sys.argv[2]), int(sys.argv[3])
            print(memory.numel(), crc32c(memory[start:stop]), flush=True)
            memory[start:stop].fill_(5)
            """,
            *(name, str(slot.offset), str(slot.offset + slot.nbytes)),
            core=core,
        )
        assert line_of(reader) == f"{3 << 20} {expected}"
        assert finish(reader) == 0
        assert slot.buffer.eq(5).all()


def test_open_shared_memory_outlives_its_creator(name: str, core: str) -> None:
    creator = start(CREATOR, name, core=core)
    offset = int(line_of(creator).split()[1])
    memory = open_shared(name)
    assert finish(creator) == 0
    assert memory[offset : offset + 100_000].eq(9).all()
    with pytest.raises(MisuseError, match=name):
        open_shared(name)


def test_create_under_a_living_name_is_misuse_and_leaves_it_alone(name: str, core: str) -> None:
    creator = start(CREATOR, name, core=core)
    line_of(creator)
    with pytest.raises(MisuseError, match="living process"):
        PinnedPool(1 << 20, shared_memory=name)
    assert name not in remove_abandoned("test-")
    assert open_shared(name).numel() == 1 << 20
    assert finish(creator) == 0


@pytest.mark.parametrize("how", ["create", "sweep"])
def test_name_left_by_a_killed_process_is_taken_over(name: str, how: str, core: str) -> None:
    creator = start(CREATOR, name, core=core)
    line_of(creator)
    creator.send_signal(signal.SIGKILL)
    finish(creator)
    assert open_shared(name).numel() == 1 << 20  # what it left is still there
    if how == "sweep":
        assert name in remove_abandoned("test-")
        assert name not in remove_abandoned("test-")
    else:
        with PinnedPool(1 << 19, shared_memory=name) as pool:
            assert open_shared(name).numel() == 1 << 19
            assert not pool.reserve(1 << 19).buffer.any()


def test_creators_racing_for_one_abandoned_name_only_one_gets_it(name: str, core: str) -> None:
    first = start(CREATOR, name, core=core)
    line_of(first)
    first.kill()
    finish(first)
    racers = start(
        """
        gate, go = os.pipe()
        for _ in range(4):
            if os.fork() == 0:
                os.read(gate, 1)
                try:
                    pool = PinnedPool(1 << 20, shared_memory=sys.argv[1])
                except Exception as error:
                    os.write(1, f"{type(error).__name__}\\n".encode())
                else:
                    os.write(1, b"won\\n")
                    sys.stdin.read()
                    pool.close()
                os._exit(0)
        os.write(go, b"gogo")  # all at once
        for _ in range(4):
            os.wait()
        """,
        name,
        core=core,
    )
    assert sorted(line_of(racers) for _ in range(4)) == ["MisuseError"] * 3 + ["won"]
    assert open_shared(name).numel() == 1 << 20
    assert finish(racers) == 0


def test_forked_child_that_ends_leaves_the_name_to_its_parent(name: str, core: str) -> None:
    parent = start(
        """
        pool = PinnedPool(1 << 20, shared_memory=sys.argv[1])
        pid = os.fork()
        if pid == 0:
            pool.close()
            del pool
            os._exit(0)
        os.waitpid(pid, 0)
        print(open_shared(sys.argv[1]).numel(), flush=True)
        pool.close()
        """,
        name,
        core=core,
    )
    assert line_of(parent) == str(1 << 20)
    assert finish(parent) == 0


def test_create_more_than_the_file_system_has_is_a_capacity_error_and_leaves_nothing(name: str) -> None:
    status = os.statvfs("/dev/shm")
    with pytest.raises(CapacityError) as caught:
        PinnedPool(status.f_bavail * status.f_frsize + (64 << 30), shared_memory=name)
    assert not caught.value.can_wait


@pytest.mark.parametrize("bad", ["", "a/b", "x\0y", "y" * 300])
def test_open_shared_name_that_cannot_be_is_misuse(bad: str) -> None:
    with pytest.raises(MisuseError):
        open_shared(bad)


def test_remove_abandoned_touches_only_names_of_pools(name: str) -> None:
    foreign = Path("/dev/shm") / name
    foreign.write_bytes(b"somebody else's")
    try:
        assert remove_abandoned(name) == []
        assert foreign.exists()
    finally:
        foreign.unlink()
