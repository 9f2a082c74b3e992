"""``nccl-stream``: the store that two launches meet at."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading

from nccl_stream.coordination.kv import tcp_store

__all__ = ["main"]

EVERY_INTERFACE = ("0.0.0.0", "::")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="nccl-stream", description="Feature streaming for draft-model training.")
    commands = parser.add_subparsers(dest="command", required=True)
    store = commands.add_parser("store", help="keep a store that target and draft launches meet at, until interrupted")
    store.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, which other hosts cannot reach; 0.0.0.0 is every interface)",
    )
    store.add_argument("--port", type=int, default=29600, help="port; 0 picks a free one (default: %(default)s)")
    options = parser.parse_args(arguments)
    return _keep_store(options.host, options.port)


def _keep_store(host: str, port: int) -> int:
    try:
        store = tcp_store(host, port, serve=True, timeout=30.0)
    except (RuntimeError, OSError) as exc:
        sys.stderr.write(f"nccl-stream store: cannot listen on {host}:{port}: {str(exc).splitlines()[0]}\n")
        return 1
    bound: int = store.port  # type: ignore[attr-defined]  # torch's stubs leave it out
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    name = socket.gethostname() if host in EVERY_INTERFACE else host
    sys.stdout.write(f"nccl-stream store: tcp://{name}:{bound} (no authentication: keep it on a private network)\n")
    sys.stdout.flush()
    while not done.wait(1.0):
        pass
    return 0
