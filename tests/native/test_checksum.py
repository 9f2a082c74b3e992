"""CRC-32C against published values, against another implementation of the definition, and in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_stream import _core
from nccl_stream.errors import MisuseError
from nccl_stream.staging import crc32c

pytestmark = pytest.mark.usefixtures("core")
both_cores = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

# RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms.
PUBLISHED = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def one_byte(state: int) -> int:
    for _ in range(8):
        state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state


ONE_BYTE = [one_byte(byte) for byte in range(256)]


def by_definition(data: bytes, value: int = 0) -> int:
    """A byte at a time."""
    state = value ^ 0xFFFFFFFF
    for byte in data:
        state = (state >> 8) ^ ONE_BYTE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "expected"), PUBLISHED)
def test_crc32c_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert crc32c(bytearray(data)) == expected
    assert crc32c(memoryview(data)) == expected
    if data:
        assert crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected


@both_cores
@given(data=st.binary(max_size=3000), value=st.integers(0, 0xFFFFFFFF), skip=st.integers(0, 9))
def test_crc32c_any_data_and_start_matches_the_definition(data: bytes, value: int, skip: int) -> None:
    assert crc32c(memoryview(data)[skip:], value) == by_definition(data[skip:], value)


@pytest.mark.parametrize("nbytes", [383, 384, 385, 511, 512, 513, 3071, 3072, 24575, 24576, 24577, 49152, 100_001])
def test_crc32c_pieces_equal_the_whole_at_every_block_size(nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 8,), dtype=torch.uint8, generator=generator)
    for start in (0, 1, 7):
        whole = crc32c(data[start : start + nbytes])
        assert whole == by_definition(bytes(data[start : start + nbytes].tolist()))
        for cut in (0, 1, nbytes // 3, nbytes - 1, nbytes):
            first = crc32c(data[start : start + cut])
            assert crc32c(data[start + cut : start + nbytes], first) == whole


@both_cores
@given(nbytes=st.integers(1, 70_000), bit=st.integers(min_value=0))
def test_crc32c_one_flipped_bit_changes_it(nbytes: int, bit: int) -> None:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    before = crc32c(data)
    data[bit // 8 % nbytes] = 1 << bit % 8
    assert crc32c(data) != before


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("text", 0),
        (3, 0),
        (torch.zeros(4), 0),
        (torch.zeros((2, 2), dtype=torch.uint8), 0),
        (torch.zeros(8, dtype=torch.uint8)[::2], 0),
        (torch.zeros(4, dtype=torch.uint8, device="meta"), 0),
        (b"x", -1),
        (b"x", 1 << 32),
        (b"x", True),
        (b"x", None),
        (memoryview(bytes(8))[::2], 0),
    ],
)
def test_crc32c_wrong_argument_is_misuse(data: object, value: object) -> None:
    with pytest.raises(MisuseError):
        crc32c(data, value)  # type: ignore[arg-type]


def test_crc32c_compiled_uses_the_instruction_where_there_is_one(core: str) -> None:
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    expected = "sse4_2" in flags or "crc32" in flags
    if core == "compiled":
        assert (_core.core().crc32c_kind() != "table") == expected
