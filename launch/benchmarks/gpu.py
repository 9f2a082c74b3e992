"""What the GPU part of the package reaches, against the plain way of doing the same, in one run on one GPU.

Contenders take turns, so that a clock that changes changes for all of them; a ratio is the median over the rounds.

    python launch/benchmarks/gpu.py --csv out.csv --markdown out.md

Exit status 1 when a ratio stays below its bar.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nccl_stream.config import StreamConfig
from nccl_stream.device_staging import DeviceStager, device_crc32c, device_pack
from nccl_stream.refs import FeatureSpec
from nccl_stream.staging import PinnedPool
from nccl_stream.stores.preallocated import make_sample_memory
from nccl_stream.transport.layout import SlotLayout
from nccl_stream.transport.nccl_group import NcclLink

MIB = 1 << 20
GPU = torch.device("cuda", 0)
IN_FLIGHT = 4
TIMEOUT_S = 60.0


@dataclass
class Result:
    """One line of the table; rates in GB/s, or as ``unit`` says."""

    what: str
    ours: float
    plain: float
    ratio: float
    bar: float | None = None
    unit: str = "GB/s"

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.ratio < self.bar


def seconds(work: Callable[[], object]) -> float:
    """Wall time until the device is idle again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(
    what: str, nbytes: int, ours: Callable[[], object], plain: Callable[[], object], *, rounds: int, bar: float | None
) -> Result:
    ours()
    plain()
    pairs = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
    rates = [nbytes / statistics.median(times) / 1e9 for times in zip(*pairs, strict=True)]
    return Result(what, rates[0], rates[1], statistics.median(theirs / mine for mine, theirs in pairs), bar)


