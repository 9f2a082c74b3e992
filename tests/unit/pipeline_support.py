"""Shared pieces of the pipeline tests: a cheap deterministic target, prompts, and small helpers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from nccl_stream.queue import SampleRefQueue
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.target import Eagle3TargetBackend, Eagle3TargetBatch

HIDDEN, VOCAB, SEQ = 4, 16, 8
DEADLINE_S = 30.0


class FakeTarget(Eagle3TargetBackend):
    """Computes its features from the ids alone and counts its forwards; ``on_forward`` may block or raise."""

    def __init__(self, dtype: torch.dtype = torch.float32, on_forward: Callable[[int], None] | None = None) -> None:
        self.dtype = dtype
        self.num_forwards = 0
        self.on_forward = on_forward
        self.vocab_mapping: tuple[Tensor, Tensor] | None = None
        self.embedding = nn.Embedding(VOCAB, HIDDEN)

    def generate_batch(
        self, input_ids, attention_mask, loss_mask, position_ids=None, seq_lens=None, doc_remaining=None
    ):
        self.num_forwards += 1
        if self.on_forward is not None:
            self.on_forward(self.num_forwards)
        scale = input_ids.unsqueeze(-1).to(self.dtype)
        return Eagle3TargetBatch(
            aux_hidden_states=scale * torch.arange(3 * HIDDEN).to(self.dtype),
            input_ids=input_ids.roll(-1, 1),
            attention_mask=attention_mask,
            loss_mask=loss_mask.roll(-1, 1),
            logits=scale * torch.arange(VOCAB).to(self.dtype),
            position_ids=position_ids,
            seq_lens=seq_lens,
            doc_remaining=doc_remaining,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_vocab_mapping(self, selected_token_ids, selected_token_mask) -> None:
        self.vocab_mapping = (selected_token_ids, selected_token_mask)


def prompt(fill: int, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.full((1, seq), fill, dtype=torch.long)
    return ids, torch.ones_like(ids), torch.ones_like(ids)


def prompts(count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return (prompt(fill) for fill in range(1, count + 1))


def packed_prompt(lengths: list[int]) -> tuple[Tensor, ...]:
    total = sum(lengths)
    ids = torch.arange(1, total + 1).unsqueeze(0) % VOCAB
    position_ids = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    remaining = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).unsqueeze(0)
    ones = torch.ones_like(ids)
    return ids, ones, ones.clone(), position_ids, torch.tensor([lengths]), remaining


def fill_of(batch: Eagle3TargetBatch) -> int:
    """The fill value of the :func:`prompt` a batch was made from."""
    return int(batch.input_ids[0, 0])


def sample_bytes(dtype: torch.dtype = torch.float32) -> int:
    """Bytes of one sample that :class:`FakeTarget` makes of one :func:`prompt`."""
    return SEQ * (3 * HIDDEN + VOCAB) * dtype.itemsize + 3 * SEQ * 8


def store_for(num_samples: int | None = None, **kwargs) -> LocalFeatureStore:
    return LocalFeatureStore(max_samples=num_samples, **kwargs)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.001)


class Background:
    """Runs a function in a thread; :meth:`result` re-raises its error."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._value: object = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = function()
            except BaseException as error:  # noqa: BLE001 - raised again by result()
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the background function hangs"
        if self._error is not None:
            raise self._error
        return self._value


class DocumentedQueue:
    """A queue with the documented methods and nothing else."""

    def __init__(self, queue: SampleRefQueue) -> None:
        self._queue = queue

    @property
    def is_closed(self) -> bool:
        return self._queue.is_closed

    def acquire(self, poll_interval: float = 0.05):
        return self._queue.acquire(poll_interval)

    def put_blocks_until_below(self, ref, poll_interval: float = 0.05, abort_when=None) -> None:
        self._queue.put_blocks_until_below(ref, poll_interval, abort_when)

    def ack(self, lease) -> None:
        self._queue.ack(lease)

    def fail(self, lease) -> None:
        self._queue.fail(lease)

    def pending_count(self) -> int:
        return self._queue.pending_count()

    def outstanding_count(self) -> int:
        return self._queue.outstanding_count()

    def close(self) -> None:
        self._queue.close()
