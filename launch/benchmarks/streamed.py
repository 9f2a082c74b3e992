"""A sample that travels in pieces through a small arena against the same bytes as whole samples, alternating in a run.

Two processes on one host, CPU tensors, gloo links. The whole samples go as in ``stream.py``, four in flight, through an
arena that holds six of them; the pieces go through an arena of ``--arena-mib``. Prints both rates, their ratio with its
spread, and the most memory that either side had for the streamed sample at any time.

    python launch/benchmarks/streamed.py --mib 1024 --arena-mib 128 --repeats 5
    python launch/benchmarks/streamed.py --mib 128 --repeats 2                       # a quick look
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from _pair import run_pair
from torch.distributed import TCPStore

import nccl_stream
from nccl_stream import FeatureAlgorithm, StreamConfig
from nccl_stream.refs import FeatureSpec
from nccl_stream.streamed.sample import OpenFeatureSpec

MIB = 1 << 20
DEPTH = 4
WHOLE_MIB = 64
HIDDEN = 4096  # of bfloat16: 8 KiB a position


def _features(nbytes: int) -> dict[str, torch.Tensor]:
    """Consecutive positions of about ``nbytes``."""
    length = nbytes // (2 * HIDDEN)
    ids = torch.zeros(1, length, dtype=torch.long)
    return {
        "aux_hidden_states": torch.zeros(1, length, HIDDEN, dtype=torch.bfloat16),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
    }


def _size(features: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in features.values())


class _Whole:
    """The yardstick: the bytes as samples of ``WHOLE_MIB``, four in flight."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.features = _features(WHOLE_MIB * MIB)
        self.count = max(1, options.mib // WHOLE_MIB)
        self.nbytes = self.count * _size(self.features)
        nbytes = _size(self.features)
        self.config = StreamConfig(
            max_sample_bytes=nbytes,
            arena_bytes=(DEPTH + 2) * (nbytes + 4 * MIB),
            max_bytes=(DEPTH + 2) * (nbytes + MIB),
            high_watermark_bytes=(DEPTH + 1) * nbytes,
            low_watermark_bytes=DEPTH * nbytes,
            end="ragged",
            depth=DEPTH,
        )

    def put(self, stream: Any, tag: str) -> None:
        for number in range(self.count):
            while not stream.store.wait_for_room(_size(self.features), 10.0):
                pass
            ref = stream.store.put(f"{tag}-{number}", self.features, "bench", FeatureAlgorithm.EAGLE3)
            stream.queue.put_blocks_until_below(ref)

    def take(self, stream: Any) -> None:
        for _ in range(self.count):
            lease = _acquire(stream)
            tensors, handle = stream.store.get(lease.ref)
            del tensors
            stream.queue.ack(lease)
            stream.store.release(handle)


class _Pieces:
    """The same bytes as one sample in pieces."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.features = _features(options.piece_mib * MIB)
        self.count = _Whole(options).nbytes // _size(self.features)
        self.nbytes = self.count * _size(self.features)
        room = options.arena_mib * MIB // 3 - 64 * 1024  # what the stream lets one sample have, see StreamConfig
        largest = room * 64 // 65
        self.window = largest // _size(self.features)
        self.config = StreamConfig(
            max_sample_bytes=largest,
            arena_bytes=options.arena_mib * MIB,
            max_bytes=2 * largest,
            end="ragged",
            depth=DEPTH,
        )
        self.most = 0

    def put(self, stream: Any, tag: str) -> None:
        specs: dict[str, FeatureSpec | OpenFeatureSpec] = {
            name: OpenFeatureSpec.of(tensor, 1) for name, tensor in self.features.items()
        }
        length = self.features["input_ids"].shape[1]
        writer = stream.store.open_stream(tag, specs, "bench", piece_length=length, window=self.window)
        with writer:
            stream.queue.put(writer.ref)
            for _ in range(self.count):
                writer.append(self.features)
                self.most = max(self.most, stream.store.health().resident_bytes)

    def take(self, stream: Any) -> None:
        lease = _acquire(stream)
        with stream.store.open_reader(lease.ref) as reader:
            for piece in reader:
                self.most = max(self.most, stream.store.health().resident_bytes)
                piece.release()
            stream.queue.ack(lease)


def _acquire(stream: Any) -> Any:
    lease = None
    while lease is None:
        lease = stream.queue.acquire(10.0)
    return lease


def _main(side: int, port: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    modes: dict[str, _Whole | _Pieces] = {"whole": _Whole(options), "pieces": _Pieces(options)}
    role: Any = "target" if side == 0 else "draft"
    streams = {
        mode: nccl_stream.connect(
            f"tcp://127.0.0.1:{port}",
            run_id=mode,
            role=role,
            rank=0,
            num_targets=1,
            num_drafts=1,
            config=work.config,
        )
        for mode, work in modes.items()
    }
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(-1, options.repeats):
        for mode, work in modes.items():
            key = f"{mode}-{repeat}"
            store.set(f"{key}-{side}", b"1")
            store.wait([f"{key}-{1 - side}"])
            started = time.perf_counter()
            if side == 0:
                work.put(streams[mode], key)
            else:
                work.take(streams[mode])
            if repeat >= 0:
                times[mode].append(time.perf_counter() - started)
    for stream in streams.values() if side == 0 else reversed(list(streams.values())):
        stream.close()
    pieces = modes["pieces"]
    assert isinstance(pieces, _Pieces)
    found = {"times": times, "bytes": {mode: work.nbytes for mode, work in modes.items()}}
    return {**found, "most": pieces.most, "window": pieces.window, "count": pieces.count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=1024, help="size of the streamed sample")
    parser.add_argument("--arena-mib", type=int, default=128, help="receive memory of the stream with pieces")
    parser.add_argument("--piece-mib", type=int, default=10, help="size of a piece")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sides = dict(enumerate(run_pair(_main, options)))
    if options.json:
        print(json.dumps(sides))
        return
    found = sides[1]
    rates = {mode: [found["bytes"][mode] / took / 1e9 for took in times] for mode, times in found["times"].items()}
    ratios = [pieces / whole for pieces, whole in zip(rates["pieces"], rates["whole"], strict=True)]
    print(
        f"{found['bytes']['pieces'] / MIB:.0f} MiB in {found['count']} pieces, a window of {found['window']}, through "
        f"an arena of {options.arena_mib} MiB; {options.repeats} repeats"
    )
    print(f"whole samples of {WHOLE_MIB} MiB, {DEPTH} in flight  {statistics.median(rates['whole']):6.2f} GB/s")
    print(
        f"one sample in pieces                   {statistics.median(rates['pieces']):6.2f} GB/s   of whole samples: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    )
    print(f"most memory: target {sides[0]['most'] / MIB:.0f} MiB, draft {sides[1]['most'] / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
