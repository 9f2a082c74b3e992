"""What every store with streamed samples has in common: their refs, the checks of pieces, and the joined sample.

Nothing here waits, locks or moves bytes, except :func:`read_joined`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from nccl_stream.errors import ClosedError, MisuseError, StreamBrokenError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef, StreamSpec
from nccl_stream.stores.tensors import check_tensors, copy_tensor, join_tensors
from nccl_stream.streamed.sample import OpenFeatureSpec, PieceReader

__all__ = ["PieceCount", "piece_specs", "read_joined", "require_stream", "stream_ref", "window_bytes"]


def stream_ref(
    sample_id: str,
    specs: Mapping[str, FeatureSpec | OpenFeatureSpec],
    *,
    piece_length: int,
    window: int,
    retain: bool,
    run_id: str,
    store_uri: str,
    key_prefix: str = "",
    algorithm: FeatureAlgorithm,
    schema_version: int,
    num_tokens: int,
    target_model_version: str,
    draft_weight_version: str,
    attributes: Mapping[str, str] | None,
) -> SampleRef:
    """Make the ref of a streamed sample; ``estimated_bytes`` is :func:`window_bytes`.

    Args:
        key_prefix: what stands before the features' names in their keys.
        ...: as for :meth:`FeatureStore.open_stream`.

    Raises:
        MisuseError: (``ValueError``) specs that are none, none that is open, or a value that a ref refuses.
    """
    if not isinstance(specs, Mapping) or not specs:
        raise MisuseError(f"streamed sample {sample_id!r}: specs must be a non-empty mapping of name to spec")
    for name, spec in specs.items():
        if not isinstance(spec, (FeatureSpec, OpenFeatureSpec)):
            raise MisuseError(
                f"streamed sample {sample_id!r}: the spec of {name!r} must be a FeatureSpec or an OpenFeatureSpec, "
                f"got {type(spec).__name__}"
            )
    open_specs = {name: spec for name, spec in specs.items() if isinstance(spec, OpenFeatureSpec)}
    if not open_specs:
        raise MisuseError(f"streamed sample {sample_id!r}: at least one feature needs an OpenFeatureSpec")
    stream = StreamSpec({name: spec.dim for name, spec in open_specs.items()}, piece_length, window, retain)
    full = {
        name: spec.of_length(piece_length) if isinstance(spec, OpenFeatureSpec) else spec
        for name, spec in specs.items()
    }
    return SampleRef(
        sample_id=sample_id,
        run_id=run_id,
        store_uri=store_uri,
        feature_keys={name: f"{key_prefix}{name}" for name in specs},
        feature_specs=full,
        algorithm=algorithm,
        schema_version=schema_version,
        num_tokens=num_tokens,
        estimated_bytes=window_bytes(full, stream),
        target_model_version=target_model_version,
        draft_weight_version=draft_weight_version,
        attributes=attributes or {},
        stream=stream,
    )


def window_bytes(specs: Mapping[str, FeatureSpec], stream: StreamSpec) -> int:
    """Bytes of a full window: its pieces, and the features that travel once. Without any alignment."""
    return sum(spec.nbytes * (stream.window if name in stream.dims else 1) for name, spec in specs.items())


def piece_specs(ref: SampleRef, index: int, length: int) -> dict[str, FeatureSpec]:
    """Return what piece ``index`` with ``length`` positions consists of, in the ref's order.

    Raises:
        MisuseError: (``ValueError``) the sample is not streamed, or no piece of it has this index and length.
    """
    stream = require_stream(ref)
    if type(index) is not int or index < 0 or type(length) is not int or not 1 <= length <= stream.piece_length:
        raise MisuseError(
            f"streamed sample {ref.sample_id!r}: a piece has 1 to {stream.piece_length} positions and an index of at "
            f"least 0; got {length!r} and {index!r}"
        )
    specs = {}
    for name, spec in ref.feature_specs.items():
        dim = stream.dims.get(name)
        if dim is not None:
            specs[name] = FeatureSpec((*spec.shape[:dim], length, *spec.shape[dim + 1 :]), spec.dtype)
        elif index == 0:
            specs[name] = spec
    return specs


def require_stream(ref: SampleRef) -> StreamSpec:
    """Return how the sample travels.

    Raises:
        MisuseError: (``ValueError``) it is not streamed.
    """
    if ref.stream is None:
        raise MisuseError(f"sample {ref.sample_id!r} is not streamed: get it as a whole")
    return ref.stream


class PieceCount:
    """How far a streamed sample has got, and which piece may come next. Not thread-safe.

    Attributes:
        num_pieces: pieces so far.
        num_positions: positions so far.
    """

    def __init__(self, ref: SampleRef) -> None:
        self._ref = ref
        self._stream = require_stream(ref)
        self._specs: dict[tuple[bool, int], dict[str, FeatureSpec]] = {}
        self.num_pieces = 0
        self.num_positions = 0

    def check(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Check the next piece; changes nothing.

        Returns:
            Its number of positions.

        Raises:
            MisuseError: (``ValueError``) not exactly the features that this piece has, one of the wrong shape or dtype,
                different numbers of positions, or a piece after a shorter one.
        """
        sample_id, stream = self._ref.sample_id, self._stream
        what = f"streamed sample {sample_id!r}, piece {self.num_pieces}"
        if self.num_positions != self.num_pieces * stream.piece_length:
            raise MisuseError(f"{what}: the piece before was shorter than {stream.piece_length}, so it is the last one")
        check_tensors(sample_id, tensors)
        expected = self._specs_of(stream.piece_length)
        if tensors.keys() != expected.keys():
            raise MisuseError(f"{what} must have the features {sorted(expected)}, got {sorted(tensors)}")
        length: int | None = None
        for name, tensor in tensors.items():
            dim = stream.dims.get(name)
            if dim is not None and tensor.dim() > dim and length is None:
                length = tensor.shape[dim]
        if length is None or not 1 <= length <= stream.piece_length:
            raise MisuseError(f"{what} must have 1 to {stream.piece_length} positions, got {length}")
        for name, spec in self._specs_of(length).items():
            found = FeatureSpec.of(tensors[name])
            if found != spec:
                raise MisuseError(f"{what} with {length} positions: {name!r} must be {spec}, got {found}")
        return length

    def _specs_of(self, length: int) -> dict[str, FeatureSpec]:
        """What the next piece consists of; nearly all pieces are alike."""
        key = self.num_pieces == 0, length
        if key not in self._specs:
            self._specs[key] = piece_specs(self._ref, self.num_pieces, length)
        return self._specs[key]

    def add(self, length: int) -> tuple[int, int]:
        """Count a checked piece; return its index and the position at which it starts."""
        place = self.num_pieces, self.num_positions
        self.num_pieces += 1
        self.num_positions += length
        return place

    def broken(self, reason: str) -> StreamBrokenError:
        """The error of a reader that has got so far."""
        return StreamBrokenError(self._ref.sample_id, self.num_pieces, self.num_positions, reason)


