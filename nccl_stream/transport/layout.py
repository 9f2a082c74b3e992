"""Where each feature of a sample lies inside a slot, and how the slot is cut into messages.

Both ends compute the layout from the same specs, so nothing about it travels. A slot starts with a fixed header, then
come the small features, each on a 256-byte boundary, then the large ones. Header and small features form one region
that travels together: a sample of a thousand scalars costs one message, not a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from nccl_stream.device_staging import MAX_DIMS, aside, device_pack, has_kernels
from nccl_stream.errors import MisuseError, WireFormatError
from nccl_stream.refs import FeatureSpec
from nccl_stream.staging import pack

__all__ = ["ALIGN_BYTES", "HEADER_BYTES", "MAX_HEADER_BYTES", "SMALL_BYTES", "SlotLayout"]

ALIGN_BYTES = 256  # cudaMalloc's own granularity; enough for every dtype and every vector load
HEADER_BYTES = 256
_LENGTH_BYTES = 2
MAX_HEADER_BYTES = HEADER_BYTES - _LENGTH_BYTES
SMALL_BYTES = 1 << 20  # below this a message of its own costs more than copying the feature once more

# Copies between equal dtypes go through an integer carrier of the same width: torch has no copy kernel for the
# sub-byte dtypes, and a strided copy of bool rewrites bytes that are neither 0 nor 1.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _cut(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, stop, chunk_bytes):
        yield offset, min(chunk_bytes, stop - offset)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd history and lazy conj/neg bits; a copy only where a lazy bit was set."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise MisuseError(
            f"feature {name!r}: only dense tensors with memory travel, got {tensor.layout} {tensor.dtype} on "
            f"{tensor.device}; pass to_dense(), or int_repr() with the scale as a feature of its own"
        )
    return tensor.detach().resolve_conj().resolve_neg()


@dataclass(frozen=True, eq=False)
class SlotLayout:
    """Byte layout of one sample's slot.

    Attributes:
        specs: the features in their order.
        chunk_bytes: the largest message in bytes.
        total_bytes: size of the slot, a multiple of ``ALIGN_BYTES``.
        packed_bytes: size of the region of header and small features at the start of the slot, likewise a multiple. A
            sender that donates all large features needs a staging slot of this size only.
        offsets: byte offset of each feature, multiples of ``ALIGN_BYTES``, in feature order.
        chunks: ``(offset, nbytes)`` of each message in the order in which they travel. No chunk spans two large
            features, so that a donated feature can be sent from where it lies.
    """

    specs: Mapping[str, FeatureSpec]
    chunk_bytes: int
    total_bytes: int
    packed_bytes: int
    offsets: Mapping[str, int]
    chunks: tuple[tuple[int, int], ...]

    @staticmethod
    def from_specs(specs: Mapping[str, FeatureSpec], *, chunk_bytes: int) -> SlotLayout:
        """The layout for these specs; equal arguments give the same cached object.

        Args:
            specs: feature name to spec, in feature order.
            chunk_bytes: largest message, a positive multiple of ``ALIGN_BYTES``.

        Raises:
            MisuseError: ``chunk_bytes`` is not such a multiple.
        """
        if isinstance(chunk_bytes, bool) or chunk_bytes <= 0 or chunk_bytes % ALIGN_BYTES:
            raise MisuseError(f"chunk_bytes must be a positive multiple of {ALIGN_BYTES}, got {chunk_bytes!r}")
        return _layout(tuple((name, tuple(spec.shape), spec.dtype) for name, spec in specs.items()), chunk_bytes)

    @property
    def large(self) -> tuple[str, ...]:
        """Names of the features that have chunks of their own, in wire order."""
        return tuple(name for name, spec in self.specs.items() if spec.nbytes >= SMALL_BYTES)

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of a slot, in feature order; they share its memory.

        Args:
            slot: ``[>= total_bytes] uint8``, contiguous, its memory aligned to at least 16 bytes.

        Raises:
            MisuseError: the slot is too small or not flat bytes.
        """
        self._check_slot(slot, self.total_bytes)
        result = {}
        for name, spec in self.specs.items():
            offset = self.offsets[name]
            result[name] = slot[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        return result

    def pack(self, tensors: Mapping[str, torch.Tensor], slot: torch.Tensor) -> None:
        """Copies features into their places, byte for byte.

        Args:
            tensors: the features to copy: all of them, or those that are not donated. Strides are free.
            slot: ``uint8``; it must reach to the end of the last feature copied.

        Raises:
            MisuseError: a name, shape, dtype or kind of tensor that the layout does not have. Nothing was copied.
        """
        plain = {name: self._check_feature(name, tensor) for name, tensor in tensors.items()}
        end = max((self.offsets[name] + self.specs[name].nbytes for name in plain), default=0)
        self._check_slot(slot, end)
        together = {name: tensor for name, tensor in plain.items() if self._goes_together(tensor, slot)}
        offsets = [self.offsets[name] for name in together]
        if together and slot.is_cuda:
            device_pack(list(together.values()), slot, offsets, stream=torch.cuda.current_stream(slot.device))
        elif together:
            pack(list(together.values()), slot, offsets)
        for name in plain.keys() - together.keys():
            spec, offset = self.specs[name], self.offsets[name]
            if spec.nbytes == 0:
                continue
            carrier = _CARRIERS[spec.dtype.itemsize]
            target = slot[offset : offset + spec.nbytes].view(carrier).view(spec.shape)
            with torch.inference_mode():  # the slot may have been made in that mode, by another thread
                target.copy_(plain[name].view(carrier))

    @staticmethod
    def _goes_together(tensor: torch.Tensor, slot: torch.Tensor) -> bool:
        """Whether the core copies this one along with others. From one device to another torch does."""
        if tensor.device != slot.device:
            return False
        return slot.is_cpu or (slot.is_cuda and tensor.dim() < MAX_DIMS and has_kernels(slot.device))

    def write_header(self, slot: torch.Tensor, header: bytes) -> None:
        """Writes up to ``MAX_HEADER_BYTES`` bytes of header, padded with zeros. Waits for no stream that uses the slot.

        Raises:
            MisuseError: the header is too long or the slot too small.
        """
        if len(header) > MAX_HEADER_BYTES:
            raise MisuseError(f"a slot header holds {MAX_HEADER_BYTES} bytes, got {len(header)}")
        self._check_slot(slot, HEADER_BYTES)
        raw = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        with torch.inference_mode(), aside(slot.device):  # in which the slot may have been made, by another thread
            slot[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(raw.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8))

    def read_header(self, slot: torch.Tensor) -> bytes:
        """The header that the sender wrote. The slot must have been received: no stream is waited for.

        Raises:
            WireFormatError: the length field is impossible: these bytes were not written as a header.
        """
        self._check_slot(slot, HEADER_BYTES)
        with aside(slot.device):
            raw = bytes(slot[:HEADER_BYTES].cpu().numpy())
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise WireFormatError(f"slot header claims {length} bytes, at most {MAX_HEADER_BYTES} are possible")
        return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]

    @staticmethod
    def donatable(tensor: torch.Tensor) -> bool:
        """Whether the tensor's own memory is what would travel: dense, contiguous, no lazy conj or neg bit."""
        return (
            tensor.layout == torch.strided
            and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
            and tensor.is_contiguous()
        )

    def wire_buffers(self, slot: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The messages of one sample, as flat byte views in wire order; nothing is copied.

        Args:
            slot: ``uint8``. With every large feature in ``tensors`` its first ``packed_bytes`` are enough.
            tensors: donated features. Large ones among them are sent from where they lie; small ones must be packed.

        Returns:
            One contiguous ``[n] uint8`` tensor per entry of ``chunks``. They keep the memory of slot or feature alive.

        Raises:
            MisuseError: a donated large feature is not ``donatable`` or unlike its spec, or the slot is too small.
        """
        donated: dict[int, torch.Tensor] = {}
        needed = self.packed_bytes
        for name in self.large:
            start, spec = self.offsets[name], self.specs[name]
            if tensors is None or name not in tensors:
                needed = max(needed, start + spec.nbytes)
                continue
            if not self.donatable(tensors[name]):
                raise MisuseError(f"feature {name!r}: only a contiguous dense tensor can be sent in place; pack it")
            flat = self._check_feature(name, tensors[name]).view(-1).view(torch.uint8)
            for offset, nbytes in _cut(0, spec.nbytes, self.chunk_bytes):
                donated[start + offset] = flat[offset : offset + nbytes]
        self._check_slot(slot, needed)
        return [
            donated[offset] if offset in donated else slot[offset : offset + nbytes] for offset, nbytes in self.chunks
        ]

    def _check_slot(self, slot: torch.Tensor, nbytes: int) -> None:
        if slot.dtype != torch.uint8 or slot.dim() != 1 or not slot.is_contiguous() or slot.numel() < nbytes:
            raise MisuseError(
                f"a slot is a flat contiguous uint8 tensor of at least {nbytes} bytes, "
                f"got {slot.dtype} {tuple(slot.shape)}"
            )

    def _check_feature(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        spec = self.specs.get(name)
        if spec is None:
            raise MisuseError(f"feature {name!r} is not in the layout, which has {sorted(self.specs)}")
        plain = _plain(name, tensor)
        if tuple(plain.shape) != tuple(spec.shape) or plain.dtype != spec.dtype:
            raise MisuseError(
                f"feature {name!r}: the spec says {tuple(spec.shape)} {spec.dtype}, "
                f"the tensor is {tuple(plain.shape)} {plain.dtype}"
            )
        return plain


@lru_cache(maxsize=1024)
def _layout(key: tuple[tuple[str, tuple[int, ...], torch.dtype], ...], chunk_bytes: int) -> SlotLayout:
    specs = {name: FeatureSpec(shape=shape, dtype=dtype) for name, shape, dtype in key}
    offsets: dict[str, int] = {}
    end = HEADER_BYTES
    packed_end = HEADER_BYTES
    for name, spec in specs.items():
        if spec.nbytes < SMALL_BYTES:
            offsets[name] = end
            packed_end = end + spec.nbytes
            end = _round_up(packed_end)
    packed_bytes = end
    chunks = list(_cut(0, packed_end, chunk_bytes))
    for name, spec in specs.items():
        if spec.nbytes >= SMALL_BYTES:
            offsets[name] = end
            chunks.extend(_cut(end, end + spec.nbytes, chunk_bytes))
            end = _round_up(end + spec.nbytes)
    return SlotLayout(
        specs=MappingProxyType(specs),
        chunk_bytes=chunk_bytes,
        total_bytes=end,
        packed_bytes=packed_bytes,
        offsets=MappingProxyType({name: offsets[name] for name in specs}),
        chunks=tuple(chunks),
    )
