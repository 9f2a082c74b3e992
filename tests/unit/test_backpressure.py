"""Blocking puts against a real store: who pauses, who resumes, and that nothing ever waits for itself."""

import threading

import pytest

from nccl_stream.errors import ClosedError
from nccl_stream.queue import SampleRefQueue
from nccl_stream.store import StoreHealth
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.testing.store_suite import make_sample
from tests.unit.helpers import make_ref

POLL = 0.002
SIZE = sum(tensor.numel() * tensor.element_size() for tensor in make_sample().values())


class Scene:
    """A store with room for plenty, watermarks in units of one sample, and a queue that records its transitions."""

    def __init__(self, high, low, **queue_kwargs):
        self.store = LocalFeatureStore(100, 1000 * SIZE, int(high * SIZE), int(low * SIZE))
        self.paused = threading.Event()
        self.resumed = threading.Event()
        queue_kwargs.setdefault("on_pause", lambda _: self.paused.set())
        queue_kwargs.setdefault("on_resume", lambda _: self.resumed.set())
        self.queue = SampleRefQueue(self.store, **queue_kwargs)
        self.threads = []

    def make(self, name, size=1):
        return self.store.put(name, make_sample(num_tokens=8 * size), "run")

    def blocked_put(self, ref, **kwargs):
        """Start a put that is expected to pause; wait until it has."""
        put = BlockedPut(self.queue, ref, kwargs)
        self.threads.append(put)
        put.start()
        assert self.paused.wait(20)
        return put

    def consume(self, wait=0):
        lease = self.queue.acquire(wait)
        _, handle = self.store.get(lease.ref)
        self.queue.ack(lease)
        self.store.release(handle)
        return lease.ref.sample_id


class BlockedPut(threading.Thread):
    def __init__(self, queue, ref, kwargs):
        super().__init__(daemon=True)
        self.queue, self.ref, self.kwargs = queue, ref, {"poll_interval": POLL, **kwargs}
        self.error = None

    def run(self):
        try:
            self.queue.put_blocks_until_below(self.ref, **self.kwargs)
        except (RuntimeError, ValueError) as error:
            self.error = error

    def finish(self):
        self.join(20)
        assert not self.is_alive()
        return self.error


def test_put_pauses_at_high_and_resumes_only_at_low():
    scene = Scene(high=4, low=1.5)
    for name in "abc":
        scene.queue.put_blocks_until_below(scene.make(name))
    assert not scene.paused.is_set()
    put = scene.blocked_put(scene.make("d"))
    # d itself is one, so two of the others have to go before 1.5 is reached, and then one more.
    for name in "ab":
        assert scene.consume() == name
        put.join(5 * POLL)
        assert put.is_alive()
        assert not scene.resumed.is_set()
    assert scene.consume() == "c"
    assert put.finish() is None
    assert scene.resumed.is_set()
    assert scene.consume() == "d"
    assert scene.queue.statistics().pauses == 1
    assert scene.queue.statistics().paused_s > 0


def test_put_while_paused_in_the_band_waits_too():
    scene = Scene(high=3, low=1)
    for name in "ab":
        scene.queue.put(scene.make(name))
    first = scene.blocked_put(scene.make("c"))
    scene.consume()
    second = scene.blocked_put(scene.make("d"))
    second.join(5 * POLL)
    assert first.is_alive()
    assert second.is_alive()
    scene.consume()
    assert first.finish() is None
    assert second.finish() is None
    assert scene.queue.pending_count() == 2


def test_put_queue_thresholds_win_over_those_of_the_store():
    scene = Scene(high=50, low=40, high_watermark_bytes=2 * SIZE, low_watermark_bytes=1 * SIZE)
    scene.queue.put_blocks_until_below(scene.make("a"))
    put = scene.blocked_put(scene.make("b"))
    scene.consume()
    assert put.finish() is None


def test_put_nonblocking_ignores_the_watermarks():
    scene = Scene(high=1, low=0.5)
    for name in "abcdef":
        scene.queue.put(scene.make(name))
    assert scene.queue.pending_count() == 6


def test_close_unblocks_a_paused_put_with_an_error():
    scene = Scene(high=2, low=1)
    scene.queue.put(scene.make("a"))
    put = scene.blocked_put(scene.make("b"), poll_interval=1000)
    scene.queue.close()
    assert isinstance(put.finish(), ClosedError)
    assert scene.queue.pending_count() == 1


def test_abort_unblocks_a_paused_put_with_an_error():
    scene = Scene(high=2, low=1)
    scene.queue.put(scene.make("a"))
    stop = threading.Event()
    ref = scene.make("b")
    put = scene.blocked_put(ref, abort_when=stop.is_set)
    stop.set()
    error = put.finish()
    assert isinstance(error, RuntimeError)
    assert "abort" in str(error)
    # The aborted ref is not known to the queue any more.
    scene.queue.put(ref)


def test_abort_that_raises_reaches_the_caller_and_leaves_nothing():
    scene = Scene(high=2, low=1)
    ref = scene.make("a")

    def explode():
        raise KeyError("abort trouble")

    with pytest.raises(KeyError):
        scene.queue.put_blocks_until_below(ref, abort_when=explode)
    scene.queue.put(ref)


