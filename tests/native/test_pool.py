"""The pool: threads, waits, closing, wrong input, and who keeps memory alive."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from nccl_stream import _core
from nccl_stream.errors import CapacityError, ClosedError, ConfigError, MisuseError
from nccl_stream.staging import PinnedPool, PoolSlot, crc32c

pytestmark = pytest.mark.usefixtures("core")
PATIENCE_S = 60.0


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    with PinnedPool(1 << 16, pin=False) as pool:
        yield pool


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


class Waiter(threading.Thread):
    """Reserves in a thread of its own and keeps what came of it."""

    def __init__(self, pool: PinnedPool, nbytes: int, timeout: float | None = PATIENCE_S) -> None:
        super().__init__(daemon=True)
        self.slot: PoolSlot | None = None
        self.error: BaseException | None = None
        self._arguments = (pool, nbytes, timeout)
        before = pool.statistics().waiting
        self.start()
        wait_until(lambda: not self.is_alive() or pool.statistics().waiting > before)

    def run(self) -> None:
        pool, nbytes, timeout = self._arguments
        try:
            self.slot = pool.reserve(nbytes, timeout=timeout)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def result(self) -> PoolSlot:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        assert self.slot is not None
        return self.slot


def test_reserve_many_threads_never_share_memory_and_all_comes_back() -> None:
    threads, rounds, capacity = 2000, 4, 1 << 20
    failures: list[BaseException] = []
    together = threading.Barrier(threads)
    # Half of them use up what the others wait for, so that waits, frees and merges run into each other.
    with PinnedPool(capacity, alignment=64, pin=False) as pool:

        def give_back(slot: PoolSlot, seed: int) -> None:
            assert slot.buffer.eq(seed % 251).all()
            slot.free()

        def work(seed: int) -> None:
            rng = random.Random(seed)
            held: list[PoolSlot] = []
            try:
                together.wait(PATIENCE_S)
                for _ in range(rounds):
                    with contextlib.suppress(CapacityError):
                        slot = pool.reserve(
                            rng.choice([1, 100, 5000, 60_000]),
                            alignment=rng.choice([None, 4096]),
                            # Nobody waits with slots in hand: that could not end.
                            timeout=0 if held else PATIENCE_S,
                        )
                        slot.buffer.fill_(seed % 251)
                        held.append(slot)
                    while held and (len(held) > 2 or rng.random() < 0.5):
                        give_back(held.pop(rng.randrange(len(held))), seed)
                for slot in held:
                    give_back(slot, seed)
            except BaseException as error:  # noqa: BLE001 - reported below
                failures.append(error)

        running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(PATIENCE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in running)
        now = pool.statistics()
        assert (now.used, now.slots, now.waiting, now.free_ranges, now.largest_free) == (0, 0, 0, 1, capacity)
        assert now.reserved >= threads
        assert now.peak_used <= capacity


def test_reserve_waits_until_room_is_freed(pool: PinnedPool) -> None:
    first = pool.reserve(50_000)
    waiter = Waiter(pool, 50_000, timeout=None)
    assert waiter.is_alive()
    first.free()
    assert waiter.result().offset == 0


def test_reserve_waiters_are_served_in_order_and_small_ones_do_not_overtake(pool: PinnedPool) -> None:
    halves = [pool.reserve(1 << 15), pool.reserve(1 << 15)]
    large, small = Waiter(pool, 1 << 16), Waiter(pool, 1)
    halves[0].free()
    time.sleep(0.05)  # the small one would fit now; it must stay where it is
    assert large.is_alive()
    assert small.is_alive()
    assert pool.statistics().waiting == 2
    halves[1].free()
    slot = large.result()
    assert small.is_alive()
    slot.free()
    small.result().free()


def test_reserve_past_its_deadline_raises_and_lets_those_behind_pass(pool: PinnedPool) -> None:
    pool.reserve(1 << 15)
    impatient, patient = Waiter(pool, 1 << 16, timeout=0.3), Waiter(pool, 1 << 15)
    with pytest.raises(CapacityError, match=r"no room for 65536 bytes within 0\.3 s") as caught:
        impatient.result()
    assert caught.value.can_wait
    assert patient.result().offset == 1 << 15
    assert pool.statistics().waiting == 0


def test_reserve_without_waiting_raises_at_once_also_behind_waiters(pool: PinnedPool) -> None:
    held = pool.reserve(1 << 15)
    waiter = Waiter(pool, 1 << 16)
    pool.reserve(1 << 14).free()  # overtakes
    with pytest.raises(CapacityError, match="32768 of 65536 bytes are in 1 slots, the largest free range has 32768"):
        pool.reserve(1 << 16)
    held.free()
    waiter.result()


def test_close_wakes_waiters_and_slots_can_still_be_used_and_freed(pool: PinnedPool) -> None:
    slot = pool.reserve(1 << 16)
    waiters = [Waiter(pool, 100), Waiter(pool, 100, timeout=None)]
    pool.close()
    pool.close()
    for waiter in waiters:
        with pytest.raises(ClosedError):
            waiter.result()
    with pytest.raises(ClosedError):
        pool.reserve(1)
    slot.buffer.fill_(3)
    assert slot.buffer.sum() == 3 << 16
    slot.free()
    with pytest.raises(MisuseError):
        slot.free()
    assert pool.statistics().used == 0


def test_free_foreign_or_stale_slots_is_misuse_and_changes_nothing(pool: PinnedPool) -> None:
    with PinnedPool(1 << 16, pin=False) as other:
        slot, theirs = pool.reserve(100), other.reserve(100)
        with pytest.raises(MisuseError, match="no slot of this pool"):
            pool.free(theirs)
        with pytest.raises(MisuseError, match="no slot of this pool"):
            pool.free(None)  # type: ignore[arg-type]
        slot.free()
        again = pool.reserve(100)
        assert again.offset == slot.offset
        with pytest.raises(MisuseError, match="returned before"):
            slot.free()
        assert (pool.statistics().slots, other.statistics().slots) == (1, 1)
        again.free()


def test_free_of_made_up_numbers_is_told_apart(pool: PinnedPool) -> None:
    slot = pool.reserve(100)
    status, native = pool._free_status, pool._pool
    assert native.free(slot.offset, slot._serial + 1) == status.FOREIGN
    assert native.free(slot.offset, 0) == status.FOREIGN
    assert native.free(slot.offset + 256, slot._serial) == status.ALREADY_FREE
    slot.free()
    assert native.free(slot.offset, slot._serial) == status.ALREADY_FREE


def test_memory_lives_as_long_as_a_tensor_over_it() -> None:
    pool = PinnedPool(1 << 16, pin=False)
    region = weakref.ref(pool._region)
    slot = pool.reserve(1000)
    view = slot.buffer[10:20].view(torch.int16)
    view.fill_(-2)
    pool.close()
    del pool, slot
    gc.collect()
    assert region() is not None
    assert view.eq(-2).all()
    del view
    gc.collect()
    assert region() is None


def test_memory_is_zeroed_and_present_before_its_first_use() -> None:
    def minor_faults() -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    nbytes = 64 << 20
    with PinnedPool(nbytes, pin=False) as pool:
        slot = pool.reserve(nbytes)
        before = minor_faults()
        assert slot.buffer.numpy().any() == False  # noqa: E712 - a numpy bool
        slot.buffer.numpy().fill(1)
        assert minor_faults() - before < nbytes // 4096 // 20


@pytest.mark.parametrize(
    "arguments",
    [
        {"capacity_bytes": 0},
        {"capacity_bytes": -1},
        {"capacity_bytes": True},
        {"capacity_bytes": 1.5},
        {"capacity_bytes": 100, "alignment": 0},
        {"capacity_bytes": 100, "alignment": 96},
        {"capacity_bytes": 100, "alignment": 1 << 20},
        {"capacity_bytes": 100, "pin": "yes"},
        {"capacity_bytes": 100, "shared_memory": ""},
        {"capacity_bytes": 100, "shared_memory": "a/b"},
        {"capacity_bytes": 100, "shared_memory": "a\0b"},
        {"capacity_bytes": 100, "shared_memory": "x" * 300},
    ],
)
def test_pool_that_cannot_be_is_misuse(arguments: dict[str, object]) -> None:
    with pytest.raises(MisuseError):
        PinnedPool(**arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be page-locked here")
def test_pool_pinned_by_force_without_a_gpu_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="pin"):
        PinnedPool(100, pin=True)
    with PinnedPool(100) as pool:
        assert not pool.statistics().is_pinned


def test_pool_larger_than_the_address_space_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError) as caught:
        PinnedPool(1 << 60, pin=False)
    assert not caught.value.can_wait


@pytest.mark.parametrize(
    ("nbytes", "options"),
    [
        (-1, {}),
        (True, {}),
        (2.0, {}),
        (1, {"alignment": 3}),
        (1, {"alignment": 0}),
        (1, {"alignment": 1 << 13}),
        (1, {"timeout": -1.0}),
        (1, {"timeout": float("nan")}),
    ],
)
def test_reserve_what_cannot_be_is_misuse(pool: PinnedPool, nbytes: int, options: dict[str, float]) -> None:
    with pytest.raises(MisuseError):
        pool.reserve(nbytes, **options)  # type: ignore[arg-type]
    assert pool.statistics().reserved == 0


@pytest.mark.parametrize("nbytes", [(1 << 16) + 1, 1 << 61])
def test_reserve_more_than_the_pool_is_a_capacity_error_that_waiting_cannot_help(pool: PinnedPool, nbytes: int) -> None:
    with pytest.raises(CapacityError) as caught:
        pool.reserve(nbytes, timeout=None)
    assert not caught.value.can_wait


def interrupted(pool: PinnedPool, timer: threading.Timer) -> None:
    timer.start()
    pool.reserve(1, timeout=PATIENCE_S)


def test_reserve_waiting_in_the_main_thread_is_ended_by_a_signal(pool: PinnedPool) -> None:
    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    held = pool.reserve(1 << 16)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        with pytest.raises(StopError):
            interrupted(pool, timer)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pool.statistics().waiting == 0
    held.free()
    pool.reserve(1 << 16).free()


def test_exit_while_a_daemon_thread_waits_is_clean(core: str) -> None:
    script = f"""
        import threading, time
        from nccl_stream import _core
        if {core == "python"}:
            _core.native = None
        from nccl_stream.staging import PinnedPool
        pool = PinnedPool(4096, pin=False)
        pool.reserve(4096)
        threading.Thread(target=pool.reserve, args=(1,), kwargs=dict(timeout=None), daemon=True).start()
        while not pool.statistics().waiting:
            time.sleep(0.001)
        print("leaving")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr


def test_fallback_says_once_that_it_is_in_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "native", None)
    monkeypatch.setattr(_core, "_announced", threading.Lock())
    crc32c(b"x")
    crc32c(b"y")
    assert [record.levelname for record in caplog.records if "compiled core is absent" in record.message] == ["WARNING"]
