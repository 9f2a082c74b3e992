import copy
import dataclasses
import json
import pickle
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from nccl_stream.errors import RefError, WireFormatError
from nccl_stream.frozen import FrozenDict
from nccl_stream.refs import (
    MAX_WIRE_BYTES,
    FeatureAlgorithm,
    FeatureSpec,
    SampleRef,
    assert_no_tensors,
    dtype_from_name,
    dtype_name,
)
from tests.unit.helpers import CORE, make_ref

ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


class TensorLike:
    is_cuda = False

    def data_ptr(self):
        return 0

    def numel(self):
        return 0


# -- FeatureSpec --


def test_spec_list_shape_becomes_tuple_and_compares_equal():
    spec = FeatureSpec([2, 3], torch.float32)
    assert spec == FeatureSpec((2, 3), torch.float32)
    assert type(spec.shape) is tuple
    assert type(FeatureSpec(torch.zeros(2, 3).shape, torch.float32).shape) is tuple
    assert hash(spec) == hash(FeatureSpec((2, 3), torch.float32))


@pytest.mark.parametrize("shape", [(2, -1), ("2",), (2, "3"), (2.0,), (True, 2), (None,), "23", 5, {2, 3}])
def test_spec_bad_shape_is_refused(shape):
    with pytest.raises(ValueError, match="tuple of non-negative ints"):
        FeatureSpec(shape, torch.float32)


def test_spec_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"torch\.dtype"):
        FeatureSpec((2,), "float32")


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [((), torch.float64, 8), ((0, 5), torch.float32, 0), ((3, 5), torch.bfloat16, 30), ((7,), torch.bool, 7)],
)
def test_spec_nbytes_is_that_of_a_contiguous_tensor(shape, dtype, nbytes):
    spec = FeatureSpec(shape, dtype)
    tensor = torch.empty(shape, dtype=dtype)
    assert spec.nbytes == nbytes == tensor.numel() * tensor.element_size()
    assert spec.numel == tensor.numel()
    assert FeatureSpec.of(tensor) == spec


# -- SampleRef --


def test_ref_is_frozen_with_read_only_ordered_mappings():
    names = ("loss_mask", "input_ids", "extra", "attention_mask", "aux_hidden_states")
    source = {name: name for name in names}
    ref = make_ref(names=names, feature_keys=source)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ref.sample_id = "other"
    with pytest.raises(TypeError):
        ref.feature_keys["x"] = "y"
    with pytest.raises(TypeError):
        ref.feature_specs["x"] = FeatureSpec((1,), torch.int8)
    source["added"] = "later"
    assert ref.feature_names() == names == tuple(ref.feature_specs)
    assert ref.feature_keys == {name: name for name in names}


@pytest.mark.parametrize(
    "bad",
    [
        {"sample_id": ""},
        {"sample_id": 3},
        {"sample_id": None},
        {"run_id": ""},
        {"run_id": b"run"},
        {"store_uri": ""},
        {"store_uri": "no-scheme"},
        {"store_uri": "://x"},
        {"store_uri": "mem://"},
        {"num_tokens": -1},
        {"estimated_bytes": -4},
        {"schema_version": -1},
        {"num_tokens": True},
        {"num_tokens": 1.5},
        {"target_model_version": 0},
        {"draft_weight_version": ""},
        {"algorithm": "eagle3"},
        {"feature_keys": {name: name for name in CORE}},
        {"feature_keys": [("input_ids", "x")]},
        {"feature_keys": {**{name: name for name in (*CORE, "logits")}, "input_ids": 3}},
        {"attributes": {"norm": 3}},
        {"attributes": {1: "x"}},
    ],
    ids=str,
)
def test_ref_bad_field_is_refused_by_name(bad):
    with pytest.raises(RefError) as info:
        make_ref(**bad)
    assert next(iter(bad)) in str(info.value)


@pytest.mark.parametrize(
    ("algorithm", "required"),
    [
        (FeatureAlgorithm.EAGLE3, {"aux_hidden_states", "input_ids", "attention_mask", "loss_mask"}),
        (FeatureAlgorithm.DFLASH, {"hidden_states", "input_ids", "attention_mask", "loss_mask"}),
        (
            FeatureAlgorithm.DSPARK,
            {"target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"},
        ),
    ],
)
def test_ref_lacking_any_required_feature_is_refused(algorithm, required):
    assert make_ref(names=sorted(required), algorithm=algorithm).algorithm is algorithm
    for name in required:
        with pytest.raises(ValueError, match=name):
            make_ref(names=sorted(required - {name}), algorithm=algorithm)


