"""Writes a streamed sample from what a chunked prefill or a decode loop computes: positions in place, in any portions.

A sample's *slots* are not the target's positions everywhere: in EAGLE-3's frame, slot t holds the hidden states of
position t and the token and distribution of position t + 1. So the last slot that is known is one behind the last
position that was computed, and only the end of the sample is filled with zeros. Cutting each chunk's own features to
slots would put zeros at every border instead, and labels from nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nccl_stream.errors import MisuseError
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

    As a context manager it closes the sample on the way out; with an exception it fails it. Holds up to a piece and one
    position back. For one thread at a time.

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
        self._pending: dict[str, Tensor] = {}
        self._num_pending = 0  # positions of an unshifted feature
        self._constants: dict[str, Tensor] = {}
        self._begun = False
        self._closing = False

    def extend(self, tensors: Mapping[str, Tensor], timeout: float | None = None) -> None:
        """Add the next positions, all features in place (unshifted); blocks as :meth:`StreamWriter.append` does.

        Args:
            tensors: every feature with equally many positions, at least one; with the first call also the features
                that have no open axis. They are copied, also those that are held back.
            timeout: longest wait for the reader to make room, for each piece, in seconds; None for no limit.

        Raises:
            MisuseError: (``ValueError``) features that are not those of the sample, different numbers of positions, or
                :meth:`close` was called, even if it raised. Nothing was added.
            NcclStreamError: what :meth:`StreamWriter.append` raises. Positions that were added stay, and are tried
                again with the next call or by :meth:`close`.
        """
        if self._closing:
            raise MisuseError(f"streamed sample {self._writer.ref.sample_id!r} has its end: nothing can follow it")
        length = self._check(tensors)
        for name, tensor in tensors.items():
            if name not in self._dims:
                self._constants[name] = tensor.detach().clone()
                continue
            dim = self._dims[name]
            new = tensor.detach()
            if name in self._shifted and not self._begun:
                new = new.narrow(dim, 1, length - 1)
            self._pending[name] = torch.cat((self._pending[name], new), dim) if name in self._pending else new.clone()
        self._begun = True
        self._num_pending += length
        # A full piece needs the position after it, if anything is shifted.
        while self._num_pending - bool(self._shifted) >= self._piece_length:
            self._append(self._piece_length, timeout)

    def close(self, timeout: float | None = None) -> int:
        """Append what is left, the shifted features ending with zeros, and close the sample.

        Returns:
            The number of pieces.

        Raises:
            MisuseError: (``ValueError``) nothing was added.
            NcclStreamError: what :meth:`StreamWriter.append` raises.
        """
        self._closing = self._begun
        if self._begun and self._shifted:
            for name in self._shifted:
                spec, dim = self._specs[name], self._dims[name]
                shape = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
                zero = self._pending[name].new_zeros(shape)
                self._pending[name] = torch.cat((self._pending[name], zero), dim)
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

    def _append(self, length: int, timeout: float | None) -> None:
        piece = {name: tensor.narrow(self._dims[name], 0, length) for name, tensor in self._pending.items()}
        self._writer.append({**piece, **self._constants}, timeout)
        self._constants = {}
        self._num_pending -= length
        self._pending = {
            name: tensor.narrow(dim := self._dims[name], length, tensor.shape[dim] - length)
            for name, tensor in self._pending.items()
        }
