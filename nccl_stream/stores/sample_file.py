"""One sample as one safetensors file.

The format is simple enough to be read and written here, which the store needs: bytes go straight between tensor memory
and the file, a file cut short is an error instead of a fault in mapped memory, dtypes that the format has no name for
still travel, and the file that is read is the very one that was opened. Other readers of the format can read these
files, and the other way round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from nccl_stream.errors import MisuseError, SpecMismatchError
from nccl_stream.refs import FeatureSpec, dtype_name
from nccl_stream.stores.tensors import copy_tensor

__all__ = ["SampleHeader", "read_header", "read_sample", "write_sample"]

MAX_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_ALIGN_BYTES = 8
_METADATA = "__metadata__"
_OUR_METADATA = "nccl_stream"
_CPU = torch.device("cpu")

_FORMAT_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class SampleHeader:
    """What a file says about itself.

    Attributes:
        owner: who wrote it; empty when another program did.
        token: what no other file has; empty when another program wrote it.
        features: name to (format's dtype name, our dtype name or "", shape, first byte, end byte); offsets count from
            the end of the header.
        data_start: where the data begins in the file.
    """

    owner: str
    token: str
    features: Mapping[str, tuple[str, str, tuple[int, ...], int, int]]
    data_start: int


def write_sample(file: BinaryIO, tensors: Mapping[str, torch.Tensor], owner: str, token: str = "") -> None:
    """Write ``tensors`` to an empty file.

    Args:
        file: open for writing, at its start.
        tensors: checked feature map; any device, any strides.
        owner: kept in the file's metadata.
        token: kept there as well.

    Raises:
        MisuseError: (``ValueError``) a feature has the name that the format reserves, or the names and shapes fill
            more than a header may have.
        OSError: the disk is full, or worse.
    """
    if _METADATA in tensors:
        raise MisuseError(f"a feature must not be named {_METADATA!r}: the safetensors format reserves it")
    # Widest first, so that every tensor is aligned to its own element size, which other readers count on.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {}
    unnamed: dict[str, str] = {}
    offset = 0
    for name in names:
        spec = FeatureSpec.of(tensors[name])
        end = offset + spec.nbytes
        if spec.dtype in _FORMAT_NAMES:
            header[name] = _entry(_FORMAT_NAMES[spec.dtype], spec.shape, offset, end)
        else:
            unnamed[name] = dtype_name(spec.dtype)
            header[name] = _entry("U8", (*spec.shape, spec.dtype.itemsize), offset, end)
        offset = end
    ours = json.dumps({"owner": owner, "token": token, "dtypes": unnamed}, separators=(",", ":"))
    text = json.dumps({_METADATA: {"format": "pt", _OUR_METADATA: ours}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise MisuseError(
            f"names and shapes of {len(names)} features make a header of {len(text)} bytes; {MAX_HEADER_BYTES} are read"
        )
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)
    for name in names:
        if tensors[name].numel():
            file.write(_as_bytes(_on_host(tensors[name])))
    file.flush()


def read_header(file: BinaryIO, what: str) -> SampleHeader:
    """Read and check a file's header.

    Args:
        file: at its start.
        what: how to call the file in messages.

    Raises:
        SpecMismatchError: (``RuntimeError``) it is no safetensors file, or not all of it is there.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if not 2 <= length <= MAX_HEADER_BYTES or start > size:
        raise SpecMismatchError(f"{what} is damaged or cut short: {size} bytes, a header of {length} bytes announced")
    try:
        header = json.loads(file.read(length))
        metadata = header.pop(_METADATA, {})
        ours = json.loads(metadata.get(_OUR_METADATA, "{}"))
        dtypes = ours.get("dtypes", {})
        features = {name: _parse_entry(value, dtypes.get(name, "")) for name, value in header.items()}
        owner, token = str(ours.get("owner", "")), str(ours.get("token", ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SpecMismatchError(f"{what} is damaged: its header cannot be read ({type(error).__name__})") from error
    needed = start + max((end for *_, end in features.values()), default=0)
    if size < needed:
        raise SpecMismatchError(f"{what} is cut short: {size} bytes of {needed}")
    return SampleHeader(owner, token, features, start)


def read_sample(
    file: BinaryIO,
    header: SampleHeader,
    specs: Mapping[str, FeatureSpec],
    what: str,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Read the features named in ``specs``, in that order, into memory of their own.

    Args:
        file: the one that ``header`` is of, anywhere in it.
        header: what :func:`read_header` returned.
        specs: what the caller's ref says is in the file.
        what: how to call the file in messages.
        device: where the tensors shall be; None for the CPU.

    Raises:
        SpecMismatchError: (``RuntimeError``) the file is damaged, or holds something else than ``specs``.
    """
    for name, spec in specs.items():
        _check_feature(header, name, spec, what)
    tensors: dict[str, torch.Tensor] = {}
    # In the order of the file: one pass over the disk.
    for name in sorted(specs, key=lambda name: header.features[name][3]):
        spec = specs[name]
        tensor = torch.empty(spec.nbytes, dtype=torch.uint8)
        if spec.nbytes:
            file.seek(header.data_start + header.features[name][3])
            got = file.readinto(tensor.numpy())  # type: ignore[attr-defined]
            if got != spec.nbytes:
                raise SpecMismatchError(f"{what} is cut short: {got} bytes of {spec.nbytes} of feature {name!r}")
        tensors[name] = tensor.view(spec.dtype).view(spec.shape)
    if device is not None and device.type != "cpu":
        tensors = {name: copy_tensor(tensor, device) for name, tensor in tensors.items()}
    return {name: tensors[name] for name in specs}


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _parse_entry(value: dict[str, object], dtype: object) -> tuple[str, str, tuple[int, ...], int, int]:
    shape, offsets, format_name = value["shape"], value["data_offsets"], value["dtype"]
    if not (isinstance(format_name, str) and isinstance(dtype, str) and isinstance(shape, list)):
        raise TypeError("dtype and shape")
    if not (isinstance(offsets, list) and all(type(number) is int and number >= 0 for number in (*shape, *offsets))):
        raise TypeError("numbers")
    start, end = offsets
    if start > end:
        raise ValueError("offsets")
    return format_name, dtype, tuple(shape), start, end


def _check_feature(header: SampleHeader, name: str, spec: FeatureSpec, what: str) -> None:
    if name not in header.features:
        raise SpecMismatchError(f"{what} has no feature {name!r}; stored: {sorted(header.features)[:20]}")
    format_name, our_name, shape, start, end = header.features[name]
    if our_name:
        matches = our_name == dtype_name(spec.dtype) and shape == (*spec.shape, spec.dtype.itemsize)
    else:
        matches = format_name == _FORMAT_NAMES.get(spec.dtype) and shape == spec.shape
    if not matches or end - start != spec.nbytes:
        raise SpecMismatchError(
            f"{what}, feature {name!r}: the ref says {spec}, stored is {our_name or format_name} {shape} "
            f"of {end - start} bytes"
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return copy_tensor(tensor, _CPU)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
