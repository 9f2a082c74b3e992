"""Links over 2-rank process groups: gloo between CPUs, NCCL between CUDA devices, never one in place of the other."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from nccl_stream._version import __version__
from nccl_stream.errors import ConfigError, LinkError, LinkTimeoutError, VersionMismatchError
from nccl_stream.transport.link import MAX_SHOWN, RECEIVER, SENDER, HostBytes, Link, Transfer, link_error, warm_up
from nccl_stream.transport.nccl_group import NcclLink, connect_nccl

__all__ = ["GlooLink", "NcclLink", "open_link"]

logger = logging.getLogger(__name__)

_ABORT_TAG, _SENTINEL_TAG = 0x7FFFFFFF, 0x7FFFFFFE  # gloo tags on which nobody ever sends
_FOREVER = timedelta(days=365)
_GLOO_INFLIGHT_OPS = 64


def _milliseconds(seconds: float) -> timedelta:
    # gloo reads 0 as "no deadline", and counts in whole milliseconds.
    return timedelta(milliseconds=max(1, int(seconds * 1000)))


class GlooLink(Link):
    """A link over a gloo process group of two, on the CPU.

    gloo has two gaps to work around. Its own abort wakes nobody; but a wait that times out closes the pair on the spot,
    without asking the peer. And when a pair breaks, only operations that have not begun are told: one that was half
    through is forgotten, and whoever waits for it waits until the timeout. So every link keeps a receive pending on
    which nobody ever sends: it raises when the pair breaks.
    """

    pollable = False
    max_inflight_ops = _GLOO_INFLIGHT_OPS

    def __init__(self, group: Any, other: int, *, peer: str) -> None:
        self.device = torch.device("cpu")
        self.peer = peer
        self._group = group
        self._other = other
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._never = torch.empty(1, dtype=torch.uint8)
        self._sentinel = group.recv([self._never], other, _SENTINEL_TAG)

    def send(self, buf: torch.Tensor | HostBytes) -> Transfer:
        return self._start("send to", self._check(buf))

    def recv(self, buf: torch.Tensor) -> Transfer:
        return self._start("receive from", self._check(buf))

    def watch(self) -> str:
        try:
            self._sentinel.wait(_FOREVER)
        except RuntimeError as error:
            return str(link_error(error, "the connection to", self.peer)) if self._ended is None else self._ended
        return "the peer sent what no link sends"

    def abort(self) -> None:
        self._end("aborted")

    def close(self) -> None:
        self._end("closed")

    def _end(self, how: str) -> None:
        # Whoever comes second waits here: when this returns, the pair is closed.
        with self._lock:
            if self._ended is not None:
                return
            self._ended = how
            group, self._group = self._group, None
            try:
                probe = group.recv([torch.empty(1, dtype=torch.uint8)], self._other, _ABORT_TAG)
                probe.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                logger.debug("link to %s %s: %s", self.peer, how, error)

    def _start(self, operation: str, buf: torch.Tensor) -> Transfer:
        group = self._group
        if self._ended is not None or group is None:
            raise LinkError(f"{operation} {self.peer}: the link is {self._ended}")
        try:
            work = (group.send if operation == "send to" else group.recv)([buf], self._other, 0)
        except RuntimeError as error:
            raise link_error(error, operation, self.peer) from error
        return _GlooTransfer(work, buf, operation, self)


class _GlooTransfer(Transfer):
    def __init__(self, work: Any, buf: torch.Tensor, operation: str, link: GlooLink) -> None:
        # A Work that is dropped before it finished wedges the pair, so it lives as long as this object.
        self._work = work
        self._buf = buf
        self._operation = operation
        self._link = link

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(_milliseconds(timeout))
        except RuntimeError as error:
            if self._link._ended is not None:
                raise LinkError(f"{self._operation} {self._link.peer}: the link is {self._link._ended}") from error
            raise link_error(error, self._operation, self._link.peer) from error

    def done(self) -> bool:
        return False


_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05


class _Deadline:
    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())


def open_link(
    store: Store,
    prefix: str,
    side: int,
    device: torch.device | str,
    timeout: float,
    *,
    peer: str,
    cancelled: Callable[[], bool] = lambda: False,
) -> Link:
    """Builds one link; both ends call it with the same prefix. Blocks until the link carried a byte.

    The device decides what carries the link: gloo on the CPU, NCCL on CUDA. Nothing is ever swapped for the other.

    Args:
        store: used by this call and by the process group for as long as the link lives; nobody else may block on it.
        prefix: keys of this link alone. A prefix can never be used twice.
        side: 0 for the end that sends, 1 for the end that receives.
        device: where the buffers lie.
        timeout: seconds for everything together.
        peer: name of the other end, for messages.
        cancelled: asked every now and then while the peer is awaited; when it says so, the wait ends in an error.

    Raises:
        LinkTimeoutError: the peer did not come within the timeout.
        VersionMismatchError: the two ends run another nccl_stream, torch or NCCL, or another kind of device.
        LinkError: the link could not be built.
        ConfigError: no such device here, or torch was built without its backend.
    """
    if side not in (SENDER, RECEIVER):
        raise ConfigError(f"side must be 0 (sends) or 1 (receives), got {side!r}")
    device = torch.device(device)
    deadline = _Deadline(timeout)
    scoped = PrefixStore(prefix, store)
    _check_device(device)
    _compare_versions(scoped, side, _versions(device), deadline, peer, cancelled)
    if device.type == "cuda":
        return connect_nccl(scoped, side, device, deadline.left(), peer=peer)
    link = _connect_gloo(scoped, side, deadline, peer)
    try:
        warm_up(link, side, deadline.left())
    except BaseException:
        link.abort()
        raise
    return link


def _check_device(device: torch.device) -> None:
    if device.type == "cpu":
        if not dist.is_gloo_available():
            raise ConfigError("links between CPUs need gloo, which this build of torch lacks")
    elif device.type == "cuda":
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ConfigError(f"links on {device} need a CUDA device and NCCL in torch; use device 'cpu' without them")
        if device.index is None:
            raise ConfigError("name the CUDA device with its index, e.g. 'cuda:0'")
    else:
        raise ConfigError(f"links run on 'cpu' or 'cuda:N', got {device}")


def _versions(device: torch.device) -> dict[str, str]:
    # Both ends derive the layout of a sample from its ref: with other code on one end, gloo kills the process that gets
    # more bytes than it expects.
    versions = {"device": device.type, "nccl_stream": __version__, "torch": str(torch.__version__).split("+")[0]}
    if device.type == "cuda":
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return versions


def _compare_versions(
    store: Store, side: int, mine: dict[str, str], deadline: _Deadline, peer: str, cancelled: Callable[[], bool]
) -> None:
    theirs_key = f"versions/{1 - side}"
    try:
        store.set(f"versions/{side}", json.dumps(mine, sort_keys=True))
        # Looking again and again, not a blocking wait: nothing could end that when the peer dies meanwhile.
        pause = _FIRST_LOOK_S
        while not store.check([theirs_key]):
            if cancelled():
                raise LinkError(f"{peer} is not awaited any more; it did not open its side of the link")
            if deadline.left() <= pause:
                raise LinkTimeoutError(
                    f"{peer} did not open its side of the link in time; is it running, and does it know of this link?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        raw = store.get(theirs_key)
    except LinkError:
        raise
    except RuntimeError as error:
        raise link_error(error, "opening a link to", peer) from error
    if raw != json.dumps(mine, sort_keys=True).encode():
        shown = raw[:MAX_SHOWN].decode("utf-8", "replace")
        raise VersionMismatchError(
            f"{peer} runs {shown}, this rank {json.dumps(mine, sort_keys=True)}: install the same on both"
        )


def _connect_gloo(store: Store, side: int, deadline: _Deadline, peer: str) -> GlooLink:
    try:
        group = ProcessGroupGloo(store, side, 2, _milliseconds(deadline.left()))
    except RuntimeError as error:
        raise link_error(error, "opening a link to", peer) from error
    return GlooLink(group, 1 - side, peer=peer)
