"""What every store does with the tensors it is given: check them, copy them byte by byte, and sum their bytes up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nccl_stream.device_staging import device_crc32c, has_kernels
from nccl_stream.errors import MisuseError
from nccl_stream.staging import crc32c

__all__ = ["check_finite", "check_tensors", "checksum_of", "copy_tensor", "join_tensors"]

# A dtype of the same size that every device can copy; torch has no kernel for its sub-byte dtypes and warns whenever
# it makes a complex32 tensor.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_tensor(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a detached, contiguous, byte-exact copy of ``tensor`` on ``device`` (None: where it is)."""
    source = tensor.detach().resolve_conj().resolve_neg()
    carrier = _CARRIERS.get(source.dtype.itemsize, source.dtype)
    copy = torch.empty(source.shape, dtype=carrier, device=source.device if device is None else device)
    return copy.copy_(source.view(carrier)).view(source.dtype)


def join_tensors(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the byte-exact concatenation of at least one tensor of the same dtype along ``dim``, as a new tensor."""
    carrier = _CARRIERS.get(tensors[0].dtype.itemsize, tensors[0].dtype)
    return torch.cat([tensor.view(carrier) for tensor in tensors], dim=dim).view(tensors[0].dtype)


def check_tensors(sample_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` can be stored.

    Raises:
        MisuseError: (``ValueError``) the map is empty, a name is not a non-empty str, or a value is not a plain dense
            tensor with data.
    """
    if not isinstance(tensors, Mapping) or not tensors:
        raise MisuseError(f"sample {sample_id!r}: tensors must be a non-empty mapping of name to tensor")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name:
            raise MisuseError(f"sample {sample_id!r}: feature name must be a non-empty str, got {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise MisuseError(f"sample {sample_id!r}: feature {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise MisuseError(
                f"sample {sample_id!r}: feature {name!r} must be a dense, unquantized tensor with data, "
                f"got layout={tensor.layout}, dtype={tensor.dtype}, device={tensor.device}"
            )


def checksum_of(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32C of the tensors' bytes, one after the other. Blocks; on a GPU until the current stream has come to them.

    Computed where the tensors are, by the compiled core's kernel; where that cannot run, bytes of a GPU are brought to
    the host.

    Args:
        tensors: contiguous, of any shape and dtype, with no lazy conj or neg bit.
    """
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        on_device = flat.is_cuda and has_kernels(flat.device)
        checksum = device_crc32c(flat, checksum) if on_device else crc32c(flat.cpu(), checksum)
    return checksum


def check_finite(sample_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that no floating-point feature holds NaN or infinite values; a pass over all of them.

    Raises:
        MisuseError: (``ValueError``) one does; names it.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise MisuseError(f"sample {sample_id!r}: feature {name!r} holds NaN or infinite values")
