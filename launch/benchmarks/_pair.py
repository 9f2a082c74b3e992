"""Two processes on one host that measure together."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import TCPStore

TIMEOUT_S = 600
Body = Callable[[int, int, argparse.Namespace], Any]


def run_pair(body: Body, options: argparse.Namespace) -> list[Any]:
    """Run ``body(side, port, options)`` in a process for side 0 and one for side 1; they meet at a store on ``port``.

    Returns:
        What the two returned, by side.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_run, args=(body, side, store.port, options, out)) for side in (0, 1)]
    for process in processes:
        process.start()
    found = dict(out.get(timeout=TIMEOUT_S) for _ in processes)
    for process in processes:
        process.join(60)
    return [found[side] for side in (0, 1)]


def _run(body: Body, side: int, port: int, options: argparse.Namespace, out: Any) -> None:
    out.put((side, body(side, port, options)))
