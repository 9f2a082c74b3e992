"""How samples become batches: which of them go together, and how their tensors are joined.

Pure: nothing here waits, locks or holds memory of its own. Lengths are known from refs, so batches are formed before
any tensor is fetched.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nccl_stream.batch import FeatureBatch, batch_of
from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.refs import SampleRef
from nccl_stream.schema import Schema, schema_of

__all__ = ["Batcher", "BatchRule", "collate", "concatenate", "extent_of"]

T = TypeVar("T")

_PADDED = ("S", "D")
"""Symbols of axes along which shorter samples are padded; along any other but ``B``, samples must agree."""


@dataclass(frozen=True)
class BatchRule:
    """Which samples may share a batch.

    Attributes:
        batch_size: samples per batch; None for one, or for as many as ``max_tokens`` allows.
        max_tokens: most tokens of a batch, padding included: rows times the longest length. A sample that is longer
            than that comes alone.
        length_buckets: ascending upper bounds of lengths; samples in one batch lie between the same two. Whatever is
            longer than the last bound shares a bucket.

    Raises:
        ConfigError: (``ValueError``) a value that is not positive, or bounds that do not ascend.
    """

    batch_size: int | None = None
    max_tokens: int | None = None
    length_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive int, got {value!r}")
        bounds = self.length_buckets
        ascending = all(low < high for low, high in zip((0, *bounds), bounds, strict=False))
        if any(type(bound) is not int for bound in bounds) or not ascending:
            raise ConfigError(f"length_buckets must be ascending positive ints, got {bounds!r}")

    @property
    def most_samples(self) -> int | None:
        """Samples that a batch may have at most; None when only tokens count."""
        return 1 if self.batch_size is None and self.max_tokens is None else self.batch_size

    def bucket_of(self, length: int) -> int:
        """Index of the bucket for samples of ``length`` tokens."""
        return bisect_left(self.length_buckets, length)


@dataclass(frozen=True)
class _Entry(Generic[T]):
    item: T
    rows: int
    length: int


class Batcher(Generic[T]):
    """Forms batches from samples as they come.

    Without a window, a batch is complete as soon as its bucket is full, so batches of one bucket keep the order of
    arrival. With one, the samples of the whole window are collected, ordered by length if there are buckets, and cut
    into batches: of equal numbers of samples, whatever their lengths, so that ranks which take the same number of
    samples per step also take the same number of batches, unless ``max_tokens`` cuts them differently.

    Not thread-safe.

    Args:
        rule: which samples may share a batch.
        window: samples that are batched among themselves; None for no such border.
    """

    def __init__(self, rule: BatchRule, *, window: int | None = None) -> None:
        self._rule = rule
        self._window = window
        self._in_window = 0
        self._buckets: dict[int, list[_Entry[T]]] = {}  # in the order in which they were begun
        self._complete: deque[list[T]] = deque()

    def __len__(self) -> int:
        """Samples that wait here."""
        return sum(map(len, self._buckets.values())) + sum(map(len, self._complete))

    def add(self, item: T, rows: int, length: int) -> None:
        """Take one sample of ``rows`` rows of ``length`` tokens."""
        entry = _Entry(item, rows, length)
        if self._window is None:
            self._fill(self._rule.bucket_of(length), entry)
        else:
            self._buckets.setdefault(0, []).append(entry)
            self._advance()

    def skip(self) -> None:
        """Count a sample that was taken but will not come: it has used up its place in the window."""
        if self._window is not None:
            self._advance()

    def pop(self) -> list[T] | None:
        """Return the next complete batch, if there is one."""
        return self._complete.popleft() if self._complete else None

    def flush(self) -> list[T] | None:
        """Return the next batch, complete or not; None when nothing waits. The bucket begun first comes first."""
        if not self._complete and self._buckets:
            key = next(iter(self._buckets))
            if self._window is None:
                self._close(key)
            else:
                self._cut()
        return self.pop()

    def take_all(self) -> list[T]:
        """Remove and return everything that waits."""
        waiting = [item for batch in self._complete for item in batch]
        waiting += [entry.item for bucket in self._buckets.values() for entry in bucket]
        self._complete.clear()
        self._buckets.clear()
        return waiting

    def _advance(self) -> None:
        self._in_window += 1
        if self._in_window == self._window:
            self._cut()

    def _cut(self) -> None:
        """Make batches of what the window holds, and begin the next one."""
        self._in_window = 0
        entries = self._buckets.pop(0, [])
        if self._rule.length_buckets:
            entries.sort(key=lambda entry: entry.length)  # stable: equal lengths keep their order
        for entry in entries:
            self._fill(0, entry)
        self._close(0)

    def _fill(self, key: int, entry: _Entry[T]) -> None:
        if not self._fits([*self._buckets.get(key, ()), entry]):
            self._close(key)
        bucket = self._buckets.setdefault(key, [])
        bucket.append(entry)
        most_tokens = self._rule.max_tokens
        if len(bucket) == self._rule.most_samples or (most_tokens is not None and _tokens(bucket) >= most_tokens):
            self._close(key)

    def _fits(self, entries: list[_Entry[T]]) -> bool:
        return self._rule.max_tokens is None or _tokens(entries) <= self._rule.max_tokens

    def _close(self, key: int) -> None:
        if bucket := self._buckets.pop(key, None):
            self._complete.append([entry.item for entry in bucket])


def _tokens(entries: Sequence[_Entry[T]]) -> int:
    """Tokens of a batch of ``entries``, padding included."""
    return sum(entry.rows for entry in entries) * max(entry.length for entry in entries)


def extent_of(schema: Schema, ref: SampleRef) -> tuple[int, int]:
    """Return rows and tokens per row of a sample, from the first of its features that has both.

    Nobody knows yet how long a streamed sample becomes: it counts as longer than any other, so with a limit of tokens
    it comes alone.
    """
    for feature in schema.features:
        spec = ref.feature_specs.get(feature.name)
        if spec is not None and feature.dims[:2] == ("B", "S") and len(spec.shape) >= 2:
            return spec.shape[0], spec.shape[1] if ref.stream is None else sys.maxsize
    return 1, 0


def collate(batches: Sequence[FeatureBatch]) -> FeatureBatch:
    """Make one batch of the batches of several samples; see :func:`concatenate`.

    Attributes that differ between samples are left out.

    Raises:
        MisuseError: (``ValueError``) the samples cannot be joined, or an attribute differs that the schema needs, such
            as whether last hidden states are taken before the norm.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    schema = schema_of(first.algorithm)
    tensors = concatenate(schema, batches)
    common = {
        name: value
        for name, value in first.attributes.items()
        if all(batch.attributes.get(name) == value for batch in batches)
    }
    differing = [name for feature in tensors for name in schema.attributes.get(feature, ()) if name not in common]
    if differing:
        raise MisuseError(f"samples of one batch must agree on {differing}")
    sample_ids = tuple(sample_id for batch in batches for sample_id in batch.sample_ids)
    return batch_of(first.algorithm, tensors, attributes=common, sample_ids=sample_ids)


