"""The transfer engine over the NCCL double and over links that misbehave on purpose."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from nccl_stream.errors import ClosedError, LinkError, LinkTimeoutError, MisuseError
from nccl_stream.testing.link_suite import WAIT_S, Recorder
from nccl_stream.testing.nccl_double import DoubleGroup, DoubleQueue, DoubleWork, Fabric, connected_links
from nccl_stream.transport import nccl_group
from nccl_stream.transport.engine import TransferEngine
from nccl_stream.transport.link import Link, Transfer
from nccl_stream.transport.nccl_group import NcclLink, connect_nccl, quiet_watchdog, within


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def buf(nbytes=64, value=0):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


@pytest.fixture
def double():
    return connected_links()


@pytest.fixture
def make_engine():
    made = []

    def make(**options):
        engine = TransferEngine("cpu", **{"timeout": WAIT_S, "name": "e", **options})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close(0.6)


def attach(engine, link):
    recorder = Recorder()
    return engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed), recorder


@pytest.mark.parametrize("depth", [1, 3])
def test_window_never_exceeds_depth_and_spans_samples(make_engine, double, depth):
    sender, _, fabric = double
    engine = make_engine(depth=depth, issue="pump")
    channel, _ = attach(engine, sender)
    for token in range(5):
        channel.send(token, [buf()])
    for _ in range(10):
        engine.pump()
    assert len(fabric.sides[0].pending) == depth


def test_window_respects_the_links_own_limit(make_engine, double):
    sender, _, fabric = double
    sender.max_inflight_ops = 2
    engine = make_engine(depth=50, issue="pump")
    channel, _ = attach(engine, sender)
    channel.send("x", [buf() for _ in range(10)])
    engine.pump()
    assert len(fabric.sides[0].pending) == 2


def test_pump_nothing_moves_without_it(make_engine, double):
    sender, receiver, fabric = double
    engine = make_engine(issue="pump")
    out = buf(8, 0)
    sending, sent = attach(engine, sender)
    receiving, received = attach(engine, receiver)
    sending.send("s", [buf(8, 3)])
    receiving.recv("r", [out])
    assert not fabric.sides[0].pending
    assert not fabric.sides[1].pending
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("e-")]
    while not (sent.done and received.done):
        assert engine.pump()
    assert out.tolist() == [3] * 8
    assert not engine.pump()


def test_pump_callbacks_run_on_the_pumping_thread(make_engine, double):
    engine = make_engine(issue="pump")
    threads = []
    ends = [
        engine.attach(link, on_done=lambda _: threads.append(threading.get_ident()), on_failed=lambda *_: None)
        for link in double[:2]
    ]
    ends[0].send(0, [buf()])
    ends[1].recv(0, [buf()])
    while len(threads) < 2:
        engine.pump()
    assert set(threads) == {threading.get_ident()}


def test_pump_on_an_engine_with_a_thread_is_refused(make_engine):
    with pytest.raises(MisuseError, match="pump"):
        make_engine().pump()


def test_pollable_links_share_one_issuing_thread(make_engine):
    engine = make_engine()
    pairs = [connected_links() for _ in range(5)]
    threads = set()

    def note(_):
        threads.add(threading.current_thread().name)

    recorders = []
    for sender, receiver, _ in pairs:
        for link, start in ((sender, "send"), (receiver, "recv")):
            recorder = Recorder()
            recorders.append(recorder)
            channel = engine.attach(
                link, on_done=lambda t, r=recorder: (note(t), r.on_done(t)), on_failed=recorder.on_failed
            )
            for token in range(20):
                getattr(channel, start)(token, [buf(), buf()])
    for recorder in recorders:
        assert recorder.wait_done(20) == list(range(20))
    assert threads == {"e-poll"}
    assert all(fabric.misuse == [] for _, _, fabric in pairs)


def test_stalled_link_leaves_the_others_going(make_engine):
    engine = make_engine()
    stuck, good = connected_links(), connected_links()
    stuck[2].frozen = True
    stuck_channel, stuck_record = attach(engine, stuck[0])
    attach(engine, stuck[1])[0].recv(0, [buf()])
    stuck_channel.send(0, [buf()])
    sending, sent = attach(engine, good[0])
    receiving, received = attach(engine, good[1])
    for token in range(50):
        sending.send(token, [buf()])
        receiving.recv(token, [buf()])
    assert sent.wait_done(50) == received.wait_done(50)
    assert stuck_record.done == []
    stuck[2].thaw()
    assert stuck_record.wait_done(1) == [0]


def test_sizes_that_differ_never_complete_and_time_out(make_engine, double):
    sender, receiver, _ = double
    clock = Clock()
    engine = make_engine(issue="pump", timeout=5.0, clock=clock)
    sending, sent = attach(engine, sender)
    receiving, received = attach(engine, receiver)
    out = buf(63, 9)
    sending.send("s", [buf(64)])
    receiving.recv("r", [out])
    receiving.recv("behind", [buf(64)])
    engine.pump()
    clock.now += 4.9
    engine.pump()
    assert not sent.failures
    clock.now += 0.2
    while not (sent.failures and received.failures):
        engine.pump()
    error, tokens = received.failures[0]
    assert isinstance(error, LinkTimeoutError)
    assert "target" in str(error)
    assert tokens == ["r", "behind"]
    assert out.tolist() == [9] * 63


def test_timeout_counts_from_the_last_progress(make_engine, double):
    sender, receiver, _ = double
    clock = Clock()
    engine = make_engine(issue="pump", timeout=5.0, clock=clock, depth=4)
    sending, sent = attach(engine, sender)
    receiving, _ = attach(engine, receiver)
    sending.send("s", [buf() for _ in range(3)])
    engine.pump()
    for _ in range(3):
        clock.now += 4.0
        receiving.recv("r", [buf()])
        engine.pump()
        engine.pump()
    assert sent.done == ["s"]
    clock.now += 100.0
    engine.pump()
    assert sent.failures == [], "an idle channel does not time out"


def test_aborted_operation_is_not_reported_done_and_not_before_the_device_lets_go(make_engine, double):
    _, receiver, fabric = double
    engine = make_engine(issue="pump")
    channel, record = attach(engine, receiver)
    channel.recv("r", [buf(), buf()])
    engine.pump()
    fabric.frozen = True
    channel.abort()
    until(lambda: fabric.sides[1].aborted)
    for _ in range(20):
        engine.pump()
    assert record.failures == []
    fabric.thaw()
    until(lambda: engine.pump() or record.failures)
    error, tokens = record.wait_failed()
    assert isinstance(error, LinkError)
    assert "aborted" in str(error)
    assert tokens == ["r"]
    assert record.done == []


def test_abort_in_mid_transfer_reports_the_sample_as_unfinished(make_engine, double):
    sender, receiver, fabric = double
    engine = make_engine()
    fabric.stall_after = 10
    out = buf(64, 0)
    receiving, received = attach(engine, receiver)
    sending, _ = attach(engine, sender)
    receiving.recv("r", [out])
    sending.send("s", [buf(64, 7)])
    until(lambda: out[0] == 7)
    receiving.abort()
    _, tokens = received.wait_failed()
    assert tokens == ["r"]
    out.fill_(1)
    fabric.thaw()
    sending.abort()
    assert bool((out == 1).all())


def test_asynchronous_error_fails_the_channel_at_once(make_engine, double):
    _, receiver, fabric = double
    engine = make_engine()
    channel, record = attach(engine, receiver)
    channel.recv("r", [buf()])
    until(lambda: fabric.sides[1].pending)
    fabric.fail(1)
    error, tokens = record.wait_failed()
    assert isinstance(error, LinkError)
    assert not isinstance(error, LinkTimeoutError)
    assert tokens == ["r"]


def test_asynchronous_error_is_not_reported_before_the_device_lets_go(make_engine, double):
    _, receiver, fabric = double
    engine = make_engine(issue="pump")
    channel, record = attach(engine, receiver)
    channel.recv("r", [buf()])
    engine.pump()
    fabric.frozen = True
    fabric.fail(1)
    until(lambda: (engine.pump(), fabric.sides[1].aborted)[1])
    for _ in range(10):
        engine.pump()
        time.sleep(0.002)  # past the grace after which an error counts
    assert record.failures == []
    fabric.thaw()
    until(lambda: engine.pump() or record.failures)
    assert record.failures[0][1] == ["r"]


def test_error_found_at_the_end_of_an_operation_is_not_a_success(double):
    sender, receiver, _ = double
    out = buf()
    transfer = receiver.recv(out)
    work = transfer._work
    sender.send(buf())
    work._error = "unhandled system error"
    with pytest.raises(LinkError, match="unhandled"):
        transfer.done()


@pytest.fixture
def nccl_without_gpu(monkeypatch):
    """The bring-up of NCCL links with the communicator and the device replaced."""
    fabric = Fabric()

    class Group(DoubleGroup):
        def eager_connect_single_device(self, device):
            self.calls.append(f"connect {device}")

    groups = [Group(fabric, rank) for rank in (0, 1)]
    monkeypatch.setattr(nccl_group, "_construct", lambda store, side: groups[side])
    monkeypatch.setattr(nccl_group, "_CudaQueue", lambda device: DoubleQueue())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return groups


def test_connect_nccl_warms_up_and_gives_a_working_link(nccl_without_gpu):
    links = [None, None]

    def connect(side):
        links[side] = connect_nccl(None, side, torch.device("cpu"), WAIT_S, peer="p")

    threads = [threading.Thread(target=connect, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(group.calls == ["connect cpu"] for group in nccl_without_gpu)
    out = buf(8)
    receiving = links[1].recv(out)
    links[0].send(buf(8, 6)).wait(WAIT_S)
    receiving.wait(WAIT_S)
    assert out.tolist() == [6] * 8


def test_connect_nccl_peer_that_never_warms_up_is_a_timeout_and_leaves_nothing(nccl_without_gpu):
    with pytest.raises(LinkTimeoutError, match="draft 9"):
        connect_nccl(None, 0, torch.device("cpu"), 0.1, peer="draft 9")
    until(lambda: "abort" in nccl_without_gpu[0].calls)


def test_connect_nccl_hanging_communicator_is_a_timeout_and_is_aborted_when_it_comes(nccl_without_gpu):
    hold = threading.Event()
    nccl_without_gpu[0].eager_connect_single_device = lambda device: hold.wait(WAIT_S)
    with pytest.raises(LinkTimeoutError, match="draft 9"):
        connect_nccl(None, 0, torch.device("cpu"), 0.1, peer="draft 9")
    assert nccl_without_gpu[0].calls == []
    hold.set()
    until(lambda: "abort" in nccl_without_gpu[0].calls)


def test_connect_nccl_refusal_is_a_link_error(nccl_without_gpu):
    def refuse(device):
        raise RuntimeError("[/src/NCCLUtils.cpp:93] NCCL error: unhandled cuda error")

    nccl_without_gpu[0].eager_connect_single_device = refuse
    with pytest.raises(LinkError, match="draft 9 failed: NCCL error"):
        connect_nccl(None, 0, torch.device("cpu"), WAIT_S, peer="draft 9")


def test_exchange_is_one_group_with_one_work():
    class Group:
        def __init__(self):
            self.calls = []
            self.work = DoubleWork(Fabric(), buf(), True)

        def _start_coalescing(self):
            self.calls.append("start")

        def _end_coalescing(self):
            self.calls.append("end")
            return self.work

        def send(self, tensors, peer, tag):
            self.calls.append(("send", peer, tensors[0][0].item()))

        def recv(self, tensors, peer, tag):
            self.calls.append(("recv", peer, tensors[0][0].item()))

    group = Group()
    link = NcclLink(group, 0, device=torch.device("cpu"), peer="itself", queue=DoubleQueue())
    transfer = link.exchange(buf(4, 1), buf(4, 2))
    assert group.calls == ["start", ("send", 0, 1), ("recv", 0, 2), "end"]
    assert not transfer.done()
    group.work._on_device = True
    assert transfer.done()


def test_clean_close_flushes_and_abort_does_not(make_engine):
    first, second = connected_links(), connected_links()
    groups = [first[0]._group, second[0]._group]
    engine = make_engine()
    attach(engine, first[0])[0].close()
    attach(engine, second[0])[0].abort()
    until(lambda: all(group.calls for group in groups))
    assert groups[0].calls == ["shutdown"]
    assert groups[1].calls == ["abort"]


def test_abort_waits_for_the_operation_that_another_thread_is_issuing(double):
    sender, _, fabric = double
    sender._group.slow_issue = threading.Event()
    issuing = threading.Thread(target=sender.send, args=(buf(),))
    group = sender._group
    issuing.start()
    until(lambda: fabric.sides[0].inside is not None)
    sender.abort()
    assert not sender.wait_closed(0.05)
    assert group.calls == []
    group.slow_issue.set()
    assert sender.wait_closed(WAIT_S)
    issuing.join(WAIT_S)
    assert group.calls == ["abort"]
    assert fabric.misuse == []
    with pytest.raises(LinkError, match="aborted"):
        sender.send(buf())


def test_abort_does_not_wait_for_ever_for_an_operation_that_hangs(double, monkeypatch):
    monkeypatch.setattr(nccl_group, "_ISSUE_S", 0.01)
    sender, _, _ = double
    group = sender._group
    group.slow_issue = threading.Event()

    def issue():
        with pytest.raises(LinkError, match="aborted"):
            sender.send(buf())

    issuing = threading.Thread(target=issue)
    issuing.start()
    until(lambda: sender._issuing.locked())
    sender.abort()
    assert sender.wait_closed(WAIT_S)
    assert group.calls == ["abort"]
    group.slow_issue.set()
    issuing.join(WAIT_S)


def test_close_of_the_engine_waits_until_links_have_given_their_resources_back(make_engine, double):
    engine = make_engine()
    flushed = threading.Event()
    group = double[0]._group
    group.shutdown = lambda: (time.sleep(0.1), flushed.set())
    attach(engine, double[0])
    assert engine.close(WAIT_S) == []
    assert flushed.is_set()


def test_close_of_the_engine_aborts_what_does_not_end(make_engine, double):
    engine = make_engine()
    channel, record = attach(engine, double[1])
    channel.recv("never", [buf()])
    until(lambda: engine.close(1.0) == [])  # at once, unless this process stands still meanwhile
    assert engine.close(1.0) == []
    assert record.failures[0][1] == ["never"]
    with pytest.raises(ClosedError):
        attach(engine, connected_links()[0])
    with pytest.raises(ClosedError):
        channel.recv("more", [buf()])


def test_close_of_a_pumped_engine_needs_no_pump(make_engine, double):
    engine = make_engine(issue="pump")
    channel, record = attach(engine, double[1])
    channel.recv("never", [buf()])
    assert engine.close(0.5) == []
    assert record.failures[0][1] == ["never"]


def test_close_names_a_thread_that_hangs_in_a_callback(make_engine, double):
    engine = make_engine(name="hung")
    hold = threading.Event()
    channel = engine.attach(double[1], on_done=lambda _: hold.wait(WAIT_S), on_failed=lambda *_: None)
    channel.recv(0, [])
    try:
        until(lambda: engine.close(0.3) == ["hung-poll"])
    finally:
        hold.set()
    until(lambda: engine.close(0.1) == [])


def test_callback_may_use_its_own_channel(make_engine, double):
    sender, receiver, _ = double
    engine = make_engine()
    record = Recorder()
    channels = {}

    def done(token):
        record.on_done(token)
        if token < 5:
            channels["r"].recv(token + 1, [buf()])
        else:
            channels["r"].abort()

    channels["r"] = engine.attach(receiver, on_done=done, on_failed=record.on_failed)
    sending, _ = attach(engine, sender)
    channels["r"].recv(0, [buf()])
    for token in range(6):
        sending.send(token, [buf()])
    assert record.wait_failed()[1] == []
    assert record.done == [0, 1, 2, 3, 4, 5]
    sending.abort()


def test_link_on_another_device_is_refused(make_engine):
    with pytest.raises(MisuseError, match="meta"):
        attach(make_engine(), connected_links(device="meta")[0])


@pytest.mark.parametrize("options", [{"depth": 0}, {"timeout": 0.0}, {"issue": "fork"}])
def test_engine_bad_options_are_refused(make_engine, options):
    with pytest.raises(MisuseError):
        make_engine(**options)


def test_refused_buffer_fails_the_channel_with_its_tokens(make_engine, double):
    engine = make_engine()
    channel, record = attach(engine, double[0])
    channel.send("bad", [torch.zeros(4)])
    channel_error, tokens = record.wait_failed()
    assert isinstance(channel_error, LinkError)
    assert "float32" in str(channel_error)
    assert tokens == ["bad"]


def test_ended_channels_are_forgotten(make_engine):
    engine = make_engine()
    for _ in range(10):
        channel, _ = attach(engine, connected_links()[0])
        channel.close()
        until(lambda c=channel: c.has_ended)
    assert len(engine._channels) + len(engine._polled) <= 2


class ForgetfulTransfer(Transfer):
    """A transfer of a transport that forgets what was half through when it broke."""

    def __init__(self, link):
        self.link = link
        self.finished = threading.Event()

    def wait(self, timeout):
        if not self.finished.wait(timeout):
            raise LinkTimeoutError("forgotten")

    def done(self):
        return False


class ForgetfulLink(Link):
    pollable = False
    max_inflight_ops = 8

    def __init__(self):
        self.device = torch.device("cpu")
        self.peer = "draft 0"
        self.broken = threading.Event()
        self.transfers = []
        self.closed = 0

    def send(self, buf):
        self.transfers.append(ForgetfulTransfer(self))
        return self.transfers[-1]

    recv = send

    def watch(self):
        self.broken.wait()
        return "gone"

    def abort(self):
        self.broken.set()

    def close(self):
        self.closed += 1
        self.broken.set()


def queue_at_once(channel, tokens):
    """Before the serving thread sees the first of them."""
    with channel._wake:
        for token in tokens:
            channel.recv(token, [buf()])


def test_forgotten_transfer_is_reported_when_the_link_breaks(make_engine):
    engine, link = make_engine(timeout=60.0, depth=3), ForgetfulLink()
    channel, record = attach(engine, link)
    queue_at_once(channel, range(4))
    until(lambda: len(link.transfers) == 3)
    link.transfers[0].finished.set()
    record.wait_done(1)
    link.broken.set()
    error, tokens = record.wait_failed()
    assert "gone" in str(error)
    assert tokens == [1, 2, 3]
    assert link.closed == 1
    assert engine.close(WAIT_S) == []
    for transfer in link.transfers:
        transfer.finished.set()
    time.sleep(0.01)
    assert record.done == [0]
    assert len(record.failures) == 1


def test_forgotten_transfer_is_reported_after_abort(make_engine):
    engine, link = make_engine(timeout=60.0), ForgetfulLink()
    channel, record = attach(engine, link)
    channel.send("s", [buf()])
    until(lambda: link.transfers)
    channel.abort()
    error, tokens = record.wait_failed()
    assert "aborted" in str(error)
    assert tokens == ["s"]


def test_what_arrived_before_the_link_broke_still_counts(make_engine):
    engine, link = make_engine(timeout=60.0, depth=4), ForgetfulLink()
    channel, record = attach(engine, link)
    queue_at_once(channel, range(3))
    until(lambda: len(link.transfers) == 3)
    for transfer in link.transfers[1:]:
        transfer.finished.set()
    link.broken.set()
    link.transfers[0].finished.set()
    assert record.wait_done(3) == [0, 1, 2]
    assert not channel.has_ended


def test_idle_link_that_breaks_is_an_error_only_when_used_again(make_engine):
    engine, link = make_engine(), ForgetfulLink()
    channel, record = attach(engine, link)
    link.broken.set()
    until(lambda: channel._broken is not None)
    assert record.failures == []
    channel.recv("r", [buf()])
    error, tokens = record.wait_failed()
    assert "gone" in str(error)
    assert tokens == ["r"]


def test_idle_link_that_breaks_closes_cleanly(make_engine):
    engine, link = make_engine(), ForgetfulLink()
    channel, record = attach(engine, link)
    link.broken.set()
    until(lambda: channel._broken is not None)
    channel.close()
    until(lambda: channel.has_ended)
    assert engine.close(WAIT_S) == []
    assert record.failures == []


def test_quiet_watchdog_sets_and_restores_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    seen = {}

    def construct():
        with quiet_watchdog():
            seen.update(os.environ)
            raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        construct()
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ


def test_within_returns_raises_and_discards_what_comes_too_late():
    assert within(WAIT_S, lambda: 7, print, name="t") == 7
    with pytest.raises(ZeroDivisionError):
        within(WAIT_S, lambda: 1 // 0, print, name="t")
    go, late = threading.Event(), []

    def slow():
        go.wait(WAIT_S)
        return "late"

    with pytest.raises(TimeoutError, match="connect"):
        within(0.01, slow, late.append, name="connect")
    go.set()
    until(lambda: late == ["late"])
