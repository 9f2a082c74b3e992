"""Last hidden states in pieces: what a target head makes of the chunks is what it makes of the whole sample."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from nccl_stream import FeatureAlgorithm, FeatureDataLoader, LocalFeatureStore, SampleRefQueue
from nccl_stream.chunk_policy import LeftContextChunkPolicy
from nccl_stream.errors import ConfigError, StreamLostError
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.streamed.writer import SequenceWriter, open_specs
from nccl_stream.target_head import TargetHead
from nccl_stream.vocab import DraftVocabulary

HIDDEN, VOCAB, PIECE = 4, 11, 2
CHUNKS = LeftContextChunkPolicy(2, 1)  # pieces
VOCABULARY = DraftVocabulary.from_ids(torch.tensor([7, 2, 3, 9]), VOCAB)
CONTEXT = {FeatureAlgorithm.EAGLE3: "aux_hidden_states", FeatureAlgorithm.DFLASH: "hidden_states"}


def features(algorithm: FeatureAlgorithm, seq: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    states = torch.randn(1, seq, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCAB, (1, seq), generator=generator)
    ones = torch.ones_like(ids)
    context = torch.cat([states] * 3, dim=-1)
    masks = {"attention_mask": ones, "loss_mask": ones}
    return {CONTEXT[algorithm]: context, "input_ids": ids, **masks, "last_hidden_states": states}


def head() -> TargetHead:
    # Two slots at a time: the head's own chunks have borders that are not those of the sample's.
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(VOCAB, generator=generator)
    return TargetHead(torch.randn(VOCAB, HIDDEN, generator=generator), bias, chunk_tokens=2)


def batches(algorithm: FeatureAlgorithm, given: dict[str, torch.Tensor], frame: str, policy):
    """The batches of one streamed sample; of all of it without a policy."""
    store = LocalFeatureStore()
    queue = SampleRefQueue(store)
    attributes = {NORM_ATTRIBUTE: "post", FRAME_ATTRIBUTE: frame}
    options = {"algorithm": algorithm, "schema_version": 2, "attributes": attributes}
    specs = open_specs(algorithm, given)
    writer = store.open_stream("s", specs, "run", piece_length=PIECE, window=6, **options)
    queue.put(writer.ref)
    queue.close()

    def write() -> None:
        # Whoever takes no more batches ends the sample, maybe before all of it is written.
        with contextlib.suppress(StreamLostError), SequenceWriter(writer) as sequence:
            sequence.extend(given)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    yield from FeatureDataLoader(queue, store, algorithm, chunk_policy=policy)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("seq", [1, 2, 4, 12, 13])
@pytest.mark.parametrize(
    ("algorithm", "frame", "vocabulary"),
    [
        (FeatureAlgorithm.EAGLE3, "shifted", None),
        (FeatureAlgorithm.EAGLE3, "shifted", VOCABULARY),
        (FeatureAlgorithm.DFLASH, "unshifted", None),
    ],
    ids=["eagle3-logits", "eagle3-target_probs", "dflash-logits"],
)
def test_supervision_of_the_chunks_is_that_of_the_whole_sample(algorithm, frame, seq, vocabulary):
    given = features(algorithm, seq)
    (whole,) = batches(algorithm, given, frame, None)
    expected = head().supervise(whole, vocabulary)
    names = set(expected) & {"logits", "target_probs", "position_mask"}
    assert names
    finals, counted = [], {name: [] for name in names}
    for batch in batches(algorithm, given, frame, CHUNKS):
        made = head().supervise(batch, vocabulary)
        assert made.place == batch.place
        assert made.sample_ids == batch.sample_ids
        finals.append(made.is_final)
        start = made.place.start_position
        for name in names:
            assert torch.equal(made[name], expected[name][:, start : start + made.place.num_positions]), name
            counted[name].append(made[name][:, made.place.supervised()])
    assert finals == [False] * (len(finals) - 1) + [True]
    for name in names:
        assert torch.equal(torch.cat(counted[name], dim=1), expected[name]), name


def test_states_in_place_are_refused_where_the_next_position_is_not_in_the_chunk():
    """The distribution of a chunk's last slot comes from the position after it."""
    given = features(FeatureAlgorithm.EAGLE3, 12)
    with pytest.raises(ConfigError, match=r"'s'.*shifted"):
        head().supervise(next(batches(FeatureAlgorithm.EAGLE3, given, "unshifted", CHUNKS)))
    (whole,) = batches(FeatureAlgorithm.EAGLE3, given, "unshifted", None)
    (shifted,) = batches(FeatureAlgorithm.EAGLE3, given, "shifted", None)
    assert torch.equal(head().supervise(whole).logits, head().supervise(shifted).logits)
