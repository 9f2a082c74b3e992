"""A few tensors from a target to every draft, through the control-plane store: embeddings, head, norm, vocabulary map.

For weights that are read once, not for samples: they go through the store's host, which keeps them until the run ends.
A JSON manifest names the tensors and the SHA-256 of everything; the bytes themselves go in raw pieces. Nothing is ever
unpickled.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from nccl_stream.coordination.kv import clone_store, dump_json, load_json
from nccl_stream.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    ControlStoreError,
    MisuseError,
    PeerTimeoutError,
    WireFormatError,
)
from nccl_stream.refs import FeatureSpec, dtype_from_name, dtype_name
from nccl_stream.stores.tensors import check_tensors, copy_tensor

__all__ = ["PIECE_BYTES", "SharedTensors"]

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Largest value put into the store; a client loses its connection on one over 8 MiB."""

MAX_TENSORS = 1024
POLL_S = 0.1

_NAME = re.compile(r"[\w.\-]{1,200}")
_VERSION = 1
_MANIFEST_FIELDS = {"v", "owner", "label", "tensors", "sha256"}


class SharedTensors:
    """Named sets of tensors under one prefix of a store. One thread at a time.

    Args:
        store: the control-plane store.
        prefix: of this run and epoch, so that no earlier life's tensors are met.
        owner: id of this process, unique in the epoch.
        label: how messages name this process.
        timeout: seconds after which a call that the store does not answer raises.
        max_bytes: most that this process publishes in all, and most that it fetches under one name. The process that
            hosts the store keeps what every publisher has put there in memory.
    """

    def __init__(self, store: Store, prefix: str, *, owner: str, label: str, timeout: float, max_bytes: int) -> None:
        self._store = store
        self._prefix = f"{prefix}/shared"
        self._owner = owner
        self._label = label
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._published: dict[str, int] = {}

    def publish(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Make ``tensors`` available under ``name``; returns once the store has them.

        Several targets may publish the same tensors under one name; the first ones are kept.

        Args:
            name: letters, digits, ``_``, ``-``, ``.``; at most 200.
            tensors: dense tensors on any device; the caller keeps them.

        Returns:
            SHA-256 over names, dtypes, shapes and bytes, in hex.

        Raises:
            MisuseError: (``ValueError``) a bad name, or values that are not dense tensors.
            CapacityError: (``MemoryError``) with what this rank has shared already, more than ``max_bytes``.
            ConfigError: (``ValueError``) something else has this name, from this target or another one.
            ControlStoreError: the store does not answer.
        """
        _check_name(name)
        check_tensors(name, tensors)
        if len(tensors) > MAX_TENSORS:
            raise MisuseError(f"shared {name!r} has {len(tensors)} tensors; at most {MAX_TENSORS} go under one name")
        specs = {key: FeatureSpec.of(tensor) for key, tensor in tensors.items()}
        nbytes = sum(spec.nbytes for spec in specs.values())
        others = sum(size for other, size in self._published.items() if other != name)
        if nbytes + others > self._max_bytes:
            raise CapacityError(
                f"sharing {name!r} would put {nbytes} bytes beside {others} shared before into the control store; the "
                f"limit is {self._max_bytes} (StreamConfig.max_shared_bytes). Read large weights from a checkpoint on "
                "each draft rank instead.",
                can_wait=False,
            )
        described = [[key, dtype_name(spec.dtype), list(spec.shape)] for key, spec in specs.items()]
        host = {key: copy_tensor(tensor, torch.device("cpu")) for key, tensor in tensors.items()}
        digest = _digest(described, host.values())
        manifest = {
            "v": _VERSION,
            "owner": self._owner,
            "label": self._label,
            "tensors": described,
            "sha256": digest,
        }
        client = self._client()
        if not self._same_as_there(client, name, digest):
            keys = []
            for index, piece in enumerate(_pieces(host.values())):
                keys.append(self._piece_key(name, self._owner, index))
                _call(name, partial(client.set, keys[-1], piece.numpy().tobytes()))  # type: ignore[arg-type]
            # Set last, on the same connection: who sees the manifest finds every piece.
            text = dump_json(manifest)
            answer = _call(name, partial(client.compare_set, self._manifest_key(name), "", text))
            if answer != text.encode():  # another target was faster
                for key in keys:
                    _call(name, partial(client.delete_key, key))
                self._same_as_there(client, name, digest)
        self._published[name] = nbytes
        return digest

    def fetch(
        self, name: str, timeout: float, waiting_for: Callable[[], str], device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Wait until ``name`` is there and return its tensors.

        Args:
            name: as it was published.
            timeout: longest wait, in seconds.
            waiting_for: called while waiting; says whom for, and raises when the wait is in vain.
            device: where the tensors shall be.

        Raises:
            PeerTimeoutError: nobody published it in time; names those who could have.
            ChecksumError: what came is not what the manifest says.
            WireFormatError: the manifest is malformed or too large.
            ControlStoreError: the store does not answer.
        """
        _check_name(name)
        client = self._client()
        deadline = time.monotonic() + timeout
        while not _call(name, partial(client.check, [self._manifest_key(name)])):
            whom = waiting_for()
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"nothing was shared as {name!r} within {timeout:.0f} s by {whom}: does it call "
                    f"stream.share({name!r}, ...)?"
                )
            time.sleep(POLL_S)
        manifest = self._manifest(client, name)
        tensors: dict[str, torch.Tensor] = {}
        for key, spec in manifest["specs"].items():
            # Bytes first: torch has no host copy for every dtype.
            tensors[key] = torch.empty(spec.nbytes, dtype=torch.uint8)
        for index, piece in enumerate(_pieces(tensors.values())):
            key = self._piece_key(name, manifest["owner"], index)
            if not _call(name, partial(client.check, [key])):
                raise ChecksumError(f"shared {name!r} from {manifest['label']} lacks piece {index}")
            data = _call(name, partial(client.get, key))
            if len(data) != piece.numel():
                raise ChecksumError(f"piece {index} of shared {name!r} has {len(data)} bytes, not {piece.numel()}")
            piece.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if _digest(manifest["tensors"], tensors.values()) != manifest["sha256"]:
            raise ChecksumError(f"shared {name!r} from {manifest['label']} does not have the digest it was sent with")
        shaped = {k: tensors[k].view(spec.dtype).reshape(spec.shape) for k, spec in manifest["specs"].items()}
        return {key: tensor.to(device) for key, tensor in shaped.items()}

    def _client(self) -> Store:
        client = clone_store(self._store)
        client.set_timeout(timedelta(seconds=self._timeout))
        return client

    def _manifest_key(self, name: str) -> str:
        return f"{self._prefix}/{name}/manifest"

    def _piece_key(self, name: str, owner: str, index: int) -> str:
        return f"{self._prefix}/{name}/{owner}/{index}"

    def _manifest(self, client: Store, name: str) -> dict[str, Any]:
        return _parse_manifest(_call(name, partial(client.get, self._manifest_key(name))), self._max_bytes)

    def _same_as_there(self, client: Store, name: str, digest: str) -> bool:
        """Whether the same tensors have this name already; an error if others have."""
        if not _call(name, partial(client.check, [self._manifest_key(name)])):
            return False
        there = self._manifest(client, name)
        if there["sha256"] != digest:
            raise ConfigError(
                f"{self._label} shares as {name!r} something else than {there['label']} did (digests {digest[:12]} and "
                f"{there['sha256'][:12]}): all targets must share the same tensors, and a name cannot be used again"
            )
        return True


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MisuseError(f"a shared name has 1 to 200 letters, digits, '_', '-' or '.', got {name!r}")


