from __future__ import annotations

import pytest
import torch

from nccl_stream.errors import ConfigError, MisuseError
from nccl_stream.vocab import DraftVocabulary, draft_supervision

IDS = torch.tensor([5, 2, 7])
MASK = torch.tensor([False, False, True, False, False, True, False, True, False])


def test_tables_of_checkpoints_are_offsets_and_come_back():
    vocabulary = DraftVocabulary(IDS, MASK)
    assert vocabulary.d2t.tolist() == [5, 1, 5]
    assert vocabulary.t2d is MASK
    again = DraftVocabulary.from_tables(vocabulary.t2d, vocabulary.d2t.to(torch.int32))
    assert torch.equal(again.selected_token_ids, IDS)
    assert again.digest == vocabulary.digest
    assert torch.equal(DraftVocabulary.from_ids(IDS, 9).selected_token_mask, MASK)
    assert len(vocabulary) == 3


def test_shared_tensors_give_the_same_map():
    vocabulary = DraftVocabulary(IDS, MASK)
    assert DraftVocabulary.from_tensors(vocabulary.tensors()).digest == vocabulary.digest


def test_most_frequent_tokens_are_chosen_and_ties_go_to_the_lowest():
    counts = torch.tensor([4, 1, 9, 4, 4])
    assert DraftVocabulary.from_counts(counts, 3).selected_token_ids.tolist() == [0, 2, 3]


def test_digest_tells_order_content_and_size_apart():
    others = [
        DraftVocabulary.from_ids(IDS.flip(0), 9),
        DraftVocabulary.from_ids(torch.tensor([5, 2, 6]), 9),
        DraftVocabulary.from_ids(IDS, 10),
    ]
    ours = DraftVocabulary(IDS, MASK)
    ours.require_same(DraftVocabulary.from_ids(IDS, 9).digest, "the twin")
    assert len({other.digest for other in [ours, *others]}) == 4
    for other in others:
        with pytest.raises(ConfigError, match="the other rank"):
            ours.require_same(other.digest, "the other rank")


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (IDS.int(), MASK),
        (IDS[:0], MASK),
        (IDS.unsqueeze(0), MASK),
        (IDS, MASK.int()),
        (IDS, MASK.unsqueeze(0)),
        (torch.tensor([5, 2, 9]), MASK),
        (torch.tensor([5, 2, -1]), MASK),
        (torch.tensor([5, 2, 2]), MASK),
        (torch.tensor([5, 2]), MASK),
        (torch.tensor([5, 2, 8]), MASK),
    ],
)
def test_maps_that_do_not_fit_are_refused(ids, mask):
    with pytest.raises(MisuseError):
        DraftVocabulary(ids, mask)


def test_supervision_over_another_vocabulary_size_is_refused():
    with pytest.raises(MisuseError, match="over 8 tokens"):
        draft_supervision(torch.zeros(1, 2, 8), torch.ones(1, 2), DraftVocabulary(IDS, MASK))
