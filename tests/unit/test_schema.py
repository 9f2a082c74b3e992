import pytest
import torch

from nccl_stream.capture import shift_left
from nccl_stream.errors import MisuseError, SchemaError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec
from nccl_stream.schema import (
    FRAME_ATTRIBUTE,
    NORM_ATTRIBUTE,
    Schema,
    register_schema,
    schema_of,
    validate_ref,
)
from tests.unit.helpers import CORE, make_ref

B, S, H, V, VD = 2, 8, 4, 32, 16
SHAPES = {
    "aux_hidden_states": ((B, S, 3 * H), torch.bfloat16),
    "hidden_states": ((B, S, 5 * H), torch.bfloat16),
    "target_hidden_states": ((B, S, 2 * H), torch.bfloat16),
    "target_last_hidden_states": ((B, S, H), torch.bfloat16),
    "input_ids": ((B, S), torch.int64),
    "attention_mask": ((B, S), torch.int64),
    "loss_mask": ((B, S), torch.bool),
    "logits": ((B, S, V), torch.float32),
    "target_probs": ((B, S, VD), torch.float32),
    "position_mask": ((B, S, 1), torch.bool),
    "last_hidden_states": ((B, S, H), torch.bfloat16),
    "position_ids": ((B, S), torch.int64),
    "seq_lens": ((B, 3), torch.int64),
    "doc_remaining": ((B, S), torch.int64),
}
PACKING = ("position_ids", "seq_lens", "doc_remaining")
LAST_HIDDEN = {NORM_ATTRIBUTE: "pre", FRAME_ATTRIBUTE: "shifted"}
REQUIRED = {
    FeatureAlgorithm.EAGLE3: CORE,
    FeatureAlgorithm.DFLASH: ("hidden_states", "input_ids", "attention_mask", "loss_mask"),
    FeatureAlgorithm.DSPARK: ("target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"),
}


def ref_of(names, algorithm=FeatureAlgorithm.EAGLE3, *, shapes=None, **kwargs):
    shapes = {**SHAPES, **(shapes or {})}
    return make_ref(
        names=tuple(names),
        algorithm=algorithm,
        feature_specs={name: FeatureSpec(*shapes.get(name, ((1,), torch.int8))) for name in names},
        **kwargs,
    )


