"""The example of long sequences, over a store of one process; with real ranks it runs among the launched examples."""

import importlib
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the example needs transformers")

from nccl_stream.chunk_policy import LeftContextChunkPolicy
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.queue import SampleRefQueue
from nccl_stream.stores.local import LocalFeatureStore

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    module = importlib.import_module("long_context")
    config = module.make_config(num_drafts=2)
    assert config.arena_bytes * 4 <= module.SAMPLE_BYTES
    monkeypatch.setattr(module, "POSITIONS", 512)  # a shorter one will do here
    return module


def run(example, policy):
    """Train on one sample; returns the number of samples trained on."""
    limit = example.POSITIONS * example.POSITION_BYTES // 4
    assert limit >= example.WINDOW_BYTES
    model = example.make_target()
    with LocalFeatureStore(max_bytes=limit, high_watermark_bytes=None, low_watermark_bytes=None) as store:
        queue = SampleRefQueue(store)

        def produce():
            example.produce(model, store, queue.put, 0)
            queue.close()

        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        samples = example.train(FeatureDataLoader(queue, store, ack="step", chunk_policy=policy), model)
        thread.join(60)
        assert not thread.is_alive()
        assert queue.statistics().acked == 1
        assert store.health().sample_count == 0
    return samples


def test_chunks_add_up_to_the_whole_sample(example, capsys):
    assert run(example, example.POLICY) == 1
    assert "from 11 chunks" in capsys.readouterr().out


def test_too_little_context_does_not_go_unnoticed(example):
    with pytest.raises(SystemExit, match="do not add up"):
        run(example, LeftContextChunkPolicy(chunk=4, left_context=1))
