"""The process group of the ranks of one role, which training code gives to DDP or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig, Store, get_backend_config

from nccl_stream.errors import ConfigError
from nccl_stream.ranks.place import Place

__all__ = ["check_backend", "make_role_group"]


def make_role_group(
    place: Place, store: Callable[[], Store], device_type: str, backend: str | None, timeout: float | None
) -> tuple[Any, bool]:
    """The group, and whether it was made the process's default group here; all ranks of the role call it.

    Args:
        place: of this rank.
        store: makes a client of this group's own, under a prefix that the ranks of the role share.
        device_type: of the stream.
        backend: None for NCCL on a GPU and gloo on the CPU, or what the default group has.
        timeout: of collectives and of forming the group, in seconds; None for torch's own.

    Raises:
        ConfigError: the process's default group has other ranks, or another backend than was asked for.
    """
    world_size = place.num_targets if place.role == "target" else place.num_drafts
    limit = None if timeout is None else timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group(
            backend or ("nccl" if device_type == "cuda" else "gloo"),
            store=store(),
            rank=place.rank,
            world_size=world_size,
            timeout=limit,
        )
        return dist.group.WORLD, True
    if dist.get_world_size() == world_size:
        if dist.get_rank() != place.rank:
            raise ConfigError(
                f"the default process group has this process as rank {dist.get_rank()}, the stream as {place.role} "
                f"rank {place.rank}"
            )
        check_backend(dist.group.WORLD, backend, device_type)
        return dist.group.WORLD, False
    if dist.get_world_size() == place.num_targets + place.num_drafts:
        ranks = list(place.global_ranks)
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True, timeout=limit), False
    raise ConfigError(
        f"the default process group has {dist.get_world_size()} ranks: neither the {world_size} of this role nor all "
        "of the run"
    )


def check_backend(group: Any, backend: str | None, device_type: str) -> None:
    """Refuse a backend that an existing group does not have on this kind of device; None is any.

    Raises:
        ConfigError: names both.
    """
    if backend is None:
        return
    has = dict(pair.split(":", 1) for pair in get_backend_config(group).split(","))
    asked = BackendConfig(Backend(backend)).get_device_backend_map()
    if has.get(device_type) != asked.get(device_type) or device_type not in has:
        raise ConfigError(
            f"process_group(backend={backend!r}): there is a group already, with {get_backend_config(group)}. Ask for "
            "that, or make the stream's group first"
        )
