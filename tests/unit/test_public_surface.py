"""What is public says so in ``__all__``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import nccl_stream

# Packages that only hold modules.
PLAIN_PACKAGES = {
    f"nccl_stream.{name}" for name in ("coordination", "interop", "ranks", "streamed", "testing", "transport")
}


@pytest.mark.parametrize("flag", ["is_closed", "is_drained"])
def test_state_of_the_queue_is_a_property(flag):
    assert isinstance(inspect.getattr_static(nccl_stream.SampleRefQueue, flag), property)


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(nccl_stream.__path__, prefix="nccl_stream.")
    # Neither a program nor what the compiler made has a public surface.
    names = (module.name for module in found if not module.name.endswith((".__main__", "._native")))
    return [nccl_stream, *(importlib.import_module(name) for name in names)]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_module_says_what_is_public_and_has_it(module):
    if module.__name__ in PLAIN_PACKAGES:
        assert not hasattr(module, "__all__")
        return
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    missing = [name for name in exported if not hasattr(module, name)]
    assert missing == []
