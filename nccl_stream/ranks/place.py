"""Where a process stands in a run: its role and rank, its device, and the store where all meet."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.distributed_c10d import Store

from nccl_stream.config import StreamConfig
from nccl_stream.coordination.kv import launch_store, tcp_store
from nccl_stream.errors import ConfigError, ControlStoreError

__all__ = ["Place", "Role", "find_place", "pick_device", "reach_store"]

Role = Literal["target", "draft"]

MAX_PORT = 65535
_MAX_DIGITS = 18
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Place:
    """Where this process stands in the run.

    Attributes:
        role: what it does.
        rank: within its role.
        num_targets: target ranks of the run.
        num_drafts: draft ranks of the run.
        one_launch: whether all ranks were started together, and go down together.
        scope: which start of the launch this is; ranks of different ones never meet.
        global_ranks: the ranks of this role in the launch.
        hosts_store: whether the store that all meet at lives in this process.
    """

    role: Role
    rank: int
    num_targets: int
    num_drafts: int
    one_launch: bool
    scope: str
    global_ranks: tuple[int, ...]
    hosts_store: bool = False


def reach_store(store: str | Store | None, timeout: float) -> Store:
    """Return a client of the store where all meet, None for torchrun's own. Blocks up to ``timeout`` seconds.

    Raises:
        ConfigError: a malformed address, or something that is no store.
        ControlStoreError: nobody answers at it.
    """
    if store is None:
        return _reach_own_store(timeout)
    if isinstance(store, str):
        host, port = _parse_address(store)
        try:
            return tcp_store(host, port, serve=False, timeout=timeout)
        except (RuntimeError, ValueError) as exc:
            where = "" if host in _LOOPBACK else "--host 0.0.0.0 "
            raise ControlStoreError(
                f"no store answers at {store} within {timeout:.0f} s: start one there with "
                f"'nccl-stream store {where}--port {port}' ({_first_line(exc)})"
            ) from exc
    if not all(callable(getattr(store, method, None)) for method in ("clone", "compare_set")):
        raise ConfigError(f"store must be None, 'tcp://host:port' or a TCPStore, got {type(store).__name__}")
    return store


def _reach_own_store(timeout: float) -> Store:
    """The store of this launch, which torchrun's agent keeps, or else its first rank."""
    host, port = os.environ.get("MASTER_ADDR", ""), _env_int("MASTER_PORT")
    if not host or port is None:
        raise ConfigError(
            "RANK is set, but not MASTER_ADDR and MASTER_PORT: start this under torchrun, set them, or pass a store"
        )
    if not 0 < port <= MAX_PORT:
        raise ConfigError(f"MASTER_PORT={port} in the environment is not a port")
    agent = _agent_keeps_store()
    serve = not agent and _env_int("RANK") == 0
    try:
        return launch_store(host, port, serve=serve, timeout=timeout)
    except (RuntimeError, ValueError) as exc:
        keeper = "torchrun's agent" if agent else "rank 0 of the launch"
        what = "cannot be kept" if serve else f"does not answer within {timeout:.0f} s"
        raise ControlStoreError(
            f"the store at MASTER_ADDR:MASTER_PORT = {host}:{port}, which {keeper} keeps, {what}: {_first_line(exc)}"
        ) from exc


