"""Host memory work: checksums."""

from __future__ import annotations

import torch

__all__ = ["crc32c"]


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, reflected
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: torch.Tensor | bytes, value: int = 0) -> int:
    """CRC-32C of flat bytes, going on from ``value``, the checksum of what came before."""
    raw = data.numpy().tobytes() if isinstance(data, torch.Tensor) else data
    value ^= 0xFFFFFFFF
    for byte in raw:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF
