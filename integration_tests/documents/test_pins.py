"""What sessions and the container install has its version in constraints.txt, and nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lock import (
    HEAD,
    HEAD_OF_HASHES,
    LOCK,
    LOWEST_PYTHON,
    as_constraints,
    as_hashes,
    with_hashes,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
LOCAL = {file.parent.name for file in FILES[1:]}
PINS = {
    pin.name: Version(next(iter(pin.specifier)).version)
    for pin in map(Requirement, LOCK.read_text().removeprefix(HEAD).splitlines())
}


def required(table: dict[str, Any]) -> Iterator[Requirement]:
    """Yield what a pyproject.toml requires: for builds, for itself, in extras and in groups."""
    project = table.get("project", {})
    lists = [table.get("build-system", {}).get("requires", []), project.get("dependencies", [])]
    lists += project.get("optional-dependencies", {}).values()
    lists += table.get("dependency-groups", {}).values()
    for texts in lists:
        yield from (Requirement(text) for text in texts if isinstance(text, str))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_everything_that_is_required_has_a_pin_that_fits(file: Path) -> None:
    found = list(required(tomllib.loads(file.read_text())))
    assert found
    for requirement in found:
        name = canonicalize_name(requirement.name)
        if name == "triton":  # of the CPU's sessions alone: torch's CUDA builds name another one
            assert name not in PINS
            assert "==" in str(requirement.specifier)
        elif name not in LOCAL:
            assert PINS[name] in requirement.specifier, requirement


def test_the_lowest_python_of_all_packages_is_that_of_the_pins() -> None:
    ranges = {tomllib.loads(f.read_text())["project"]["requires-python"] for f in FILES[1:]}
    assert {SpecifierSet(text) for text in ranges} == {SpecifierSet(f">={LOWEST_PYTHON}")}


def test_the_pins_name_no_place_and_force_no_build_of_torch() -> None:
    text = LOCK.read_text()
    assert not re.search(r"://|^\s*-|@", text, re.MULTILINE)
    assert PINS["torch"].local is None
    assert not [name for name in PINS if re.match(r"nvidia|cuda|triton|hp-", name)]


def test_uv_finds_every_package_in_the_workspace() -> None:
    uv = tomllib.loads(FILES[0].read_text())["tool"]["uv"]
    assert uv["workspace"] == {"members": ["packages/*"]}
    assert uv["sources"] == {name: {"workspace": True} for name in LOCAL}


def test_a_marker_stays_where_it_tells_two_versions_apart() -> None:
    pins = ["a==1 ; python_version < '3.12'", "a==2 ; python_version >= '3.12'"]
    text = as_constraints([*pins, "b==3 ; sys_platform == 'linux'", "torch==2.13.0+cpu"])
    assert text.removeprefix(HEAD).splitlines() == [*pins, "b==3", "torch==2.13.0"]


def test_hashes_are_those_that_uv_has_found() -> None:
    found = with_hashes("a==1 ; x \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\nb==2\n")
    assert found == {"a==1 ; x": ["sha256:0", "sha256:1"], "b==2": []}
    text = as_hashes(found).removeprefix(HEAD_OF_HASHES)
    assert text == "a==1 \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\nb==2\n"


def test_the_container_copies_what_is_there_and_obeys_the_pins_as_an_ordinary_user() -> None:
    text = (ROOT / "Containerfile").read_text()
    copied = re.findall(r"^COPY (\S+) \S+$", text, re.MULTILINE)
    assert copied == [LOCK.name, "packages/"]
    assert all((ROOT / source).exists() for source in copied)
    installed, _, run = text.partition("\nUSER hp\n")
    assert f"pip install --no-cache-dir --constraint /opt/hp/{LOCK.name}" in installed
    assert 'ENTRYPOINT ["hp"]' in run