@pytest.mark.parametrize(
    ("algorithm", "supervision", "kwargs"),
    [
        (FeatureAlgorithm.EAGLE3, ("logits",), {}),
        (FeatureAlgorithm.EAGLE3, ("target_probs", "position_mask"), {}),
        (FeatureAlgorithm.EAGLE3, ("last_hidden_states",), {"schema_version": 2, "attributes": LAST_HIDDEN}),
        (FeatureAlgorithm.DFLASH, (), {}),
        (FeatureAlgorithm.DFLASH, ("logits",), {}),
        (FeatureAlgorithm.DFLASH, ("last_hidden_states",), {"schema_version": 2, "attributes": LAST_HIDDEN}),
        (FeatureAlgorithm.DSPARK, (), {}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_documented_form_is_valid(algorithm, supervision, kwargs, packed):
    names = [*REQUIRED[algorithm], *supervision, *(PACKING if packed else ()), "extra"]
    ref = ref_of(names, algorithm, **kwargs)
    validate_ref(ref, shapes=True)
    assert schema_of(algorithm).supervision_of(ref) == supervision
    assert schema_of(algorithm).required == REQUIRED[algorithm]


@pytest.mark.parametrize(
    ("names", "kwargs"),
    [
        (CORE, {}),
        ((*CORE, "logits", "target_probs", "position_mask"), {}),
        ((*CORE, "logits", "position_mask"), {}),
        ((*CORE, "target_probs"), {}),
        ((*CORE, "position_mask"), {}),
        ((*CORE, "logits", "last_hidden_states"), {"schema_version": 2, "attributes": LAST_HIDDEN}),
        ((*CORE, "last_hidden_states"), {"schema_version": 1, "attributes": LAST_HIDDEN}),
        ((*CORE, "logits"), {"schema_version": 2}),
        ((*CORE, "logits"), {"schema_version": 0}),
        ((*CORE, "logits"), {"schema_version": 3}),
        ((*CORE, "last_hidden_states"), {"schema_version": 2}),
        (
            (*CORE, "last_hidden_states"),
            {"schema_version": 2, "attributes": {**LAST_HIDDEN, NORM_ATTRIBUTE: "maybe"}},
        ),
        ((*CORE, "last_hidden_states"), {"schema_version": 2, "attributes": {NORM_ATTRIBUTE: "pre"}}),
        ((*CORE, "logits", "position_ids"), {}),
        ((*CORE, "logits", "position_ids", "doc_remaining"), {}),
    ],
    ids=lambda value: "+".join(value[4:]) if isinstance(value, tuple) else str(value),
)
def test_eagle3_ref_that_breaks_a_rule_is_refused(names, kwargs):
    with pytest.raises(SchemaError):
        validate_ref(ref_of(names, **kwargs))


def test_ref_of_another_algorithm_is_refused():
    ref = ref_of(REQUIRED[FeatureAlgorithm.DFLASH], FeatureAlgorithm.DFLASH)
    with pytest.raises(SchemaError, match="dflash"):
        schema_of(FeatureAlgorithm.EAGLE3).validate(ref)


def test_dspark_ref_with_eagle3_supervision_is_accepted_as_an_extra():
    names = [*REQUIRED[FeatureAlgorithm.DSPARK], "logits"]
    validate_ref(ref_of(names, FeatureAlgorithm.DSPARK), shapes=True)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("aux_hidden_states", ((B, S), torch.bfloat16)),
        ("aux_hidden_states", ((B, S, 3 * H + 1), torch.bfloat16)),
        ("aux_hidden_states", ((B, S, 3 * H), torch.int64)),
        ("input_ids", ((B, S + 1), torch.int64)),
        ("input_ids", ((B + 1, S), torch.int64)),
        ("input_ids", ((B, S), torch.float32)),
        ("input_ids", ((B, S), torch.bool)),
        ("loss_mask", ((B, S), torch.complex64)),
        ("position_mask", ((B, S, 2), torch.bool)),
        ("target_probs", ((B, S, VD), torch.int32)),
        ("seq_lens", ((B,), torch.int64)),
    ],
)
def test_shapes_that_do_not_fit_are_refused_only_when_asked(name, spec):
    names = (*CORE, "target_probs", "position_mask", *PACKING)
    ref = ref_of(names, shapes={name: spec})
    validate_ref(ref)
    with pytest.raises(SchemaError):
        validate_ref(ref, shapes=True)


def test_shapes_hidden_size_binds_across_features():
    ref = ref_of(
        (*CORE, "last_hidden_states"),
        schema_version=2,
        attributes=LAST_HIDDEN,
        shapes={"last_hidden_states": ((B, S, H + 1), torch.bfloat16)},
    )
    with pytest.raises(SchemaError, match="aux_hidden_states"):
        validate_ref(ref, shapes=True)
    names = REQUIRED[FeatureAlgorithm.DSPARK]
    good = ref_of(names, FeatureAlgorithm.DSPARK)
    bad = ref_of(names, FeatureAlgorithm.DSPARK, shapes={"target_hidden_states": ((B, S, 2 * H + 1), torch.bfloat16)})
    validate_ref(good, shapes=True)
    with pytest.raises(SchemaError, match="target_hidden_states"):
        validate_ref(bad, shapes=True)


def test_shapes_empty_sample_is_consistent():
    shapes = {name: ((0, *shape[1:]), dtype) for name, (shape, dtype) in SHAPES.items()}
    validate_ref(ref_of((*CORE, "logits"), shapes=shapes), shapes=True)


def test_canonical_renames_and_orders():
    tensors = {name: torch.zeros(1) for name in ("loss_mask", "note", "last_hidden_states", "input_ids")}
    tensors["hidden_states"] = torch.ones(1)
    result = schema_of(FeatureAlgorithm.DSPARK).canonical(tensors)
    assert list(result) == ["target_hidden_states", "target_last_hidden_states", "input_ids", "loss_mask", "note"]
    assert result["target_hidden_states"] is tensors["hidden_states"]
    tensors["target_hidden_states"] = torch.zeros(1)
    with pytest.raises(MisuseError, match="target_hidden_states"):
        schema_of(FeatureAlgorithm.DSPARK).canonical(tensors)


def test_canonical_order_is_that_of_the_batch():
    names = [*PACKING, "position_mask", "target_probs", *reversed(CORE)]
    result = schema_of(FeatureAlgorithm.EAGLE3).canonical(dict.fromkeys(names, torch.zeros(1)))
    assert list(result) == [*CORE, "target_probs", "position_mask", *PACKING]


@pytest.mark.parametrize("packed", [False, True])
def test_padding_attends_supervises_nothing_and_makes_no_nan(packed):
    names = (*CORE, "logits", *(PACKING if packed else ()))
    ref = ref_of(names)
    tensors = schema_of(FeatureAlgorithm.EAGLE3).padding(ref, "cpu")
    assert {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()} == ref.feature_specs
    assert tensors["attention_mask"].eq(1).all()
    assert not tensors["loss_mask"].any()
    assert not tensors["logits"].any()
    scores = torch.zeros(B, S, S).masked_fill(tensors["attention_mask"][:, None] == 0, float("-inf"))
    assert not torch.softmax(scores, -1).isnan().any()
    if packed:
        assert tensors["seq_lens"].sum(-1).tolist() == [S] * B
        assert tensors["position_ids"][0].tolist() == list(range(S))
        assert not tensors["doc_remaining"].any()


@pytest.mark.parametrize(
    ("algorithm", "mask", "worth"),
    [
        (FeatureAlgorithm.EAGLE3, [[0, 0, 0], [0, 1, 0]], True),
        (FeatureAlgorithm.EAGLE3, [[0, 0, 0], [0, 0, 0]], False),
        (FeatureAlgorithm.EAGLE3, [[1, 0, 0, 0]], False),
        (FeatureAlgorithm.EAGLE3, [[0, 0, 0, 1]], True),
        (FeatureAlgorithm.EAGLE3, [[1]], False),
        (FeatureAlgorithm.DFLASH, [[1, 0, 1], [0, 1, 0]], False),
        (FeatureAlgorithm.DFLASH, [[1, 0, 1], [0, 1, 1]], True),
        (FeatureAlgorithm.DSPARK, [[0, 1], [1, 0]], False),
        (FeatureAlgorithm.DSPARK, [[1], [1]], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_is_worth_a_forward_needs_a_run_of_supervised_tokens(algorithm, mask, worth, dtype):
    assert schema_of(algorithm).is_worth_a_forward(torch.tensor(mask, dtype=dtype)) is worth


@pytest.mark.parametrize("position", range(4))
def test_eagle3_prompt_is_worth_a_forward_if_its_backend_leaves_something_to_learn(position):
    mask = torch.zeros(1, 4, dtype=torch.long)
    mask[0, position] = 1
    assert schema_of(FeatureAlgorithm.EAGLE3).is_worth_a_forward(mask) is bool(shift_left(mask).any())


def test_registry_refuses_a_second_schema_and_an_unknown_algorithm():
    with pytest.raises(MisuseError):
        register_schema(Schema(FeatureAlgorithm.EAGLE3, (), {}))
    with pytest.raises(SchemaError):
        schema_of("medusa")
    for algorithm in FeatureAlgorithm:
        assert schema_of(algorithm).algorithm is algorithm


def test_frames_and_versions_are_those_of_the_formats():
    eagle3 = schema_of(FeatureAlgorithm.EAGLE3)
    assert {"input_ids", "logits", "loss_mask"} <= set(eagle3.shifted)
    assert not {"aux_hidden_states", "attention_mask", *PACKING} & set(eagle3.shifted)
    assert schema_of(FeatureAlgorithm.DFLASH).shifted == schema_of(FeatureAlgorithm.DSPARK).shifted == ()
    assert [schema_of(algorithm).versions for algorithm in FeatureAlgorithm] == [(1, 2), (1, 2), (1,)]
