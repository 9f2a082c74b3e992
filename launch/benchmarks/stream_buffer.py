#!/usr/bin/env python3
"""What an item costs in a stream buffer, from a thousand items to a million.

Every item is registered, put and popped once, as a handle, on one core::

    python launch/benchmarks/stream_buffer.py --check

Two patterns: ``follow`` asks after every put and pops as soon as a chunk is ready, so little is ever buffered;
``backlog`` registers and puts the whole stream before the first pop, so all of it is. Each length is measured over the
same number of items, as many short streams or one long one, in rounds that alternate between the lengths. It is the
processor time of the best round, because other work on the machine only ever adds to it. One JSON line per measurement;
the last line sums up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nccl_stream.chunk_policy import ChunkPolicy, FixedChunkPolicy, LeftContextChunkPolicy, SlidingWindowChunkPolicy
from nccl_stream.stream_buffer import StreamBuffer

# Items per second that handles must reach with the first policy, and how much dearer an item of the longest stream may
# be than one of the shortest: a table of a million ids no longer fits the caches, which is all that may show.
REQUIRED_RATE = 0.3e6
ALLOWED_GROWTH = 2.0
POLICIES: dict[str, ChunkPolicy] = {
    "fixed(32)": FixedChunkPolicy(32),
    "fixed(1)": FixedChunkPolicy(1),
    "sliding(28, 7)": SlidingWindowChunkPolicy(28, 7),
    "left_context(25, 25)": LeftContextChunkPolicy(25, 25),
}


def follow(buffer: StreamBuffer, ids: Sequence[str]) -> int:
    """Pop every chunk as soon as it is ready; the poll per item is part of the cost."""
    chunks = 0
    for handle, tensor_id in enumerate(ids):
        buffer.pre_read_register(tensor_id)
        buffer.put(tensor_id, handle)
        if buffer.has_chunk_ready():  # one item completes at most one chunk
            buffer.pop_chunk()
            chunks += 1
    return chunks + finish(buffer, len(ids))


def backlog(buffer: StreamBuffer, ids: Sequence[str]) -> int:
    """Buffer the whole stream before the first pop."""
    for tensor_id in ids:
        buffer.pre_read_register(tensor_id)
    for handle, tensor_id in enumerate(ids):
        buffer.put(tensor_id, handle)
    return finish(buffer, len(ids))


def finish(buffer: StreamBuffer, total: int) -> int:
    """Signal done and pop up to the final chunk."""
    buffer.signal_done(total)
    chunks = 1
    while not buffer.pop_chunk().is_final:
        chunks += 1
    if buffer.statistics().delivered_items != total:
        raise RuntimeError("the stream did not come through whole")
    return chunks


PATTERNS: dict[str, Callable[[StreamBuffer, Sequence[str]], int]] = {"follow": follow, "backlog": backlog}


def seconds_per_item(pattern: str, policy: ChunkPolicy, num_items: int, num_streams: int) -> float:
    """Processor seconds per item, over ``num_streams`` streams of ``num_items``."""
    spent = 0.0
    for _ in range(num_streams):
        ids = [f"item-{index}" for index in range(num_items)]
        buffer = StreamBuffer(0, "edge", "producer", policy)
        started = time.thread_time()
        PATTERNS[pattern](buffer, ids)
        spent += time.thread_time() - started
    return spent / (num_items * num_streams)


def measure(pattern: str, policy: ChunkPolicy, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """The best round's seconds per item, by length of the stream."""
    best = dict.fromkeys(sizes, float("inf"))
    gc.disable()  # a collection walks the benchmark's own ids, which are not part of the cost
    try:
        for _ in range(rounds):
            for size in sizes:
                best[size] = min(best[size], seconds_per_item(pattern, policy, size, max(1, max(sizes) // size)))
            gc.collect()
    finally:
        gc.enable()
    return best


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000], metavar="ITEMS")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES)[:1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail when the first policy misses the bars")
    arguments = parser.parse_args(argv)

    missed: list[str] = []
    for policy_name in arguments.policies:
        for pattern in PATTERNS:
            by_size = measure(pattern, POLICIES[policy_name], sorted(arguments.sizes), arguments.rounds)
            for size, cost in by_size.items():
                line = {"policy": policy_name, "pattern": pattern, "items": size, "us_per_item": round(cost * 1e6, 3)}
                print(json.dumps(line | {"items_per_s": round(1 / cost)}), flush=True)
            costs = list(by_size.values())
            if policy_name != arguments.policies[0]:
                continue
            if costs[-1] > ALLOWED_GROWTH * costs[0]:
                missed.append(
                    f"{pattern}: an item of the longest stream costs {costs[-1] / costs[0]:.2f} times as much"
                )
            if 1 / max(costs) < REQUIRED_RATE:
                missed.append(f"{pattern}: {1 / max(costs):.0f} items/s is below {REQUIRED_RATE:.0f}")
    summary = {
        "missed": missed,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    print(json.dumps(summary))
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
