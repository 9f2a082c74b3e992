"""Pools in shared memory, between real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
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


# Importing torch takes seconds, so one process does it, and each process that a test needs is forked from that one: it
# connects to the socket that it is told, has its input and output there, and runs its script.
NURSERY = """
import json, os, signal, socket, sys, traceback
import nccl_stream.staging
from nccl_stream import _core
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(order["socket"])
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = ["-c", *order["arguments"]]
    if order["core"] == "python":
        _core.native = None
    print(os.getpid(), flush=True)
    break
else:
    os._exit(0)
exec(order["script"])
print("done", flush=True)
"""


class Process:
    """A process that runs a script, with its input and output."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self._pid = int(self.line())

    def line(self) -> str:
        return self._lines.readline().strip()

    def finish(self) -> str:
        """Ends its input, and waits for its end; the last line of its output, "done" where the script ran through."""
        self._connection.shutdown(socket.SHUT_WR)
        return self._lines.read().strip().rpartition("\n")[2]

    def kill(self) -> None:
        if self._lines.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._lines.read()
        self._lines.close()
        self._connection.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, text=True) as process:
        yield process


Start = Callable[..., Process]


@pytest.fixture
def start(nursery: subprocess.Popen[str], core: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that runs a script over the core under test; what follows the script is its ``sys.argv``."""
    started: list[Process] = []
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(TIMEOUT_S)

        def start(script: str, *arguments: str) -> Process:
            whole = "from nccl_stream.staging import *\n" + textwrap.dedent(script)
            order = {"socket": address, "arguments": arguments, "core": core, "script": whole}
            assert nursery.stdin is not None
            nursery.stdin.write(json.dumps(order) + "\n")
            nursery.stdin.flush()
            connection, _ = listener.accept()
            connection.settimeout(TIMEOUT_S)
            started.append(Process(connection))
            return started[-1]

        yield start
    for process in started:
        process.kill()


CREATOR = """
    pool = PinnedPool(1 << 20, shared_memory=sys.argv[1])
    slot = pool.reserve(100_000)
    slot.buffer.fill_(9)
    print("ready", slot.offset, flush=True)
    sys.stdin.read()
    pool.close()
"""


def test_open_shared_sees_what_the_other_process_writes_and_the_other_way_round(name: str, start: Start) -> None:
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
        )
        assert reader.line() == f"{3 << 20} {expected}"
        assert reader.finish() == "done"
        assert slot.buffer.eq(5).all()


def test_open_shared_memory_outlives_its_creator(name: str, start: Start) -> None:
    creator = start(CREATOR, name)
    offset = int(creator.line().split()[1])
    memory = open_shared(name)
    assert creator.finish() == "done"
    assert memory[offset : offset + 100_000].eq(9).all()
    with pytest.raises(MisuseError, match=name):
        open_shared(name)


def test_create_under_a_living_name_is_misuse_and_leaves_it_alone(name: str, start: Start) -> None:
    creator = start(CREATOR, name)
    creator.line()
    with pytest.raises(MisuseError, match="living process"):
        PinnedPool(1 << 20, shared_memory=name)
    assert name not in remove_abandoned("test-")
    assert open_shared(name).numel() == 1 << 20
    assert creator.finish() == "done"


@pytest.mark.parametrize("how", ["create", "sweep"])
def test_name_left_by_a_killed_process_is_taken_over(name: str, how: str, start: Start) -> None:
    creator = start(CREATOR, name)
    creator.line()
    creator.kill()
    assert open_shared(name).numel() == 1 << 20  # what it left is still there
    if how == "sweep":
        assert name in remove_abandoned("test-")
        assert name not in remove_abandoned("test-")
    else:
        with PinnedPool(1 << 19, shared_memory=name) as pool:
            assert open_shared(name).numel() == 1 << 19
            assert not pool.reserve(1 << 19).buffer.any()


def test_creators_racing_for_one_abandoned_name_only_one_gets_it(name: str, start: Start) -> None:
    first = start(CREATOR, name)
    first.line()
    first.kill()
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
    )
    assert sorted(racers.line() for _ in range(4)) == ["MisuseError"] * 3 + ["won"]
    assert open_shared(name).numel() == 1 << 20
    assert racers.finish() == "done"


def test_forked_child_that_ends_leaves_the_name_to_its_parent(name: str, start: Start) -> None:
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
    )
    assert parent.line() == str(1 << 20)
    assert parent.finish() == "done"


def test_pool_that_is_never_closed_takes_its_name_away_at_exit(name: str, start: Start) -> None:
    process = start("pool = PinnedPool(1 << 20, shared_memory=sys.argv[1])", name)
    assert process.finish() == "done"
    with pytest.raises(MisuseError):
        open_shared(name)


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