def read_joined(
    reader: PieceReader, device: torch.device | None = None, timeout: float | None = None
) -> dict[str, torch.Tensor]:
    """Read a streamed sample to its end and return it as one, in memory of its own. Blocks until it is closed.

    Pieces are copied as they come and released at once, so any window will do. For the moment of joining a feature, it
    is in memory twice.

    Args:
        reader: at its beginning. Neither closed nor released here.
        device: where the tensors shall be; None leaves them where the pieces are.
        timeout: longest wait in seconds for the whole sample; None waits for as long as its producer lives.

    Raises:
        what :meth:`PieceReader.next` raises.
    """
    stream = require_stream(reader.ref)
    deadline = None if timeout is None else time.monotonic() + timeout
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in reader.ref.feature_names()}
    while True:
        piece = reader.next(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if piece is None:
            break
        for name in piece.tensors:
            parts[name].append(copy_tensor(piece.tensors[name], device))
        piece.release()
        # A view that is still alive would keep its memory, and with a window of one piece the next would never come.
        del piece
    joined = {}
    for name, copies in parts.items():
        if not copies:
            raise ClosedError(f"streamed sample {reader.ref.sample_id!r}: the reader was not at its beginning")
        joined[name] = copies[0] if len(copies) == 1 else join_tensors(copies, stream.dims[name])
        copies.clear()
    return joined
