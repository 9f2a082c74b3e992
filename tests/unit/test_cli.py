"""``nccl-stream store`` as people start it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from nccl_stream.cli import main
from nccl_stream.errors import ControlStoreError
from nccl_stream.ranks.place import reach_store

PATIENCE_S = 60.0


def test_store_for_every_interface_is_reached_until_it_is_told_to_end() -> None:
    command = [sys.executable, "-m", "nccl_stream", "store", "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"nccl-stream store: tcp://(\S+):(\d+) ", process.stdout.readline())
            assert found is not None
            assert found[1] == socket.gethostname()  # 0.0.0.0 is nowhere to connect to
            client = dist.TCPStore("127.0.0.1", int(found[2]), is_master=False, timeout=timedelta(seconds=PATIENCE_S))
            client.set("key", "value")
            assert client.get("key") == b"value"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "store --port"), ("no.such.host.invalid", "store --host 0.0.0.0 --port")]
)
def test_store_that_does_not_answer_says_how_to_start_one_that_would(host: str, told: str) -> None:
    with pytest.raises(ControlStoreError, match=f"nccl-stream {told} 9'"):
        reach_store(f"tcp://{host}:9", 1.0)


def test_store_on_a_port_in_use_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["store", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
