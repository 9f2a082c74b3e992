"""The owner's journal against a real store: what others read after its death is the truth."""

import random

import pytest

from nccl_stream.coordination.journal import CHUNK_IDS, Journal, JournalReading, read_journal
from nccl_stream.coordination.kv import ControlStore, tcp_store
from nccl_stream.errors import WireFormatError

OUTCOMES = ["acked", "dropped", "dead", "lost"]


@pytest.fixture
def documents():
    return ControlStore(tcp_store("127.0.0.1", 0, serve=True, timeout=10.0), "run", timeout=10.0)


def write(documents, journal):
    writes, deletes = journal.take_writes()
    documents.set_many(writes)
    for key in deletes:
        documents.delete(key)
    return writes, deletes


def test_owner_without_samples_reads_as_empty(documents):
    assert read_journal(documents, "t0") == JournalReading(dict.fromkeys(["put", *OUTCOMES], 0), ())


@pytest.mark.parametrize("seed", range(4))
def test_reading_equals_what_happened_at_every_write(documents, seed):
    rng = random.Random(seed)
    journal, settled, still_open = Journal("t0"), dict.fromkeys(OUTCOMES, 0), []
    for number in range(4 * CHUNK_IDS):
        journal.opened(f"s{number}")
        still_open.append(f"s{number}")
        while still_open and rng.random() < 0.5:
            at = 0 if rng.random() < 0.8 else rng.randrange(len(still_open))
            outcome = rng.choice(OUTCOMES)
            journal.settled(still_open.pop(at), outcome)
            settled[outcome] += 1
        if rng.random() < 0.1:
            write(documents, journal)
            reading = read_journal(documents, "t0")
            assert sorted(reading.open_ids) == sorted(still_open)
            assert reading.totals == {"put": number + 1, **settled}
            assert reading.totals["put"] == sum(settled.values()) + len(reading.open_ids)


def test_unchanged_journal_writes_nothing(documents):
    journal = Journal("t0")
    assert journal.take_writes() == ({}, [])
    journal.opened("a")
    assert write(documents, journal)[0]
    assert journal.take_writes() == ({}, [])


def test_settled_chunks_leave_the_store(documents):
    journal = Journal("t0")
    ids = [f"s{n}" for n in range(3 * CHUNK_IDS)]
    for sample_id in ids:
        journal.opened(sample_id)
    write(documents, journal)
    assert documents.exists(["journal/t0/0", "journal/t0/1", "journal/t0/2"])
    for sample_id in ids[CHUNK_IDS : 2 * CHUNK_IDS]:
        journal.settled(sample_id, "acked")
    write(documents, journal)
    assert not documents.exists(["journal/t0/1"])
    assert read_journal(documents, "t0").open_ids == tuple(ids[:CHUNK_IDS] + ids[2 * CHUNK_IDS :])


def test_owner_that_dies_between_writing_and_deleting_leaves_no_open_ghosts(documents):
    journal = Journal("t0")
    ids = [f"s{n}" for n in range(3 * CHUNK_IDS)]
    for sample_id in ids:
        journal.opened(sample_id)
    write(documents, journal)
    for sample_id in ids[CHUNK_IDS : 2 * CHUNK_IDS]:
        journal.settled(sample_id, "acked")
    writes, deletes = journal.take_writes()
    documents.set_many(writes)
    assert deletes  # and here it is killed
    assert read_journal(documents, "t0").open_ids == tuple(ids[:CHUNK_IDS] + ids[2 * CHUNK_IDS :])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head", 7),
        ("head", {"low": 0, "high": 1}),
        ("head", {"low": 0, "high": 1, "totals": []}),
        ("0", {"ids": ["a", "b"], "out": "."}),
        ("0", ["a"]),
    ],
)
def test_damaged_journal_is_refused(documents, key, value):
    journal = Journal("t0")
    journal.opened("a")
    write(documents, journal)
    documents.set(f"journal/t0/{key}", value)
    with pytest.raises(WireFormatError):
        read_journal(documents, "t0")
