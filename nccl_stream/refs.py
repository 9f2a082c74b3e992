"""Tensor-free references: what travels on the control plane in place of tensors.

A :class:`SampleRef` names one sample of one store and says, by its :class:`FeatureSpec` map, exactly how many bytes
each feature has, so that a receiver can prepare memory before anything is sent. Refs are immutable, hashable,
picklable and have a strict JSON form for the wire.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch

from nccl_stream.errors import RefError, WireFormatError
from nccl_stream.frozen import FrozenDict
from nccl_stream.streamed.spec import StreamSpec

__all__ = [
    "MAX_WIRE_BYTES",
    "FeatureAlgorithm",
    "FeatureSpec",
    "FrozenDict",
    "SampleRef",
    "StreamSpec",
    "assert_no_tensors",
    "dtype_from_name",
    "dtype_name",
]

MAX_WIRE_BYTES = 1 << 20
"""Largest JSON text of one ref, in bytes; far below the 8 MiB at which a TCPStore drops its client."""

MAX_FEATURES = 4096
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 4096
MAX_DIMS = 16
MAX_WIRE_INT = 2**62
_MAX_DEPTH = 64

_WIRE_VERSION = 1

V = TypeVar("V")


class FeatureAlgorithm(str, Enum):
    """Draft family a sample was produced for. The value is the name used on the wire.

    Attributes:
        required_features: names that every ref of the algorithm carries, whatever its supervision.
    """

    required_features: tuple[str, ...]

    def __new__(cls, value: str, required_features: tuple[str, ...] = ()) -> FeatureAlgorithm:
        member = str.__new__(cls, value)
        member._value_ = value
        member.required_features = required_features
        return member

    EAGLE3 = "eagle3", ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask")
    DFLASH = "dflash", ("hidden_states", "input_ids", "attention_mask", "loss_mask")
    DSPARK = "dspark", ("target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask")


_DTYPE_BY_NAME: dict[str, torch.dtype] = {
    # Aliases (torch.float, torch.half) are the same objects; str() gives the one canonical name.
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NAME_BY_DTYPE = {dtype: name for name, dtype in _DTYPE_BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of ``dtype``: ``torch.bfloat16`` is ``"bfloat16"``."""
    return _NAME_BY_DTYPE[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype with this canonical name.

    Raises:
        WireFormatError: this version of torch has no such dtype.
    """
    try:
        return _DTYPE_BY_NAME[name]
    except (KeyError, TypeError):
        raise WireFormatError(
            f"unknown dtype name {_shorten(name)}; known: {', '.join(sorted(_DTYPE_BY_NAME))}"
        ) from None


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and dtype of one feature; all a receiver needs to prepare memory for it.

    Attributes:
        shape: dims in the producer's axis order; a list is accepted and becomes a tuple. ``()`` is a 0-d tensor.
        dtype: the stored dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if isinstance(self.shape, (str, bytes)) or not isinstance(self.shape, (tuple, list)):
            raise RefError(f"FeatureSpec.shape must be a tuple of non-negative ints, got {self.shape!r}")
        # bool is an int to isinstance, but never a size.
        if not all(type(dim) is int and dim >= 0 for dim in self.shape):
            raise RefError(f"FeatureSpec.shape must be a tuple of non-negative ints, got {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise RefError(f"FeatureSpec.dtype must be a torch.dtype, got {type(self.dtype).__name__}")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this spec."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FeatureSpec:
        """Return the spec of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class SampleRef:
    """Immutable reference to one sample in one feature store. Holds no tensor at any depth.

    Attributes:
        sample_id: identifies the sample within its store.
        run_id: the run it belongs to.
        store_uri: ``scheme://location`` of the store that holds it.
        feature_keys: feature name to the store's own key, in the order in which features are handed out.
        feature_specs: feature name to :class:`FeatureSpec`; the same names as ``feature_keys``.
        algorithm: the draft family the features are for.
        schema_version: version of that family's feature layout.
        num_tokens: number of supervised tokens as counted by the producer.
        estimated_bytes: sum of the features' bytes.
        target_model_version: version of the target's weights.
        draft_weight_version: version of the draft's weights.
        attributes: short facts about the features that shapes cannot tell, such as
            ``{"last_hidden_states": "pre_norm"}``; str to str.
        stream: for a sample that travels in pieces, how it does. ``feature_specs`` then describe one full piece, and
            ``estimated_bytes`` is the memory of its window.

    Raises:
        RefError: (a ``ValueError``) a field breaks its rule; the message names the field.
    """

    sample_id: str
    run_id: str
    store_uri: str
    feature_keys: Mapping[str, str]
    feature_specs: Mapping[str, FeatureSpec]
    algorithm: FeatureAlgorithm
    schema_version: int
    num_tokens: int
    estimated_bytes: int
    target_model_version: str
    draft_weight_version: str
    attributes: Mapping[str, str] = field(default=FrozenDict(), kw_only=True)
    stream: StreamSpec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("sample_id", "run_id", "store_uri", "target_model_version", "draft_weight_version"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                _refuse_tensor(value, f"SampleRef.{name}")
                raise RefError(f"SampleRef.{name} must be a non-empty str, got {_shorten(value)}")
        scheme, separator, location = self.store_uri.partition("://")
        if not (scheme and separator and location):
            raise RefError(f"SampleRef.store_uri must look like scheme://location, got {self.store_uri!r}")
        for name in ("schema_version", "num_tokens", "estimated_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                _refuse_tensor(value, f"SampleRef.{name}")
                raise RefError(f"SampleRef.{name} must be a non-negative int, got {_shorten(value)}")
        if not isinstance(self.algorithm, FeatureAlgorithm):
            raise RefError(f"SampleRef.algorithm must be a FeatureAlgorithm, got {_shorten(self.algorithm)}")
        object.__setattr__(self, "feature_keys", _frozen(self.feature_keys, str, "SampleRef.feature_keys"))
        object.__setattr__(self, "feature_specs", _frozen(self.feature_specs, FeatureSpec, "SampleRef.feature_specs"))
        object.__setattr__(self, "attributes", _frozen(self.attributes, str, "SampleRef.attributes"))
        self._check_features()

    def _check_features(self) -> None:
        if self.feature_keys.keys() != self.feature_specs.keys():
            raise RefError(
                "SampleRef.feature_keys and feature_specs must name the same feature set; "
                f"keys={sorted(self.feature_keys)} specs={sorted(self.feature_specs)}"
            )
        missing = [name for name in self.algorithm.required_features if name not in self.feature_keys]
        if missing:
            raise RefError(
                f"SampleRef for {self.algorithm.value} is missing required features {missing}; "
                f"present={sorted(self.feature_keys)}"
            )
        if self.stream is not None:
            self._check_stream(self.stream)

    def _check_stream(self, stream: StreamSpec) -> None:
        if not isinstance(stream, StreamSpec):
            _refuse_tensor(stream, "SampleRef.stream")
            raise RefError(f"SampleRef.stream must be a StreamSpec or None, got {_shorten(stream)}")
        for name, dim in stream.dims.items():
            if name not in self.feature_specs:
                raise RefError(f"SampleRef.stream opens {_shorten(name)!r}, which is not among the features")
            shape = self.feature_specs[name].shape
            if dim >= len(shape) or shape[dim] != stream.piece_length:
                raise RefError(
                    f"SampleRef.stream opens axis {dim} of {name!r}, which must have piece_length="
                    f"{stream.piece_length} positions; its shape is {shape}"
                )

    def feature_names(self) -> tuple[str, ...]:
        """Return the feature names in the order the producer chose."""
        return tuple(self.feature_keys)

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: plain dicts, lists, strs and ints.

        Raises:
            WireFormatError: the ref exceeds a limit of the wire (length of a name, number of features, total size).
        """
        wire: dict[str, Any] = {
            "v": _WIRE_VERSION,
            "sample_id": self.sample_id,
            "run_id": self.run_id,
            "store_uri": self.store_uri,
            # A list, because the order of features matters and that of JSON object members does not.
            "features": [
                [name, key, dtype_name(self.feature_specs[name].dtype), list(self.feature_specs[name].shape)]
                for name, key in self.feature_keys.items()
            ],
            "algorithm": self.algorithm.value,
            "schema_version": self.schema_version,
            "num_tokens": self.num_tokens,
            "estimated_bytes": self.estimated_bytes,
            "target_model_version": self.target_model_version,
            "draft_weight_version": self.draft_weight_version,
            "attributes": dict(self.attributes),
        }
        if self.stream is not None:
            wire["stream"] = {
                "dims": dict(self.stream.dims),
                "piece_length": self.stream.piece_length,
                "window": self.stream.window,
                "retain": self.stream.retain,
            }
        _parse_ref(wire)
        return wire

    @classmethod
    def from_wire(cls, obj: object) -> SampleRef:
        """Build a ref from parsed JSON that an untrusted peer sent.

        Raises:
            WireFormatError: a field is missing, unknown, of the wrong type, too long or too large, or the ref breaks
                a rule of :class:`SampleRef`. Nothing of ``obj`` is executed or kept.
        """
        return _parse_ref(obj)

    def to_json(self) -> str:
        """Return :meth:`to_wire` as compact JSON text."""
        return _dump(self.to_wire())

    @classmethod
    def from_json(cls, text: str | bytes) -> SampleRef:
        """Parse JSON text from an untrusted peer; see :meth:`from_wire`."""
        if len(text) > MAX_WIRE_BYTES:
            raise WireFormatError(f"ref text has {len(text)} bytes; the limit is {MAX_WIRE_BYTES}")
        try:
            obj = json.loads(text, object_pairs_hook=_unique_members)
        except (ValueError, RecursionError) as error:
            raise WireFormatError(
                f"ref text is not valid JSON: {type(error).__name__}: {_shorten(str(error))}"
            ) from error
        return _parse_ref(obj)


_FIELDS_OF_THEIR_OWN = ("feature_keys", "feature_specs", "stream")
_WIRE_FIELDS = frozenset(
    ("v", "features", *(item.name for item in dataclasses.fields(SampleRef) if item.name not in _FIELDS_OF_THEIR_OWN))
)
_STREAM_FIELDS = frozenset(item.name for item in dataclasses.fields(StreamSpec))


def _parse_ref(obj: object) -> SampleRef:
    if not isinstance(obj, dict):
        raise WireFormatError(f"a ref must be a JSON object, got {type(obj).__name__}")
    # Absent where the sample is not streamed: such a ref has one form, which readers without streams understand too.
    if obj.keys() - {"stream"} != _WIRE_FIELDS:
        missing = sorted(_WIRE_FIELDS - obj.keys())
        unknown = sorted(_shorten(name) for name in obj.keys() - _WIRE_FIELDS - {"stream"})
        raise WireFormatError(f"ref fields: missing {missing}, unknown {unknown[:8]}")
    if type(obj["v"]) is not int or obj["v"] != _WIRE_VERSION:
        raise WireFormatError(f"ref wire version must be {_WIRE_VERSION}, got {_shorten(obj['v'])}")
    keys, specs = _parse_features(obj["features"])
    attributes = obj["attributes"]
    if not isinstance(attributes, dict) or len(attributes) > MAX_FEATURES:
        raise WireFormatError(f"ref attributes must be an object of at most {MAX_FEATURES} members")
    fields: dict[str, Any] = {
        name: _wire_str(obj[name], name)
        for name in ("sample_id", "run_id", "store_uri", "target_model_version", "draft_weight_version")
    }
    fields.update({name: _wire_int(obj[name], name) for name in ("schema_version", "num_tokens", "estimated_bytes")})
    fields["attributes"] = {
        _wire_str(name, "attributes", MAX_NAME_CHARS): _wire_str(value, "attributes")
        for name, value in attributes.items()
    }
    try:
        fields["stream"] = _parse_stream(obj["stream"]) if "stream" in obj else None
        fields["algorithm"] = FeatureAlgorithm(_wire_str(obj["algorithm"], "algorithm"))
        ref = SampleRef(feature_keys=keys, feature_specs=specs, **fields)
    except ValueError as error:
        raise WireFormatError(f"ref refused: {_shorten(str(error))}") from error
    size = len(_dump(obj))
    if size > MAX_WIRE_BYTES:
        raise WireFormatError(f"ref has {size} bytes on the wire; the limit is {MAX_WIRE_BYTES}")
    return ref


def _parse_features(features: object) -> tuple[dict[str, str], dict[str, FeatureSpec]]:
    if not isinstance(features, list) or len(features) > MAX_FEATURES:
        raise WireFormatError(f"ref features must be a list of at most {MAX_FEATURES} entries")
    keys: dict[str, str] = {}
    specs: dict[str, FeatureSpec] = {}
    for entry in features:
        if not isinstance(entry, list) or len(entry) != 4:
            raise WireFormatError("a feature must be a list [name, key, dtype, shape]")
        name = _wire_str(entry[0], "feature name", MAX_NAME_CHARS)
        if name in keys:
            raise WireFormatError(f"feature {name!r} appears twice")
        shape = entry[3]
        if not isinstance(shape, list) or len(shape) > MAX_DIMS:
            raise WireFormatError(f"shape of feature {name!r} must be a list of at most {MAX_DIMS} dims")
        dims = tuple(_wire_int(dim, f"dim of feature {name!r}") for dim in shape)
        keys[name] = _wire_str(entry[1], f"key of feature {name!r}")
        specs[name] = FeatureSpec(dims, dtype_from_name(_wire_str(entry[2], "dtype")))
        if specs[name].nbytes >= MAX_WIRE_INT:
            raise WireFormatError(f"feature {name!r} of shape {dims} is larger than 2**62 bytes")
    return keys, specs


def _parse_stream(obj: object) -> StreamSpec:
    if not isinstance(obj, dict) or obj.keys() != _STREAM_FIELDS:
        raise WireFormatError(f"ref stream must be an object of {sorted(_STREAM_FIELDS)}")
    dims = obj["dims"]
    if not isinstance(dims, dict) or len(dims) > MAX_FEATURES:
        raise WireFormatError(f"ref stream dims must be an object of at most {MAX_FEATURES} members")
    if type(obj["retain"]) is not bool:
        raise WireFormatError("ref stream retain must be true or false")
    return StreamSpec(
        dims={
            _wire_str(name, "feature name", MAX_NAME_CHARS): _wire_int(dim, "open axis") for name, dim in dims.items()
        },
        piece_length=_wire_int(obj["piece_length"], "piece_length"),
        window=_wire_int(obj["window"], "window"),
        retain=obj["retain"],
    )


def _wire_str(value: object, what: str, limit: int = MAX_TEXT_CHARS) -> str:
    if type(value) is not str:
        raise WireFormatError(f"{what} must be a string, got {type(value).__name__}")
    if not value or len(value) > limit:
        raise WireFormatError(f"{what} must have 1 to {limit} characters, got {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A lone surrogate parses as JSON but cannot become a store key or a file name.
        raise WireFormatError(f"{what} is not valid Unicode") from None
    return value


def _wire_int(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_WIRE_INT:
        raise WireFormatError(f"{what} must be an integer in [0, 2**62), got {_shorten(value)}")
    return value


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise WireFormatError("a JSON object names a member twice")
    return members


def _dump(obj: object) -> str:
    return json.dumps(obj, separators=(",", ":"), allow_nan=False)


def _shorten(value: object, limit: int = 200) -> str:
    text = value if type(value) is str else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _frozen(value: object, kind: type[V], path: str) -> FrozenDict[V]:
    if not isinstance(value, Mapping):
        _refuse_tensor(value, path)
        raise RefError(f"{path} must be a mapping, got {type(value).__name__}")
    for name, item in value.items():
        if not isinstance(name, str) or not name:
            raise RefError(f"{path} has a key {_shorten(name)}; control-plane dicts must be str-keyed, and not empty")
        if not isinstance(item, kind):
            _refuse_tensor(item, f"{path}[{name!r}]")
            raise RefError(f"{path}[{name!r}] must be {kind.__name__}, got {type(item).__name__}")
    return value if type(value) is FrozenDict else FrozenDict(value)


def _is_tensor_like(obj: object) -> bool:
    return isinstance(obj, (torch.Tensor, np.ndarray)) or all(
        hasattr(obj, name) for name in ("data_ptr", "is_cuda", "numel")
    )


def _refuse_tensor(obj: object, path: str) -> None:
    if _is_tensor_like(obj):
        raise RefError(f"a tensor-like object is not allowed on the control plane at {path}: {type(obj).__name__}")


def assert_no_tensors(obj: Any, path: str = "ref") -> None:
    """Check that ``obj`` can go on the control plane: no tensor, and nothing opaque that might hide one.

    Accepts ``None``, ``str``, ``bytes``, ``int``, ``float``, ``bool``, enum members and ``torch.dtype``, and,
    recursively, dataclass instances, lists, tuples and mappings with str keys. Everything else is refused: tensors,
    numpy arrays, anything with ``data_ptr``, ``is_cuda`` and ``numel``, but also sets and objects of unknown type.

    Args:
        obj: the object to check.
        path: what to call ``obj`` in the message.

    Raises:
        RefError: (a ``ValueError``) with the path of the offending item.
    """
    _walk(obj, path, 0)


def _walk(obj: Any, path: str, depth: int) -> None:
    if obj is None or type(obj) in (str, bytes, int, float, bool, torch.dtype):
        return
    _refuse_tensor(obj, path)
    if depth > _MAX_DEPTH:
        raise RefError(f"{path} is nested more than {_MAX_DEPTH} levels deep, or contains itself")
    if isinstance(obj, Enum):
        _walk(obj.value, f"{path}.value", depth + 1)
        return
    if isinstance(obj, Mapping):
        if not all(isinstance(key, str) for key in obj):
            raise RefError(f"non-str key at {path}; control-plane dicts must be str-keyed")
        children = {f"{path}[{key!r}]": value for key, value in obj.items()}
    elif isinstance(obj, (list, tuple)):
        children = {f"{path}[{index}]": value for index, value in enumerate(obj)}
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        children = {f"{path}.{item.name}": getattr(obj, item.name) for item in dataclasses.fields(obj)}
    else:
        raise RefError(f"object of type {type(obj).__name__} is not allowed on the control plane at {path}")
    # Subclasses and dataclasses may carry more than their items.
    children.update({f"{path}.{name}": value for name, value in getattr(obj, "__dict__", {}).items()})
    for child_path, child in children.items():
        _walk(child, child_path, depth + 1)
