"""What features a sample of an algorithm has: names, symbolic shapes, kinds of dtype, frame and supervision.

One :class:`Schema` per algorithm, in one registry. The module that is named like the algorithm registers it, together
with its batch object and its target backend, and is imported when the schema is first asked for. Symbols: ``B`` batch,
``S`` sequence, ``H`` hidden size of the target, ``L`` number of captured layers, ``V`` vocabulary, ``Vd`` draft
vocabulary, ``D`` documents per row.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from nccl_stream.errors import MisuseError, SchemaError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, FrozenDict, SampleRef, StreamSpec

__all__ = [
    "FRAME_ATTRIBUTE",
    "INPUTS",
    "LAST_HIDDEN",
    "LAST_HIDDEN_ATTRIBUTES",
    "LOGITS",
    "NORM_ATTRIBUTE",
    "PACKING",
    "Feature",
    "Schema",
    "register_schema",
    "schema_of",
    "validate_ref",
]

Kind = Literal["float", "id", "mask"]

NORM_ATTRIBUTE = "last_hidden_states.norm"
"""Ref attribute: ``pre`` or ``post``, whether last hidden states are taken before or after the target's final norm."""

FRAME_ATTRIBUTE = "last_hidden_states.frame"
"""Ref attribute: ``shifted`` (slot t holds position t + 1, zero at the end) or ``unshifted``."""


@dataclass(frozen=True)
class Feature:
    """One named feature.

    Attributes:
        name: its name in refs and batches.
        dims: one entry per axis, each a product of ints and symbols such as ``"3*H"``. A symbol has one value
            throughout a sample.
        kind: ``float``; ``id``, an integer that indexes or counts; ``mask``, bool or any real number, carried as given.
        itemsize: bytes per element where it does not follow from the target's dtype (float) or int64 (others).
    """

    name: str
    dims: tuple[str, ...]
    kind: Kind
    itemsize: int | None = None


INPUTS = (
    Feature("input_ids", ("B", "S"), "id"),
    Feature("attention_mask", ("B", "S"), "mask"),
    Feature("loss_mask", ("B", "S"), "mask"),
)
LOGITS = Feature("logits", ("B", "S", "V"), "float")
LAST_HIDDEN = Feature("last_hidden_states", ("B", "S", "H"), "float")
LAST_HIDDEN_ATTRIBUTES = {
    LAST_HIDDEN.name: {NORM_ATTRIBUTE: ("pre", "post"), FRAME_ATTRIBUTE: ("shifted", "unshifted")}
}
PACKING = (
    Feature("position_ids", ("B", "S"), "id"),
    Feature("seq_lens", ("B", "D"), "id"),
    Feature("doc_remaining", ("B", "S"), "id"),
)
_PACKING = tuple(feature.name for feature in PACKING)


