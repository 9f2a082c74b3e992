import threading

import pytest

from nccl_stream.store import StoreHealth
from nccl_stream.watermarks import WatermarkGate


def health(resident, *, count=10, high=False, low=False):
    return StoreHealth(resident, 1000, count, high, low)


def judge(gate, resident, **flags):
    return gate.judge(health(resident, **flags), stuck_bytes=0, stuck_samples=0)


def test_gate_closes_at_high_opens_at_low_and_keeps_its_state_between():
    gate = WatermarkGate(high_watermark_bytes=100, low_watermark_bytes=50)
    opened = [judge(gate, resident) for resident in (99, 51, 100, 99, 51, 50, 51, 99, 100)]
    assert opened == [True, True, False, False, False, True, True, True, False]
    assert gate.num_pauses == 2


def test_gate_own_thresholds_win_over_the_flags():
    gate = WatermarkGate(high_watermark_bytes=100, low_watermark_bytes=50)
    assert judge(gate, 99, high=True)
    assert not judge(gate, 100, low=True)
    assert not judge(gate, 99, low=True)


def test_gate_without_thresholds_follows_the_flags():
    gate = WatermarkGate()
    assert judge(gate, 10**9)
    assert not judge(gate, 1, high=True)
    assert not judge(gate, 1)
    assert judge(gate, 1, low=True)


@pytest.mark.parametrize(
    ("high", "low", "word"),
    [(0, None, "positive"), (-1, None, "positive"), (None, -1, "non-negative"), (5, 5, "strictly"), (5, 6, "strictly")],
)
def test_gate_thresholds_that_cannot_work_are_refused(high, low, word):
    with pytest.raises(ValueError, match=word):
        WatermarkGate(high_watermark_bytes=high, low_watermark_bytes=low)


@pytest.mark.parametrize(
    ("resident", "count", "stuck_bytes", "stuck_samples", "closes"),
    [
        (200, 2, 200, 2, False),
        (200, 2, 150, 1, True),
        (250, 2, 200, 2, False),  # files are larger than the tensors in them
        (200, 0, 199, 1, True),  # a store that does not count samples
    ],
)
def test_gate_ignores_what_waiting_cannot_free(resident, count, stuck_bytes, stuck_samples, closes):
    gate = WatermarkGate(high_watermark_bytes=100, low_watermark_bytes=50)
    stuck = {"stuck_bytes": stuck_bytes, "stuck_samples": stuck_samples}
    assert gate.judge(health(resident, count=count), **stuck) is not closes


def test_gate_opens_when_only_stuck_samples_are_left():
    gate = WatermarkGate(high_watermark_bytes=100, low_watermark_bytes=50)
    assert not gate.judge(health(150, count=2), stuck_bytes=80, stuck_samples=1)
    assert gate.judge(health(80, count=1), stuck_bytes=80, stuck_samples=1)


def test_callbacks_fire_once_per_transition_in_order():
    calls = []
    gate = WatermarkGate(
        high_watermark_bytes=100,
        low_watermark_bytes=50,
        on_pause=lambda h: calls.append(("pause", h.resident_bytes)),
        on_resume=lambda h: calls.append(("resume", h.resident_bytes)),
    )
    for resident in (120, 130, 60, 40, 30, 110):
        judge(gate, resident)
    assert calls == []
    gate.call_back()
    gate.call_back()
    assert calls == [("pause", 120), ("resume", 40), ("pause", 110)]


def test_callback_that_raises_does_not_stop_the_next(caplog):
    calls = []

    def explode(_):
        raise ValueError("callback trouble")

    gate = WatermarkGate(high_watermark_bytes=100, on_pause=explode, on_resume=calls.append)
    judge(gate, 100)
    judge(gate, 0, low=True)
    gate.call_back()
    assert len(calls) == 1
    assert "callback trouble" in caplog.text


def test_callback_may_re_enter_and_its_own_transition_follows():
    calls = []

    def on_pause(_):
        calls.append("pause starts")
        judge(gate, 0, low=True)
        gate.call_back()
        calls.append("pause ends")

    gate = WatermarkGate(high_watermark_bytes=100, on_pause=on_pause, on_resume=lambda _: calls.append("resume"))
    judge(gate, 100)
    gate.call_back()
    assert calls == ["pause starts", "pause ends", "resume"]


def test_callbacks_of_two_threads_run_in_the_order_of_their_transitions():
    inside, leave = threading.Event(), threading.Event()
    calls = []

    def on_pause(_):
        inside.set()
        assert leave.wait(20)
        calls.append("pause")

    gate = WatermarkGate(high_watermark_bytes=100, on_pause=on_pause, on_resume=lambda _: calls.append("resume"))
    judge(gate, 100)
    thread = threading.Thread(target=gate.call_back)
    thread.start()
    assert inside.wait(20)
    judge(gate, 0, low=True)
    gate.call_back()
    assert calls == []
    leave.set()
    thread.join(20)
    assert calls == ["pause", "resume"]
