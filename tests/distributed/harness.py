"""Streams of real processes for tests: a store, targets and drafts, each killed, stopped or watched on its own.

Processes come from multiprocessing's fork server, which has torch loaded already, so that a test does not pay for
importing it eight times over. What a process does is written line by line, as JSON, to a file of its own: a process
that is killed has said all that it knew. Every wait is bounded, and whatever is alive at the end is killed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# The last one is what DDP imports as it is made, for seconds.
CONTEXT.set_forkserver_preload(["torch.distributed", "nccl_stream", "tests.distributed.workers", "torch._dynamo"])

PATIENCE = 90.0  # seconds that a test waits for what must come, on however busy a machine

SMALL = {
    "max_sample_bytes": 1 << 20,
    "arena_bytes": 8 << 20,
    "max_bytes": 16 << 20,
    "heartbeat": 0.25,
    "death_timeout": PATIENCE,
    "connect_timeout": PATIENCE,
    "draft_restart_timeout": 0.0,
}


def soon():
    """Seconds after which a silent process is as good as dead: one that gets no processor must not be taken for it.

    0.6 of it, after which a silent store is given up, is longer than a pause of 2 s.
    """
    return 5.0 * min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Journal:
    """What one process says; written by it, read by the test."""

    def __init__(self, path):
        self.path = Path(path)

    def say(self, kind, **facts):
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "at": time.monotonic(), **facts}) + "\n")

    def lines(self, kind=None):
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0]
        entries = [json.loads(line) for line in whole.splitlines()]
        return [entry for entry in entries if kind in (None, entry["kind"])]


def _die_with(parent):
    """A test run that was killed leaves no processes behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def _enter(body, spec, journal_path, log_path):
    """First thing in a child: its log goes to a file, its errors into its journal."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s", stream=sys.stderr)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    journal = Journal(journal_path)
    try:
        body(spec, journal)
    except BaseException as exc:
        logging.exception("%s ends with an error", spec.get("name"))
        names = [cls.__name__ for cls in type(exc).__mro__]
        ids = list(getattr(exc, "sample_ids", ()))
        journal.say("error", type=names[0], is_a=names, text=str(exc), sample_ids=ids)
        os._exit(1)
    journal.say("end")
    # Not sys.exit: a process of a test is over when its work is, whatever threads a fault has left behind.
    os._exit(0)


class Worker:
    """One process of the run."""

    def __init__(self, name, body, spec, folder):
        self.name = name
        self.journal = Journal(folder / f"{name}.jsonl")
        self.log = folder / f"{name}.log"
        self.process = CONTEXT.Process(
            target=_enter, args=(body, {**spec, "name": name}, str(self.journal.path), str(self.log))
        )
        self.process.start()

    @property
    def alive(self):
        return self.process.is_alive()

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def said(self, kind):
        return self.journal.lines(kind)

    @property
    def got(self):
        """Numbers of the samples it was handed, in order."""
        return [entry["number"] for entry in self.said("got")]

    @property
    def acked(self):
        return [entry["number"] for entry in self.said("acked")]

    @property
    def lost(self):
        return [sample_id for entry in self.said("lost") for sample_id in entry["ids"]]

    @property
    def error(self):
        """The error it ended with, or None."""
        return next(iter(self.said("error")), None)

    @property
    def books(self):
        return self.said("books")[-1]


class Run:
    """The processes of one test. Use as a context manager: leaving kills what is left.

    Args:
        folder: for journals and logs.
        targets, drafts: ranks of each role.
        deaths: whether somebody falls silent in this test, which the others are to notice soon; else nobody is ever
            declared dead, however slow the machine.
        config: overrides of :data:`SMALL`.
        spec: what all workers are told, see ``workers.py``.
    """

    def __init__(self, folder, *, targets, drafts, deaths=False, config=None, run_id="run", port=None, **spec):
        self.folder = Path(folder)
        self.death = soon() if deaths else SMALL["death_timeout"]
        self.config = {**SMALL, "death_timeout": self.death, **(config or {})}
        self.base = {"width": 64, "targets": targets, "drafts": drafts, "run_id": run_id, "gates": str(folder), **spec}
        self.workers = {}
        self.store = None
        self.port = port

    def __enter__(self):
        from tests.distributed import workers

        if self.port is None:
            self.store = self.start("store", workers.keep_store)
            self.port = self.wait_for("the store", lambda: self.store.said("port"))[0]["port"]
        return self

    def __exit__(self, kind, exc, trace):
        for worker in self.workers.values():
            if worker.alive:
                worker.signal(signal.SIGKILL)
        for worker in self.workers.values():
            worker.process.join(PATIENCE)
        if exc is not None:
            print(self.report())

    def start(self, name, body, **spec):
        config = {**self.config, **spec.pop("config", {})}
        worker = Worker(name, body, {**self.base, "port": self.port, "config": config, **spec}, self.folder)
        self.workers[name] = worker
        return worker

    def target(self, rank, *, life=0, **spec):
        from tests.distributed import workers

        return self.start(f"t{rank}" + f".{life}" * bool(life), workers.target, rank=rank, **spec)

    def draft(self, rank, *, life=0, **spec):
        from tests.distributed import workers

        return self.start(f"d{rank}" + f".{life}" * bool(life), workers.draft, rank=rank, **spec)

    def start_all(self, *, target=None, draft=None):
        """All ranks of both roles, with what each role is told; returns ``(targets, drafts)``."""
        targets = [self.target(rank, **(target or {})) for rank in range(self.base["targets"])]
        return targets, [self.draft(rank, **(draft or {})) for rank in range(self.base["drafts"])]

    def open_gate(self, name):
        """Let the workers that wait for this gate go on."""
        (self.folder / f"gate-{name}").touch()

    def wait_for(self, what, condition, timeout=PATIENCE):
        """The first true value of ``condition()``; fails the test, naming ``what``, after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"waited {timeout} s for {what}")

    def wait_got(self, worker, count):
        self.wait_for(f"{worker.name} to get {count} samples", lambda: len(worker.got) >= count or not worker.alive)
        assert len(worker.got) >= count, f"{worker.name} ended early: {worker.error}"

    def wait_drafts_gone(self, *owners):
        """Until each of these targets knows that every draft is gone, or has ended for it."""
        label = re.compile(r": draft rank \d+ .* is gone: ")

        def knows(owner):
            return not owner.alive or len(label.findall(owner.log.read_text())) == self.base["drafts"]

        self.wait_for("the targets to know that the drafts are gone", lambda: all(knows(owner) for owner in owners))

    def wait_ended(self, *workers, timeout=PATIENCE):
        """Until these have ended by themselves."""
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            assert not worker.alive, f"{worker.name} hangs"

    def report(self):
        """What everybody said last, for a failed test."""
        parts = []
        for worker in self.workers.values():
            said = [f"{entry['kind']}" for entry in worker.journal.lines()][-5:]
            log = worker.log.read_text(errors="replace").splitlines()[-25:] if worker.log.exists() else []
            parts.append(f"--- {worker.name}: exit {worker.process.exitcode}, said {said}\n" + "\n".join(log))
        return "\n".join(parts)
