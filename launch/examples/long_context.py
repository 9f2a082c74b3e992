#!/usr/bin/env python3
"""Train a draft on sequences that its receive memory could not hold: one target rank, all others drafts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 launch/examples/long_context.py

The target prefills each prompt in chunks and sends the features as it goes. A draft rank never has more of a sample
than a window of pieces, and trains chunk by chunk, each behind as much left context as its attention looks back on. Its
loss and its gradients are those of the whole sample, which every rank computes too, in order to say so.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the example also runs from a checkout

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import nccl_stream
from nccl_stream.chunk_policy import LeftContextChunkPolicy
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.refs import FeatureAlgorithm, SampleRef
from nccl_stream.store import FeatureStore
from nccl_stream.streamed.writer import SequenceWriter, open_specs
from nccl_stream.target import HFEagle3TargetModel

VOCABULARY, HIDDEN, AUX_LAYERS = 512, 32, (0, 1, 2)
PROMPTS, POSITIONS, PREFILL = 4, 1536, 100  # the prefill's portions need not be multiples of a piece
PIECE, LOOKBACK, LOOKAHEAD = 16, 24, 1  # positions per piece; what the loss at a position depends on, left and right

# Context has to reach back over what the draft looks back on, from positions that were left over for LOOKAHEAD.
POLICY = LeftContextChunkPolicy(chunk=3, left_context=-(-(LOOKBACK + LOOKAHEAD) // PIECE))
WINDOW = POLICY.chunk + POLICY.left_context + 1  # pieces: a chunk, its context, and one more that says what follows

POSITION_BYTES = 4 * 3 * HIDDEN + 4 * VOCABULARY + 3 * 8
SAMPLE_BYTES, WINDOW_BYTES = POSITIONS * POSITION_BYTES, WINDOW * PIECE * POSITION_BYTES
ONE_AT_A_TIME = threading.Lock()  # transformers collects hidden states by hooks that threads would share
ROUNDING = 1e-4  # relative; sums of float32 in another order


def make_config(num_drafts: int) -> nccl_stream.StreamConfig:
    sizes = {"max_sample_bytes": WINDOW_BYTES, "max_bytes": 2 * num_drafts * WINDOW_BYTES}
    smallest = nccl_stream.StreamConfig(**sizes).smallest_arena()
    return nccl_stream.StreamConfig(**sizes, arena_bytes=smallest, assignment="static")


def prompt(index: int) -> Tensor:
    """Token ids ``[1, POSITIONS]``."""
    return torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(index))


def make_target() -> nn.Module:
    """A small random Llama, the same on every rank."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, max_position_embeddings=POSITIONS, **shape)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def prefill(model: nn.Module, input_ids: Tensor) -> Iterator[dict[str, Tensor]]:
    """Run the target over its prompt in portions; yields the features of each, in place."""
    cache: Any = None
    for ids in input_ids.split(PREFILL, dim=1):
        with ONE_AT_A_TIME:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
        cache = out.past_key_values
        # hidden_states[0] is the embedding's output, so that of layer i is at i + 1.
        aux = torch.cat([out.hidden_states[layer + 1] for layer in AUX_LAYERS], dim=-1)
        masks = {name: torch.ones_like(ids) for name in ("attention_mask", "loss_mask")}
        yield {"aux_hidden_states": aux, "input_ids": ids, **masks, "logits": out.logits}


def produce(model: nn.Module, store: FeatureStore, put: Callable[[SampleRef], None], index: int) -> None:
    """Prefill one prompt and stream its features; waits for the draft rank that reads them."""
    portions = prefill(model, prompt(index))
    first = next(portions)
    specs = open_specs(FeatureAlgorithm.EAGLE3, first)
    writer = store.open_stream(str(index), specs, run_id="long", piece_length=PIECE, window=WINDOW)
    put(writer.ref)  # its reader may begin at once
    with SequenceWriter(writer) as sequence:
        sequence.extend(first)
        for portion in portions:
            sequence.extend(portion)


