"""What target ranks tell draft rank 0 for its report, over the launch's own store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist


class ReportBoard:
    """One small JSON value per target and kind, newest wins.

    Args:
        run_id: keeps runs on one store apart, together with torchrun's restart count.
        address: ``tcp://host:port`` of the store; default is the one torchrun made.
    """

    def __init__(self, run_id: str, address: str | None = None) -> None:
        if address is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        else:
            parts = urlsplit(address)
            host, port = parts.hostname or "localhost", parts.port or 0
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"train_draft/{run_id}/{life}", store)

    def post(self, kind: str, target: int, value: Mapping[str, Any]) -> None:
        """Publish ``value`` of target rank ``target``."""
        self._store.set(f"{kind}/{target}", json.dumps(value))

    def read(self, kind: str, num_targets: int) -> list[dict[str, Any]]:
        """The values that are there, without waiting."""
        keys = [f"{kind}/{target}" for target in range(num_targets)]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def wait(self, kind: str, num_targets: int, timeout: float) -> list[dict[str, Any]]:
        """The values of all targets, or of those that posted within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while len(values := self.read(kind, num_targets)) < num_targets and time.monotonic() < deadline:
            time.sleep(0.1)
        return values
