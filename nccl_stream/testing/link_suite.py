"""What every link must pass: subclass :class:`LinkConformance` and give it a pair of connected ends.

    class TestGlooLink(LinkConformance):
        @pytest.fixture
        def pair(self):
            yield sender, receiver

Both ends live in one process; the engine serves them as it would in two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nccl_stream.errors import ClosedError, LinkError, MisuseError
from nccl_stream.transport.engine import Channel, TransferEngine
from nccl_stream.transport.link import Link

__all__ = ["LinkConformance", "Recorder"]

WAIT_S = 20.0  # how long a test waits for what must happen; never how long it takes


class Recorder:
    """Callbacks of a channel, and waiting for them."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failures: list[tuple[BaseException, list[object]]] = []
        self._changed = threading.Condition()

    def on_done(self, token: object) -> None:
        with self._changed:
            self.done.append(token)
            self._changed.notify_all()

    def on_failed(self, error: BaseException, tokens: list[object]) -> None:
        with self._changed:
            self.failures.append((error, tokens))
            self._changed.notify_all()

    def wait_done(self, count: int) -> list[Any]:
        """Waits until so many tokens are done."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count or self.failures, WAIT_S), "nothing came"
            assert not self.failures, self.failures
            return list(self.done)

    def wait_failed(self) -> tuple[BaseException, list[object]]:
        """Waits for the failure."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.failures, WAIT_S), "no failure came"
            return self.failures[0]


class LinkConformance:
    """Every test needs the fixture ``pair``: a fresh sending and a receiving :class:`Link`, each other's peer."""

    depth = 4
    timeout = WAIT_S

    @pytest.fixture
    def pair(self) -> Any:
        raise NotImplementedError("give the suite a pair of links")

    @pytest.fixture
    def engines(self, pair: tuple[Link, Link]) -> Any:
        engines = [
            TransferEngine(link.device, depth=self.depth, timeout=self.timeout, name=f"suite{side}")
            for side, link in enumerate(pair)
        ]
        yield engines
        for engine in engines:
            assert engine.close(5.0) == []

    @pytest.fixture
    def channels(self, pair: tuple[Link, Link], engines: list[TransferEngine]) -> Any:
        recorders = (Recorder(), Recorder())
        ends = [
            engine.attach(link, on_done=recorder.on_done, on_failed=recorder.on_failed)
            for engine, link, recorder in zip(engines, pair, recorders, strict=True)
        ]
        return ends[0], ends[1], recorders[0], recorders[1]

    @staticmethod
    def filled(where: Link | Channel, nbytes: int, value: int) -> torch.Tensor:
        """``nbytes`` bytes on the device of that link or channel, all of one value."""
        return torch.full((nbytes,), value, dtype=torch.uint8, device=where.device)

    def test_transfer_one_message_arrives_byte_exact(self, pair: tuple[Link, Link]) -> None:
        sender, receiver = pair
        data = torch.arange(100_000, dtype=torch.int64).view(torch.uint8).to(sender.device)
        out = self.filled(receiver, data.numel(), 0)
        receiving = receiver.recv(out)
        sending = sender.send(data)
        sending.wait(WAIT_S)
        receiving.wait(WAIT_S)
        assert torch.equal(out.cpu(), data.cpu())

    def test_transfer_equal_sizes_never_swap(self, channels: tuple[Channel, Channel, Recorder, Recorder]) -> None:
        send_end, recv_end, sent, received = channels
        slots = []
        for token in range(40):
            slots.append([self.filled(recv_end, 4096, 255) for _ in range(3)])
            recv_end.recv(token, slots[-1])
            send_end.send(token, [self.filled(send_end, 4096, 5 * token + part) for part in range(3)])
        assert sent.wait_done(40) == received.wait_done(40) == list(range(40))
        for token, parts in enumerate(slots):
            for part, buf in enumerate(parts):
                assert bool((buf.cpu() == 5 * token + part).all()), (token, part)

    def test_send_before_recv_waits_for_it(self, channels: tuple[Channel, Channel, Recorder, Recorder]) -> None:
        send_end, recv_end, sent, received = channels
        send_end.send("early", [self.filled(send_end, 3 << 20, 7)])
        out = self.filled(recv_end, 3 << 20, 0)
        recv_end.recv("late", [out])
        assert received.wait_done(1) == ["late"]
        assert sent.wait_done(1) == ["early"]
        assert bool((out.cpu() == 7).all())

    def test_sample_without_messages_finishes_in_its_turn(
        self, channels: tuple[Channel, Channel, Recorder, Recorder]
    ) -> None:
        send_end, recv_end, sent, received = channels
        for end, recorder in ((send_end, sent), (recv_end, received)):
            start = end.send if end is send_end else end.recv
            start("empty-first", [])
            assert recorder.wait_done(1) == ["empty-first"]
            start("full", [self.filled(end, 512, 1)])
            start("empty-last", [])
        assert sent.wait_done(3) == received.wait_done(3) == ["empty-first", "full", "empty-last"]

    def test_uneven_sizes_random_depths_arrive_in_order(
        self, channels: tuple[Channel, Channel, Recorder, Recorder]
    ) -> None:
        send_end, recv_end, sent, received = channels
        generator = torch.Generator().manual_seed(11)
        sizes: list[Sequence[int]] = [
            torch.randint(1, 200_000, (int(n),), generator=generator).tolist()
            for n in torch.randint(1, 9, (25,), generator=generator)
        ]
        sources = [
            [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in parts]
            for parts in sizes
        ]
        outs = [[self.filled(recv_end, size, 0) for size in parts] for parts in sizes]
        for token, (source, out) in enumerate(zip(sources, outs, strict=True)):
            send_end.send(token, [buf.to(send_end.device) for buf in source])
            recv_end.recv(token, out)
        assert received.wait_done(25) == sent.wait_done(25) == list(range(25))
        for source, out in zip(sources, outs, strict=True):
            assert all(torch.equal(a, b.cpu()) for a, b in zip(source, out, strict=True))

    @pytest.mark.parametrize("kind", ["dtype", "strided", "empty", "2d", "meta"])
    def test_unfit_buffer_is_refused_and_harms_nothing(self, pair: tuple[Link, Link], kind: str) -> None:
        sender, receiver = pair
        unfit = {
            "dtype": torch.zeros(4, device=sender.device),
            "strided": self.filled(sender, 8, 0)[::2],
            "empty": self.filled(sender, 0, 0),
            "2d": self.filled(sender, 4, 0).view(2, 2),
            "meta": torch.zeros(4, dtype=torch.uint8, device="meta"),
        }[kind]
        for call in (sender.send, sender.recv):
            with pytest.raises(MisuseError):
                call(unfit)
        out = self.filled(receiver, 4, 0)
        receiving = receiver.recv(out)
        sender.send(self.filled(sender, 4, 9)).wait(WAIT_S)
        receiving.wait(WAIT_S)
        assert out.tolist() == [9, 9, 9, 9]

    @pytest.mark.parametrize("receiving", [False, True])
    def test_abort_unblocks_pending_transfers_and_reports_them_once(
        self, channels: tuple[Channel, Channel, Recorder, Recorder], receiving: bool
    ) -> None:
        send_end, recv_end, sent, received = channels
        end, recorder = (recv_end, received) if receiving else (send_end, sent)
        start = recv_end.recv if receiving else send_end.send
        for token in range(6):
            start(token, [self.filled(end, 1 << 20, 0), self.filled(end, 64, 0)])
        threads = [threading.Thread(target=end.abort) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        error, tokens = recorder.wait_failed()
        assert isinstance(error, LinkError)
        assert tokens == [0, 1, 2, 3, 4, 5]
        with pytest.raises(ClosedError):
            start(7, [self.filled(end, 64, 0)])
        assert len(recorder.failures) == 1

    def test_abort_of_a_link_makes_later_calls_fail(self, pair: tuple[Link, Link]) -> None:
        sender, _ = pair
        sender.abort()
        sender.abort()
        with pytest.raises(LinkError):
            sender.send(self.filled(sender, 4, 0))
        with pytest.raises(LinkError):
            sender.recv(self.filled(sender, 4, 0))
        sender.close()

    def test_after_failure_is_reported_no_buffer_changes(
        self, channels: tuple[Channel, Channel, Recorder, Recorder]
    ) -> None:
        send_end, recv_end, _, received = channels
        slot = self.filled(recv_end, 48 << 20, 0)
        recv_end.recv("doomed", list(slot.chunk(12)))
        send_end.send("doomed", list(self.filled(send_end, 48 << 20, 1).chunk(12)))
        recv_end.abort()
        _, tokens = received.wait_failed()
        assert received.done + tokens == ["doomed"]  # it may all have come before the abort
        send_end.abort()  # NCCL does not tell the other end
        slot.fill_(77)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert bool((slot == 77).all()), "a transfer wrote into a slot that had been given back"

    def test_close_lets_queued_samples_finish(self, channels: tuple[Channel, Channel, Recorder, Recorder]) -> None:
        send_end, recv_end, sent, received = channels
        out = self.filled(recv_end, 1 << 20, 0)
        recv_end.recv("last", [out])
        recv_end.close()
        send_end.send("last", [self.filled(send_end, 1 << 20, 3)])
        send_end.close()
        assert received.wait_done(1) == sent.wait_done(1) == ["last"]
        assert bool((out.cpu() == 3).all())
        with pytest.raises(ClosedError):
            send_end.send("more", [])

    def test_callback_that_raises_does_not_stop_the_channel(
        self, pair: tuple[Link, Link], engines: list[TransferEngine], caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = Recorder()

        def explode(token: object) -> None:
            recorder.on_done(token)
            raise ValueError("user bug")

        receiver = engines[1].attach(pair[1], on_done=explode, on_failed=recorder.on_failed)
        sender = engines[0].attach(pair[0], on_done=lambda _: None, on_failed=lambda *_: None)
        for token in range(3):
            receiver.recv(token, [self.filled(pair[1], 16, 0)])
            sender.send(token, [self.filled(pair[0], 16, 1)])
        assert recorder.wait_done(3) == [0, 1, 2]
        assert "raised" in caplog.text
