"""What the processes of a test stream do. Runs in children only; told what to do by a dict (see the functions)."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data

import nccl_stream
import nccl_stream.ranks.links
from nccl_stream.async_pipeline import AsyncFeaturePipeline
from nccl_stream.backend import TargetBackend
from nccl_stream.config import StreamConfig
from nccl_stream.coordination.kv import tcp_store
from nccl_stream.errors import ClosedError
from nccl_stream.producer import FeatureProducer
from nccl_stream.ranks.draft_side import DraftSide
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.transport.process_group import GlooLink

torch.set_num_threads(1)

SETTLING_S = 60.0


def keep_store(spec, journal):
    """Serve a TCPStore until killed."""
    store = tcp_store("127.0.0.1", 0, serve=True, timeout=30.0)
    journal.say("port", port=store.port)
    while True:
        time.sleep(1.0)


def sample(number, width):
    """A sample whose every feature is filled with its number; equal shapes for all numbers of the same residue."""
    seq = 8 + number % 3
    return {
        "aux_hidden_states": torch.full((1, seq, 3 * width), float(number)),
        "input_ids": torch.full((1, seq), number),
        "attention_mask": torch.ones(1, seq, dtype=torch.long),
        "loss_mask": torch.ones(1, seq, dtype=torch.long),
        "logits": torch.full((1, seq, width), float(-number), dtype=torch.bfloat16),
    }


def number_of(index, rank, targets):
    """Number of a target's sample; exact in bfloat16 up to 256 only, so tests stay below."""
    return index * targets + rank


def check(tensors, number, width):
    """Whether the sample holds its own values and nobody else's."""
    expected = sample(number, width)
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def wait_gate(spec, name):
    path = Path(spec["gates"]) / f"gate-{name}"
    while not path.exists():
        time.sleep(0.02)


def flip_on_the_wire(every):
    """Change the last byte of every so-many-th message that this process receives."""
    receive, numbers = GlooLink.recv, itertools.count(1)

    def recv(self, buf):
        transfer = receive(self, buf)
        if buf.numel() > 1 and next(numbers) % every == 0:  # not the byte that warms a link up
            wait = transfer.wait

            def wait_and_flip(timeout):
                wait(timeout)
                buf[-1] ^= 0x10

            transfer.wait = wait_and_flip
        return transfer

    GlooLink.recv = recv


def flip_in_the_slot(sample_ids):
    """Change a byte of these samples wherever they arrive in this process, every time."""
    transfer_done = DraftSide.transfer_done

    def flip_and_go_on(self, delivery):
        if delivery.sample_id in sample_ids:
            self.store.layout_of(delivery.ref.feature_specs).views(delivery.slot.buffer)["input_ids"][0, 0] ^= 1
        transfer_done(self, delivery)

    DraftSide.transfer_done = flip_and_go_on


def join(spec, role, journal):
    """Connect.

    ``flip_every``, ``flip``: corrupt what comes, see above; ``no_links``: this rank never opens its side of a link;
    ``forks``: then run so many loader processes; ``one_launch``: as a rank of a launch of targets and drafts;
    ``own_store``: at a store that the first rank of the launch keeps.
    """
    if spec.get("no_links"):
        nccl_stream.ranks.links.Links.opening = lambda self, inc, gen: None
    if "flip_every" in spec:
        flip_on_the_wire(spec["flip_every"])
    if "flip" in spec:
        flip_in_the_slot(spec["flip"])
    place = {"role": role, "rank": spec["rank"]}
    if spec.get("one_launch"):
        place = {}
        os.environ["RANK"] = str(spec["rank"] + (spec["targets"] if role == "draft" else 0))
        os.environ["WORLD_SIZE"] = str(spec["targets"] + spec["drafts"])
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))
    stream = nccl_stream.connect(
        None if spec.get("own_store") else f"tcp://127.0.0.1:{spec['port']}",
        run_id=spec["run_id"],
        num_targets=spec["targets"],
        num_drafts=spec["drafts"],
        config=StreamConfig(**spec["config"]),
        **place,
    )
    journal.say("connected")
    if "forks" in spec:
        loader = torch.utils.data.DataLoader(
            list(range(16)), batch_size=4, num_workers=spec["forks"], multiprocessing_context="fork"
        )
        journal.say("loaded", items=[item for batch in loader for item in batch.tolist()])
    return stream


