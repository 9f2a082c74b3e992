"""The error tree.

Every error of the package derives from :class:`NcclStreamError` and, where the documented contracts promise a builtin
(``KeyError``, ``MemoryError``, ``RuntimeError``, ``ValueError``), from that builtin too. The class says whose fault it
is: *closed* is ours, *lost* is the peer's, *misuse* is the caller's.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ChecksumError",
    "ClosedError",
    "ConfigError",
    "ControlStoreError",
    "DeviceError",
    "FencedError",
    "LauncherLostError",
    "LinkError",
    "LinkTimeoutError",
    "MembershipError",
    "MisuseError",
    "NcclStreamError",
    "PeerLostError",
    "PeerTimeoutError",
    "ProducerFailedError",
    "RefError",
    "SampleNotFoundError",
    "SamplesLostError",
    "SchemaError",
    "SlotsHeldError",
    "SpecMismatchError",
    "StreamBrokenError",
    "StreamLostError",
    "VersionMismatchError",
    "WireFormatError",
]


class NcclStreamError(Exception):
    """Base of every error raised on purpose by this package."""


class ClosedError(NcclStreamError, RuntimeError):
    """The object was closed; the call came after its life."""


class MisuseError(NcclStreamError, ValueError):
    """The caller passed something the contract refuses; nothing was changed."""


class ConfigError(MisuseError):
    """A configuration that cannot work, or that ranks disagree on; the message names the value that would."""


class RefError(MisuseError):
    """A sample reference (or something offered as one) breaks the reference contract."""


class SchemaError(MisuseError):
    """A sample's features do not match the schema of its algorithm."""


class WireFormatError(MisuseError):
    """A control-plane value is malformed, oversized or of an unknown kind. It was dropped, never executed."""


class SampleNotFoundError(NcclStreamError, KeyError):
    """The store does not hold this sample: released, never put, or it belongs to another store."""

    def __str__(self) -> str:
        # KeyError shows repr(args[0]); these messages are sentences.
        return str(self.args[0]) if self.args else ""


class CapacityError(NcclStreamError, MemoryError):
    """A cap would be exceeded.

    Attributes:
        can_wait: True when the same request fits once other samples are gone; False when it never can.
    """

    def __init__(self, message: str, *, can_wait: bool = True) -> None:
        super().__init__(message)
        self.can_wait = can_wait


class SlotsHeldError(CapacityError):
    """User references keep all receive slots alive past the deadline; the message lists who holds what."""


class SpecMismatchError(NcclStreamError, RuntimeError):
    """What the store holds has another shape or dtype than the ref says."""


class ChecksumError(NcclStreamError, RuntimeError):
    """The bytes that arrived are not the bytes that were put."""


class LinkError(NcclStreamError, RuntimeError):
    """A link failed. It is thrown away and comes back under the next generation."""


class LinkTimeoutError(LinkError, TimeoutError):
    """A link operation passed its deadline."""


class VersionMismatchError(LinkError):
    """The two ends run versions of this package, torch or NCCL that cannot talk to each other."""


class PeerLostError(NcclStreamError, RuntimeError):
    """A peer died or became unreachable; the message names it."""


class PeerTimeoutError(PeerLostError, TimeoutError):
    """A peer did not do in time what it had promised; the message names it."""


class SamplesLostError(PeerLostError):
    """Samples died with their owner.

    Attributes:
        sample_ids: the ids to produce again.
    """

    def __init__(self, message: str, sample_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids


class ProducerFailedError(NcclStreamError, RuntimeError):
    """The producing side failed; its error is in the message."""


class StreamBrokenError(NcclStreamError, RuntimeError):
    """The producer of a streamed sample failed, died or gave up before its end. Raised where the sample is read.

    Attributes:
        sample_id: the sample.
        num_pieces: pieces that were read before.
        num_positions: positions that these pieces had.
        reason: why, in words.
    """

    def __init__(self, sample_id: str, num_pieces: int, num_positions: int, reason: str) -> None:
        super().__init__(
            f"streamed sample {sample_id!r} broke off after {num_pieces} pieces with {num_positions} positions: "
            f"{reason}"
        )
        self.sample_id = sample_id
        self.num_pieces = num_pieces
        self.num_positions = num_positions
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.sample_id, self.num_pieces, self.num_positions, self.reason)


class StreamLostError(NcclStreamError, RuntimeError):
    """Nobody can read this streamed sample as a whole any more: its reader stopped or died and pieces of it are gone.

    Raised where the sample is produced, and to whoever tries to read it again. It can be produced anew, under
    ``retain`` if it shall outlive its reader.

    Attributes:
        sample_id: the sample.
        reason: why, in words.
    """

    def __init__(self, sample_id: str, reason: str) -> None:
        super().__init__(f"streamed sample {sample_id!r} is lost: {reason}")
        self.sample_id = sample_id
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.sample_id, self.reason)


class FencedError(NcclStreamError, RuntimeError):
    """This process stopped itself, or was declared dead by its peers; it continues only as a new incarnation."""


class ControlStoreError(NcclStreamError, RuntimeError):
    """The control-plane store (TCPStore) did not answer, or its connection broke."""


class DeviceError(NcclStreamError, RuntimeError):
    """A call of the CUDA runtime failed; the message names the call."""


class LauncherLostError(NcclStreamError, RuntimeError):
    """The process that launched this rank is gone."""


class MembershipError(NcclStreamError, RuntimeError):
    """The run could not be formed or joined: a rank is missing, taken twice, or the epoch is over."""