def test_ref_with_a_tensor_names_where_it_is():
    specs = {name: FeatureSpec((2,), torch.float32) for name in CORE}
    with pytest.raises(ValueError, match=r"tensor-like object is not allowed.*feature_specs\['loss_mask'\]"):
        make_ref(names=CORE, feature_specs={**specs, "loss_mask": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"tensor-like.*sample_id"):
        make_ref(sample_id=torch.zeros(1))


def test_ref_pickles_copies_and_hashes():
    ref = make_ref(attributes={"norm": "pre"})
    for twin in (pickle.loads(pickle.dumps(ref)), copy.copy(ref), copy.deepcopy(ref)):
        assert twin == ref
        assert hash(twin) == hash(ref)
        assert twin.feature_names() == ref.feature_names()
        assert twin.algorithm is FeatureAlgorithm.EAGLE3
    assert len({ref, make_ref(attributes={"norm": "pre"}), make_ref("other")}) == 2


def test_frozen_dict_equals_a_dict_whatever_the_order():
    first, second = FrozenDict({"a": 1, "b": 2}), FrozenDict({"b": 2, "a": 1})
    assert first == second == {"a": 1, "b": 2}
    assert hash(first) == hash(second)
    assert list(second) == ["b", "a"]
    assert first != {"a": 1}


# -- the wire --


def test_dtype_names_cover_every_dtype_of_torch():
    assert len(ALL_DTYPES) > 30
    for dtype in ALL_DTYPES:
        assert dtype_from_name(dtype_name(dtype)) is dtype
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name(torch.float) == "float32"
    with pytest.raises(WireFormatError):
        dtype_from_name("float33")
    with pytest.raises(WireFormatError):
        dtype_from_name("__class__")


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_wire_round_trip_keeps_everything(dtype):
    names = ("zeta", *reversed(CORE))
    specs = {name: FeatureSpec((2, 0, 3), dtype) for name in names} | {"zeta": FeatureSpec((), dtype)}
    ref = make_ref("ä/☃", names=names, feature_specs=specs, attributes={"norm": "pre"})
    for twin in (SampleRef.from_wire(ref.to_wire()), SampleRef.from_json(ref.to_json())):
        assert twin == ref
        assert twin.feature_names() == names
    assert json.loads(json.dumps(ref.to_wire())) == ref.to_wire()


def _wire(**changes):
    wire = make_ref().to_wire()
    wire.update(changes)
    return wire


def _feature(index, value):
    wire = make_ref().to_wire()
    wire["features"][0][index] = value
    return wire


@pytest.mark.parametrize("field", sorted(make_ref().to_wire()))
def test_wire_missing_field_is_refused(field):
    wire = make_ref().to_wire()
    del wire[field]
    with pytest.raises(WireFormatError, match=field):
        SampleRef.from_wire(wire)


@pytest.mark.parametrize("field", sorted(make_ref().to_wire()))
@pytest.mark.parametrize("value", [None, 1.5, True, [1], {"a": 1}, -1, "", 2**62, "x" * 5000], ids=repr)
def test_wire_wrong_value_is_refused(field, value):
    if field == "attributes" and value == {"a": 1}:
        value = {"a": [1]}
    with pytest.raises(WireFormatError):
        SampleRef.from_wire(_wire(**{field: value}))


@pytest.mark.parametrize(
    "wire",
    [
        _wire(surprise=1),
        _wire(v=2),
        _wire(algorithm="eagle4"),
        _wire(sample_id="\ud800"),
        _wire(store_uri="nowhere"),
        _wire(features=[]),
        _wire(features=make_ref().to_wire()["features"] * 2),
        _wire(features=[["a"] * 3]),
        _wire(features={"a": 1}),
        _wire(features=[[f"n{i}", "k", "int8", []] for i in range(4097)]),
        _wire(attributes={"a" * 300: "b"}),
        _feature(0, "n" * 257),
        _feature(0, 5),
        _feature(1, ""),
        _feature(2, "torch.float32"),
        _feature(2, "float33"),
        _feature(2, ["float32"]),
        _feature(3, [1] * 17),
        _feature(3, [2**62]),
        _feature(3, [2**31, 2**31]),
        _feature(3, [-1]),
        _feature(3, [True]),
        _feature(3, [1.0]),
        _feature(3, 4),
        None,
        [],
        "text",
        3,
    ],
    ids=lambda wire: repr(wire)[-60:],
)
def test_wire_hostile_value_is_refused(wire):
    with pytest.raises(WireFormatError):
        SampleRef.from_wire(wire)


def test_wire_just_over_the_size_limit_is_refused_on_both_sides():
    keys = dict.fromkeys((*CORE, *(f"f{i}" for i in range(270))), "k" * 4000)
    ref = make_ref(names=tuple(keys), feature_keys=keys)
    with pytest.raises(WireFormatError, match=str(MAX_WIRE_BYTES)):
        ref.to_wire()
    keys = dict.fromkeys((*CORE, *(f"f{i}" for i in range(200))), "k" * 4000)
    assert SampleRef.from_wire(make_ref(names=tuple(keys), feature_keys=keys).to_wire()).feature_keys == keys


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nope",
        b"\xff\xfe\x00",
        "[" * 100_000,
        " " * (MAX_WIRE_BYTES + 1),
        make_ref().to_json().replace('"num_tokens":16', '"num_tokens":NaN'),
        make_ref().to_json().replace('"num_tokens":16', '"num_tokens":1e999'),
        make_ref().to_json().replace('"num_tokens":16', '"num_tokens":' + "9" * 5000),
        make_ref().to_json().replace('"num_tokens":16', '"num_tokens":16,"num_tokens":17'),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_json_that_is_not_a_ref_is_refused(text):
    with pytest.raises(WireFormatError):
        SampleRef.from_json(text)


def test_wire_never_unpickles():
    with pytest.raises(WireFormatError):
        SampleRef.from_json(pickle.dumps(make_ref()))


# -- assert_no_tensors --


@dataclasses.dataclass
class Holder:
    item: object


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        0,
        -1,
        0.5,
        True,
        b"bytes",
        torch.float16,
        FeatureAlgorithm.DSPARK,
        [1, (2, {"a": [None]})],
        OrderedDict(a=1),
        Holder("x"),
        Pair(1, "b"),
        make_ref(),
        {"ref": make_ref()},
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_tensors_plain_data_is_accepted(value):
    assert_no_tensors(value)


@pytest.mark.parametrize("tensor", [torch.zeros(1), np.zeros(1), TensorLike()], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda t: t, r"here: "),
        (lambda t: [1, t], r"here\[1\]"),
        (lambda t: {"a": ({"b": t},)}, r"here\['a'\]\[0\]\['b'\]"),
        (lambda t: Holder(t), r"here\.item"),
        (lambda t: Pair(1, t), r"here\[1\]"),
    ],
    ids=["bare", "list", "nested", "dataclass", "namedtuple"],
)
def test_no_tensors_tensor_anywhere_is_refused_with_its_path(tensor, wrap, path):
    with pytest.raises(ValueError, match=r"tensor-like.*" + path):
        assert_no_tensors(wrap(tensor), path="here")


class Opaque:
    pass


class SneakyList(list):
    pass


def _sneaky():
    items = SneakyList()
    items.hidden = torch.zeros(1)
    return items


def _sneaky_dataclass():
    holder = Holder(1)
    holder.hidden = torch.zeros(1)
    return holder


def _cycle():
    items = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    "value",
    [{1, 2}, frozenset({"a"}), Opaque(), object(), lambda: 0, iter([]), Holder, np.float32(1), np.float64(1)],
    ids=lambda value: type(value).__name__,
)
def test_no_tensors_sets_and_opaque_objects_are_refused(value):
    with pytest.raises(ValueError, match=r"here\['a'\]"):
        assert_no_tensors({"a": value}, path="here")


@pytest.mark.parametrize("make", [_sneaky, _sneaky_dataclass, _cycle])
def test_no_tensors_hidden_or_endless_content_is_refused(make):
    with pytest.raises(ValueError):
        assert_no_tensors(make())


def test_no_tensors_non_str_key_is_refused():
    with pytest.raises(ValueError, match="control-plane dicts must be str-keyed"):
        assert_no_tensors({1: "x"})
