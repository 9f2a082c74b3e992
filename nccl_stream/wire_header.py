"""What travels in a slot's header, so that the receiver can tell that these bytes are the sample it asked for."""

from __future__ import annotations

import hashlib
import struct

from nccl_stream.errors import LinkError

__all__ = ["check_header", "make_header"]

_MAGIC = b"NCS1"
_FORMAT = struct.Struct("<4sQQQQ16s")


def make_header(owner: str, sample_id: str, *, gen: int, seq: int, serial: int, delivery: int) -> bytes:
    """Identity of one delivery: link generation and seq, the owner's serial, the delivery number, a digest of names."""
    digest = hashlib.blake2b(f"{owner}\0{sample_id}".encode(), digest_size=16).digest()
    return _FORMAT.pack(_MAGIC, gen, seq, serial, delivery, digest)


def check_header(raw: bytes, expected: bytes, what: str) -> None:
    """Compare what arrived with what was announced.

    Raises:
        LinkError: the two ends are out of step; the payload must not be used.
    """
    if raw != expected:
        raise LinkError(f"the bytes that arrived are not {what}: the two ends of the link are out of step")
