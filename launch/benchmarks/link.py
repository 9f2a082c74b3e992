"""How much of raw gloo's throughput the transfer engine keeps, between two processes on one machine.

Rounds of raw ``isend``/``irecv`` and rounds of the engine (arena slot, layout, chunks, callbacks) alternate in the same
two processes, and every engine round is compared with the raw rounds before and after it: on a shared machine only
such ratios mean anything.

    python launch/benchmarks/link.py --sample-mib 100 --depth 4 --rounds 8
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from nccl_stream.refs import FeatureSpec
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.process_group import open_link

MIB = 1 << 20
TIMEOUT_S = 120.0
WHOLE, CHUNKS, ENGINE = "raw, whole samples", "raw, same chunks", "engine"


def sample_layout(sample_mib: int, chunk_mib: int) -> SlotLayout:
    """A sample of about the size asked for: hidden states, and the small features that go with them."""
    tokens = sample_mib * MIB // (3 * 1024 * 2)
    specs = {
        "aux_hidden_states": FeatureSpec((1, tokens, 3 * 1024), torch.bfloat16),
        "input_ids": FeatureSpec((1, tokens), torch.int64),
        "loss_mask": FeatureSpec((1, tokens), torch.int64),
    }
    return SlotLayout.from_specs(specs, chunk_bytes=chunk_mib * MIB)


class Raw:
    """A window of plain operations on a process group of its own, over as many whole samples as fit the window."""

    def __init__(self, store: dist.Store, name: str, side: int, chunks: list[tuple[int, int]], depth: int) -> None:
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), side, 2, timedelta(seconds=TIMEOUT_S))
        self.side = side
        self.depth = depth
        end = max(offset + nbytes for offset, nbytes in chunks)
        samples = [torch.ones(end, dtype=torch.uint8) for _ in range(depth)]
        self.messages = [[sample[offset : offset + nbytes] for offset, nbytes in chunks] for sample in samples]

    def round(self, samples: int) -> None:
        start = self.group.send if self.side == 0 else self.group.recv
        window: list[dist.Work] = []
        for sample in range(samples):
            for message in self.messages[sample % len(self.messages)]:
                if len(window) == self.depth:
                    window.pop(0).wait()
                window.append(start([message], 1 - self.side, 0))
        for work in window:
            work.wait()


class Engine:
    """The product's path: donated tensors on the sending side, an arena on the receiving one."""

    def __init__(self, store: dist.Store, side: int, layout: SlotLayout, depth: int, ahead: int) -> None:
        self.side = side
        self.layout = layout
        self.ahead = ahead
        self.finished: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.engine = TransferEngine("cpu", depth=depth, timeout=TIMEOUT_S, name="benchmark")
        link = open_link(store, "engine", side, "cpu", TIMEOUT_S, peer=f"rank {1 - side}")
        self.channel = self.engine.attach(link, on_done=self.finished.put, on_failed=self.fail)
        if side == 0:
            self.staging = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
            big = layout.specs["aux_hidden_states"]
            self.donated = [{"aux_hidden_states": torch.ones(big.shape, dtype=big.dtype)} for _ in range(ahead)]
            self.next = 0
        else:
            self.arena = Arena(ahead * layout.total_bytes)

    def fail(self, error: BaseException, tokens: list[object]) -> None:
        self.finished.put(error)

    def start(self) -> None:
        if self.side == 0:
            self.next = (self.next + 1) % len(self.donated)
            self.channel.send(None, self.layout.wire_buffers(self.staging, self.donated[self.next]))
            return
        slot = self.arena.reserve(self.layout.total_bytes, "sample")
        assert slot is not None, "the slot before was settled"
        self.channel.recv(slot, self.layout.wire_buffers(slot.buffer))

    def round(self, samples: int) -> None:
        started = 0
        for finished in range(samples):
            while started < min(samples, finished + self.ahead):
                self.start()
                started += 1
            token = self.finished.get(timeout=TIMEOUT_S)
            if isinstance(token, BaseException):
                raise token
            if token is not None:
                token.settle()


def run(side: int, port: int, options: argparse.Namespace, pipe: object) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, side == 0, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    layout = sample_layout(options.sample_mib, options.chunk_mib)
    sample_bytes = sum(nbytes for _, nbytes in layout.chunks)
    contenders = {
        WHOLE: Raw(store, "raw/whole", side, [(0, sample_bytes)], options.depth),
        CHUNKS: Raw(store, "raw/chunks", side, list(layout.chunks), options.depth),
        ENGINE: Engine(store, side, layout, options.depth, ahead=options.depth),
    }
    meet = dist.ProcessGroupGloo(dist.PrefixStore("meet", store), side, 2, timedelta(seconds=TIMEOUT_S))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name, contender in contenders.items():
            meet.barrier().wait()
            begin = time.perf_counter()
            contender.round(options.samples)
            elapsed = time.perf_counter() - begin
            if number:  # the first round warms up pages and connections
                rates[name].append(options.samples * sample_bytes / elapsed / 1e9)
    meet.barrier().wait()
    contenders[ENGINE].engine.close(5.0)
    if side == 1:
        pipe.send(rates)


def report(rates: dict[str, list[float]]) -> None:
    print(f"{'':22} {'median':>8} {'min':>8} {'max':>8}  GB/s")
    for name, values in rates.items():
        print(f"{name:22} {statistics.median(values):8.2f} {min(values):8.2f} {max(values):8.2f}")
    for base in (WHOLE, CHUNKS):
        raw = rates[base]
        neighbours = [(raw[i] + raw[min(i + 1, len(raw) - 1)]) / 2 for i in range(len(raw))]
        ratios = sorted(value / around for value, around in zip(rates[ENGINE], neighbours, strict=True))
        print(
            f"engine / {base}: median {statistics.median(ratios):.2f}, "
            f"range {ratios[0]:.2f} to {ratios[-1]:.2f} over {len(ratios)} rounds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample-mib", type=int, default=100)
    parser.add_argument("--chunk-mib", type=int, default=16, help="largest message of the engine")
    parser.add_argument("--depth", type=int, default=4, help="operations in flight")
    parser.add_argument("--samples", type=int, default=8, help="samples per round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--port", type=int, default=29611)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes = [context.Process(target=run, args=(side, options.port, options, there)) for side in (0, 1)]
    for process in processes:
        process.start()
    try:
        while not here.poll(0.2):
            if any(process.exitcode for process in processes):
                raise SystemExit("a benchmark process failed")
        print(
            f"{options.sample_mib} MiB samples, {options.chunk_mib} MiB chunks, depth {options.depth}, "
            f"torch {torch.__version__}, {multiprocessing.cpu_count()} cores"
        )
        report(here.recv())
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