@dataclass(frozen=True)
class Schema:
    """The features of one algorithm.

    Attributes:
        algorithm: whose they are.
        features: every feature the algorithm knows, in the order of its batch object.
        supervision: schema version to the encodings of the target's distribution that it allows. Each is a group of
            features that come together; a ref has exactly one group of its version. The empty group stands for none.
        shifted: features whose slot t holds position t + 1, with zero fill at the end. The others are in place.
        packing: features that a packed sample has all of and any other none.
        renames: other names under which engines ship a feature, to its name here.
        min_supervised_run: consecutive supervised tokens that a sample needs to be worth a forward.
        attributes: feature to the ref attributes it needs, each with its allowed values.
    """

    algorithm: FeatureAlgorithm
    features: tuple[Feature, ...]
    supervision: Mapping[int, tuple[tuple[str, ...], ...]]
    shifted: tuple[str, ...] = ()
    packing: tuple[str, ...] = _PACKING
    renames: Mapping[str, str] = field(default_factory=FrozenDict)
    min_supervised_run: int = 1
    attributes: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=FrozenDict)

    @property
    def required(self) -> tuple[str, ...]:
        """Names that every ref has, whatever its supervision."""
        return self.algorithm.required_features

    @property
    def versions(self) -> tuple[int, ...]:
        """The schema versions that are understood, ascending."""
        return tuple(sorted(self.supervision))

    @property
    def names(self) -> tuple[str, ...]:
        """Every feature name, in the order of the batch object."""
        return tuple(feature.name for feature in self.features)

    @property
    def draft_vocabulary_features(self) -> tuple[str, ...]:
        """Features that mean nothing without the draft vocabulary, since it is one of their axes."""
        return tuple(feature.name for feature in self.features if "Vd" in feature.dims)

    def version_of(self, present: Iterable[str]) -> int:
        """Return the schema version that carries the supervision among the feature names ``present``.

        Raises:
            SchemaError: (``ValueError``) no version knows it: none where one is needed, several, or half a pair.
        """
        found = self._supervision_names.intersection(present)
        for version in self.versions:
            if any(found == set(group) for group in self.supervision[version]):
                return version
        raise SchemaError(
            f"{self.algorithm.value} needs exactly one supervision encoding, {self._choices(self.versions)}; "
            f"got {sorted(found) or 'none'}"
        )

    def validate(self, ref: SampleRef, *, shapes: bool = False) -> None:
        """Check that ``ref`` fits this schema. Features that the schema does not know are allowed.

        Args:
            ref: the ref.
            shapes: also check shapes and dtypes.

        Raises:
            SchemaError: (``ValueError``) another algorithm or version, a required feature missing, no or several
                supervision encodings, partial packing, an attribute missing, a stream that is not open along the
                sequence; with ``shapes``, a shape or dtype that does not fit.
        """
        name = self.algorithm.value
        if ref.algorithm is not self.algorithm:
            raise SchemaError(f"sample {ref.sample_id!r} is for {ref.algorithm.value}, this consumer takes {name}")
        if ref.schema_version not in self.supervision:
            raise SchemaError(
                f"sample {ref.sample_id!r}: schema_version of {name} must be one of {list(self.versions)}, "
                f"got {ref.schema_version}"
            )
        present = ref.feature_specs.keys()
        missing = [feature for feature in self.required if feature not in present]
        if missing:
            raise SchemaError(f"sample {ref.sample_id!r} lacks required {name} features {missing}")
        self.check_packing(present)
        self._check_supervision(ref)
        self.check_attributes(present, ref.attributes)
        if ref.stream is not None:
            self._check_stream(ref.feature_specs, ref.stream)
        if shapes:
            self.check_specs(ref.feature_specs)

    def check_packing(self, present: Iterable[str]) -> None:
        """Check that of the packing features all are in ``present`` or none.

        Raises:
            SchemaError: (``ValueError``) some are and some are not.
        """
        names = set(present)
        found = [name for name in self.packing if name in names]
        if found and len(found) != len(self.packing):
            raise SchemaError(
                f"{self.algorithm.value} sequence packing needs {', '.join(self.packing)} together; got only {found}"
            )

    def check_attributes(self, present: Iterable[str], attributes: Mapping[str, str]) -> None:
        """Check that ``attributes`` say what the features ``present`` need said.

        Raises:
            SchemaError: (``ValueError``) an attribute is missing or has a value that is not known.
        """
        names = set(present)
        for feature, needed in self.attributes.items():
            if feature not in names:
                continue
            for attribute, values in needed.items():
                if attributes.get(attribute) not in values:
                    raise SchemaError(
                        f"with {feature}, the attribute {attribute!r} of a sample must be one of {list(values)}, "
                        f"got {attributes.get(attribute)!r}"
                    )

    def open_dims(self, present: Iterable[str]) -> dict[str, int]:
        """Return the sequence axis of each of the features ``present`` that has one: where a streamed sample is open.

        Raises:
            SchemaError: (``ValueError``) packing features: a streamed sample is one document.
        """
        names = set(present)
        if packed := sorted(names.intersection(self.packing)):
            raise SchemaError(f"a streamed sample cannot be packed, it is one document: got {packed}")
        return {f.name: f.dims.index("S") for f in self.features if f.name in names and "S" in f.dims}

    def _check_stream(self, specs: Mapping[str, FeatureSpec], stream: StreamSpec) -> None:
        wanted = self.open_dims(specs)
        found = {name: dim for name, dim in stream.dims.items() if name in self.names}
        if found != wanted:
            raise SchemaError(
                f"a streamed sample must be open along the sequence, {wanted}; this one is open in {found}"
            )

    def check_specs(self, specs: Mapping[str, FeatureSpec]) -> None:
        """Check shapes and dtypes of the known features in ``specs`` against each other.

        Raises:
            SchemaError: (``ValueError``) wrong number of axes, a symbol with two values, or a dtype of another kind.
        """
        known = [feature for feature in self.features if feature.name in specs]
        axes: list[tuple[str, str, int]] = []
        for feature in known:
            spec = specs[feature.name]
            if len(spec.shape) != len(feature.dims):
                raise SchemaError(f"{feature.name} must be [{', '.join(feature.dims)}], got shape {list(spec.shape)}")
            if not _is_kind(spec.dtype, feature.kind):
                raise SchemaError(f"{feature.name} must have a dtype of kind {feature.kind!r}, got {spec.dtype}")
            axes += [(feature.name, dim, size) for dim, size in zip(feature.dims, spec.shape, strict=True)]
        sizes: dict[str, int] = {}
        # Single symbols first: they fix the values that products are checked against.
        for name, dim, size in sorted(axes, key=lambda axis: "*" in axis[1]):
            _bind(name, dim, size, sizes)

    def sample_bytes(
        self, sizes: Mapping[str, int], *, supervision: Iterable[str] = (), dtype: torch.dtype = torch.bfloat16
    ) -> int:
        """Return the bytes of one sample without packing.

        Args:
            sizes: symbol to size, such as ``{"B": 1, "S": 4096, "H": 4096, "V": 151_936}``.
            supervision: the features it carries beside the required ones.
            dtype: of the target's activations. Ids and masks count as int64, probabilities as fp32, a position mask as
                bool, which is what the backends here give.
        """
        names = {*self.required, *supervision}
        total = 0
        for feature in self.features:
            if feature.name in names:
                axes = (math.prod(int(f) if f.isdigit() else sizes[f] for f in dim.split("*")) for dim in feature.dims)
                itemsize = feature.itemsize or (dtype.itemsize if feature.kind == "float" else 8)
                total += math.prod(axes) * itemsize
        return total

    def supervision_of(self, ref: SampleRef) -> tuple[str, ...]:
        """Return the supervision group that ``ref`` carries; empty when it has none."""
        for group in self.supervision.get(ref.schema_version, ()):
            if group and all(name in ref.feature_specs for name in group):
                return group
        return ()

    def canonical(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``tensors`` under their names here and in the order of the batch, unknown ones last.

        Raises:
            MisuseError: (``ValueError``) a feature comes under two of its names.
        """
        renamed: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            target = self.renames.get(name, name)
            if target in renamed:
                raise MisuseError(f"feature {target!r} comes under two names, one of them {name!r}")
            renamed[target] = tensor
        order = [feature.name for feature in self.features if feature.name in renamed]
        return {name: renamed[name] for name in [*order, *(n for n in renamed if n not in order)]}

    def padding(self, ref: SampleRef, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Make tensors shaped like those of ``ref`` that contribute nothing to a loss and produce no NaN.

        The attention mask is one (an all-masked softmax is NaN), the loss mask zero, packing describes one document,
        everything else is zero.
        """
        tensors = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=device) for name, spec in ref.feature_specs.items()
        }
        if "attention_mask" in tensors:
            tensors["attention_mask"].fill_(1)
        if all(name in tensors for name in _PACKING):
            num_tokens = tensors["position_ids"].shape[-1]
            tensors["position_ids"].copy_(torch.arange(num_tokens))
            tensors["seq_lens"][..., 0] = num_tokens
        return tensors

    def is_worth_a_forward(self, loss_mask: torch.Tensor) -> bool:
        """Whether some row of ``loss_mask`` ``[B, S]`` (unshifted) has a long enough run of supervised tokens.

        Where the loss mask is shifted, that of the first token has no slot in the sample.
        """
        supervised = loss_mask != 0
        if "loss_mask" in self.shifted:
            supervised = supervised[:, 1:]
        run = supervised
        for shift in range(1, self.min_supervised_run):
            run = run[:, :-1] & supervised[:, shift:]
        return bool(run.any())

    @property
    def _supervision_names(self) -> set[str]:
        return {name for groups in self.supervision.values() for group in groups for name in group}

    def _choices(self, versions: Iterable[int]) -> str:
        groups = [group for version in versions for group in self.supervision[version]]
        return " or ".join(" + ".join(group) if group else "none" for group in groups)

    def _check_supervision(self, ref: SampleRef) -> None:
        # Every name that any version uses for supervision: one of another version is as wrong as two of this one.
        found = self._supervision_names.intersection(ref.feature_specs)
        if any(found == set(group) for group in self.supervision[ref.schema_version]):
            return
        raise SchemaError(
            f"sample {ref.sample_id!r} must carry exactly one supervision encoding: "
            f"{self._choices((ref.schema_version,))} (schema version {ref.schema_version}); got {sorted(found)}"
        )


