"""Whole streams, one event at a time: the real sides over faulty mail, links that break and ranks that are killed."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_stream.coordination.membership import Gone
from nccl_stream.coordination.messages import Leaving
from nccl_stream.errors import WireFormatError
from tests.property.simulation import run
from tests.property.stream_world import World

pytestmark = pytest.mark.usefixtures("quiet")

STREAMS = {
    "seed": st.integers(0, 2**32),
    "targets": st.integers(1, 3),
    "drafts": st.integers(1, 3),
    "per_target": st.integers(0, 10),
    "end": st.sampled_from(["drop", "pad", "ragged"]),
    "static": st.booleans(),
    "batch": st.integers(1, 2),
}
SOME = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def simulate(**kwargs):
    world = World(**kwargs)
    run(world.rng, world.offer, max_events=20_000)
    return world, world.finish()


@given(**STREAMS, mail_faults=st.integers(0, 6))
@SOME
def test_calm_stream_every_sample_is_trained_on_once(**kwargs):
    """Mail that is lost, doubled and reordered changes nothing."""
    world, trained = simulate(breaks=0, failures=0, deaths=[], **kwargs)
    assert all(count == 1 for count in trained.values())
    assert all(draft.error is None for draft in world.survivors("draft"))
    left_over = len(world.samples) - len(trained)
    if kwargs["end"] != "drop":
        assert left_over == 0
    else:
        assert left_over == sum(t.side.delivery.books.dropped for t in world.survivors("target"))


@given(**STREAMS, mail_faults=st.integers(0, 4), breaks=st.integers(1, 5), failures=st.integers(0, 2))
@SOME
def test_broken_links_and_failing_consumers_lose_nothing(**kwargs):
    world, trained = simulate(deaths=[], **kwargs)
    if kwargs["end"] != "drop" and not kwargs["failures"]:
        assert set(trained) == set(world.samples)
    for target in world.survivors("target"):
        books = target.side.delivery.books
        assert books.put == books.acked + books.dropped + books.dead


@given(
    **STREAMS,
    mail_faults=st.integers(0, 4),
    breaks=st.integers(0, 2),
    failures=st.integers(0, 1),
    deaths=st.lists(st.sampled_from(["t0", "t1", "d0", "d1", "d2"]), min_size=1, max_size=3),
    uneven=st.sampled_from([0, 0, 20]),
)
@SOME
def test_killed_ranks_everybody_else_ends_and_the_books_close(**kwargs):
    simulate(**kwargs)


@given(
    **{
        **STREAMS,
        "targets": st.just(1),
        "drafts": st.integers(2, 3),
        "per_target": st.integers(4, 10),
        "end": st.sampled_from(["drop", "pad"]),
    },
    mail_faults=st.integers(0, 2),
)
@SOME
def test_drafts_that_end_together_for_a_loss_all_know_what_was_lost(**kwargs):
    """The end follows the books of the dead, and no draft takes it before it has read them."""
    world, _ = simulate(breaks=0, failures=0, deaths=["t0"], **kwargs)
    assert len({type(draft.error) for draft in world.survivors("draft")}) == 1


@given(
    **{**STREAMS, "targets": st.integers(2, 3), "static": st.just(True), "end": st.sampled_from(["drop", "pad"])},
    mail_faults=st.integers(0, 2),
    uneven=st.integers(1, 25),
)
@SOME
def test_static_shares_that_differ_by_more_than_memory(**kwargs):
    """The first target has more than the others, and with as many drafts as targets all of it is for one of them."""
    world, trained = simulate(breaks=0, failures=0, deaths=[], **kwargs)
    assert all(draft.error is None for draft in world.survivors("draft"))
    assert all(count == 1 for count in trained.values())
    if kwargs["end"] == "pad":
        assert set(trained) == set(world.samples)


@given(**{**STREAMS, "drafts": st.integers(2, 3)}, mail_faults=st.integers(0, 4), leavers=st.integers(1, 2))
@SOME
def test_leavers_hand_back_what_others_then_train_on(**kwargs):
    """What somebody has in hand when he leaves is as good as not yet given: the end waits for it."""
    world, trained = simulate(breaks=0, failures=0, deaths=[], **kwargs)
    assert all(draft.error is None for draft in world.survivors("draft"))
    assert all(count == 1 for count in trained.values())
    if kwargs["end"] != "drop":
        assert set(trained) == set(world.samples)


def everything_is_here_and_d1_has_some(world):
    first, second = world.ranks["d0"].side, world.ranks["d1"].side
    return (
        first._drained()
        and first.leases.table.pending_count == 0
        and second.intake.held
        and not first.rounds._proposed
        and first.rounds.end is None
    )


@pytest.mark.parametrize("death", [False, True])
def test_leader_that_hears_of_an_end_does_not_go_by_what_it_knew_before(death):
    """It had all that was left for it, and so had the other, whose samples now come back."""
    for seed in range(100):
        world = World(
            seed, targets=1, drafts=2, per_target=6, end="pad", static=False, batch=1, breaks=0, mail_faults=0,
            failures=0, deaths=[],
        )  # fmt: skip
        while not everything_is_here_and_d1_has_some(world) and (events := world.offer()):
            world.rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        if everything_is_here_and_d1_has_some(world):
            break
    leader, other = world.ranks["d0"], world.ranks["d1"]
    if death:
        leader.see_gone("d1", Gone("died", "killed", "chance"))
    else:
        leader.side.on_message(leader.view["d1"], Leaving("c"))
    assert not leader.side.rounds._proposed, f"{len(other.side.intake.held)} samples would have been dropped"


@given(**STREAMS, mail_faults=st.integers(0, 2))
@example(  # the leader leaves in the moment in which it has told the end
    seed=1, targets=1, drafts=2, per_target=9, end="pad", static=True, batch=1, mail_faults=1
)  # fmt: skip
@SOME
def test_end_that_is_damaged_as_soon_as_it_is_written_has_been_told(**kwargs):
    world, _ = simulate(breaks=0, failures=0, deaths=[], damaged=["/end", "/members"], **kwargs)
    assert all(draft.error is None for draft in world.survivors("draft"))


@given(
    **{**STREAMS, "end": st.sampled_from(["drop", "pad"]), "drafts": st.integers(2, 3)}, mail_faults=st.integers(0, 2)
)
@SOME
def test_end_that_is_damaged_while_its_leader_dies_is_a_named_error(**kwargs):
    """Whether some got to know the end before: nobody stands still."""
    world = World(breaks=0, failures=0, deaths=["d0"], damaged=["/end"], **kwargs)
    run(world.rng, world.offer, max_events=20_000)
    for rank in (*world.survivors("draft"), *world.survivors("target")):
        assert rank.state == "left", f"{rank.inc} stands still"
    for draft in world.survivors("draft"):
        assert draft.error is None or isinstance(draft.error, WireFormatError)


@given(seed=st.integers(0, 2**32), end=st.sampled_from(["drop", "ragged"]))
@SOME
def test_static_order_is_the_same_in_every_run(seed, end):
    """What one draft trains on, and in which order, does not depend on the interleaving."""
    shape = {"targets": 2, "drafts": 2, "per_target": 6, "static": True, "batch": 1, "end": end}
    orders = []
    for variant in (seed, seed + 1):
        world, _ = simulate(seed=variant, breaks=0, failures=0, deaths=[], mail_faults=2, **shape)
        orders.append([draft.consumed for draft in world.survivors("draft")])
    assert orders[0] == orders[1]


@given(
    **STREAMS,
    mail_faults=st.integers(0, 4),
    breaks=st.integers(0, 3),
    flips=st.integers(1, 12),
    budget=st.integers(0, 3),
)
@SOME
def test_bits_flipped_on_the_wire_reach_nobody_and_cost_the_retry_budget(**kwargs):
    world, trained = simulate(failures=0, deaths=[], **kwargs)
    targets = world.survivors("target")
    dead = {(t.inc, letter.sample_id): letter for t in targets for letter in t.side.delivery.dead_letters}
    for key, letter in dead.items():
        assert letter.failures == kwargs["budget"] + 1 <= world.flipped[key]
        assert "CRC-32C" in letter.reason
    for key, count in world.flipped.items():
        assert key in dead or count <= kwargs["budget"] or kwargs["breaks"]
    assert all(count == 1 for count in trained.values()) or kwargs["breaks"]
    if kwargs["end"] != "drop":
        assert set(trained) == set(world.samples) - set(dead)
    if not kwargs["breaks"] and not kwargs["mail_faults"]:
        failures = sum(draft.side.status()["checksum_failures"] for draft in world.survivors("draft"))
        assert failures == sum(world.flipped.values())


@given(seed=st.integers(0, 2**32), flips=st.integers(1, 4))
@SOME
def test_static_order_survives_flipped_bits(seed, flips):
    shape = {"targets": 2, "drafts": 2, "per_target": 6, "static": True, "batch": 1, "end": "ragged"}
    world, _ = simulate(seed=seed, flips=flips, budget=5, breaks=0, failures=0, deaths=[], mail_faults=0, **shape)
    for draft in world.survivors("draft"):
        orders = [int(sid[1:]) * 2 + int(owner[1:]) for owner, sid in draft.consumed]
        # The order gives way only where there is no memory to keep it.
        assert orders == sorted(orders) or draft.side.intake.statistics.order_relaxed
