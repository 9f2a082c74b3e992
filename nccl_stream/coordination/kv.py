"""The typed face of a ``TCPStore``: bounded JSON values under one prefix, foreign errors translated in one place."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from nccl_stream.errors import ControlStoreError, WireFormatError

__all__ = ["MAX_VALUE_BYTES", "ControlStore", "clone_store", "dump_json", "launch_store", "load_json", "tcp_store"]

# A TCPStore client loses its connection for good on a value over 8 MiB; half of that leaves room for framing.
MAX_VALUE_BYTES = 4 * 1024 * 1024

_FOREVER = timedelta(days=30)


def tcp_store(host: str, port: int, *, serve: bool, timeout: float) -> Store:
    """A ``TCPStore``: the server itself, or a client of one; ``RuntimeError`` or ``OSError`` when it cannot be had.

    The server listens on ``host`` only. Left to itself it would listen on every interface, through an IPv6 socket on
    which IPv4 clients show with mapped addresses: it looks up the name of each client that connects, on its one thread,
    and for those only a name server can answer. When that is slow, all clients stand still with it.
    """
    listener = _listen(host, port) if serve else None
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs leave it out
        host,
        port if listener is None else listener.getsockname()[1],
        is_master=serve,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return store


def launch_store(host: str, port: int, *, serve: bool, timeout: float) -> Store:
    """The ``TCPStore`` at which the ranks of one launch meet; ``RuntimeError`` when it cannot be had.

    As torch's rendezvous makes it, on every interface and shared with other groups of this process, but without
    waiting for the other ranks: who is missing is found out later, by name.
    """
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs leave it out
        host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout), multi_tenant=True
    )
    return store


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def clone_store(store: Store) -> Store:
    """A second connection to the same server; a blocked client holds its connection's lock.

    Raises:
        ControlStoreError: only a TCPStore can do that.
    """
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
    except (RuntimeError, NotImplementedError, AttributeError) as exc:
        raise ControlStoreError(
            f"the control plane needs a TCPStore; {type(store).__name__} cannot be cloned per thread"
        ) from exc
    return clone


def _refuse_constant(name: str) -> Any:
    raise WireFormatError(f"control value holds the non-JSON constant {name}")


def dump_json(value: Any) -> str:
    """Compact JSON text of ``value``; raises :class:`WireFormatError` when it is larger than a store value may be."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_VALUE_BYTES:
        raise WireFormatError(f"control value of {len(text)} bytes exceeds the limit of {MAX_VALUE_BYTES}")
    return text


def load_json(raw: bytes | str) -> Any:
    """Parse a store value; anything but bounded, plain JSON raises :class:`WireFormatError`."""
    if len(raw) > MAX_VALUE_BYTES:
        raise WireFormatError(f"control value of {len(raw)} bytes exceeds the limit of {MAX_VALUE_BYTES}")
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise WireFormatError(f"control value is not JSON: {str(exc)[:120]}") from exc


