"""Importing the package has no effect on the process, and imports inside it point down."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nccl_stream

ROOT = Path(nccl_stream.__file__).parents[1]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(nccl_stream.__path__, prefix="nccl_stream.")
    if not module.name.endswith(".__main__")
)

# Third parties are imported first, so that only what our own modules do is seen.
PROBE = """
import importlib, logging, os, signal, sys, threading, warnings
import numpy, safetensors, torch, torch.distributed
from torch.distributed import TCPStore
for name in {third_parties!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass

reads = []

class WatchedEnviron(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        reads.append(key)
        return super().__contains__(key)

    def __iter__(self):
        reads.append("*")
        return super().__iter__()

def state():
    loggers = {{
        name: (logger.level, logger.propagate, len(logger.handlers), logger.disabled)
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and not name.startswith("nccl_stream")
    }}
    ours = [
        name for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith("nccl_stream") and isinstance(logger, logging.Logger) and (logger.handlers or logger.level)
    ]
    return {{
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "os_threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "root_logger": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "loggers": loggers,
        "our_loggers": ours,
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "process_group": torch.distributed.is_initialized(),
    }}

before = state()
os.environ.__class__ = WatchedEnviron
reads.clear()
for name in {modules!r}:
    importlib.import_module(name)
seen = list(reads)
os.environ.__class__ = WatchedEnviron.__mro__[1]
after = state()
known = set(before["loggers"])
after["loggers"] = {{name: value for name, value in after["loggers"].items() if name in known}}
problems = [f"{{key}} changed from {{before[key]}} to {{after[key]}}" for key in before if before[key] != after[key]]
if seen:
    problems.append(f"environment read: {{seen}}")
if problems:
    sys.exit("; ".join(problems))
print("clean")
"""


def run_probe(modules: list[str], path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = PROBE.format(modules=modules, third_parties=third_parties())
    return subprocess.run(
        [sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=False, timeout=110
    )


def third_parties() -> list[str]:
    """What test helpers of the package may import from elsewhere."""
    return [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name)]


def test_importing_every_module_starts_nothing_reads_no_environment_and_configures_nothing():
    assert len(MODULES) > 10
    result = run_probe(["nccl_stream", *MODULES])
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "clean"


GUILTY = """
import logging, os, signal, threading, torch
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.environ.get("VIA_GET"), os.getenv("VIA_GETENV"), "VIA_IN" in os.environ
os.environ["VIA_SET"] = "1"
logging.basicConfig()
logging.getLogger("nccl_stream.x").setLevel("DEBUG")
signal.signal(signal.SIGTERM, lambda *_: None)
torch.set_grad_enabled(False)
"""


def test_probe_notices_a_module_that_does_have_effects(tmp_path):
    (tmp_path / "guilty.py").write_text(GUILTY)
    result = run_probe(["guilty"], tmp_path)
    assert result.returncode != 0
    for what in ("threads", "root_logger", "our_loggers", "signals", "environment", "torch"):
        assert f"{what} changed" in result.stderr, what
    for variable in ("VIA_GET", "VIA_GETENV", "VIA_IN"):
        assert f"'{variable}'" in result.stderr


# An editable installation redirects imports to its own checkout, whatever the path says.
LINT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


needs_checkout = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a source checkout")


@needs_checkout
def test_imports_point_down():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 broken" in result.stdout


@needs_checkout
@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("refs.py", "nccl_stream.loader"),
        ("transport/layout.py", "nccl_stream.coordination"),
        ("coordination/__init__.py", "nccl_stream.transport"),
    ],
)
def test_import_that_points_up_or_across_is_noticed(tmp_path, module, imported):
    shutil.copytree(ROOT / "nccl_stream", tmp_path / "nccl_stream", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "nccl_stream" / module).open("a") as source:
        source.write(f"\nimport {imported}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout
