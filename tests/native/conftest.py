"""Everything here runs twice: over the compiled core, and over what stands in for it."""

from __future__ import annotations

import pytest

from nccl_stream import _core


@pytest.fixture(params=["compiled", "python"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(_core, "native", None)
    elif not _core.is_compiled():
        pytest.skip("nccl_stream was installed without its compiled core")
    return request.param
