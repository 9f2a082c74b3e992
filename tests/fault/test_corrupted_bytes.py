"""Bytes that change on their way or where they arrived: no trainer ever sees them."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("assignment", ["demand", "static"])
def test_bytes_changed_on_the_wire_are_delivered_anew(tmp_path, assignment):
    config = {"verify_checksums": True, "end": "ragged", "assignment": assignment, "max_failures": 20}
    with Run(tmp_path, targets=2, drafts=2, config=config, samples=40) as run:
        owners, takers = run.start_all(draft={"flip_every": 4})
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 4
        assert sorted(number for taker in takers for number in taker.acked) == list(range(80))
        books = takers[0].books
        assert books["balanced"]
        assert books["acked"] == books["put"] == 80
        # A trainer that saw changed bytes would have ended with an error: see the worker.
        logged = sum(taker.log.read_text().count("owner computed CRC-32C") for taker in takers)
        assert logged >= 10
        # Each draft knows its own count, and the other's as of its last sign of life.
        counts = [taker.books["checksum_failures"] for taker in takers]
        assert 0 < max(counts) <= logged
        assert books["redelivered"] >= logged  # on a busy machine a link may fail as well


def test_sample_that_never_arrives_whole_is_a_dead_letter_with_its_reason(tmp_path):
    config = {"verify_checksums": True, "end": "ragged", "max_failures": 2}
    with Run(tmp_path, targets=1, drafts=2, config=config, samples=21) as run:
        owners, takers = run.start_all(draft={"flip": ["s7"]})
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 3
        assert sorted(number for taker in takers for number in taker.acked) == [n for n in range(21) if n != 7]
        books = owners[0].said("own books")[-1]
        assert (books["put"], books["acked"], books["dead"], books["redelivered"]) == (21, 20, 1, 2)
        [[sample_id, failures, reason]] = books["letters"]
        assert (sample_id, failures) == ("s7", 3)
        assert reason.startswith("ChecksumError: sample 's7' of ")
        assert "delivery 2: its owner computed CRC-32C " in reason


def test_without_verification_changed_bytes_are_not_noticed(tmp_path):
    """The counterproof: the worker's own comparison sees what no checksum has stopped."""
    with Run(tmp_path, targets=1, drafts=1, config={"end": "ragged"}, samples=4) as run:
        _, takers = run.start_all(draft={"flip": ["s2"]})
        run.wait_ended(*takers)
        assert "sample 2 holds foreign values" in takers[0].error["text"]
