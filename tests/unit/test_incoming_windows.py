"""The memory of a streamed sample's window on its draft, while a lost link still writes to some of it."""

import threading
import time

import pytest

from nccl_stream.coordination.messages import Announce, AnnouncePiece, StreamOpen
from nccl_stream.refs import FeatureAlgorithm
from nccl_stream.stores.pieces import stream_ref
from tests.property.streamed_world import PIECE, SPECS, StreamedWorld

WINDOW = 3


@pytest.fixture
def draft():
    world = StreamedWorld(
        1, streamed=1.0, window=WINDOW, pieces=1, targets=1, drafts=1, per_target=0, end="ragged", static=False,
        batch=1, breaks=0, mail_faults=0, failures=0, deaths=[],
    )  # fmt: skip
    return world.ranks["d0"]


def admit(side):
    ref = stream_ref(
        "s", SPECS, piece_length=PIECE, window=WINDOW, retain=False, run_id="run", store_uri="nccl://run/t0",
        algorithm=FeatureAlgorithm.EAGLE3, schema_version=1, num_tokens=0,
        target_model_version="0", draft_weight_version="0", attributes=None,
    )  # fmt: skip
    side.intake.announced("t0", Announce(1, 0, 0, 0, 0, 0, ref.to_wire()))
    side.intake.stream_opened("t0", StreamOpen(0, 0))
    return side.intake.streams.find("t0", 0)


def bring_up(side, gen):
    side.intake.link_opening("t0", gen)
    side.intake.link_up("t0", gen)


def announce(side, gen, piece):
    side.intake.piece_announced("t0", AnnouncePiece(gen, 0, 0, piece, PIECE))


def coming(stream):
    return [piece.index for piece in stream.flying if not piece.void]


def test_window_first_piece_comes_again_while_a_lost_link_writes_to_it_has_room_for_all(draft):
    """The first piece is larger than the others: elsewhere in the window than at its head, it leaves them no room."""
    side = draft.side
    bring_up(side, 1)
    stream = admit(side)
    announce(side, 1, 0)
    (lost,) = stream.flying
    bring_up(side, 2)
    for piece in range(WINDOW):
        announce(side, 2, piece)
    side.streams.transfer_over(lost, ok=False)
    assert coming(stream) == [0, 1, 2]


def test_reader_closed_by_two_threads_gives_both_the_same_answer(draft):
    """With another one a sample that can be read again would be failed for good."""
    side = draft.side
    bring_up(side, 1)
    with side.cond:
        reader = side.streams.open_reader(admit(side).delivery)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(reader.close())) for _ in range(2)]
    with side.cond:  # held by a node's thread
        for thread in threads:
            thread.start()
            while not reader._closed:
                time.sleep(0.001)
        threads[1].join(0.1)
    for thread in threads:
        thread.join()
    assert answers == [True, True]
