"""Of tests with many cases of a kind a sample runs, and all of them on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = """
import pytest

@pytest.mark.sample("a", "{second}")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_case(name): pass

@pytest.mark.sample()
def test_long(): pass

def test_short(): pass
"""


def collected(
    folder: Path, *arguments: str, second: str = "c", whole: bool = False
) -> tuple[int, set[str]]:
    """Exit status, and the names of the tests that would run."""
    file = folder / "test_cases.py"
    file.write_text(CASES.format(second=second))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "conftest"]
    end = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), *(arguments or [str(file)])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"HP_WHOLE": "1" if whole else ""},
    )
    lines = (line.partition("::")[2] for line in end.stdout.splitlines())
    return end.returncode, {name for name in lines if name}


def test_the_sample_runs(tmp_path: Path) -> None:
    assert collected(tmp_path) == (0, {"test_case[a]", "test_case[c]", "test_short"})


def test_all_cases_run_on_request(tmp_path: Path) -> None:
    status, names = collected(tmp_path, whole=True)
    assert (status, len(names)) == (0, 5)


@pytest.mark.parametrize("name", ["test_case[b]", "test_long"])
def test_a_case_that_is_named_runs(name: str, tmp_path: Path) -> None:
    assert collected(tmp_path, f"{tmp_path / 'test_cases.py'}::{name}") == (0, {name})


def test_a_case_that_is_named_leaves_the_sample_of_other_files_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "test_others.py"
    other.write_text(CASES.format(second="c").replace("_case", "_other"))

    status, names = collected(tmp_path, f"{tmp_path / 'test_cases.py'}::test_case[b]", str(other))

    assert status == 0
    assert names == {"test_case[b]", "test_other[a]", "test_other[c]", "test_short"}


def test_a_sample_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    status, _ = collected(tmp_path, second="d")
    assert status == pytest.ExitCode.USAGE_ERROR
