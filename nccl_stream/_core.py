"""Picks the compiled core, or what stands in for it."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

from nccl_stream import _native_fallback

__all__ = ["core", "cuda_compiled", "is_compiled", "native"]

logger = logging.getLogger(__name__)

_announced = threading.Lock()  # taken once, by whoever gives the warning

_API_VERSION = 4
_why_absent = ""
native: Any = None
try:
    native = importlib.import_module("nccl_stream._native")
except ImportError as error:
    _why_absent = str(error)
else:
    if getattr(native, "api_version", 0) != _API_VERSION:
        native = None
        _why_absent = "it was built from other sources than this file belongs to"


def is_compiled() -> bool:
    """Whether the compiled core is in use."""
    return native is not None


def cuda_compiled() -> bool:
    """Whether the compiled core has its CUDA part. Says nothing about a GPU being there."""
    return native is not None and native.cuda_compiled


def core() -> Any:
    """The module that does the work: ``_native``, or ``_native_fallback`` with the same functions."""
    if native is not None:
        return native
    if _announced.acquire(blocking=False):
        logger.warning(
            "the compiled core is absent (%s); staging runs in Python, and checksums are about a hundred times slower. "
            "Reinstall nccl-stream with a C++17 compiler to have it",
            _why_absent,
        )
    return _native_fallback
