"""The link conformance suite over gloo and over the NCCL double."""

from __future__ import annotations

import json
import re
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nccl_stream._version import __version__
from nccl_stream.errors import ConfigError, LinkError, LinkTimeoutError, VersionMismatchError
from nccl_stream.testing.link_suite import WAIT_S, LinkConformance
from nccl_stream.testing.nccl_double import connected_links
from nccl_stream.transport.link import Link
from nccl_stream.transport.process_group import open_link


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def open_pair(server, prefix, device="cpu", timeout=WAIT_S):
    """Both ends of a link in one process, each on a client of its own."""
    ends: list[Link | BaseException] = [LinkError("never opened")] * 2

    def run(side: int) -> None:
        try:
            store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))
            ends[side] = open_link(store, prefix, side, device, timeout, peer=("draft 0", "target 0")[side])
        except BaseException as error:  # noqa: BLE001
            ends[side] = error

    threads = [threading.Thread(target=run, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends


class TestGlooLink(LinkConformance):
    @pytest.fixture
    def pair(self, server):
        ends = open_pair(server, "link/0")
        yield ends
        for end in ends:
            end.abort()


class TestGlooLinkOneInFlight(TestGlooLink):
    depth = 1


class TestNcclLinkOverDouble(LinkConformance):
    @pytest.fixture
    def pair(self):
        sender, receiver, fabric = connected_links()
        yield sender, receiver
        assert fabric.misuse == []
        sender.abort()
        receiver.abort()


def test_open_link_peer_never_comes_times_out_with_its_name(server):
    with pytest.raises(LinkTimeoutError, match="draft 3"):
        open_link(server, "link/1", 0, "cpu", 0.3, peer="draft 3")


def versions_of(server, prefix, device):
    """What a rank on this kind of device tells its peer."""
    with pytest.raises(LinkTimeoutError):
        open_link(server, prefix, 0, device, 0.1, peer="draft 0")
    return json.loads(server.get(f"{prefix}/versions/0"))


@pytest.fixture
def nccl(monkeypatch):
    """A machine that could do NCCL, as far as opening a link goes before it calls NCCL."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))


@pytest.mark.parametrize(
    ("device", "program"),
    [("cpu", "torch"), ("cpu", "nccl_stream"), ("cpu", "device"), ("cuda:0", "nccl"), ("cuda:0", "nccl_stream")],
)
def test_open_link_other_versions_are_refused(server, nccl, device, program):
    mine = versions_of(server, "link/2", device)
    server.set("link/3/versions/1", json.dumps({**mine, program: "1.0"}, sort_keys=True))
    with pytest.raises(VersionMismatchError, match="draft 0") as caught:
        open_link(server, "link/3", 0, device, 5.0, peer="draft 0")
    assert f'"{program}": "1.0"' in str(caught.value)
    assert f'"{program}": "{mine[program]}"' in str(caught.value)


def test_version_is_that_of_the_installed_package():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == __version__


def test_open_link_hostile_version_value_is_refused(server):
    server.set("link/4/versions/1", b"\x80\x04cos\nsystem\n" * 10_000)
    with pytest.raises(VersionMismatchError) as caught:
        open_link(server, "link/4", 0, "cpu", 5.0, peer="draft 0")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_open_link_device_without_backend_is_never_swapped(server, device):
    with pytest.raises(ConfigError):
        open_link(server, "link/9", 0, device, 5.0, peer="draft 0")


def test_open_link_bad_side_is_refused(server):
    with pytest.raises(ConfigError, match="side"):
        open_link(server, "link/5", 2, "cpu", 5.0, peer="draft 0")


def test_gloo_wait_that_times_out_fails_that_link_and_no_other(server):
    first, second = open_pair(server, "link/6"), open_pair(server, "link/7")
    pending = first[1].recv(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(LinkTimeoutError, match="target 0"):
        pending.wait(0.05)
    with pytest.raises(LinkError):
        first[0].send(torch.zeros(8, dtype=torch.uint8)).wait(WAIT_S)
    out = torch.zeros(8, dtype=torch.uint8)
    receiving = second[1].recv(out)
    second[0].send(torch.full((8,), 3, dtype=torch.uint8)).wait(WAIT_S)
    receiving.wait(WAIT_S)
    assert out.tolist() == [3] * 8


def test_gloo_link_comes_back_under_the_next_generation(server):
    old = open_pair(server, "link/8/0")
    old[0].abort()
    with pytest.raises(LinkError):
        old[1].recv(torch.zeros(1, dtype=torch.uint8)).wait(WAIT_S)
    new = open_pair(server, "link/8/1")
    out = torch.zeros(1, dtype=torch.uint8)
    receiving = new[1].recv(out)
    new[0].send(torch.full((1,), 5, dtype=torch.uint8)).wait(WAIT_S)
    receiving.wait(WAIT_S)
    assert out.item() == 5
