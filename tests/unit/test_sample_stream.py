"""Refs and specs of streamed samples, and the errors that their two ends raise."""

import copy
import pickle

import pytest
import torch

from nccl_stream.errors import (
    MisuseError,
    NcclStreamError,
    RefError,
    StreamBrokenError,
    StreamLostError,
    WireFormatError,
)
from nccl_stream.interop.nemo import to_nemo_ref
from nccl_stream.refs import FeatureSpec, SampleRef, StreamSpec
from nccl_stream.stores.shared_dir import SharedDirFeatureStore
from nccl_stream.streamed.sample import OpenFeatureSpec
from tests.unit.helpers import CORE, make_ref

DIMS = dict.fromkeys(CORE, 1)


def make_stream_ref(**changes):
    fields = {"dims": DIMS, "piece_length": 8, "window": 3}
    return make_ref(stream=StreamSpec(**{**fields, **changes}))


# -- StreamSpec and SampleRef.stream --


def test_stream_ref_travels_hashes_and_copies():
    ref = make_stream_ref(retain=True)
    assert ref.stream.retain is True
    for twin in (SampleRef.from_json(ref.to_json()), pickle.loads(pickle.dumps(ref)), copy.deepcopy(ref)):
        assert twin == ref
        assert hash(twin) == hash(ref)
    assert ref != make_ref()
    assert len({ref, make_stream_ref(retain=True), make_stream_ref(), make_stream_ref(window=4)}) == 3


def test_stream_dims_are_read_only_and_a_copy():
    dims = dict(DIMS)
    spec = StreamSpec(dims, 8, 1)
    dims["more"] = 0
    assert spec.dims == DIMS
    with pytest.raises(TypeError):
        spec.dims["more"] = 0


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": {}},
        {"dims": [("input_ids", 1)]},
        {"dims": {"": 1}},
        {"dims": {3: 1}},
        {"dims": {"input_ids": -1}},
        {"dims": {"input_ids": True}},
        {"dims": {"input_ids": 1.0}},
        {"piece_length": 0},
        {"piece_length": True},
        {"piece_length": 8.0},
        {"window": 0},
        {"window": None},
        {"retain": 1},
        {"retain": None},
        # Of the ref: the axis must be there and have the length of a piece.
        {"dims": {"nobody": 1}},
        {"dims": {"input_ids": 2}},
        {"dims": {"input_ids": 0}},
        {"piece_length": 7},
    ],
)
def test_stream_bad_value_is_refused(changes):
    with pytest.raises(RefError):
        make_stream_ref(**changes)


@pytest.mark.parametrize("value", [3, "stream", {"dims": DIMS}, torch.zeros(1)])
def test_stream_that_is_none_is_refused(value):
    with pytest.raises(RefError, match=r"SampleRef\.stream"):
        make_ref(stream=value)


def test_wire_of_a_plain_ref_has_no_stream_and_may_not_have_an_empty_one():
    wire = make_ref().to_wire()
    assert "stream" not in wire
    assert SampleRef.from_wire(wire).stream is None
    with pytest.raises(WireFormatError):
        SampleRef.from_wire({**wire, "stream": None})


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": None},
        {"dims": {}},
        {"dims": {"input_ids": -1}},
        {"dims": {"input_ids": 2**62}},
        {"dims": {"n" * 300: 1}},
        {"dims": {"nobody": 1}},
        {"piece_length": "8"},
        {"piece_length": 0},
        {"piece_length": 2**62},
        {"window": 0},
        {"window": 1.0},
        {"retain": "yes"},
        {"retain": None},
        {"surprise": 1},
    ],
)
def test_wire_hostile_stream_is_refused(changes):
    wire = make_stream_ref().to_wire()
    wire["stream"] = {**wire["stream"], **changes}
    with pytest.raises(WireFormatError):
        SampleRef.from_wire(wire)


@pytest.mark.parametrize("field", ["dims", "piece_length", "window", "retain"])
def test_wire_stream_without_a_field_is_refused(field):
    wire = make_stream_ref().to_wire()
    del wire["stream"][field]
    with pytest.raises(WireFormatError):
        SampleRef.from_wire(wire)


def test_store_without_streams_says_so(tmp_path):
    with SharedDirFeatureStore(tmp_path) as store:
        with pytest.raises(MisuseError, match="SharedDirFeatureStore takes no streamed samples"):
            store.open_stream(
                "s", {"input_ids": OpenFeatureSpec((1, -1), torch.int64)}, "run", piece_length=4, window=2
            )
        with pytest.raises(MisuseError, match="SharedDirFeatureStore holds no streamed samples"):
            store.open_reader(make_stream_ref())
        assert store.health().sample_count == 0


def test_stream_ref_has_no_form_at_nemo():
    with pytest.raises(MisuseError, match="whole samples"):
        to_nemo_ref(make_stream_ref())


# -- OpenFeatureSpec --


def test_open_spec_gives_the_spec_of_a_piece():
    spec = OpenFeatureSpec([2, -1, 4], torch.bfloat16)
    assert spec.dim == 1
    assert spec.of_length(3) == FeatureSpec((2, 3, 4), torch.bfloat16)
    assert OpenFeatureSpec.of(torch.zeros(2, 9, 4, dtype=torch.bfloat16), 1) == spec
    assert OpenFeatureSpec.of(torch.zeros(2, 9), -1) == OpenFeatureSpec((2, -1), torch.float32)


@pytest.mark.parametrize("shape", [(), (2, 3), (-1, -1), (-1, -2), (-1, 2.0), "-1", (-1, None)])
def test_open_spec_bad_shape_is_refused(shape):
    with pytest.raises(RefError):
        OpenFeatureSpec(shape, torch.float32)


def test_open_spec_bad_dtype_is_refused():
    with pytest.raises(RefError):
        OpenFeatureSpec((-1,), "float32")


# -- errors --


def test_errors_say_how_far_it_got_and_travel():
    broken = pickle.loads(pickle.dumps(StreamBrokenError("s", 3, 24, "killed")))
    assert (broken.sample_id, broken.num_pieces, broken.num_positions, broken.reason) == ("s", 3, 24, "killed")
    assert str(broken) == str(StreamBrokenError("s", 3, 24, "killed"))
    assert "3 pieces" in str(broken)
    assert "24 positions" in str(broken)
    lost = pickle.loads(pickle.dumps(StreamLostError("s", "its reader stopped")))
    assert "its reader stopped" in str(lost)
    assert isinstance(broken, NcclStreamError)
    assert isinstance(lost, RuntimeError)
