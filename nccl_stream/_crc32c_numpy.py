"""CRC-32C with numpy, for where the compiled core is absent.

The state is a polynomial over GF(2) modulo the Castagnoli polynomial, bit 31 being x^0. What it becomes when n zero
bytes follow is a linear map of it, here the list of the images of its 32 bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["crc32c_of"]

_Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, reflected
_LANE_BYTES = 512  # a buffer is cut into lanes of this size, which numpy advances side by side


@lru_cache(maxsize=1)
def _byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def _advance_over_zeros(states: _Words, nbytes: int) -> _Words:
    """Each of the ``[n] uint32`` states after ``nbytes`` zero bytes."""
    power = 0
    while nbytes >> power:
        if (nbytes >> power) & 1:
            states = _apply(_zeros_map(power), states)
        power += 1
    return states


def _apply(images: _Words, states: _Words) -> _Words:
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= images[bit] * ((states >> np.uint32(bit)) & np.uint32(1))
    return result


@lru_cache(maxsize=64)
def _zeros_map(power: int) -> _Words:
    """The images of the 32 bits under 2**power zero bytes."""
    if power:
        half = _zeros_map(power - 1)
        return _apply(half, half)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    images: _Words = (bits >> np.uint32(8)) ^ _byte_table()[bits & np.uint32(0xFF)]
    return images


def crc32c_of(data: npt.NDArray[np.uint8], value: int) -> int:
    """The checksum of ``[n] uint8``, continued from ``value``."""
    table = _byte_table()
    state = value ^ 0xFFFFFFFF
    lanes = len(data) // _LANE_BYTES
    if lanes:
        columns = data[: lanes * _LANE_BYTES].reshape(lanes, _LANE_BYTES).T
        states = np.zeros(lanes, dtype=np.uint32)
        states[0] = state
        for column in columns:
            states = (states >> np.uint32(8)) ^ table[(states & np.uint32(0xFF)) ^ column]
        # Neighbours are joined until one is left; a lane of zeros in front changes nothing.
        lane_bytes = _LANE_BYTES
        if lanes & (lanes - 1):
            states = np.concatenate([np.zeros((1 << lanes.bit_length()) - lanes, dtype=np.uint32), states])
        while len(states) > 1:
            states = _advance_over_zeros(states[0::2], lane_bytes) ^ states[1::2]
            lane_bytes *= 2
        state = int(states[0])
    for byte in data[lanes * _LANE_BYTES :].tolist():
        state = (state >> 8) ^ int(table[(state ^ byte) & 0xFF])
    return state ^ 0xFFFFFFFF
