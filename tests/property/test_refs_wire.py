"""Whatever a peer sends as a ref is either that ref again or a WireFormatError."""

import copy
import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_stream.errors import WireFormatError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef, StreamSpec, dtype_name
from tests.unit.helpers import make_ref

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=dtype_name)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
COUNTS = st.integers(0, 2**62 - 1)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def streams(draw, specs):
    places = [(name, dim, size) for name, spec in specs.items() for dim, size in enumerate(spec.shape) if size]
    if not places:
        return None
    length = draw(st.sampled_from(sorted({size for _, _, size in places})))
    fitting = {name: dim for name, dim, size in draw(st.permutations(places)) if size == length}
    return StreamSpec(fitting, length, draw(st.integers(1, 2**62 - 1)), draw(st.booleans()))


@st.composite
def refs(draw):
    algorithm = draw(st.sampled_from(FeatureAlgorithm))
    names = draw(st.permutations([*algorithm.required_features, *draw(st.lists(TEXT, max_size=3))]))
    names = list(dict.fromkeys(names))
    shapes = st.lists(st.integers(0, 2**10), max_size=5)
    specs = {name: FeatureSpec(draw(shapes), draw(st.sampled_from(DTYPES))) for name in names}
    return SampleRef(
        sample_id=draw(TEXT),
        run_id=draw(TEXT),
        store_uri="x://" + draw(TEXT),
        feature_keys={name: draw(TEXT) for name in names},
        feature_specs=specs,
        stream=draw(st.none() | streams(specs)),
        algorithm=algorithm,
        schema_version=draw(COUNTS),
        num_tokens=draw(COUNTS),
        estimated_bytes=draw(COUNTS),
        target_model_version=draw(TEXT),
        draft_weight_version=draw(TEXT),
        attributes=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@given(refs())
def test_wire_round_trip_is_the_same_ref(ref):
    twin = SampleRef.from_json(ref.to_json().encode())
    assert twin == ref
    assert hash(twin) == hash(ref)
    assert twin.feature_names() == ref.feature_names()
    assert copy.deepcopy(ref) == ref


def _paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths(item, (*path, index))


WIRE = make_ref(attributes={"norm": "pre"}, stream=StreamSpec({"input_ids": 1, "logits": 1}, 8, 3)).to_wire()
PATHS = list(_paths(WIRE))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATHS), JSON_VALUES)
def test_wire_any_value_anywhere_is_a_ref_or_a_wire_format_error(path, value):
    holder = {"wire": copy.deepcopy(WIRE)}
    *parents, last = ("wire", *path)
    target = holder
    for step in parents:
        target = target[step]
    target[last] = value
    wire = holder["wire"]
    try:
        ref = SampleRef.from_wire(wire)
    except WireFormatError:
        return
    assert json.loads(json.dumps(ref.to_wire())) == wire
