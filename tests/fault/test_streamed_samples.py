"""Samples that travel in pieces between real processes: many at once, and all that can go wrong in the middle."""

import itertools

import pytest

from tests.distributed import streamed_workers as workers
from tests.distributed.harness import Run
from tests.distributed.streamed_workers import PIECE

pytestmark = pytest.mark.distributed

WIDTH = 64
WINDOW = 3
PIECE_BYTES = PIECE * (4 * WIDTH + 3 * 8)
WINDOW_BYTES = WINDOW * PIECE_BYTES
# The least arena that a stream accepts: room for one window at work, one whose tensors are still alive, one to come.
TIGHT = {"max_sample_bytes": WINDOW_BYTES, "arena_bytes": 3 * (WINDOW_BYTES + WINDOW_BYTES // 64 + 64 * 1024)}


def start(run, *, target=None, draft=None):
    targets = [
        run.start(f"t{rank}", workers.target, rank=rank, window=WINDOW, **(target or {}))
        for rank in range(run.base["targets"])
    ]
    drafts = [run.start(f"d{rank}", workers.draft, rank=rank, **(draft or {})) for rank in range(run.base["drafts"])]
    return targets, drafts


def wait_all_put(run, owner, count):
    """Until so many streams have a piece: nobody is told that the run ends before it has put its own."""
    run.wait_for("all to be put", lambda: len({entry["number"] for entry in owner.said("appended")}) == count)
    run.open_gate("all put")


def read_by(*drafts):
    """Length of each streamed sample that was read to its end; each once."""
    entries = [entry for draft in drafts for entry in draft.said("read")]
    numbers = [entry["number"] for entry in entries]
    assert len(numbers) == len(set(numbers)), "a stream was read twice"
    return {entry["number"]: entry["length"] for entry in entries}


def errors(*members):
    return [worker.error for worker in members if worker.error is not None]


@pytest.mark.parametrize(("end", "assignment"), [("ragged", "demand"), ("drop", "static")])
def test_many_streams_of_all_lengths_among_whole_samples(tmp_path, end, assignment):
    """Totals at and around multiples of the window, several on one link, over two targets and two drafts."""
    lengths = [1, PIECE - 1, PIECE, PIECE + 1, WINDOW * PIECE - 1, WINDOW * PIECE, WINDOW * PIECE + 1, 9 * PIECE + 5]
    spec = {"lengths": lengths, "samples": 4}
    config = {"end": end, "assignment": assignment, **TIGHT, "max_bytes": 16 << 20}
    with Run(tmp_path, targets=2, drafts=2, config=config, width=WIDTH) as run:
        targets, drafts = start(run, target=spec)
        run.wait_ended(*targets, *drafts)
        assert errors(*targets, *drafts) == []
        expected = {index * 2 + rank: length for rank in range(2) for index, length in enumerate(lengths)}
        assert read_by(*drafts) == expected
        assert sorted(number for draft in drafts for number in draft.got) == list(range(8))
        books = drafts[0].books
        assert books["balanced"]
        assert books["acked"] == books["put"] == 2 * (len(lengths) + 4)
        # Each window is bounded, so what is open at once is: on a target all of them, on a draft what fits.
        most = max(entry["resident"] for owner in targets for entry in owner.said("appended"))
        assert most <= len(lengths) * WINDOW_BYTES + TIGHT["max_sample_bytes"] + 4 * WINDOW_BYTES
        assert all(entry["used"] <= TIGHT["arena_bytes"] for draft in drafts for entry in draft.said("piece"))


def test_stream_much_longer_than_memory_is_bounded_by_its_window(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=1, drafts=1, config=config, width=WIDTH) as run:
        (owner,), (taker,) = start(run, target={"lengths": [60 * PIECE]}, draft={"stall_at": (0, "full")})
        run.wait_for("a full window", lambda: len(owner.said("appended")) == WINDOW)
        run.open_gate("full")
        run.wait_ended(owner, taker)
        assert errors(owner, taker) == []
        assert read_by(taker) == {0: 60 * PIECE}
        assert max(entry["resident"] for entry in owner.said("appended")) == WINDOW_BYTES
        most = max(entry["used"] for entry in taker.said("piece"))
        assert most <= WINDOW_BYTES + WINDOW * 5 * 256, "more than one window with its headers and alignment"


def test_killed_producer_makes_the_reader_raise_with_how_far_it_got(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=2, drafts=1, deaths=True, config=config, width=WIDTH) as run:
        spec = {"lengths": [8 * PIECE], "window": WINDOW}
        victim = run.start("t0", workers.target, rank=0, gate_at=(5, "never"), **spec)
        survivor = run.start("t1", workers.target, rank=1, first="more", **spec)
        taker = run.start("d0", workers.draft, rank=0)
        run.wait_for("five pieces", lambda: len(taker.said("piece")) == 5)
        victim.kill()
        run.open_gate("more")
        run.wait_ended(survivor, taker)
        assert errors(survivor, taker) == []
        assert read_by(taker) == {1: 8 * PIECE}
        books = taker.books
        assert books["balanced"]
        assert (books["put"], books["acked"], books["lost"], books["resident"]) == (2, 1, 1, 0)
        assert taker.lost == ["p0"]
        (broken,) = taker.said("broken")
        assert broken["type"] == "StreamBrokenError"
        assert (broken["number"], broken["num_pieces"], broken["num_positions"]) == (0, 5, 5 * PIECE)


@pytest.mark.parametrize("retain", [False, True], ids=["lost", "retained"])
def test_killed_reader(tmp_path, retain):
    """Its stream is lost, and its producer told, unless it was retained: then another draft reads it from the start."""
    config = {"end": "ragged", **TIGHT, "max_bytes": 16 << 20}
    with Run(tmp_path, targets=1, drafts=2, deaths=True, config=config, width=WIDTH) as run:
        spec = {"lengths": [12 * PIECE, 12 * PIECE], "retain": retain, "pace": 0.01}
        (owner,) = [run.start("t0", workers.target, rank=0, window=WINDOW, **spec)]
        victim = run.start("d0", workers.draft, rank=0, stall_at=(4, "never"))
        other = run.start("d1", workers.draft, rank=1)
        run.wait_for("the victim to be in the middle", lambda: len(victim.said("piece")) == 5)
        (number,) = {entry["number"] for entry in victim.said("piece")}
        victim.kill()
        run.wait_ended(owner, other)
        assert errors(owner, other) == []
        books = owner.said("own books")[0]
        assert books["put"] == books["acked"] + books["lost"] == 2
        if retain:
            assert read_by(other) == {0: 12 * PIECE, 1: 12 * PIECE}
            assert not owner.said("lost")
        else:
            assert read_by(other) == {1 - number: 12 * PIECE}
            assert owner.lost == [f"p{number}"]
            assert [(e["number"], e["type"]) for e in owner.said("gave up")] == [(number, "StreamLostError")]


def test_reader_that_stops_early_hands_back_its_memory_and_the_writer_goes_on(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=1, drafts=1, config=config, width=WIDTH) as run:
        (owner,), (taker,) = start(run, target={"lengths": [20 * PIECE] * 5}, draft={"stop_at": 2})
        run.wait_ended(owner, taker)
        assert errors(owner, taker) == []
        assert len(taker.said("stopped")) == 5
        assert {entry["type"] for entry in owner.said("gave up")} == {"StreamLostError"}
        assert len(owner.said("gave up")) == 5
        books = owner.said("own books")[0]
        assert (books["acked"], books["lost"], books["resident"]) == (5, 0, 0)
        assert taker.books["balanced"]


def test_producer_that_fails_is_told_to_its_reader(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=1, drafts=1, config=config, width=WIDTH) as run:
        (owner,), (taker,) = start(run, target={"lengths": [9 * PIECE] * 2, "fail_at": 4, "pace": 0.02})
        run.wait_ended(owner, taker)
        assert errors(owner, taker) == []
        for broken in taker.said("broken"):
            assert "the forward went wrong" in broken["text"]
            assert (broken["num_pieces"], broken["num_positions"]) == (4, 4 * PIECE)
        books = owner.said("own books")[0]
        assert books["lost"] == books["put"] == 2
        assert sorted(owner.lost) == ["p0", "p1"]
        assert taker.books["balanced"]


def test_broken_link_in_mid_stream_goes_on_where_it_broke(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=2, drafts=1, config=config, width=WIDTH) as run:
        spec = {"lengths": [15 * PIECE + 3] * 2, "samples": 3}
        targets, (taker,) = start(run, target=spec, draft={"break_at": 4})
        run.wait_ended(*targets, taker)
        assert errors(*targets, taker) == []
        assert read_by(taker) == dict.fromkeys(range(4), 15 * PIECE + 3)
        assert sorted(set(taker.got)) == list(range(6))
        assert "is lost: the test breaks it" in taker.log.read_text()
        pieces = [(entry["number"], entry["piece"]) for entry in taker.said("piece")]
        assert sorted(pieces) == list(itertools.product(range(4), range(16))), "a piece came twice, or never"
        assert taker.books["balanced"]


def test_reader_that_fails_takes_its_stream_along_and_nobody_hangs(tmp_path):
    config = {"end": "ragged", **TIGHT}
    with Run(tmp_path, targets=1, drafts=1, config=config, width=WIDTH) as run:
        target = {"lengths": [9 * PIECE, 9 * PIECE], "gate_at": (2, "all put")}
        (owner,), (taker,) = start(run, target=target, draft={"raise_at": 2})
        wait_all_put(run, owner, 2)
        run.wait_ended(owner, taker)
        assert taker.error["type"] == "ZeroDivisionError"
        assert owner.error is None
        assert {entry["type"] for entry in owner.said("gave up")} <= {"StreamLostError", "PeerLostError"}
        assert len(owner.said("gave up")) == 2


def test_aligned_end_drops_an_open_stream_and_its_writer_is_told(tmp_path):
    """Three streams for two drafts that take rounds together: the third is left over, its window full."""
    config = {"end": "drop", **TIGHT, "max_bytes": 16 << 20}
    with Run(tmp_path, targets=1, drafts=2, config=config, width=WIDTH) as run:
        (owner,), takers = start(run, target={"lengths": [9 * PIECE] * 3, "close_first": True})
        run.wait_ended(owner, *takers)
        assert errors(owner, *takers) == []
        assert len(read_by(*takers)) == 2
        books = owner.said("own books")[0]
        assert (books["put"], books["acked"], books["dropped"], books["resident"]) == (3, 2, 1, 0)
        assert [entry["type"] for entry in owner.said("gave up")] == ["StreamLostError"]
        assert takers[0].books["balanced"]


@pytest.mark.parametrize("end", ["drop", "ragged"])
def test_stop_in_mid_stream_ends_everybody(tmp_path, end):
    """What is being read is read to its end; what waits goes back, and its writers are told that nobody is left."""
    config = {"end": end, **TIGHT, "max_bytes": 16 << 20}
    with Run(tmp_path, targets=1, drafts=2, config=config, width=WIDTH) as run:
        target = {"lengths": [9 * PIECE] * 6, "gate_at": (2, "all put")}
        (owner,), takers = start(run, target=target, draft={"stop_run_at": 3, "pace": 0.01})
        wait_all_put(run, owner, 6)
        run.wait_ended(owner, *takers)
        assert errors(owner, *takers) == []
        done = read_by(*takers)
        assert done
        assert set(done.values()) == {9 * PIECE}
        books = owner.said("own books")[0]
        assert books["put"] == books["acked"] + books["lost"] + books["resident"] == 6
        assert books["acked"] == len(done)
        assert {entry["type"] for entry in owner.said("gave up")} <= {"PeerLostError", "StreamLostError"}
        assert len(owner.said("closed")) + len(owner.said("gave up")) == 6