def concatenate(schema: Schema, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the features of several samples along their rows, shorter rows padded at their right end.

    Padding is zero, so it has no loss and, where there is an attention mask, nothing attends to it. A padding slot
    itself still attends to the real slots before it: in a packed row the last document is extended over the padding, as
    ``seq_lens`` must sum to the length, and ``doc_remaining`` stays zero there. So no row of scores is masked
    completely, whose softmax would be NaN.

    Args:
        schema: names the axes.
        samples: at least one; all with the same features.

    Returns:
        New tensors ``[rows of all samples, longest length, ...]``; the sample's own ones if there is only one.

    Raises:
        MisuseError: (``ValueError``) features, dtypes, devices, or sizes other than rows and length differ.
    """
    first = samples[0]
    if len(samples) == 1:
        return dict(first)
    for sample in samples[1:]:
        if sample.keys() != first.keys():
            differing = sorted(set(sample) ^ set(first))
            raise MisuseError(f"samples of one batch must have the same features; {differing} are not in all of them")
    dims = {feature.name: feature.dims for feature in schema.features}
    joined = {}
    for name in first:
        if name not in dims:
            raise MisuseError(f"{name} is no feature of {schema.algorithm.value}: it is not known how to join it")
        joined[name] = _concatenate(name, dims[name], [sample[name] for sample in samples])
    if all(name in joined for name in schema.packing):
        _extend_last_documents(joined, samples)
    return joined


def _concatenate(name: str, dims: tuple[str, ...], tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    # Axes that must have the same size everywhere.
    fixed = [axis for axis, dim in enumerate(dims) if axis and dim not in _PADDED]
    for tensor in tensors:
        alike = tensor.dtype is first.dtype and tensor.device == first.device and tensor.dim() == len(dims)
        if not alike or any(tensor.shape[axis] != first.shape[axis] for axis in fixed):
            raise MisuseError(
                f"{name} cannot be joined along its rows: {_describe(tensor)} does not go with {_describe(first)}"
            )
    if all(tensor.shape[1:] == first.shape[1:] for tensor in tensors):
        return torch.cat(tensors)
    rows = sum(tensor.shape[0] for tensor in tensors)
    longest = [max(tensor.shape[axis] for tensor in tensors) for axis in range(1, len(dims))]
    joined = first.new_zeros((rows, *longest))
    row = 0
    for tensor in tensors:
        region = joined[row : row + tensor.shape[0]]
        for axis in range(1, tensor.dim()):
            region = region.narrow(axis, 0, tensor.shape[axis])
        region.copy_(tensor)
        row += tensor.shape[0]
    return joined


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _extend_last_documents(joined: dict[str, Tensor], samples: Sequence[Mapping[str, Tensor]]) -> None:
    positions, seq_lens = joined["position_ids"], joined["seq_lens"]
    row = 0
    for sample in samples:
        rows, length = sample["position_ids"].shape
        padding = positions.shape[1] - length
        own = slice(row, row + rows)
        row += rows
        if not padding or not length:
            continue
        steps = torch.arange(1, padding + 1, device=positions.device, dtype=positions.dtype)
        positions[own, length:] = positions[own, length - 1 : length] + steps
        number = torch.arange(seq_lens.shape[1], device=seq_lens.device)
        last = torch.where(seq_lens[own] > 0, number, 0).amax(dim=1, keepdim=True)
        seq_lens[own] = seq_lens[own].scatter_add(1, last, torch.full_like(last, padding).to(seq_lens.dtype))
