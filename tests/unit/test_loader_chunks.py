"""The loader over streamed samples: chunk by chunk, or as a whole."""

import gc
import threading
import time
from contextlib import suppress

import pytest
import torch

from nccl_stream.chunk_policy import FixedChunkPolicy, LeftContextChunkPolicy
from nccl_stream.errors import (
    ConfigError,
    MisuseError,
    ProducerFailedError,
    SchemaError,
    StreamBrokenError,
    StreamLostError,
)
from nccl_stream.loader import FeatureDataLoader
from nccl_stream.queue import SampleRefQueue, VisibilityTimeout
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.streamed.sample import OpenFeatureSpec
from nccl_stream.testing.clock import FakeClock
from nccl_stream.testing.store_suite import make_sample
from nccl_stream.testing.stream_suite import PIECE, SPECS, cut, make_whole
from tests.unit.chunk_producers import POLICY, WAIT_S, Producers


class World(Producers):
    """A store, a queue, and producers in threads of their own."""

    def __init__(self, **queue_args):
        self.store = LocalFeatureStore()
        self.queue = SampleRefQueue(self.store, **queue_args)
        super().__init__(self.store, self.queue)

    def books(self):
        found = self.queue.statistics()
        return {name: getattr(found, name) for name in ("acked", "dead", "pending", "leased")}

    def loader(self, **kwargs):
        kwargs.setdefault("chunk_policy", POLICY)
        return FeatureDataLoader(self.queue, self.store, **kwargs)


