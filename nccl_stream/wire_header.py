"""What travels in a slot's header, so that the receiver can tell that these bytes are the sample it asked for."""

from __future__ import annotations

import hashlib
import struct

from nccl_stream.errors import LinkError

__all__ = ["check_header", "make_header", "make_piece_header"]

_MAGIC = b"NCS1"
_FORMAT = struct.Struct("<4sQQQQ16s")
_CHECKSUM = struct.Struct("<I")


def make_header(
    owner: str, sample_id: str, *, gen: int, seq: int, serial: int, delivery: int, checksum: int | None = None
) -> bytes:
    """Identity of one delivery: link generation and seq, the owner's serial, the delivery number, a digest of names.

    Args:
        checksum: CRC-32C of the sample's bytes, which then follows; None: it is not sent.
    """
    digest = hashlib.blake2b(f"{owner}\0{sample_id}".encode(), digest_size=16).digest()
    identity = _FORMAT.pack(_MAGIC, gen, seq, serial, delivery, digest)
    return identity if checksum is None else identity + _CHECKSUM.pack(checksum)


def check_header(raw: bytes, expected: bytes, what: str, *, checksummed: bool = False) -> int | None:
    """Compare what arrived with what was announced.

    Args:
        raw: the header that arrived.
        expected: the header without a checksum.
        what: names the sample in the error.
        checksummed: whether a checksum must follow; without, it must not.

    Returns:
        The checksum that the sender computed, or None.

    Raises:
        LinkError: the two ends are out of step; the payload must not be used.
    """
    tail = raw[len(expected) :]
    if raw[: len(expected)] != expected or len(tail) != checksummed * _CHECKSUM.size:
        raise LinkError(f"the bytes that arrived are not {what}: the two ends of the link are out of step")
    return int(_CHECKSUM.unpack(tail)[0]) if checksummed else None


def make_piece_header(
    owner: str,
    sample_id: str,
    index: int,
    *,
    gen: int,
    turn: int,
    serial: int,
    delivery: int,
    checksum: int | None = None,
) -> bytes:
    """Identity of one piece of a streamed sample, as :func:`make_header`; no sample as a whole has the same."""
    return make_header(
        owner, f"{sample_id}\0{index}", gen=gen, seq=turn, serial=serial, delivery=delivery, checksum=checksum
    )