def _agent_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _parse_address(address: str) -> tuple[str, int]:
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    number = _parse_number(port)
    if not address.startswith("tcp://") or not separator or not host or number is None or not 0 < number <= MAX_PORT:
        raise ConfigError(f"a store address looks like tcp://host:port, got {address!r}")
    return host.strip("[]"), number


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def _env_int(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    number = _parse_number(value)
    if number is None:
        raise ConfigError(f"{name}={value!r} in the environment is not a number")
    return number


def find_place(
    store: object,
    role: Role | None,
    rank: int | None,
    num_targets: int | None,
    num_drafts: int | None,
    target_ranks: Sequence[int] | None,
) -> Place:
    """Find role and rank from what :func:`~nccl_stream.session.connect` was given and torchrun's environment.

    Raises:
        ConfigError: they do not fit together; the message says what to pass.
    """
    if role not in (None, "target", "draft"):
        raise ConfigError(f"role must be 'target' or 'draft', got {role!r}")
    for name, value in (("num_targets", num_targets), ("num_drafts", num_drafts)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a positive int, got {value!r}")
    if rank is not None and type(rank) is not int:
        raise ConfigError(f"rank must be an int, got {rank!r}")
    if role is None and rank is not None:
        raise ConfigError("rank goes with role: give both (two launches) or neither (one launch)")
    env_rank, env_world = _env_int("RANK"), _env_int("WORLD_SIZE")
    if role is not None:
        return _place_of_two_launches(role, rank, env_rank, env_world, num_targets, num_drafts)
    if env_rank is None or env_world is None:
        raise ConfigError(
            "no role given and RANK/WORLD_SIZE are not set: start this under torchrun, or pass role, rank, num_targets "
            "and num_drafts"
        )
    if target_ranks is None:
        if num_targets is None:
            raise ConfigError("give num_targets (the first ranks are targets) or target_ranks")
        target_ranks = range(num_targets)
    elif not isinstance(target_ranks, Collection) or any(type(r) is not int for r in target_ranks):
        raise ConfigError(f"target_ranks must be a sequence of ints, got {target_ranks!r:.80}")
    targets = tuple(sorted(set(target_ranks)))
    drafts = tuple(r for r in range(env_world) if r not in targets)
    if not targets or targets[0] < 0 or targets[-1] >= env_world or not drafts:
        raise ConfigError(
            f"{len(targets)} target ranks {list(targets)[:8]} do not fit a world of {env_world}: at least one target "
            f"and one draft rank are needed. Start torchrun with more processes, or lower num_targets."
        )
    if num_targets is not None and num_targets != len(targets):
        raise ConfigError(f"num_targets={num_targets}, but target_ranks names {len(targets)}")
    if num_drafts is not None and num_drafts != len(drafts):
        raise ConfigError(
            f"num_drafts={num_drafts}, but a world of {env_world} with {len(targets)} targets leaves {len(drafts)}"
        )
    own = targets if env_rank in targets else drafts
    scope = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = store is None and env_rank == 0 and not _agent_keeps_store()
    return Place(
        "target" if own is targets else "draft", own.index(env_rank), len(targets), len(drafts), True, scope, own, hosts
    )


def _place_of_two_launches(
    role: Role,
    rank: int | None,
    env_rank: int | None,
    env_world: int | None,
    num_targets: int | None,
    num_drafts: int | None,
) -> Place:
    own = num_targets if role == "target" else num_drafts
    if rank is None:
        rank = env_rank
        if env_world is not None:
            if own is not None and own != env_world:
                raise ConfigError(f"num_{role}s={own}, but this launch has {env_world} ranks")
            own = env_world
    if role == "target":
        num_targets = own
    else:
        num_drafts = own
    if rank is None or num_targets is None or num_drafts is None:
        raise ConfigError(
            "with a role, num_targets and num_drafts are needed (this launch's own count and rank come from torchrun, "
            "the rest must be given)"
        )
    assert own is not None
    if not 0 <= rank < own:
        raise ConfigError(f"{role} rank {rank} is outside of the {own} {role} ranks")
    return Place(role, rank, num_targets, num_drafts, False, "0", tuple(range(own)))


def pick_device(config: StreamConfig) -> torch.device:
    """Return the device of this rank's memory: the configured one, else torchrun's local GPU, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    if config.device is not None:
        device = torch.device(config.device)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={config.device!r}, but this process sees no GPU; use device='cpu' for gloo links"
            )
        if device.index is None:
            local = _env_int("LOCAL_RANK")
            device = torch.device("cuda", torch.cuda.current_device() if local is None else local)
    elif device.type != "cpu":
        raise ConfigError(f"streams run on cuda or cpu, got device={config.device!r}")
    return device
