"""What crashed processes leave in a shared directory, and how to tell it from what live ones are still writing.

A half-written file carries its writer in its name, a sample in its metadata. Only processes of this host (and of this
process's view of it: same boot, same pid namespace) can be judged; what others leave is judged by age alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nccl_stream.errors import MisuseError, SpecMismatchError
from nccl_stream.stores.directory import SAMPLE_SUFFIX, open_sample
from nccl_stream.stores.sample_file import read_header

__all__ = ["Leftover", "LeftoverScan", "new_temporary_name", "new_token", "this_owner"]

TEMPORARY_MAX_AGE_S = 3600.0
"""Age at which a half-written file of another host counts as left behind; no put takes an hour."""

_TEMPORARY = re.compile(r"\.put-([0-9a-f]{12}-\d+-\d+)-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class Leftover:
    """A file whose writer is gone.

    Attributes:
        name: file name within the directory.
        nbytes: size of the file.
        sample_id: the unread sample in it; None for a file that was never finished.
    """

    name: str
    nbytes: int
    sample_id: str | None


@lru_cache(maxsize=4)
def _host(pid: int) -> str:
    """Digest of what makes pids comparable: host, boot and pid namespace. ``pid`` only keys the cache over forks."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    except OSError:
        pass  # not Linux: the host's name has to do
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks, so that a reused pid is not taken for the old one; None: cannot be known.

    0 for a process that is dead and only not yet waited for: it writes no more.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def this_owner() -> str:
    """Identity of this process, as written into files."""
    pid = os.getpid()
    return f"{_host(pid)}-{pid}-{_start_time(pid) or 0}"


def new_token() -> str:
    """What nobody else has."""
    return secrets.token_hex(8)


def new_temporary_name() -> str:
    """A file name that nobody else uses and that tells who is writing."""
    return f".put-{this_owner()}-{new_token()}.tmp"


def _is_gone(owner: str) -> bool | None:
    """Whether the process is gone; None when that cannot be known from here."""
    host, _, process = owner.partition("-")
    pid, _, started = process.partition("-")
    if host != _host(os.getpid()) or not (pid.isdigit() and started.isdigit()):
        return None
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # somebody else's, so it lives
    return _start_time(int(pid)) not in (int(started), None)


class LeftoverScan:
    """Lists the leftovers of one directory. Reads each sample's header only once; not thread-safe."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writers: dict[tuple[str, int, int], tuple[str, bool]] = {}

    def __call__(self) -> list[Leftover]:
        """Scan now."""
        found = []
        writers: dict[tuple[str, int, int], tuple[str, bool]] = {}
        # A clock may be wrong. What is old by this one and by the file server's, which stamps both, is old.
        now = min(time.time(), os.stat(self._directory).st_mtime)
        for entry, status in self._files():
            match = _TEMPORARY.fullmatch(entry.name)
            if match is not None:
                gone = _is_gone(match[1])
                if gone is None:
                    gone = now - status.st_mtime > TEMPORARY_MAX_AGE_S
                if gone:
                    found.append(Leftover(entry.name, status.st_size, None))
            elif entry.name.endswith(SAMPLE_SUFFIX):
                key = (entry.name, status.st_ino, status.st_mtime_ns)
                writers[key] = self._writers.get(key) or _writer_of(entry.path)
                owner, is_finished = writers[key]
                if _is_gone(owner):
                    sample_id = entry.name.removesuffix(SAMPLE_SUFFIX) if is_finished else None
                    found.append(Leftover(entry.name, status.st_size, sample_id))
        self._writers = writers
        return sorted(found, key=lambda leftover: leftover.name)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        yield entry, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # consumed meanwhile


def _writer_of(path: str) -> tuple[str, bool]:
    """Who wrote the file, "" if that is not known, and whether it is a sample or only the claim of a name for one."""
    try:
        with open_sample(path) as file:
            header = read_header(file, path)
    except (OSError, MisuseError, SpecMismatchError):
        return "", False
    return header.owner, bool(header.features)