def copies(
    stager: DeviceStager,
    streams: list[torch.cuda.Stream],
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    repeats: int,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copying all several times over: our way, and one ``cudaMemcpyAsync`` per buffer, which is what ``copy_`` does."""

    def ours() -> None:
        for _ in range(repeats):
            for target, source in zip(targets, sources, strict=True):
                stager.copy(target, source)

    def plain() -> None:
        for _ in range(repeats):
            for stream, target, source in zip(streams, targets, sources, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)

    return ours, plain


def staging(rounds: int) -> list[Result]:
    """The stager, with four copies in flight on streams of their own on either side."""
    results = []
    pool = PinnedPool(IN_FLIGHT * 256 * MIB, pin=True)
    stager = DeviceStager(GPU, streams=IN_FLIGHT)
    streams = [torch.cuda.Stream(GPU, priority=-1) for _ in range(IN_FLIGHT)]
    for mib in (1, 16, 100, 256):
        slots = [pool.reserve(mib * MIB) for _ in range(IN_FLIGHT)]
        hosts = [slot.buffer for slot in slots]
        devices = [torch.ones(mib * MIB, dtype=torch.uint8, device=GPU) for _ in range(IN_FLIGHT)]
        repeats = max(1, 64 // mib)
        nbytes, bar = IN_FLIGHT * repeats * mib * MIB, 0.95 if mib >= 16 else None
        for direction, targets, sources in (("to the host", hosts, devices), ("to the GPU", devices, hosts)):
            ours, plain = copies(stager, streams, targets, sources, repeats)
            results.append(compare(f"copy {mib} MiB {direction}", nbytes, ours, plain, rounds=rounds, bar=bar))
        for slot in slots:
            slot.free()
    stager.close()
    return results


def packing(rounds: int) -> list[Result]:
    """64 strided features into one slot, against a loop of ``copy_``."""
    return [pack_features(name, rows, rounds) for name, rows in (("small", 64), ("large", 4096))]


def pack_features(name: str, rows: int, rounds: int) -> Result:
    whole = torch.randn(rows, 64, 2, 128, device=GPU).to(torch.bfloat16)
    tensors = [whole[:, n, 0] for n in range(64)]
    size = tensors[0].numel() * 2
    offsets = [-(-size // 256) * 256 * n for n in range(64)]
    slot = torch.zeros(offsets[-1] + size, dtype=torch.uint8, device=GPU)
    views = [slot[offset : offset + size].view(torch.bfloat16).view(rows, 128) for offset in offsets]
    stream = torch.cuda.current_stream(GPU)

    def ours() -> None:
        for _ in range(10):
            device_pack(tensors, slot, offsets, stream=stream)

    def plain() -> None:
        for _ in range(10):
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)

    what = f"pack 64 {name} strided features of {size // 1024} KiB"
    return compare(what, 10 * 64 * size, ours, plain, rounds=rounds, bar=1.0)


def checksums(rounds: int) -> list[Result]:
    """The kernel that debugging uses, against bringing the bytes to the host (no summing there)."""
    data = torch.ones(100 * MIB, dtype=torch.uint8, device=GPU)
    host = torch.empty(100 * MIB, dtype=torch.uint8)
    return [
        compare(
            "CRC-32C of 100 MiB, against a copy to pageable memory",
            data.numel(),
            lambda: device_crc32c(data),
            lambda: host.copy_(data),
            rounds=rounds,
            bar=None,
        )
    ]


def links(rounds: int) -> list[Result]:
    """NCCL from this rank to itself: the link with its transfers that are polled, against bare calls of the group."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    group = dist.ProcessGroupNCCL(dist.PrefixStore("self", store), 0, 1, options)
    group.eager_connect_single_device(GPU)
    link = NcclLink(group, 0, device=GPU, peer="itself")
    outgoing = [torch.ones(16 * MIB, dtype=torch.uint8, device=GPU) for _ in range(IN_FLIGHT)]
    incoming = [torch.zeros_like(buffer) for buffer in outgoing]

    def ours() -> None:
        window = []
        for number in range(32):
            if len(window) == IN_FLIGHT:
                window.pop(0).wait(TIMEOUT_S)
            window.append(link.exchange(outgoing[number % IN_FLIGHT], incoming[number % IN_FLIGHT]))
        for transfer in window:
            transfer.wait(TIMEOUT_S)

    def plain() -> None:
        window = []
        for number in range(32):
            if len(window) == IN_FLIGHT:
                window.pop(0).wait()
            group._start_coalescing()
            group.send([outgoing[number % IN_FLIGHT]], 0, 0)
            group.recv([incoming[number % IN_FLIGHT]], 0, 0)
            window.append(group._end_coalescing())
        for work in window:
            work.wait()

    result = compare("NCCL to itself, 16 MiB messages", 32 * 16 * MIB, ours, plain, rounds=rounds, bar=0.95)
    link.abort()
    link.wait_closed(TIMEOUT_S)  # the process ends soon
    return [result]


def puts(rounds: int) -> list[Result]:
    """For how long a put of 100 MiB holds the producer up, with the sample going to the host or staying on the GPU."""
    tensors = {"hidden": torch.ones(100 * MIB // 2, dtype=torch.bfloat16, device=GPU)}
    layout = SlotLayout.from_specs({n: FeatureSpec.of(t) for n, t in tensors.items()}, chunk_bytes=16 * MIB)
    times: dict[str, list[float]] = {}
    for policy in ("pinned", "device"):
        config = StreamConfig(staging=policy, max_bytes=1024 * MIB)
        memory = make_sample_memory(config, GPU)
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            owned = memory.store("s", layout, tensors, donate=False)
            times.setdefault(policy, []).append(time.perf_counter() - begin)
            owned.features()
            memory.free(owned)
        memory.close(TIMEOUT_S)
    pinned, device = (1e6 * statistics.median(times[policy][1:]) for policy in ("pinned", "device"))
    what = "put of 100 MiB to the host, against one that stays on the GPU"
    return [Result(what, pinned, device, device / pinned, unit="us")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", help="write the table there")
    parser.add_argument("--markdown", help="write the table there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        raise SystemExit(77)
    torch.cuda.set_device(GPU)
    results: list[Result] = []
    failures = []
    for part in (staging, packing, checksums, puts, links):
        try:
            results += part(options.rounds)
        except Exception as error:  # noqa: BLE001 - the other parts are worth having all the same
            failures.append(f"{part.__name__}: {type(error).__name__}: {error}")
    table = ["| what | ours | plain | unit | ratio | bar | |", "| --- | ---: | ---: | --- | ---: | ---: | --- |"]
    for r in results:
        bar, verdict = ("", "") if r.bar is None else (f"{r.bar:.2f}", "MISSED" if r.missed else "ok")
        table.append(f"| {r.what} | {r.ours:.2f} | {r.plain:.2f} | {r.unit} | {r.ratio:.2f} | {bar} | {verdict} |")
    table += [f"\nFAILED: {failure}" for failure in failures]
    print("\n".join(table))
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write("\n".join(table) + "\n")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["what", "ours", "plain", "unit", "ratio", "bar"])
            writer.writerows([r.what, r.ours, r.plain, r.unit, r.ratio, r.bar] for r in results)
    missed = sum(r.missed for r in results)
    print(f"{missed} bars missed, {len(failures)} parts failed")
    raise SystemExit(1 if missed or failures else 0)


if __name__ == "__main__":
    main()