@pytest.fixture
def make_world():
    worlds = []

    def make(**kwargs):
        worlds.append(World(**kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        world.store.close()
        world.join()


@pytest.fixture
def world(make_world):
    return make_world()


def check(batch, whole):
    place = batch.place
    expected = cut(whole, place.start_position, place.start_position + place.num_positions)
    for name, tensor in batch.items():
        assert torch.equal(tensor, expected[name]), name
    assert "logits" in batch
    assert (batch.start_offset, batch.context_items, batch.is_final) == (
        place.start_offset,
        place.context_items,
        place.is_final,
    )


def settled(world, acked):
    assert world.books() == {"acked": acked, "dead": 0, "pending": 0, "leased": 0}
    assert world.store.health().sample_count == 0


@pytest.mark.parametrize("ack", ["next", "step"])
def test_batches_come_per_chunk_and_the_ack_after_the_final_one(world, ack):
    lengths = [5 * PIECE + 1, 1, 2 * PIECE, 3 * PIECE]
    wholes = {f"s{n}": world.produce(f"s{n}", length, fill=n) for n, length in enumerate(lengths)}
    world.queue.close()
    loader = world.loader(ack=ack)
    finals, counted = 0, dict.fromkeys(wholes, 0)
    for batch in loader:
        (sample_id,) = batch.sample_ids
        check(batch, wholes[sample_id])
        assert world.queue.statistics().acked == finals
        assert loader.sample_ids == (sample_id,)
        assert batch.place.start_position + batch.place.context_positions == counted[sample_id]
        counted[sample_id] += batch.place.num_positions - batch.place.context_positions
        if ack == "step":
            loader.step()
            finals += batch.is_final
            assert world.queue.statistics().acked == finals
            loader.step()
        else:
            finals += batch.is_final
    assert list(counted.values()) == lengths
    assert finals == 4
    settled(world, 4)


def test_moved_batch_keeps_its_place(world):
    world.produce("s", PIECE)
    batch = next(iter(world.loader()))
    assert batch.to("cpu").place == batch.place
    assert batch.to("cpu").sample_ids == ("s",)


def test_sample_that_is_not_streamed_is_one_final_chunk(world):
    world.queue.put(world.store.put("s", make_sample(3), "run"))
    world.queue.close()
    (batch,) = world.loader()
    assert (batch.start_offset, batch.context_items, batch.is_final) == (0, 0, True)
    assert batch.place.supervised(2) == slice(0, None)
    settled(world, 1)


def test_streamed_samples_without_a_policy_come_whole_and_in_batches(world):
    wholes = [world.produce(f"s{n}", 3 * PIECE + n, window=1, fill=n) for n in range(2)]
    world.queue.close()
    (batch,) = world.loader(chunk_policy=None, batch_size=2)
    assert batch.sample_ids == ("s0", "s1")
    assert batch.input_ids.shape == (2, 3 * PIECE + 1)
    for row, whole in enumerate(wholes):
        length = whole["input_ids"].shape[1]
        assert torch.equal(batch.input_ids[row, :length], whole["input_ids"][0])
    assert batch.is_final
    settled(world, 2)


def test_lease_is_renewed_while_the_sample_is_read(make_world):
    clock = FakeClock()
    world = make_world(visibility_timeout=VisibilityTimeout(0.3), clock=clock)
    whole = world.produce("s", 6 * PIECE, before=world.pass_time(world.queue._table, clock))
    world.queue.close()
    for batch in world.loader():
        check(batch, whole)
    assert world.queue.statistics().expired == 0
    assert not world.errors
    settled(world, 1)


def test_streamed_sample_comes_alone_and_at_once_where_tokens_are_counted(world):
    loader = world.loader(chunk_policy=None, max_tokens=1000, length_buckets=(8, 16))
    world.produce("s0", 3 * PIECE)
    assert next(loader).sample_ids == ("s0",)  # the queue is open, nothing else will come
    world.queue.put(world.store.put("whole", make_sample(), "run"))
    world.produce("s1", 3 * PIECE)
    world.queue.close()
    assert sorted(batch.sample_ids for batch in loader) == [("s1",), ("whole",)]
    settled(world, 3)


# -- early ends --


def test_loop_that_stops_early_gives_memory_back_and_stops_the_producer(world):
    world.produce("s", 20 * PIECE)
    with world.loader() as loader:
        for batch in loader:
            if batch.start_offset:
                break
    world.join()
    assert [type(error) for error in world.errors] == [StreamLostError]
    assert world.books() == {"acked": 0, "dead": 1, "pending": 0, "leased": 0}
    assert world.store.health().sample_count == 0


def test_loader_that_is_dropped_gives_memory_back(make_world):
    clock = FakeClock()
    world = make_world(visibility_timeout=VisibilityTimeout(10.0), clock=clock)
    world.produce("s", 20 * PIECE)
    loader = world.loader()
    next(loader)
    next(loader)
    del loader
    gc.collect()
    world.join()
    assert [type(error) for error in world.errors] == [StreamLostError]
    world.store.gc()
    assert world.store.health().sample_count == 0
    # Its lease runs out, and whoever gets the ref next learns that nothing is left.
    clock.advance(11.0)
    with pytest.raises(StreamLostError):
        next(world.loader())
    assert world.books() == {"acked": 0, "dead": 1, "pending": 0, "leased": 0}


@pytest.mark.parametrize("failed", [False, True])
def test_retained_sample_comes_again_from_its_beginning(world, failed):
    whole = world.produce("s", 9 * PIECE, retain=True)
    with suppress(ValueError), world.loader() as loader:
        for batch in loader:
            if batch.start_offset:
                if failed:
                    raise ValueError("the step went wrong")
                break
    assert world.queue.statistics().failed == failed
    offsets = []
    # The first loader closed the queue.
    for batch in world.loader():
        check(batch, whole)
        offsets.append(batch.start_offset)
    assert offsets == [0, 1, 3, 5, 7]
    world.join()
    assert not world.errors
    settled(world, 1)


def test_sample_of_which_no_piece_was_released_is_only_handed_back(world):
    whole = world.produce("s", 5 * PIECE)
    with world.loader(chunk_policy=LeftContextChunkPolicy(2, 9)) as loader:
        next(loader)
    batches = list(world.loader())
    assert len(batches) == 3
    check(batches[-1], whole)
    settled(world, 1)


def test_close_from_another_thread_ends_the_wait_for_a_piece(world):
    writers = [world.open("s0"), world.open("s1")]
    for writer in writers:
        writer.append(cut(make_whole(PIECE), 0, PIECE))
    for policy in (POLICY, None):
        loader = FeatureDataLoader(world.queue, world.store, chunk_policy=policy)
        found = []
        thread = threading.Thread(target=lambda loader=loader, found=found: found.extend(loader))
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
        loader.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert found == []
        assert world.books()["leased"] == 0
    # In chunks, nothing had been released; reading it as a whole used it up.
    assert world.books() == {"acked": 0, "dead": 1, "pending": 1, "leased": 0}
    for writer in writers:
        writer.fail("over")


# -- faults --


@pytest.mark.parametrize("policy", [POLICY, None])
@pytest.mark.parametrize("retain", [False, True])
def test_producer_that_fails_in_mid_sample_is_an_error_that_says_how_far_it_got(world, policy, retain):
    world.produce("bad", 9 * PIECE, fail_after=5, retain=retain)
    good = world.produce("good", 2 * PIECE, fill=1)
    world.queue.close()
    loader = world.loader(chunk_policy=policy)
    seen = []
    with pytest.raises(StreamBrokenError, match="prefill went wrong") as info:
        seen.extend(iter(loader))
    assert (info.value.sample_id, info.value.num_pieces) == ("bad", 5)
    (batch,) = loader  # the others still come
    assert batch.sample_ids == ("good",)
    assert torch.equal(batch.input_ids, good["input_ids"])
    assert world.books() == {"acked": 1, "dead": 1, "pending": 0, "leased": 0}
    (letter,) = world.queue.dead_letters()
    assert "prefill went wrong" in letter.reason
    assert world.store.health().sample_count == 0


def test_producing_side_that_failed_is_raised_after_what_it_made(world):
    world.produce("s", 3 * PIECE)
    world.queue.close(error=OSError("no more targets"))
    loader = world.loader()
    assert [next(loader).is_final, next(loader).is_final] == [False, True]
    with pytest.raises(ProducerFailedError, match="no more targets"):
        next(loader)


def test_window_that_is_too_small_is_an_error_and_not_a_standstill(world):
    world.produce("s", 9 * PIECE, window=3)
    with pytest.raises(MisuseError, match="window of 3"):
        list(world.loader(chunk_policy=LeftContextChunkPolicy(2, 1)))
    assert world.queue.statistics().failed == 1


def test_collate_that_fails_in_mid_sample_gives_the_sample_back(world):
    world.produce("s", 9 * PIECE, retain=True)

    def collate(batches):
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError):
        next(world.loader(collate_fn=collate))
    assert world.books() == {"acked": 0, "dead": 0, "pending": 1, "leased": 0}
    assert next(world.loader()).start_offset == 0


def test_stream_along_another_axis_than_the_sequence_is_dropped_for_good(world):
    specs = {**SPECS, "input_ids": OpenFeatureSpec((-1, 4), torch.int64)}
    writer = world.store.open_stream("s", specs, "run", piece_length=PIECE, window=2)
    world.queue.put(writer.ref)
    with pytest.raises(SchemaError, match="open along the sequence"):
        next(world.loader())
    assert world.store.health().sample_count == 0
    with pytest.raises(StreamLostError):
        writer.append({name: torch.zeros(1) for name in specs})


def test_packed_stream_is_refused(world):
    packing = {
        "position_ids": OpenFeatureSpec((1, -1), torch.int64),
        "seq_lens": OpenFeatureSpec((1, -1), torch.int64),
        "doc_remaining": OpenFeatureSpec((1, -1), torch.int64),
    }
    writer = world.store.open_stream("s", {**SPECS, **packing}, "run", piece_length=PIECE, window=2)
    world.queue.put(writer.ref)
    with pytest.raises(SchemaError, match="packed"):
        next(world.loader())


def test_arguments_that_do_not_go_together_are_refused(world):
    for wrong in ({"batch_size": 2}, {"max_tokens": 100}, {"chunk_policy": FixedChunkPolicy(1, True)}):
        with pytest.raises(ConfigError):
            world.loader(**wrong)
    world.loader(batch_size=1).close()


def test_consume_now_in_the_middle_of_a_sample_changes_nothing(world):
    world.produce("s", 5 * PIECE)
    loader = world.loader()
    assert not next(loader).is_final
    loader.consume_now()
    assert world.books()["leased"] == 1
    while not next(loader).is_final:
        pass
    loader.consume_now()
    settled(world, 1)
