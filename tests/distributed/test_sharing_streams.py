"""Supervision without the vocabulary, between real processes: the head is shared once, samples carry hidden states."""

from __future__ import annotations

import pytest
import torch

from nccl_stream import FeatureDataLoader, FeatureProducer
from nccl_stream.backend import TargetBackend
from nccl_stream.eagle3 import Eagle3TargetBatch
from nccl_stream.errors import CapacityError, MisuseError, PeerTimeoutError
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE
from nccl_stream.target_head import HeadSettings, TargetHead
from nccl_stream.vocab import DraftVocabulary
from tests.distributed.harness import Run
from tests.distributed.workers import join

pytestmark = pytest.mark.distributed

HIDDEN, VOCAB, SAMPLES = 8, 32, 3
LIMIT = 1 << 20
VOCABULARY = DraftVocabulary.from_ids(torch.arange(4, 20), VOCAB)


def head() -> TargetHead:
    generator = torch.Generator().manual_seed(2)
    weight, norm = torch.randn(VOCAB, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    return TargetHead(weight, norm_weight=norm, settings=HeadSettings(offset=1.0, softcap=5.0))


class Backend(TargetBackend):
    """Hidden states that follow from the ids."""

    algorithm = FeatureAlgorithm.EAGLE3

    def generate_batch(self, input_ids, attention_mask, loss_mask, *_packing):
        states = torch.sin(input_ids.unsqueeze(-1) * torch.arange(1.0, HIDDEN + 1))
        batch = Eagle3TargetBatch(
            states.repeat(1, 1, 3), input_ids, attention_mask, loss_mask, last_hidden_states=states
        )
        batch.attributes = {NORM_ATTRIBUTE: "pre", FRAME_ATTRIBUTE: "shifted"}
        return batch

    def get_input_embeddings(self):
        raise NotImplementedError


def target(spec, journal):
    with join(spec, "target", journal) as stream:
        with pytest.raises(MisuseError, match="draft ranks"):
            stream.shared("head")
        with pytest.raises(CapacityError, match="max_shared_bytes"):
            stream.share("large", {"a": torch.zeros(LIMIT // 4 + 1)})
        digest = stream.share("head", head().tensors())
        journal.say("shared", head=digest, vocabulary=stream.share("vocabulary", VOCABULARY.tensors()))
        producer = FeatureProducer(Backend(), stream.store, stream.run_id)
        for index in range(SAMPLES):
            ids = torch.arange(6).unsqueeze(0) + 10 * index + 100 * spec["rank"]
            sample_id = f"s{stream.role_rank}.{index}"
            ref = producer.produce(ids, torch.ones_like(ids), torch.ones_like(ids), sample_id=sample_id)
            stream.queue.put_blocks_until_below(ref)
        stream.queue.close()


def draft(spec, journal):
    with join(spec, "draft", journal) as stream:
        with pytest.raises(MisuseError, match="target ranks"):
            stream.share("head", {"a": torch.zeros(1)})
        with pytest.raises(PeerTimeoutError, match=r"'nothing'.*target rank [01]"):
            stream.shared("nothing", timeout=0.0)
        mine = TargetHead.from_tensors(stream.shared("head"))
        vocabulary = DraftVocabulary.from_tensors(stream.shared("vocabulary"))
        vocabulary.require_same(VOCABULARY.digest, "the test")
        with FeatureDataLoader(stream.queue, stream.store) as loader:
            for batch in loader:
                made = mine.supervise(batch)
                states = torch.sin(batch.input_ids.unsqueeze(-1) * torch.arange(1.0, HIDDEN + 1))
                expected = head().logits(states, norm="pre")
                expected[:, -1:] = 0
                if not torch.equal(made.logits, expected):
                    raise AssertionError("other logits than the target's head gives")
                journal.say("got", sample_id=batch.sample_ids[0])


def test_head_and_vocabulary_reach_every_draft_and_samples_carry_hidden_states(tmp_path):
    with Run(tmp_path, targets=2, drafts=2, config={"end": "ragged", "max_shared_bytes": LIMIT}) as run:
        targets = [run.start(f"t{rank}", target, rank=rank) for rank in range(2)]
        drafts = [run.start(f"d{rank}", draft, rank=rank) for rank in range(2)]
        run.wait_for("all to end", lambda: not any(worker.alive for worker in targets + drafts))
        assert [worker.error for worker in targets + drafts] == [None] * 4
        got = [entry["sample_id"] for worker in drafts for entry in worker.said("got")]
        assert sorted(got) == [f"s{rank}.{index}" for rank in range(2) for index in range(SAMPLES)]
        first, second = (worker.said("shared")[0] for worker in targets)
        assert (first["head"], first["vocabulary"]) == (second["head"], second["vocabulary"])
