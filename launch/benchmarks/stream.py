"""Samples through put -> get -> release against raw gloo isend/irecv at the same depth, alternating in one run.

Two processes on one host, CPU tensors, gloo link. The stream side does everything a user's run does: the copy at put,
the control plane, leases, acks, views of the receive slots. Prints ratios with their spread and the number of
tensor-memory allocations on the receive path after warm-up.

    python launch/benchmarks/stream.py --mib 100 --samples 12 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
from _pair import run_pair
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

import nccl_stream
from nccl_stream import FeatureAlgorithm, StreamConfig
from nccl_stream.testing.allocations import TensorAllocations

MIB = 1 << 20
DEPTH = 4


def _features(nbytes: int) -> dict[str, torch.Tensor]:
    """An EAGLE-3 sample of about ``nbytes``: three quarters aux hidden states, one quarter logits."""
    hidden = nbytes * 3 // 4 // 2 // 512
    vocab = nbytes // 4 // 2 // 512
    ids = torch.zeros(1, 512, dtype=torch.long)
    return {
        "aux_hidden_states": torch.zeros(1, 512, hidden, dtype=torch.bfloat16),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
        "logits": torch.zeros(1, 512, vocab, dtype=torch.bfloat16),
    }


class _Raw:
    """The yardstick: whole messages, ``DEPTH`` in flight, into buffers that are reused."""

    def __init__(self, store: Any, side: int, nbytes: int) -> None:
        self.side = side
        self.group = ProcessGroupGloo(PrefixStore("raw", store.clone()), side, 2, timedelta(seconds=120))
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(DEPTH)]

    def run(self, samples: int) -> float:
        started = time.perf_counter()
        works: list[Any] = []
        for i in range(samples):
            if len(works) == DEPTH:
                works.pop(0).wait()
            buffer = [self.buffers[i % DEPTH]]
            works.append(self.group.send(buffer, 1, 0) if self.side == 0 else self.group.recv(buffer, 0, 0))
        for work in works:
            work.wait()
        return time.perf_counter() - started


def _target(stream: Any, features: dict[str, torch.Tensor], samples: int, tag: str, donate: bool) -> None:
    for i in range(samples):
        while not stream.store.wait_for_room(sum(t.nbytes for t in features.values()), 10.0):
            pass
        ref = stream.store.put(f"{tag}-{i}", features, "bench", FeatureAlgorithm.EAGLE3, donate=donate)
        stream.queue.put_blocks_until_below(ref)


def _draft(stream: Any, samples: int) -> float:
    started = time.perf_counter()
    for _ in range(samples):
        lease = None
        while lease is None:
            lease = stream.queue.acquire(10.0)
        tensors, handle = stream.store.get(lease.ref)
        del tensors
        stream.queue.ack(lease)
        stream.store.release(handle)
    return time.perf_counter() - started


def _main(side: int, port: int, options: argparse.Namespace) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    nbytes = options.mib * MIB
    config = StreamConfig(
        max_sample_bytes=nbytes + MIB,
        arena_bytes=(DEPTH + 2) * (nbytes + 4 * MIB),
        max_bytes=(DEPTH + 2) * (nbytes + MIB),
        high_watermark_bytes=(DEPTH + 1) * nbytes,
        low_watermark_bytes=DEPTH * nbytes,
        end="ragged",
        chunk_bytes=options.chunk_mib * MIB,
        depth=DEPTH,
    )
    features = _features(nbytes)
    raw = _Raw(store, side, sum(tensor.nbytes for tensor in features.values()))
    results: dict[str, list[float]] = {"raw": [], "copied": [], "donated": []}
    allocations = 0
    role = "target" if side == 0 else "draft"
    with nccl_stream.connect(
        f"tcp://127.0.0.1:{port}", run_id="bench", role=role, rank=0, num_targets=1, num_drafts=1, config=config
    ) as stream:
        for repeat in range(-1, options.repeats):
            for mode in results:
                key = f"{mode}-{repeat}"
                store.set(f"{key}-{side}", b"1")
                store.wait([f"{key}-{1 - side}"])
                if mode == "raw":
                    took = raw.run(options.samples)
                elif side == 0:
                    _target(stream, features, options.samples, key, donate=mode == "donated")
                    took = 0.0
                else:
                    took = _draft(stream, options.samples)
                if repeat >= 0:
                    results[mode].append(took)
        # One more pass, not timed, with torch's allocations counted on the receiving side.
        store.set(f"count-{side}", b"1")
        store.wait([f"count-{1 - side}"])
        if side == 0:
            _target(stream, features, options.samples, "count", donate=False)
            stream.queue.close()
        else:
            with TensorAllocations() as counted:
                _draft(stream, options.samples)
            allocations = counted.total
            assert stream.queue.acquire(30.0) is None
    if side == 0:
        return None
    return {"results": results, "allocations": allocations, "bytes": sum(t.nbytes for t in features.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, found = run_pair(_main, options)
    if options.json:
        print(json.dumps(found))
        return
    volume = found["bytes"] * options.samples
    raw = found["results"]["raw"]
    print(f"{options.samples} samples of {found['bytes'] / MIB:.0f} MiB, {DEPTH} in flight, {options.repeats} repeats")
    for mode, times in found["results"].items():
        ratios = [r / t for r, t in zip(raw, times, strict=True)]
        print(
            f"{mode:8s} {volume / statistics.median(times) / 1e9:6.2f} GB/s   "
            f"of raw gloo: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    print(f"tensor allocations on the receiving side after warm-up: {found['allocations']}")


if __name__ == "__main__":
    main()
