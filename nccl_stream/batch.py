"""Batch objects: what a target backend returns and a loader yields, for any algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from nccl_stream.errors import SchemaError
from nccl_stream.refs import FeatureAlgorithm, FrozenDict
from nccl_stream.schema import schema_of
from nccl_stream.streamed.place import WHOLE, ChunkPlace

__all__ = ["FeatureBatch", "batch_of", "register_batch"]

B = TypeVar("B", bound="FeatureBatch")


class FeatureBatch(Mapping[str, Tensor]):
    """The features of one sample, as attributes and as a mapping of those that are present, in the schema's order.

    A subclass is a dataclass with one field per feature of its algorithm's schema, absent ones None.

    Attributes:
        attributes: what shapes cannot tell, such as whether last hidden states are taken before the final norm; the
            same as those of the sample's ref. Not a field: a backend sets it on the batch it made.
        sample_ids: ids of the samples in the batch; empty until a loader yields it.
        place: which part of a streamed sample this is; of any other sample, all.

    Raises:
        SchemaError: (a ``ValueError``) none or more than one supervision where the schema wants one, half a pair, or
            partial packing features.
    """

    algorithm: ClassVar[FeatureAlgorithm]
    trainer_names: ClassVar[Mapping[str, str]] = FrozenDict()
    """Names under which a trainer module takes a feature, where they differ."""

    attributes: Mapping[str, str] = FrozenDict()
    sample_ids: tuple[str, ...] = ()
    place: ChunkPlace = WHOLE

    @property
    def start_offset(self) -> int:
        """Index of the first piece; see :class:`ChunkPlace`."""
        return self.place.start_offset

    @property
    def context_items(self) -> int:
        """How many leading pieces were in earlier batches; see :class:`ChunkPlace`."""
        return self.place.context_items

    @property
    def is_final(self) -> bool:
        """Whether no further part of the sample follows."""
        return self.place.is_final

    def __post_init__(self) -> None:
        schema = schema_of(self.algorithm)
        schema.version_of(self)
        schema.check_packing(self)

    def features(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name, in the schema's order."""
        present = ((name, getattr(self, name)) for name in schema_of(self.algorithm).names)
        return {name: tensor for name, tensor in present if tensor is not None}

    def to_trainer_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the algorithm's trainer module."""
        return {self.trainer_names.get(name, name): tensor for name, tensor in self.features().items()}

    def to(self: B, device: torch.device | str | None = None, *, non_blocking: bool = False) -> B:
        """Return a batch with every tensor on ``device``; tensors that are there already are shared."""
        moved: dict[str, Any] = {n: t.to(device, non_blocking=non_blocking) for n, t in self.features().items()}
        batch: B = replace(self, **moved)  # type: ignore[type-var]  # every subclass is a dataclass
        batch.attributes, batch.sample_ids, batch.place = self.attributes, self.sample_ids, self.place
        return batch

    def __getitem__(self, name: str) -> Tensor:
        tensor = getattr(self, name, None) if name in schema_of(self.algorithm).names else None
        if tensor is None:
            raise KeyError(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.features())

    def __len__(self) -> int:
        return len(self.features())

    # A mapping compares its items, and tensors have no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


_BATCHES: dict[FeatureAlgorithm, type[FeatureBatch]] = {}


def register_batch(cls: type[B]) -> type[B]:
    """Make ``cls`` the batch object of its algorithm; a class decorator."""
    _BATCHES[cls.algorithm] = cls
    return cls


def batch_of(
    algorithm: FeatureAlgorithm,
    tensors: Mapping[str, Tensor],
    *,
    attributes: Mapping[str, str] | None = None,
    sample_ids: tuple[str, ...] = (),
) -> FeatureBatch:
    """Make the algorithm's batch object of the features of a sample; those that it has no field for are left out.

    Raises:
        SchemaError: (a ``ValueError``) the algorithm has no batch object, or the features break its rules.
    """
    names = schema_of(algorithm).names
    if algorithm not in _BATCHES:
        raise SchemaError(f"no batches are defined for {algorithm.value}")
    known: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in names}
    batch = _BATCHES[algorithm](**known)
    batch.attributes, batch.sample_ids = FrozenDict(attributes), sample_ids
    return batch
