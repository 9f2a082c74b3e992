"""Writes a streamed sample from what a chunked prefill or a decode loop computes: positions in place, in any portions.

A sample's *slots* are not the target's positions everywhere: in EAGLE-3's frame, slot t holds the hidden states of
position t and the token and distribution of position t + 1. So the last slot that is known is one behind the last
position that was computed, and only the end of the sample is filled with zeros. Cutting each chunk's own features to
slots would put zeros at every border instead, and labels from nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from nccl_stream.errors import CapacityError, MisuseError, PeerTimeoutError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec
from nccl_stream.schema import FRAME_ATTRIBUTE, LAST_HIDDEN, schema_of
from nccl_stream.streamed.sample import ClosesOrFails, OpenFeatureSpec, StreamWriter

__all__ = ["SequenceWriter", "open_specs"]


def open_specs(algorithm: FeatureAlgorithm, tensors: Mapping[str, Tensor]) -> dict[str, FeatureSpec | OpenFeatureSpec]:
    """Return the specs with which to open a streamed sample that begins with ``tensors``, open along the sequence.

    Args:
        algorithm: whose features they are. One that its schema does not know is taken to have no sequence axis.
        tensors: some positions of every feature; they are not kept.

    Raises:
        SchemaError: (``ValueError``) packing features: a streamed sample is one document.
    """
    dims = schema_of(algorithm).open_dims(tensors)
    return {
        name: OpenFeatureSpec.of(tensor, dims[name]) if name in dims else FeatureSpec.of(tensor)
        for name, tensor in tensors.items()
    }


class SequenceWriter(ClosesOrFails):
    """Brings positions into the frame of the sample's algorithm and appends them in full pieces.

    As a context manager it closes the sample on the way out; with an exception it fails it. Holds back what is not yet
    a full piece, one position more, and what an :meth:`extend` with a timeout found no room for. For one thread at a
    time.

    Args:
        writer: at its beginning; closed and failed through here from now on.
    """

    def __init__(self, writer: StreamWriter) -> None:
        ref, schema = writer.ref, schema_of(writer.ref.algorithm)
        assert ref.stream is not None
        self._writer = writer
        self._dims = ref.stream.dims
        self._piece_length = ref.stream.piece_length
        self._specs = ref.feature_specs
        self._shifted = {name for name in schema.shifted if name in self._dims}
        if ref.attributes.get(FRAME_ATTRIBUTE) == "shifted" and LAST_HIDDEN.name in self._dims:
            self._shifted.add(LAST_HIDDEN.name)
        self._parts: dict[str, list[Tensor]] = {name: [] for name in self._dims}
        self._devices: dict[str, torch.device] = {}
        self._num_pending = 0  # positions of an unshifted feature
        self._constants: dict[str, Tensor] = {}
        self._begun = False
        self._closing = False
        self._spoilt = ""

    def extend(self, tensors: Mapping[str, Tensor], timeout: float | None = None) -> None:
        """Add the next positions, all features in place (unshifted): all of them, or none when this raises.

        Blocks as :meth:`StreamWriter.append` does, first for what earlier calls could not append, then for the full
        pieces that these positions make. The first wait raises; what has no room within the second is held back, and is
        appended by the next call, by :meth:`flush` or by :meth:`close`.

        Args:
            tensors: every feature with equally many positions, at least one; with the first call also the features
                that have no open axis. The caller may write into them as soon as this returns.
            timeout: longest wait for the reader to make room, for each piece, in seconds; None for no limit.

        Raises:
            MisuseError: (``ValueError``) features that are not those of the sample, different numbers of positions,
                :meth:`close` was called, even if it raised, or an earlier call lost positions to an error that was
                none of those below.
            NcclStreamError: what :meth:`StreamWriter.append` raises.
        """
        self._require_whole()
        if self._closing:
            raise MisuseError(f"streamed sample {self._writer.ref.sample_id!r} has its end: nothing can follow it")
        length = self._check(tensors)
        constants = {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in self._dims}
        self._append_full(timeout)
        try:
            self._take(tensors, length, constants)
            with contextlib.suppress(PeerTimeoutError, CapacityError, torch.OutOfMemoryError):
                self._append_full(timeout)
            for parts in self._parts.values():
                parts[-1:] = [part.clone() for part in parts[-1:]]  # all that is left of the caller's memory
        except BaseException as error:
            self._spoilt = f"{type(error).__name__}: {error}"
            raise

    def flush(self, timeout: float | None = None) -> None:
        """Append the full pieces that are held back; blocks as :meth:`StreamWriter.append` does.

        Raises:
            MisuseError: (``ValueError``) an earlier call lost positions.
            NcclStreamError: what :meth:`StreamWriter.append` raises; may be called again.
        """
        self._require_whole()
        self._append_full(timeout)

    def close(self, timeout: float | None = None) -> int:
        """Append what is left, the shifted features ending with zeros, and close the sample.

        Returns:
            The number of pieces.

        Raises:
            MisuseError: (``ValueError``) nothing was added, or an earlier call lost positions.
            NcclStreamError: what :meth:`StreamWriter.append` raises; may be called again.
        """
        self._require_whole()
        self._closing = self._begun
        self._append_full(timeout)
        if self._begun and self._shifted:
            ends = {name: self._make_zero(name) for name in self._shifted}
            for name, zero in ends.items():
                self._parts[name].append(zero)
            self._shifted = set()
        while self._num_pending:
            self._append(min(self._num_pending, self._piece_length), timeout)
        return self._writer.close()

    def fail(self, error: BaseException | str) -> None:
        """See :meth:`StreamWriter.fail`."""
        self._writer.fail(error)

    def _check(self, tensors: Mapping[str, Tensor]) -> int:
        expected = self._dims.keys() if self._begun else self._specs.keys()
        if tensors.keys() != expected:
            raise MisuseError(f"the next positions must have the features {sorted(expected)}, got {sorted(tensors)}")
        lengths = set()
        for name, tensor in tensors.items():
            spec, dim = self._specs[name], self._dims.get(name)
            wanted, found = list(spec.shape), list(tensor.shape)
            if dim is not None and len(found) == len(wanted):
                lengths.add(found[dim])
                wanted[dim] = found[dim]
            if found != wanted or tensor.dtype is not spec.dtype:
                raise MisuseError(f"{name} must be like {spec}, got {FeatureSpec.of(tensor)}")
        if len(lengths) != 1 or min(lengths) < 1:
            raise MisuseError(f"the next positions must be equally many in every feature, got {sorted(lengths)}")
        return int(lengths.pop())

    def _require_whole(self) -> None:
        if self._spoilt:
            raise MisuseError(
                f"streamed sample {self._writer.ref.sample_id!r} has lost positions to an earlier error "
                f"({self._spoilt[:500]}): fail() it"
            )

    def _take(self, tensors: Mapping[str, Tensor], length: int, constants: Mapping[str, Tensor]) -> None:
        """Put the positions behind those that are held back; they are the caller's memory still."""
        for name, dim in self._dims.items():
            new = tensors[name].detach()
            if name in self._shifted and not self._begun:
                new = new.narrow(dim, 1, length - 1)
            self._parts[name].append(new)
            self._devices[name] = new.device
        self._constants.update(constants)
        self._begun = True
        self._num_pending += length

    def _make_zero(self, name: str) -> Tensor:
        """One position of zeros."""
        spec, dim = self._specs[name], self._dims[name]
        return torch.zeros((*spec.shape[:dim], 1, *spec.shape[dim + 1 :]), dtype=spec.dtype, device=self._devices[name])

    def _append_full(self, timeout: float | None) -> None:
        """Append what makes a full piece, which needs the position after it if anything is shifted."""
        while self._num_pending - bool(self._shifted) >= self._piece_length:
            self._append(self._piece_length, timeout)

    def _append(self, length: int, timeout: float | None) -> None:
        cuts = {name: _cut(parts, self._dims[name], length) for name, parts in self._parts.items()}
        self._writer.append({**{name: piece for name, (piece, _) in cuts.items()}, **self._constants}, timeout)
        self._parts = {name: rest for name, (_, rest) in cuts.items()}
        self._constants = {}
        self._num_pending -= length


def _cut(parts: list[Tensor], dim: int, length: int) -> tuple[Tensor, list[Tensor]]:
    """The first positions, in one tensor, and the parts that are left."""
    taken, rest = [], []
    for part in parts:
        here = min(length, part.shape[dim])
        if here:
            taken.append(part.narrow(dim, 0, here))
        if here < part.shape[dim]:
            rest.append(part.narrow(dim, here, part.shape[dim] - here))
        length -= here
    return (taken[0] if len(taken) == 1 else torch.cat(taken, dim)), rest