class ControlStore:
    """One thread's client of the control-plane store.

    A blocked client holds its connection's lock, so every thread uses a :meth:`clone` of its own. All values are JSON;
    nothing is ever unpickled.

    Args:
        store: a ``torch.distributed.TCPStore`` (or a ``PrefixStore`` over one).
        prefix: put before every key.
        timeout: seconds after which a call on a missing key, or on an unresponsive server, raises. A *frozen* server
            makes a client ignore this; the node's watchdog covers that case.

    Raises:
        ControlStoreError: from every method, when the server is gone or does not answer.
        WireFormatError: when a value read is not bounded JSON.
    """

    def __init__(self, store: Store, prefix: str, *, timeout: float = 30.0) -> None:
        self._raw = store
        self.prefix = prefix
        self._timeout = timeout
        self._client = clone_store(store)
        self._client.set_timeout(timedelta(seconds=timeout))

    @property
    def raw(self) -> Store:
        """The store this client was made from; process groups rendezvous over it."""
        return self._raw

    def clone(self, prefix: str) -> ControlStore:
        """A client with its own connection, for another thread."""
        return ControlStore(self._raw, prefix, timeout=self._timeout)

    def scoped(self, suffix: str) -> ControlStore:
        """The same connection (so: the same thread) under a longer prefix."""
        scoped = copy.copy(self)
        scoped.prefix = f"{self.prefix}/{suffix}"
        return scoped

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _failed(self, what: str, key: str, exc: BaseException) -> ControlStoreError:
        return ControlStoreError(f"control store: {what} of {key!r} failed: {str(exc).splitlines()[0][:200]}")

    def set(self, key: str, value: Any) -> None:
        """Write; returns before the server has answered (proves nothing about its being alive)."""
        text = dump_json(value)
        try:
            self._client.set(self._key(key), text)
        except RuntimeError as exc:
            raise self._failed("set", key, exc) from exc

    def set_many(self, values: Mapping[str, Any]) -> None:
        """Write several keys in one call."""
        if not values:
            return
        texts = [dump_json(value) for value in values.values()]
        try:
            self._client.multi_set([self._key(key) for key in values], texts)  # type: ignore[attr-defined]
        except RuntimeError as exc:
            raise self._failed("set", next(iter(values)), exc) from exc

    def get(self, key: str) -> Any | None:
        """Read without waiting; None when the key is missing."""
        full = self._key(key)
        try:
            if not self._client.check([full]):
                return None
            raw = self._client.get(full)
        except RuntimeError as exc:
            raise self._failed("get", key, exc) from exc
        return load_json(raw)

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        """Read keys that are known to exist, in one call. A value that is not JSON comes back as its error."""
        if not keys:
            return []
        try:
            raws = self._client.multi_get([self._key(key) for key in keys])
        except RuntimeError as exc:
            raise self._failed("get", keys[0], exc) from exc
        values: list[Any] = []
        for raw in raws:
            try:
                values.append(load_json(raw))
            except WireFormatError as exc:
                values.append(exc)
        return values

    def exists(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist; does not wait."""
        try:
            return bool(self._client.check([self._key(key) for key in keys]))
        except RuntimeError as exc:
            raise self._failed("check", keys[0] if keys else "", exc) from exc

    def compare_set(self, key: str, expected: Any | None, desired: Any) -> bool:
        """Replace ``expected`` (None: a missing key) by ``desired``; True when this call did it.

        ``desired`` must differ from any value another process would write, since success is read off the answer.
        """
        before = "" if expected is None else dump_json(expected)
        after = dump_json(desired)
        try:
            if before and not self._client.check([self._key(key)]):
                return False  # compare_set on a missing key would echo `before` and set nothing
            answer = self._client.compare_set(self._key(key), before, after)
        except RuntimeError as exc:
            raise self._failed("compare_set", key, exc) from exc
        return bool(answer == after.encode())

    def replace(self, key: str, desired: Any, *, unless: Callable[[Any], bool]) -> bool:
        """Replace what stands there, whatever it is, unless it is to be kept; True when this call did it.

        A missing key, a value that is not JSON, and one for which ``unless`` raises :class:`WireFormatError` are not
        kept. Of several that replace at once, one does; ``desired`` must differ between them.
        """
        after = dump_json(desired)
        try:
            raw = self._client.get(self._key(key)) if self._client.check([self._key(key)]) else b""
            try:
                if raw and unless(load_json(raw)):
                    return False
            except WireFormatError:
                pass  # nobody can obey it
            answer = self._client.compare_set(self._key(key), raw, after)  # type: ignore[arg-type]  # bytes do
        except RuntimeError as exc:
            raise self._failed("replace", key, exc) from exc
        return bool(answer == after.encode())

    def push(self, key: str, text: str) -> None:
        """Append JSON text to a queue; returns before the server has answered."""
        try:
            self._client.queue_push(self._key(key), text)
        except RuntimeError as exc:
            raise self._failed("push", key, exc) from exc

    def pop(self, key: str) -> bytes:
        """Take the oldest entry of a queue, blocking until there is one (no timeout: wake it with a message)."""
        try:
            self._client.set_timeout(_FOREVER)
            return bytes(self._client.queue_pop(self._key(key)))
        except RuntimeError as exc:
            raise self._failed("pop", key, exc) from exc

    def delete(self, key: str) -> None:
        try:
            self._client.delete_key(self._key(key))
        except RuntimeError as exc:
            raise self._failed("delete", key, exc) from exc