def _is_kind(dtype: torch.dtype, kind: Kind) -> bool:
    if kind == "float":
        return dtype.is_floating_point
    if kind == "id":
        return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
    return not dtype.is_complex


def _bind(name: str, dim: str, size: int, sizes: dict[str, int]) -> None:
    """Check one axis against the symbols known so far, and learn from it the one symbol that is not."""
    factors = dim.split("*")
    known = math.prod(int(f) if f.isdigit() else sizes[f] for f in factors if f.isdigit() or f in sizes)
    unknown = [factor for factor in factors if not factor.isdigit() and factor not in sizes]
    fits = size == known if not unknown else size == 0 if known == 0 else size % known == 0
    if not fits:
        values = ", ".join(f"{symbol}={value}" for symbol, value in sizes.items())
        raise SchemaError(f"{name}: an axis of size {size} must be {dim} with {values or 'nothing known yet'}")
    if len(unknown) == 1 and known:
        sizes[unknown[0]] = size // known


_SCHEMAS: dict[FeatureAlgorithm, Schema] = {}


def register_schema(schema: Schema) -> Schema:
    """Make ``schema`` the one of its algorithm, and return it.

    Raises:
        MisuseError: (``ValueError``) the algorithm has one already.
    """
    if schema.algorithm in _SCHEMAS:
        raise MisuseError(f"algorithm {schema.algorithm.value} already has a schema")
    _SCHEMAS[schema.algorithm] = schema
    return schema


def schema_of(algorithm: FeatureAlgorithm) -> Schema:
    """Return the schema of ``algorithm``; imports the module named like it where that has not happened yet.

    Raises:
        SchemaError: (``ValueError``) it has none.
    """
    if algorithm not in _SCHEMAS and isinstance(algorithm, FeatureAlgorithm):
        module = f"{__package__}.{algorithm.value}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    try:
        return _SCHEMAS[algorithm]
    except KeyError:
        raise SchemaError(f"no schema is registered for algorithm {algorithm!r}") from None


def validate_ref(ref: SampleRef, *, shapes: bool = False) -> None:
    """Check ``ref`` against the schema of its own algorithm; see :meth:`Schema.validate`."""
    schema_of(ref.algorithm).validate(ref, shapes=shapes)
