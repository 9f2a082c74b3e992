"""Which CUDA compilers the build takes, and what it builds for. Skips where there is no CMake or no CUDA compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "ninja", "nvcc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.timeout(300),
]


def configure(build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DNCCL_STREAM_PYTHON=OFF", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.fixture
def old_compiler(tmp_path: Path) -> Path:
    """A compiler that works, and says that it is of CUDA 11.5, as Debian 12 has it."""
    nvcc = tmp_path / "old-nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "Cuda compilation tools, release 11.5, V11.5.119"; exit; }\n'
        f'exec "{shutil.which("nvcc")}" "$@"\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def test_compiler_that_is_too_old_counts_as_none(tmp_path: Path, old_compiler: Path) -> None:
    done = configure(tmp_path / "auto", f"-DCMAKE_CUDA_COMPILER={old_compiler}")
    assert done.returncode == 0, done.stderr
    assert "CUDA part OFF" in done.stdout
    done = configure(tmp_path / "on", f"-DCMAKE_CUDA_COMPILER={old_compiler}", "-DNCCL_STREAM_CUDA=ON")
    assert done.returncode != 0
    assert "11.8" in done.stderr


def test_kernels_are_built_for_every_generation_from_turing_on(tmp_path: Path) -> None:
    done = configure(tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert "CUDA part ON" in done.stdout
    targets = set(map(int, re.findall(r"\bsm_(\d+)", (tmp_path / "build" / "build.ninja").read_text())))
    assert {75, 80, 90} <= targets
