"""What the launchers install is pinned, down to the last package that something else asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
INSTALLED_EXTRAS = ("hf", "demo", "test", "lint", "trainers")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The pins that hold for this Python."""
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    parsed = [requirements.Requirement(line) for line in lines if line and not line.startswith("#")]
    held = [pin for pin in parsed if pin.marker is None or pin.marker.evaluate()]
    assert len({normal(pin.name) for pin in held}) == len(held), "a package is pinned twice"
    return {normal(pin.name): str(pin.specifier) for pin in held}


def wanted() -> Iterator[requirements.Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    assert set(INSTALLED_EXTRAS) == set(optional)
    texts = [*project["build-system"]["requires"], *project["project"]["dependencies"], *chain(*optional.values())]
    yield from map(requirements.Requirement, texts)
    yield from map(requirements.Requirement, ("cmake", "ninja"))  # what scikit-build-core adds where they are missing


def closure() -> set[str]:
    """Names of all that these requirements come to; what is not installed here is not looked into."""
    seen: set[tuple[str, str]] = set()
    waiting = [(normal(each.name), extra) for each in wanted() for extra in ("", *each.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(requirements.Requirement, texts):
            exact = [spec.operator for spec in each.specifier] == ["=="]  # as torch asks for its CUDA libraries
            if not exact and (each.marker is None or each.marker.evaluate({"extra": extra})):
                waiting += [(normal(each.name), inner) for inner in ("", *each.extras)]
    return {name for name, _ in seen}


def test_everything_that_gets_installed_is_pinned() -> None:
    assert sorted(closure() - pins().keys()) == []


def test_pins_are_exact() -> None:
    assert [name for name, specifier in pins().items() if not re.fullmatch(r"==[0-9][0-9a-z.]*", specifier)] == []