def say_books(stream, journal):
    """The books once the targets have ended. What other drafts did last comes with their next heartbeat or goodbye."""
    stream.wait_ended(SETTLING_S)
    deadline = time.monotonic() + SETTLING_S
    statistics = stream.statistics()
    while statistics["resident"] and time.monotonic() < deadline:
        time.sleep(0.05)
        statistics = stream.statistics()
    journal.say("books", balanced=statistics.balanced, owners=statistics.owners, **dict(statistics))


def target(spec, journal):
    """Put ``samples`` samples ``pace`` seconds apart; ``raise_at``: fail before that one; ``gate_at``: (index, gate).

    ``after``: gate to wait for between the last put and leaving.
    """
    with join(spec, "target", journal) as stream:
        for index in range(spec["samples"]):
            if index == spec.get("raise_at"):
                raise ZeroDivisionError("the target's own code is wrong")
            if index == spec.get("gate_at", (None, ""))[0]:
                wait_gate(spec, spec["gate_at"][1])
            number = number_of(index, spec["rank"], spec["targets"])
            ref = stream.store.put(f"s{number}", sample(number, spec["width"]), stream.run_id)
            if spec.get("watch_memory"):
                journal.say("memory", **stream.store.memory.used_bytes)
            try:
                stream.queue.put_blocks_until_below(ref)
            except ClosedError as exc:
                journal.say("closed", text=str(exc))
                break
            journal.say("put", number=number)
            time.sleep(spec.get("pace", 0.0))
        stream.queue.close()
        journal.say("all put")
        if "after" in spec:
            wait_gate(spec, spec["after"])
    letters = [[letter.sample_id, letter.failures, letter.reason] for letter in stream.dead_letters()]
    journal.say("own books", **vars(stream._side.books()), resident_ids=stream._side.resident_ids(), letters=letters)
    journal.say("memory", **stream.store.memory.used_bytes)


class NumberedBackend(TargetBackend):
    """A forward of its own kind: the n-th one makes sample n of this target."""

    algorithm = FeatureAlgorithm.EAGLE3

    def __init__(self, spec, journal):
        self.spec, self.journal, self.index = spec, journal, 0

    def generate_batch(self, *prompt, **named):
        number = number_of(self.index, self.spec["rank"], self.spec["targets"])
        self.index += 1
        self.journal.say("forward", number=number)
        return sample(number, self.spec["width"])

    def get_input_embeddings(self):
        raise NotImplementedError


def piped_target(spec, journal):
    """Produce ``samples`` samples through a pipeline; ``idle``: then wait for prompts that never come."""
    with join(spec, "target", journal) as stream:
        left = iter(range(spec["samples"]))
        producer = FeatureProducer(
            NumberedBackend(spec, journal),
            stream.store,
            stream.run_id,
            sample_id_factory=lambda n: f"s{number_of(n - 1, spec['rank'], spec['targets'])}",
        )

        def prompt():
            return None if next(left, None) is None else torch.ones(1, 4, dtype=torch.long)

        with AsyncFeaturePipeline(
            producer, stream.queue, prompt, stop_on_exhausted=not spec.get("idle", False)
        ) as pipeline:
            pipeline.join()