def test_put_of_an_id_whose_put_is_blocked_is_refused():
    scene = Scene(high=2, low=1)
    scene.queue.put(scene.make("a"))
    ref = scene.make("b")
    put = scene.blocked_put(ref)
    for call in (scene.queue.put, scene.queue.put_blocks_until_below):
        with pytest.raises(ValueError, match="already present"):
            call(ref)
    scene.consume()
    assert put.finish() is None


def test_callback_that_raises_does_not_end_the_put():
    def explode(_):
        raise ValueError("callback trouble")

    scene = Scene(high=2, low=1, on_resume=explode)
    scene.queue.put(scene.make("a"))
    put = scene.blocked_put(scene.make("b"))
    scene.consume()
    assert put.finish() is None
    assert scene.queue.pending_count() == 1


@pytest.mark.parametrize("size", [2, 5], ids=["above-low", "above-high"])
def test_put_never_pauses_for_its_own_sample_alone(size):
    scene = Scene(high=4, low=1)
    scene.queue.put_blocks_until_below(scene.make("a", size), abort_when=scene.paused.is_set)
    assert not scene.paused.is_set()


def test_put_larger_than_the_low_watermark_resumes_once_the_others_are_gone():
    scene = Scene(high=4, low=1)
    scene.queue.put(scene.make("a", 2))
    put = scene.blocked_put(scene.make("b", 3))
    scene.consume()
    assert put.finish() is None


def test_put_two_producers_with_large_samples_do_not_wait_for_each_other():
    scene = Scene(high=4, low=1)
    scene.queue.put(scene.make("a", 2))
    puts = [scene.blocked_put(scene.make(name, 3)) for name in "bc"]
    assert scene.consume() == "a"
    # Nothing but the two blocked ones is resident: one goes ahead, and the other one waits for that.
    consumed = {scene.consume(wait=20), scene.consume(wait=20)}
    assert consumed == {"b", "c"}
    assert [put.finish() for put in puts] == [None, None]


def test_put_dead_letters_do_not_hold_the_producers_for_ever():
    scene = Scene(high=4, low=1, max_redeliveries=0)
    scene.queue.put(scene.make("poison", 5))
    scene.queue.fail(scene.queue.acquire())
    scene.queue.put_blocks_until_below(scene.make("b"), abort_when=scene.paused.is_set)
    assert scene.queue.pending_count() == 1


def test_put_samples_that_are_gone_are_not_taken_for_ones_that_fill_the_store():
    scene = Scene(high=2, low=1)
    for name in ("x", "y", "z"):
        ref = scene.make(name)
        scene.queue.put(ref)
        scene.queue.fail(scene.queue.acquire(), final=True)
        scene.store.discard(ref)
    for name in "ab":
        scene.queue.put(scene.make(name))
    put = scene.blocked_put(scene.make("c"))
    scene.consume()
    scene.consume()
    assert put.finish() is None


@pytest.mark.parametrize(
    ("resident_bytes", "sample_count"),
    [(2 * 320, 0), (3 * 320, 2)],
    ids=["store-that-counts-no-samples", "store-whose-samples-are-larger-than-their-tensors"],
)
def test_put_recognizes_its_own_sample_and_the_dead_ones_by_bytes_or_by_count(resident_bytes, sample_count):
    class Store(LocalFeatureStore):
        def health(self):
            return StoreHealth(resident_bytes, 1000, sample_count, True, False)

    queue = SampleRefQueue(Store(), max_redeliveries=0)
    queue.put(make_ref("dead"))
    queue.fail(queue.acquire())
    looks = []
    queue.put_blocks_until_below(make_ref("own"), POLL, abort_when=lambda: looks.append(1) or len(looks) > 3)
    assert queue.statistics().pauses == 0


def test_put_never_holds_while_a_consumer_waits_with_nothing():
    """One consumer sits on leases that fill the store; another one must not starve behind the backpressure."""
    scene = Scene(high=3, low=1)
    for name in "ab":
        scene.queue.put(scene.make(name))
    held = scene.queue.acquire_many(2)
    put = scene.blocked_put(scene.make("c"), poll_interval=1000)
    lease = scene.queue.acquire(20)
    assert lease is not None
    assert lease.ref.sample_id == "c"
    assert put.finish() is None
    assert not scene.resumed.is_set()
    assert len(held) == 2


def test_put_whole_stream_through_tiny_watermarks_loses_nothing():
    scene = Scene(high=2, low=1)
    names = [f"s{i}" for i in range(60)]

    def produce(part):
        for name in part:
            scene.queue.put_blocks_until_below(scene.make(name, size=1 + int(name[1:]) % 4), POLL)

    producers = [threading.Thread(target=produce, args=(names[i::3],), daemon=True) for i in range(3)]
    for producer in producers:
        producer.start()
    seen = set()
    while len(seen) < len(names):
        lease = scene.queue.acquire(20)
        assert lease is not None, f"stuck after {len(seen)}: {scene.queue.statistics()} {scene.store.health()}"
        _, handle = scene.store.get(lease.ref)
        seen.add(lease.ref.sample_id)
        scene.queue.ack(lease)
        scene.store.release(handle)
    for producer in producers:
        producer.join(20)
    assert seen == set(names)
    assert scene.store.health().resident_bytes == 0