class Draft(nn.Module):
    """Predicts the target's next two distributions by one attention layer that looks back LOOKBACK positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.fuse = nn.Linear(4 * HIDDEN, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, VOCABULARY) for _ in range(1 + LOOKAHEAD))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of every position ``[batch, positions]``; the last LOOKAHEAD ones lack some of their targets."""
        hidden = self.fuse(torch.cat([batch["aux_hidden_states"], self.embedding(batch["input_ids"])], dim=-1))
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        ago = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (ago >= 0) & (ago <= LOOKBACK)
        hidden = hidden + functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        target, mask = batch["logits"].softmax(-1), batch["loss_mask"].float()
        losses = torch.zeros_like(mask)
        for head in self.heads:
            losses = losses - (target * head(hidden).log_softmax(-1)).sum(-1) * mask
            # The next head's target stands one position further to the right.
            target, mask = (functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))[:, 1:] for x in (target, mask))
        return losses


def whole_loss(draft: nn.Module, model: nn.Module, index: int) -> Tensor:
    """The summed loss of the whole sample at once, from the backend that makes whole samples; adds its gradients."""
    ids = prompt(index)
    backend = HFEagle3TargetModel(model, AUX_LAYERS)
    loss: Tensor = draft(backend.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))).sum()
    loss.backward()
    return loss.detach()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def train(loader: FeatureDataLoader, model: nn.Module, rank: int = 0) -> int:
    """Train on every sample; returns how many. With a default process group, data-parallel over its ranks."""
    torch.manual_seed(0)
    draft: nn.Module = Draft()
    parallel = nn.parallel.DistributedDataParallel(draft) if dist.is_initialized() else None
    optimizer = torch.optim.SGD(draft.parameters(), lr=1e-2)
    samples, chunks, total = 0, 0, torch.zeros(())
    for batch in loader:
        # Ranks have different numbers of chunks; only the final one of a sample is a step that all take together.
        local = contextlib.nullcontext() if parallel is None or batch.is_final else parallel.no_sync()
        with local:
            losses = (parallel or draft)(batch)
            loss = losses[:, batch.place.supervised(LOOKAHEAD)].sum()
            loss.backward()
        total, chunks = total + loss.detach(), chunks + 1
        if not batch.is_final:
            continue
        reference = copy.deepcopy(draft)
        reference.zero_grad()
        expected = whole_loss(reference, model, int(batch.sample_ids[0]))
        gradients = [nn.utils.parameters_to_vector([p.grad for p in m.parameters()]) for m in (draft, reference)]
        if parallel is not None:
            dist.all_reduce(gradients[1])
            gradients[1] /= dist.get_world_size()
        off = difference(total, expected), difference(*gradients)
        print(
            f"draft rank {rank}, sample {batch.sample_ids[0]}: loss {total / POSITIONS:.6f} from {chunks} chunks, "
            f"{expected / POSITIONS:.6f} from the whole; loss and gradient differ by {off[0]:.1e} and {off[1]:.1e}",
            flush=True,
        )
        if not max(off) < ROUNDING:
            raise SystemExit("the chunks do not add up to the whole sample")
        for parameter in draft.parameters():
            parameter.grad /= POSITIONS  # a mean over all positions is known only now
        optimizer.step()
        optimizer.zero_grad()
        loader.step()
        samples, chunks, total = samples + 1, 0, torch.zeros(())
    return samples


def main() -> None:
    num_drafts = int(os.environ["WORLD_SIZE"]) - 1
    config = make_config(num_drafts)
    model = make_target()
    with nccl_stream.connect(num_targets=1, run_id="long", config=config) as stream:
        if stream.role == "target":
            print(f"samples of {SAMPLE_BYTES} bytes through an arena of {config.arena_bytes}", flush=True)
            # A round begins when every draft rank has its sample, so as many must be open at a time.
            with ThreadPoolExecutor(num_drafts) as pool:
                list(pool.map(lambda index: produce(model, stream.store, stream.queue.put, index), range(PROMPTS)))
            stream.queue.close()
            return
        stream.process_group()
        with FeatureDataLoader(stream.queue, stream.store, ack="step", chunk_policy=POLICY) as loader:
            train(loader, model, stream.role_rank)
        stream.wait_ended(60.0)
        if stream.role_rank == 0:
            print(dict(stream.statistics()))


if __name__ == "__main__":
    main()
