"""docs/migration.md says where names of other projects are found here; what it says must be so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
STATUSES = ("here", "planned: hp-", "none: ")


def rows() -> list[tuple[str, str, str]]:
    """Return (there, here, status) of every row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(there, here, status) for there, here, status in cells]


def resolve(path: str) -> object:
    """Return what a dotted path names, importing as much of it as is a module."""
    parts = path.split(".")
    target: object = importlib.import_module(parts[0])
    for i, name in enumerate(parts[1:], start=2):
        if not hasattr(target, name):
            importlib.import_module(".".join(parts[:i]))
        target = getattr(target, name)
    return target


def names_here() -> list[str]:
    here = [cell for _, cell, status in rows() if status == "here"]
    return sorted({name for cell in here for name in re.findall(r"`(hp_[\w.]+)`", cell)})


def test_every_row_has_a_status() -> None:
    unclear = [there for there, _, status in rows() if not status.startswith(STATUSES)]
    assert not unclear


def test_every_row_that_says_here_names_a_place() -> None:
    placeless = [there for there, here, status in rows() if status == "here" and "`hp_" not in here]
    assert not placeless


def test_no_name_has_two_rows() -> None:
    names = [there for there, _, _ in rows()]
    assert len(names) > 60
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", names_here())
def test_name_that_is_said_to_be_here_exists(name: str) -> None:
    assert resolve(name) is not None
