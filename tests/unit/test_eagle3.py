import pytest
import torch

from nccl_stream import eagle3
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec
from tests.unit.helpers import CORE, make_ref

LOGITS = {
    "aux_hidden_states": torch.zeros(1, 4, 6),
    "input_ids": torch.zeros(1, 4, dtype=torch.int64),
    "attention_mask": torch.ones(1, 4, dtype=torch.int64),
    "loss_mask": torch.ones(1, 4, dtype=torch.int64),
    "logits": torch.zeros(1, 4, 10, dtype=torch.bfloat16),
}
PACKING = {
    "position_ids": torch.zeros(1, 4, dtype=torch.int64),
    "seq_lens": torch.zeros(1, 2, dtype=torch.int32),
    "doc_remaining": torch.zeros(1, 4, dtype=torch.int64),
}


def test_constants_have_the_documented_values():
    assert eagle3.EAGLE3_SCHEMA_VERSION == 1
    assert eagle3.EAGLE3_CORE_FEATURES == CORE
    assert eagle3.EAGLE3_LOGITS_SUPERVISION == ("logits",)
    assert eagle3.EAGLE3_DRAFT_VOCAB_SUPERVISION == ("target_probs", "position_mask")
    assert (*CORE, "logits") == eagle3.EAGLE3_SUPERVISION_ENCODINGS
    assert eagle3.EAGLE3_PACKING_FEATURES == ("position_ids", "seq_lens", "doc_remaining")


@pytest.mark.parametrize("packing", [{}, PACKING], ids=["plain", "packed"])
def test_tensors_and_specs_keep_the_order_of_the_batch(packing):
    inputs = dict(reversed({**LOGITS, **packing}.items()))
    tensors = eagle3.eagle3_logits_tensors(**inputs)
    assert list(tensors) == [*LOGITS, *packing]
    assert all(tensors[name] is inputs[name] for name in tensors)
    specs = eagle3.eagle3_logits_feature_specs(*LOGITS.values(), *packing.values())
    assert list(specs) == list(tensors)
    assert specs == {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("missing", [(), *((name,) for name in PACKING), *(tuple(set(PACKING) - {n}) for n in PACKING)])
def test_packing_inputs_all_or_none(missing):
    inputs = {name: None if name in missing else tensor for name, tensor in PACKING.items()}
    if not missing:
        eagle3.validate_eagle3_packing_inputs(**inputs)
        eagle3.validate_eagle3_packing_inputs(**dict.fromkeys(inputs))
        return
    with pytest.raises(ValueError, match="together"):
        eagle3.validate_eagle3_packing_inputs(**inputs)


def test_validate_accepts_one_supervision_and_no_other_algorithm():
    eagle3.validate_eagle3_ref(make_ref())
    eagle3.validate_eagle3_ref(make_ref(names=(*CORE, "target_probs", "position_mask", *PACKING)))
    with pytest.raises(ValueError, match="exactly one supervision"):
        eagle3.validate_eagle3_ref(make_ref(names=CORE))
    with pytest.raises(ValueError, match="together"):
        eagle3.validate_eagle3_ref(make_ref(names=(*CORE, "logits", "seq_lens")))
    with pytest.raises(ValueError, match="schema_version"):
        eagle3.validate_eagle3_ref(make_ref(schema_version=7))
    names = ("hidden_states", "input_ids", "attention_mask", "loss_mask", "logits")
    with pytest.raises(ValueError, match="dflash"):
        eagle3.validate_eagle3_ref(make_ref(names=names, algorithm=FeatureAlgorithm.DFLASH))