def draft(spec, journal):
    """Consume until the end, ``pace`` seconds per sample.

    ``max_steps``: leave after so many samples; ``hold``: keep so many tensors alive and look at them again before
    dropping them; ``raise_at``: fail with that sample in hand; ``stall_at``: (count, gate) wait with a lease in hand;
    ``linger``: gate to wait for before leaving; ``handle_signals``: stop on SIGTERM, for which there is a handler;
    ``asks_late``: ask what was lost only after the end; ``on_lost_gate``: gate for which the callback waits.
    """
    with join(spec, "draft", journal) as stream:
        if "handle_signals" in spec:
            signal.signal(signal.SIGTERM, lambda number, frame: journal.say("earlier handler", number=number))
            stream.handle_signals()

        def lost(ids):
            journal.say("lost", ids=list(ids))
            if "on_lost_gate" in spec:
                wait_gate(spec, spec["on_lost_gate"])

        if not spec.get("asks_late"):
            stream.on_lost(lost)
        consume(spec, journal, stream)
        journal.say("drained")
        if spec.get("asks_late"):
            stream.on_lost(lost)
        if "linger" in spec:
            wait_gate(spec, spec["linger"])
        if spec.get("books", True) and "max_steps" not in spec:
            say_books(stream, journal)


def consume(spec, journal, stream):
    held = deque()
    taken = 0
    while taken < spec.get("max_steps", 1 << 30):
        lease = stream.queue.acquire(1.0)
        if lease is None:
            if stream.queue.is_drained:
                break
            continue
        if getattr(lease, "is_padding", False):
            journal.say("padding")
            stream.queue.ack(lease)
            taken += 1
            continue
        tensors, handle = stream.store.get(lease.ref)
        number = int(lease.ref.sample_id.removeprefix("s"))
        if not check(tensors, number, spec["width"]):
            raise AssertionError(f"sample {number} holds foreign values")
        journal.say("got", number=number)
        if taken == spec.get("raise_at"):
            raise ZeroDivisionError("the trainer's own code is wrong")
        if taken == spec.get("stall_at", (None, ""))[0]:
            wait_gate(spec, spec["stall_at"][1])
        time.sleep(spec.get("pace", 0.0))
        stream.queue.ack(lease)
        journal.say("acked", number=number)
        held.append((tensors, number))
        stream.store.release(handle)
        del tensors
        taken += 1
        while len(held) > spec.get("hold", 0):
            old, value = held.popleft()
            if not check(old, value, spec["width"]):
                raise AssertionError(f"sample {value} changed while it was held")
            del old


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (self.canary, "w")


def garbage(canary):
    yield pickle.dumps(Bomb(canary))
    yield b"\xff\xfe not text"
    yield b"{" * 100_000
    yield b"[" * 50_000 + b"]" * 50_000
    yield b'{"epoch": NaN}'
    yield b'"' + b"x" * 1_000_000 + b'"'
    for value in (None, True, -1, 1e308, 10**400, "", "x", [], {}, {"kind": "died"}, {"inc": "x"}, {"seq": "x"}):
        yield json.dumps(value).encode()
    yield json.dumps({"from": "../../x", "first": 0, "msgs": [{"t": "x"}, 5], "ack": 0, "gap": False}).encode()
    yield json.dumps({"from": [], "first": 0, "msgs": [], "ack": 0, "gap": False}).encode()
    yield json.dumps({"from": "x" * 10_000, "first": -1, "msgs": {}, "ack": 1 << 70, "gap": 3}).encode()


def vandal(spec, journal):
    """Write garbage until killed: to every key of the run with ``attack`` in its path, or into every inbox."""
    store = dist.TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=timedelta(seconds=30))
    values = itertools.cycle(garbage(spec["canary"]))
    while True:
        keys = [key for key in store.list_keys() if "nccl_stream/" in key]
        written = 0
        for key in keys:
            if spec["attack"] in key:
                store.set(key, next(values))
                written += 1
            elif spec["attack"] == "inboxes" and "/status/" in key:
                for _ in range(3):
                    store.queue_push(key.replace("/status/", "/inbox/"), next(values))
                    written += 1
        journal.say("round", written=written)
        time.sleep(0.1)
