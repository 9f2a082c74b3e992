"""What the processes of a test stream do with samples that travel in pieces. Runs in children only; see ``workers.py``.

Every number of a sample says where it belongs: position p of sample n holds ``1000 * n + p``.
"""

from __future__ import annotations

import threading
import time

import torch

from nccl_stream.errors import NcclStreamError, StreamBrokenError, StreamLostError
from nccl_stream.streamed.sample import OpenFeatureSpec
from tests.distributed.workers import join, sample, say_books, wait_gate

PIECE = 16


def specs(width):
    return {
        "aux_hidden_states": OpenFeatureSpec((1, -1, width), torch.float32),
        "input_ids": OpenFeatureSpec((1, -1), torch.int64),
        "attention_mask": OpenFeatureSpec((1, -1), torch.int64),
        "loss_mask": OpenFeatureSpec((1, -1), torch.int64),
    }


def positions(number, start, length, width):
    """Positions of a sample."""
    ids = torch.arange(start, start + length).reshape(1, length) + 1000 * number
    return {
        "aux_hidden_states": ids.unsqueeze(-1).expand(1, length, width).float(),
        "input_ids": ids,
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
        "loss_mask": torch.ones(1, length, dtype=torch.int64),
    }


def same(tensors, expected):
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def produce(spec, journal, stream, number, length):
    """One streamed sample, as its own thread; tells how it ended."""
    if "first" in spec:
        wait_gate(spec, spec["first"])
    writer = stream.store.open_stream(
        f"p{number}", specs(spec["width"]), stream.run_id, piece_length=PIECE,
        window=spec["window"], retain=spec.get("retain", False),
    )  # fmt: skip
    stream.queue.put(writer.ref)
    try:
        for index, start in enumerate(range(0, length, PIECE)):
            if index == spec.get("gate_at", (None, ""))[0]:
                wait_gate(spec, spec["gate_at"][1])
            if index == spec.get("fail_at"):
                writer.fail("the forward went wrong")
                break
            writer.append(positions(number, start, min(PIECE, length - start), spec["width"]))
            journal.say("appended", number=number, piece=index, resident=stream.store.health().resident_bytes)
            time.sleep(spec.get("pace", 0.0))
        else:
            writer.close()
            journal.say("closed", number=number)
    except NcclStreamError as exc:
        journal.say("gave up", number=number, type=type(exc).__name__, text=str(exc))
        writer.fail(exc)


def target(spec, journal):
    """``streams`` samples in pieces, all at once, and ``samples`` whole ones among them; see :func:`produce`.

    ``lengths``: positions of each streamed sample; ``first``: gate to wait for before anything is opened; ``gate_at``:
    (piece, gate); ``fail_at``: fail instead of that piece; ``close_first``: close the queue before the samples.
    """
    with join(spec, "target", journal) as stream:
        stream.on_lost(lambda ids: journal.say("lost", ids=list(ids)))
        threads = []
        for index, length in enumerate(spec["lengths"]):
            number = index * spec["targets"] + spec["rank"]
            thread = threading.Thread(target=produce, args=(spec, journal, stream, number, length))
            thread.start()
            threads.append(thread)
        for index in range(spec.get("samples", 0)):
            number = index * spec["targets"] + spec["rank"]
            ref = stream.store.put(f"s{number}", sample(number, spec["width"]), stream.run_id)
            stream.queue.put_blocks_until_below(ref)
        if spec.get("close_first"):  # everything is on the queue once each has a piece
            while len({entry["number"] for entry in journal.lines("appended")}) < len(spec["lengths"]):
                time.sleep(0.02)
            stream.queue.close()
        for thread in threads:
            thread.join()
        stream.queue.close()
    journal.say("own books", **vars(stream._side.books()), resident_ids=stream._side.resident_ids())


def read(spec, journal, stream, lease):
    """Read one streamed sample to its end, or as far as it goes.

    With the piece of that number in hand: ``break_at``: break all links; ``stall_at``: (piece, gate) wait;
    ``stop_run_at``: ask everybody to stop; ``raise_at``: fail. ``stop_at``: read no further, and be content.
    """
    number = int(lease.ref.sample_id.removeprefix("p"))
    reader = stream.store.open_reader(lease.ref)
    position = 0
    try:
        for piece in reader:
            if piece.start != position:
                raise AssertionError(f"sample {number}: piece {piece.index} starts at {piece.start}, not at {position}")
            if not same(piece.tensors, positions(number, piece.start, piece.length, spec["width"])):
                raise AssertionError(f"sample {number}: piece {piece.index} holds foreign values")
            position += piece.length
            journal.say("piece", number=number, piece=piece.index, used=stream.store.health().resident_bytes)
            if piece.index == spec.get("break_at"):
                for inc, entry in list(stream._links._entries.items()):
                    stream._links.break_link(inc, entry.gen, "the test breaks it")
            if piece.index == spec.get("stall_at", (None, ""))[0]:
                wait_gate(spec, spec["stall_at"][1])
            if piece.index == spec.get("stop_run_at"):
                stream.request_stop("enough")
            if piece.index == spec.get("raise_at"):
                raise ZeroDivisionError("the trainer's own code is wrong")
            time.sleep(spec.get("pace", 0.0))
            piece.release()
            if piece.index == spec.get("stop_at"):
                reader.close()
                stream.queue.ack(lease)
                journal.say("stopped", number=number)
                return
    except (StreamBrokenError, StreamLostError) as exc:
        facts = {name: getattr(exc, name, None) for name in ("num_pieces", "num_positions")}
        journal.say("broken", number=number, type=type(exc).__name__, text=str(exc), **facts)
        reader.close()
        stream.queue.fail(lease, reason=exc)
        return
    journal.say("read", number=number, length=position)
    stream.queue.ack(lease)
    reader.release()


def draft(spec, journal):
    """Consume until the end; see :func:`read`."""
    with join(spec, "draft", journal) as stream:
        stream.on_lost(lambda ids: journal.say("lost", ids=list(ids)))
        while True:
            lease = stream.queue.acquire(1.0)
            if lease is None:
                if stream.queue.is_drained:
                    break
                continue
            if lease.ref.stream is not None:
                read(spec, journal, stream, lease)
                continue
            tensors, handle = stream.store.get(lease.ref)
            journal.say("got", number=int(lease.ref.sample_id.removeprefix("s")))
            del tensors
            stream.queue.ack(lease)
            stream.store.release(handle)
        journal.say("drained")
        say_books(stream, journal)
