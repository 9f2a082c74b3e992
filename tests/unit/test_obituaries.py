"""Closing a dead owner's books: what counts as acked, held and lost, and that no list of ids outgrows the store."""

import pytest

from nccl_stream.coordination.journal import JournalReading
from nccl_stream.coordination.kv import MAX_VALUE_BYTES, dump_json, load_json
from nccl_stream.coordination.mailbox import Mailbox
from nccl_stream.coordination.messages import Estate, decode_message, encode_message
from nccl_stream.coordination.obituaries import Obituaries, is_obituary

OWNER = "t0-1"


def totals(**counts):
    return {"put": 0, "acked": 0, "dropped": 0, "dead": 0, "lost": 0, **counts}


def dead_owner(*heirs, kind="died"):
    obituaries = Obituaries()
    obituaries.died(OWNER, "target rank 0", kind, "killed", list(heirs))
    return obituaries


@pytest.mark.parametrize(
    "make_id",
    [str, lambda n: f"{n:0>512}", lambda n: "\U0001f600" * 506 + f"{n:0>6}", lambda n: '"' * 506 + f"{n:0>6}"],
    ids=["short", "longest", "longest with twelve bytes a character", "all escaped"],
)
def test_estate_of_any_size_goes_through_the_mail_and_has_the_newest_acks(make_id):
    """As many ids as are remembered, of the longest that a put may have."""
    ids = [make_id(number) for number in range(65_536)]
    estate = Obituaries.estate(OWNER, ids, ids)
    sender, receiver = Mailbox("d0-1"), Mailbox("d1-1")
    sender.post("d1-1", load_json(dump_json(encode_message(estate))))
    received = []
    for peer, packet in sender.packets(0.0):
        assert peer == "d1-1"
        assert len(packet) <= MAX_VALUE_BYTES
        received += receiver.receive(load_json(packet), 0.0)[1]
    (wire,) = received
    assert decode_message(wire) == estate
    assert estate.acked[0] == ids[-1]
    assert estate.acked == ids[::-1][: len(estate.acked)]
    assert estate.held == ids[: len(estate.held)]
    assert min(len(estate.held), len(estate.acked)) >= 160


def test_short_ids_of_all_that_is_ever_outstanding_are_in_the_estate():
    ids = [str(number) for number in range(65_536)]
    assert len(Obituaries.estate(OWNER, [], ids).acked) == 50_000


def test_books_name_as_many_lost_ids_as_fit_and_count_them_all():
    obituaries = dead_owner()
    ids = [f"{number:0>512}" for number in range(65_536)]
    document = obituaries.compose(OWNER, JournalReading(totals(put=70_000, acked=4_464), tuple(ids)))
    assert len(dump_json(document)) <= MAX_VALUE_BYTES
    assert (document["lost"], document["put"], document["acked"]) == (65_536, 70_000, 4_464)
    assert document["lost_ids"] == ids[: len(document["lost_ids"])]
    assert len(document["lost_ids"]) >= 1_000
    assert is_obituary(load_json(dump_json(document)))


def test_open_sample_is_lost_unless_somebody_has_or_had_it():
    obituaries = dead_owner("d0", "d1")
    obituaries.heard("d0", Estate(OWNER, ["held", "both"], ["acked"]))
    obituaries.heard("d1", Estate(OWNER, [], ["both", "long settled"]))
    journal = JournalReading(
        totals(put=12, acked=2, dropped=1, dead=1, lost=3), ("held", "both", "acked", "lost", "gone")
    )
    document = obituaries.compose(OWNER, journal)
    assert document == {
        "put": 12, "acked": 4, "dropped": 1, "dead": 1, "held": 1, "lost": 5, "lost_ids": ["gone", "lost"],
    }  # fmt: skip


def test_books_wait_for_every_heir_that_lives_and_for_no_other():
    obituaries = dead_owner("d0", "d1", "d2")
    assert obituaries.complete(["d0", "d1", "d2"]) == []
    obituaries.heard("d0", Estate(OWNER, [], []))
    assert obituaries.complete(["d0", "d1", "d2"]) == []
    assert obituaries.complete(["d0"]) == [OWNER]
    assert obituaries.complete(["d0", "d9"]) == [OWNER]  # d9 came later and has nothing of it
    obituaries.heard("d2", Estate(OWNER, [], []))
    assert obituaries.complete(["d0", "d2"]) == [OWNER]
    assert obituaries.read(OWNER, obituaries.compose(OWNER, JournalReading(totals(), ()))) == ()
    assert obituaries.complete(["d0"]) == []  # they are closed


def test_books_of_one_that_was_gone_before_wait_for_everybody_who_lives_then():
    obituaries = Obituaries()
    obituaries.died(OWNER, "target rank 0", "died", "", None)
    obituaries.heard("d0", Estate(OWNER, [], []))
    assert obituaries.complete(["d0", "d9"]) == []
    obituaries.heard("d9", Estate(OWNER, [], []))
    assert obituaries.complete(["d0", "d9"]) == [OWNER]
    assert obituaries.declared("d9") == [Estate(OWNER, [], [])]
    obituaries.read(OWNER, obituaries.compose(OWNER, JournalReading(totals(), ())))
    assert obituaries.declared("d9") == []


def test_estate_that_is_told_before_the_death_is_known_counts_and_only_the_first_one():
    obituaries = Obituaries()
    obituaries.heard("d1", Estate(OWNER, ["a"], []))
    obituaries.died(OWNER, "target rank 0", "died", "killed", ["d1"])
    obituaries.heard("d1", Estate(OWNER, [], ["a"]))
    assert obituaries.compose(OWNER, JournalReading(totals(put=1), ("a",)))["held"] == 1


def test_lost_ids_are_reported_once():
    obituaries = dead_owner()
    document = obituaries.compose(OWNER, JournalReading(totals(put=2), ("a", "b")))
    assert obituaries.any_unread
    assert obituaries.read(OWNER, document) == ("a", "b")
    assert obituaries.read(OWNER, document) == ()
    assert not obituaries.any_unread
    assert obituaries.lost_ids() == ("a", "b")


@pytest.mark.parametrize(
    "document",
    [None, 7, {}, {**totals(), "held": 0, "lost": 0}, {**totals(), "held": 0, "lost": -1, "lost_ids": []}]
    + [{**totals(), "held": 0, "lost": 0, "lost_ids": wrong} for wrong in (None, [1], "ab")]
    + [{**totals(), "held": 0, "lost": True, "lost_ids": []}, {**totals(), "held": 0, "lost": 2**62, "lost_ids": []}],
)
def test_damaged_books_are_closed_all_the_same(document):
    obituaries = dead_owner()
    assert obituaries.read(OWNER, document) == ()
    assert not obituaries.any_unread
    assert obituaries.documents()[OWNER]["lost"] == 0


def test_owner_that_said_why_it_failed_keeps_nobody_waiting():
    obituaries = dead_owner(kind="failed")
    assert not obituaries.any_unread
    assert obituaries.died_owners() == []
    assert obituaries.failed() == "target rank 0: killed"


def test_outcomes_count_from_the_moment_the_estate_was_told():
    obituaries = dead_owner()
    assert not obituaries.outcome(OWNER, "acked")
    assert obituaries.untold() == [OWNER]
    obituaries.told(OWNER)
    assert obituaries.untold() == []
    assert obituaries.outcome(OWNER, "acked")
    assert obituaries.outcome(OWNER, "lost")
    assert not obituaries.outcome("t9", "acked")
    assert obituaries.posthumous() == {OWNER: {"acked": 1, "lost": 1}}
