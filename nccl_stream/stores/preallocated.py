"""What a target rank preallocates for its samples, as it is configured."""

from __future__ import annotations

import contextlib
import logging

import torch

from nccl_stream.config import Staging, StreamConfig, slot_bound
from nccl_stream.device_staging import DeviceStager, is_available
from nccl_stream.errors import ConfigError
from nccl_stream.stores.staged import Place, SampleMemory
from nccl_stream.transport.arena import Arena

__all__ = ["arena_bytes", "make_sample_memory"]

logger = logging.getLogger(__name__)


def arena_bytes(config: StreamConfig, staging: Staging, num_drafts: int, *, on_gpu: bool) -> dict[Place, int]:
    """Sizes of the memory that a target rank preallocates in each place.

    Page-locked memory must do for everything that the rank may hold and the GPU does not: more of it is costly to get.
    """
    cap = config.device_cap if on_gpu or config.device_bytes is not None else 0
    if on_gpu:
        on_host = slot_bound(config.resident_cap(num_drafts) - (cap if staging == "auto" else 0)) + config.slot_bytes()
    else:
        # One memory, whatever it is called; only a cap that was asked for divides it.
        on_host = config.max_bytes + config.slot_bytes() - (cap if staging == "auto" else 0)
    sizes: dict[Staging, dict[Place, int]] = {
        "device": {"device": config.max_bytes + config.slot_bytes(), "host": 0},
        "pinned": {"device": 0, "host": on_host},
        "auto": {"device": cap + config.slot_bytes() if cap else 0, "host": on_host},
    }
    return sizes[staging]


def _host_arena(nbytes: int, *, pin: bool) -> Arena:
    try:
        return Arena(nbytes, pin=pin)
    except ConfigError as error:
        raise ConfigError(
            f"the host does not page-lock {nbytes} bytes, in which samples wait for their drafts: lower max_bytes, or "
            'set staging="device" to have them wait on the GPU'
        ) from error


def make_sample_memory(config: StreamConfig, device: torch.device, num_drafts: int = 1) -> SampleMemory:
    """The memory of a target rank, as it is configured.

    Raises:
        ConfigError: ``staging="pinned"`` on a GPU where the compiled core has no CUDA part, or memory of the host that
            cannot be page-locked.
        CapacityError: the host does not have that much memory.
        DeviceError: a CUDA call failed.
    """
    staging, on_gpu = config.staging, device.type == "cuda"
    if on_gpu and not is_available():
        if staging == "pinned":
            raise ConfigError(
                'staging="pinned" on a GPU needs the CUDA part of the compiled core: reinstall nccl-stream where nvcc '
                'is on the PATH, or set staging="device"'
            )
        if staging == "auto":
            logger.info("samples wait on %s alone: the compiled core has no CUDA part here", device)
            staging = "device"
    sizes = arena_bytes(config, staging, num_drafts, on_gpu=on_gpu)
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():  # whose context locks the pages
        host_arena = _host_arena(sizes["host"], pin=on_gpu) if sizes["host"] else None
        climbs = on_gpu and host_arena is not None
        return SampleMemory(
            device,
            staging=staging,
            device_arena=Arena(sizes["device"], device) if sizes["device"] else None,
            host_arena=host_arena,
            device_bytes=config.device_cap if on_gpu or config.device_bytes is not None else 0,
            down=DeviceStager(device, streams=2) if climbs else None,
            up=DeviceStager(device, streams=2) if climbs else None,
            chunk_bytes=config.chunk_bytes,
        )