def _call(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as exc:
        raise ControlStoreError(f"control store: sharing {name!r} failed: {str(exc).splitlines()[0][:200]}") from exc


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _pieces(tensors: Any) -> Iterator[torch.Tensor]:
    """Byte views of the tensors, each tensor in pieces of at most :data:`PIECE_BYTES`."""
    for tensor in tensors:
        flat = _flat(tensor)
        for at in range(0, flat.numel(), PIECE_BYTES):
            yield flat[at : at + PIECE_BYTES]


def _digest(described: list[Any], tensors: Any) -> str:
    sha = hashlib.sha256(dump_json(described).encode())
    for piece in _pieces(tensors):
        sha.update(piece.numpy().data)
    return sha.hexdigest()


def _parse_manifest(raw: bytes, max_bytes: int) -> dict[str, Any]:
    """Check a manifest that another process wrote; the result also has the ``specs``."""
    manifest = load_json(raw)
    if type(manifest) is not dict or manifest.keys() != _MANIFEST_FIELDS or manifest["v"] != _VERSION:
        raise WireFormatError("the manifest of shared tensors has other fields than this version knows")
    texts = [manifest[field] for field in ("owner", "label", "sha256")]
    entries = manifest["tensors"]
    if any(type(text) is not str or not 0 < len(text) <= 512 for text in texts) or type(entries) is not list:
        raise WireFormatError("the manifest of shared tensors has a field of the wrong type or length")
    specs: dict[str, FeatureSpec] = {}
    for entry in entries[:MAX_TENSORS]:
        if type(entry) is not list or len(entry) != 3 or type(entry[0]) is not str or type(entry[2]) is not list:
            raise WireFormatError("a tensor in a manifest must be [name, dtype, shape]")
        if len(entry[2]) > 16 or any(type(dim) is not int or not 0 <= dim < 2**40 for dim in entry[2]):
            raise WireFormatError("a shape in a manifest must have at most 16 dims, non-negative and below 2**40")
        specs[entry[0]] = FeatureSpec(tuple(entry[2]), dtype_from_name(entry[1]))
    total = sum(spec.nbytes for spec in specs.values())
    if len(specs) != len(entries) or total > max_bytes:
        raise WireFormatError(
            f"a manifest lists {len(entries)} tensors of {total} bytes; the limits are {MAX_TENSORS} "
            f"with different names and {max_bytes} (StreamConfig.max_shared_bytes)"
        )
    return {**manifest, "specs": specs}
