"""The native core against what else there is on the machine: copies, checksums, the pool, packing.

Every round runs all contenders one after the other, and a ratio is taken inside a round: on a shared machine only such
ratios mean anything. Where one thread works, what counts is its processor time, which others can less easily take.
The fastest rounds show what the machine can do undisturbed; beside them are the median and, in brackets, the smallest
and largest round. ``pip install google-crc32c crc32c`` adds the fastest checksums on PyPI to compare with.

    python launch/benchmarks/native.py
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from nccl_stream import _core, staging

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
Contenders = dict[str, Callable[[], object]]


def race(contenders: Contenders, rounds: int, seconds: float, threads: int = 1) -> dict[str, list[float]]:
    """Seconds per call of each contender, one value per round; each has about ``seconds`` in a round."""
    clock = time.perf_counter if threads > 1 else time.thread_time
    repeats = {}
    for name, call in contenders.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds):
        names = list(contenders)
        # Whoever comes first finds other caches than the last one: all take turns.
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            start = clock()
            for _ in range(repeats[name]):
                contenders[name]()
            times[name].append((clock() - start) / repeats[name])
    return times


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):6.2f} [{min(values):.2f}..{max(values):.2f}]"


def show(label: str, nbytes: int, times: dict[str, list[float]], bar: float) -> None:
    """How many times as fast as the best of the others "ours" is: in the fastest rounds of both, and in each round."""
    fastest = {name: min(values) for name, values in times.items()}
    best = min((name for name in times if name != "ours"), key=fastest.__getitem__)
    ratio = fastest[best] / fastest["ours"]
    rounds = [theirs / mine for mine, theirs in zip(times["ours"], times[best], strict=True)]
    verdict = "" if ratio >= bar else "  MISSED"
    speeds = "  ".join(f"{name} {nbytes / seconds / 1e9:.1f}" for name, seconds in fastest.items())
    print(f"{label:>30}: {ratio:5.2f} x {best:<13} bar {bar:g}{verdict}    rounds {spread(rounds)}    GB/s: {speeds}")


def copies(rounds: int, seconds: float, threads: int) -> None:
    print(f"host copy, {threads} thread{'s' if threads > 1 else ''}, warm pages, times as fast as the best other")
    torch.set_num_threads(threads)
    for mib in (1, 4, 16, 64, 256):
        src = torch.ones(mib * MIB, dtype=torch.uint8)
        dst = torch.zeros_like(src)
        from_array, to_array = src.numpy(), dst.numpy()
        contenders: Contenders = {
            "ours": lambda: staging.copy_bytes(dst, src, threads=threads),  # noqa: B023 - called in this turn
            "torch copy_": lambda: dst.copy_(src),  # noqa: B023
            "numpy copyto": lambda: np.copyto(to_array, from_array),  # noqa: B023
            "memmove": lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel()),  # noqa: B023
        }
        show(f"{mib} MiB", mib * MIB, race(contenders, rounds, seconds, threads), 0.95)


def checksums(rounds: int, seconds: float) -> None:
    print(f"CRC-32C ({_core.core().crc32c_kind()}), one core, times as fast as the best other")
    others = {}
    for module, function in (("google_crc32c", "value"), ("crc32c", "crc32c")):
        try:
            others[module] = getattr(importlib.import_module(module), function)
        except ImportError:
            print(f"  {module} is not installed")
    for kib in (16, 1024, 65536):
        data = os.urandom(kib << 10)
        contenders: Contenders = {"ours": lambda: staging.crc32c(data)}  # noqa: B023
        for name, function in others.items():
            contenders[name] = lambda function=function: function(data)  # type: ignore[misc]  # noqa: B023
        times = race(contenders, rounds, seconds)
        speed = [(kib << 10) / value / 1e9 for value in times["ours"]]
        verdict = "" if max(speed) >= 8 else "  MISSED"
        print(f"{f'{kib} KiB':>30}: {max(speed):5.2f} GB/s            bar 8{verdict}    rounds {spread(speed)}")
        if others:
            show("or", kib << 10, times, 0.9)


def pool(rounds: int) -> None:
    print("pool, one free and one allocation, in C++ [ns], bar 1000")
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        print("  there is no C++ compiler")
        return
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "pool")
        sources = [str(ROOT / "launch/benchmarks/pool.cpp"), str(ROOT / "csrc/host/pool.cpp")]
        command = [compiler, "-std=c++17", "-O3", "-DNDEBUG", f"-I{ROOT / 'csrc'}", *sources, "-o", program, "-pthread"]
        subprocess.run(command, check=True)
        for live in (10, 1000, 10_000):
            done = subprocess.run([program, str(live), str(rounds)], check=True, capture_output=True, text=True)
            print(f"{live:>10} slots are out: {spread([float(line) for line in done.stdout.split()])}")


def packing(rounds: int, seconds: float) -> None:
    print("packing 64 strided features into a slot, times as fast as a loop of torch copy_ into views of the slot")
    torch.set_num_threads(1)
    forms = {
        "rows of 64 B": lambda: torch.randn(64, 64, 48)[..., :16],
        "rows of 1 KiB": lambda: torch.randn(64, 16, 768)[..., :256],
        "every 2nd element": lambda: torch.randn(64, 512, 2)[..., 0],
        "transposed, bf16": lambda: torch.randn(64, 48, 64).to(torch.bfloat16).transpose(1, 2),
        "large, rows of 8 KiB": lambda: torch.randn(64, 64, 6144)[..., :2048],
    }
    for name, make in forms.items():
        tensors = list(make())
        size = tensors[0].numel() * tensors[0].itemsize
        offsets = [index * size for index in range(len(tensors))]
        slot = torch.zeros(size * len(tensors), dtype=torch.uint8)
        places = [slot[o : o + size].view(t.dtype).view(t.shape) for o, t in zip(offsets, tensors, strict=True)]

        def loop(size: int = size, slot: torch.Tensor = slot, tensors: list[torch.Tensor] = tensors) -> None:
            for index, tensor in enumerate(tensors):
                place = slot[index * size : (index + 1) * size].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor)

        def bare_loop(places: list[torch.Tensor] = places, tensors: list[torch.Tensor] = tensors) -> None:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)

        contenders: Contenders = {"ours": lambda: staging.pack(tensors, slot, offsets), "loop": loop}  # noqa: B023
        times = race(contenders | {"views made beforehand": bare_loop}, rounds, seconds)
        bare = [theirs / ours for ours, theirs in zip(times["ours"], times.pop("views made beforehand"), strict=True)]
        label = f"{name}, {size / 1024:g} KiB"
        bar = 5.0 if size < MIB // 4 else 1.0  # large ones are bound by memory
        show(label, size * len(tensors), times, bar)
        print(f"{'':>30}  {spread(bare)} x where the views exist already")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="per contender and round")
    parser.add_argument("--threads", type=int, default=1, help="threads that share a copy")
    parser.add_argument("--only", choices=["copies", "checksums", "pool", "packing"])
    options = parser.parse_args()
    if not staging.is_compiled():
        print("the compiled core is absent: this measures what stands in for it")
    parts: dict[str, Callable[[], None]] = {
        "copies": lambda: copies(options.rounds, options.seconds, options.threads),
        "checksums": lambda: checksums(options.rounds, options.seconds),
        "pool": lambda: pool(options.rounds),
        "packing": lambda: packing(options.rounds, options.seconds),
    }
    for name, run in parts.items():
        if options.only in (None, name):
            run()


if __name__ == "__main__":
    main()
