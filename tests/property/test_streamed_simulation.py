"""Samples that travel in pieces, one event at a time: over faulty mail, links that break and ranks that are killed."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_stream.errors import PeerLostError
from tests.property.simulation import run
from tests.property.streamed_world import Streamed, StreamedWorld

pytestmark = pytest.mark.usefixtures("quiet")

STREAMS = {
    "seed": st.integers(0, 2**32),
    "targets": st.integers(1, 3),
    "drafts": st.integers(1, 3),
    "per_target": st.integers(0, 7),
    "end": st.sampled_from(["drop", "pad", "ragged"]),
    "static": st.booleans(),
    "batch": st.integers(1, 2),
    "streamed": st.sampled_from([0.5, 1.0]),
    "window": st.integers(1, 4),
    "pieces": st.integers(0, 9),
}
SOME = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def simulate(**kwargs):
    world = StreamedWorld(**kwargs)
    run(world.rng, world.offer, max_events=40_000)
    trained = world.finish()
    for target in world.survivors("target"):
        if target.side.delivery.all_settled:
            arena = target.store.memory.pieces_arena
            assert arena.free_bytes == arena.capacity_bytes, arena.holders()
    return world, trained


@given(**STREAMS, mail_faults=st.integers(0, 6), breaks=st.integers(0, 4))
@SOME
def test_every_stream_is_read_once_whatever_mail_and_links_do(**kwargs):
    """A link that comes back goes on where it broke: nobody reads a stream twice, and none breaks off."""
    world, trained = simulate(failures=0, deaths=[], **kwargs)
    assert all(trained[key] <= 1 for key, sample in world.samples.items() if isinstance(sample, Streamed))
    assert not world.broken()
    left_over = len(world.samples) - len(trained)
    assert left_over == sum(t.side.delivery.books.dropped for t in world.survivors("target"))
    if kwargs["end"] != "drop":
        assert left_over == 0


@given(**{**STREAMS, "streamed": st.just(1.0), "batch": st.just(1)}, breaks=st.integers(0, 2))
@SOME
def test_streams_over_several_targets_share_an_arena_of_one_window(**kwargs):
    """Partial streams never starve each other: one is admitted only with all its memory."""
    world, trained = simulate(failures=0, deaths=[], mail_faults=2, tight=True, **kwargs)
    assert not world.broken()
    assert all(count == 1 for count in trained.values())


@given(
    **STREAMS,
    retain=st.booleans(),
    mail_faults=st.integers(0, 4),
    breaks=st.integers(0, 2),
    failures=st.integers(0, 2),
    producer_failures=st.integers(0, 2),
    early_stops=st.integers(0, 3),
)
@SOME
def test_failing_producers_and_readers_that_stop_are_in_the_books(**kwargs):
    world, _ = simulate(deaths=[], **kwargs)
    for target in world.survivors("target"):
        books = target.side.delivery.books
        assert books.put == books.acked + books.dropped + books.dead + books.lost
        assert len(target.side.delivery.lost) == books.lost
    if not kwargs["producer_failures"]:
        assert not world.broken()
        if kwargs["retain"]:
            assert not any(target.side.delivery.books.lost for target in world.survivors("target"))


@given(
    **STREAMS,
    retain=st.booleans(),
    mail_faults=st.integers(0, 4),
    breaks=st.integers(0, 2),
    failures=st.integers(0, 1),
    producer_failures=st.integers(0, 1),
    early_stops=st.integers(0, 1),
    deaths=st.lists(st.sampled_from(["t0", "t1", "d0", "d1", "d2"]), min_size=1, max_size=3),
)
@SOME
def test_killed_ranks_everybody_else_ends_and_the_books_close(**kwargs):
    """A reader learns that its producer died and how far it got; what a dead reader had is lost, or read anew."""
    world, _ = simulate(**kwargs)
    given_up = PeerLostError in world.write_errors  # no draft was left: producers gave up what nobody could read
    if kwargs["retain"] and not kwargs["producer_failures"] and not given_up:
        assert not any(target.side.delivery.books.lost for target in world.survivors("target"))


@given(**{**STREAMS, "streamed": st.just(1.0)}, flips=st.integers(1, 8), budget=st.integers(0, 3))
@example(  # a later piece is announced on the link whose end has not been noticed yet
    seed=0, targets=3, drafts=2, per_target=4, end="drop", static=True, batch=2, streamed=1.0, window=4, pieces=4,
    flips=1, budget=1,
)  # fmt: skip
@example(  # the last piece arrives when its producer has closed
    seed=85728013, targets=1, drafts=3, per_target=4, end="drop", static=True, batch=2, streamed=1.0, window=1,
    pieces=0, flips=1, budget=0,
)  # fmt: skip
@SOME
def test_bits_flipped_on_the_wire_reach_nobody(**kwargs):
    """A spoilt piece comes again over the next link; a stream with more of them than its budget breaks off."""
    world, trained = simulate(breaks=0, failures=0, deaths=[], mail_faults=2, **kwargs)
    assert all("ChecksumError" in why for _, why in world.broken())
    assert len(world.broken()) * (kwargs["budget"] + 1) <= world.flipped_pieces
    if kwargs["end"] != "drop":
        assert len(trained) + len(world.broken()) >= len(world.samples)


@given(seed=st.integers(0, 2**32), end=st.sampled_from(["drop", "ragged"]))
@SOME
def test_static_order_is_the_same_in_every_run(seed, end):
    """What one draft trains on, and in which order, does not depend on the interleaving."""
    shape = {
        "targets": 2, "drafts": 2, "per_target": 5, "static": True, "batch": 1, "end": end,
        "streamed": 0.5, "window": 2, "pieces": 4,
    }  # fmt: skip
    orders = []
    for variant in (seed, seed + 1):
        world, _ = simulate(seed=variant, breaks=0, failures=0, deaths=[], mail_faults=2, **shape)
        orders.append([draft.consumed for draft in world.survivors("draft")])
    assert orders[0] == orders[1]
