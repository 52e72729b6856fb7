"""The measure of what tests find: its list of changes, and a run of it on a small repository."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutants.__main__ as series
import pytest
from mutants.__main__ import Change, Map, Outcome, read_changes, read_outcomes, table

ROOT = Path(__file__).parents[2]
CHANGES = read_changes(ROOT / "tools" / "mutants" / "changes.toml")

SOURCE = """
LIMIT = 3

def double(x):
    def inner(y):
        return y + y
    return inner(x)

def half(x):
    return x / 2
"""
TESTS = """
import os, time
from hp_tiny import LIMIT, double, half

def test_in_a_child_process():
    if (pid := os.fork()) == 0:
        os._exit(double(2))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4

def test_limit():
    assert LIMIT == 3 and double(0) == 0

def test_half_is_a_number():
    assert isinstance(half(1), float)
"""
IN_ORDER = """
import time
RUN = []

def test_that_takes_longer_and_must_be_the_first():
    time.sleep(0.5)
    assert not RUN

def test_it():
    RUN.append("it")
"""
TINY_CHANGES = """
[[change]]
name = "double-is-a-square"
area = "sums"
file = "packages/hp-tiny/src/hp_tiny/__init__.py"
old = "y + y"
new = "y * y * y"
wrong = "numbers"

[[change]]
name = "half-is-a-third"
area = "sums"
file = "packages/hp-tiny/src/hp_tiny/__init__.py"
old = "x / 2"
new = "x / 3"
wrong = "numbers"

[[change]]
name = "limit"
area = "limits"
file = "packages/hp-tiny/src/hp_tiny/__init__.py"
old = "LIMIT = 3"
new = "LIMIT = 4"
wrong = "the limit"
"""


def test_there_are_enough_changes_in_every_area() -> None:
    areas = Counter(change.area for change in CHANGES)
    assert len(CHANGES) >= 120
    assert min(areas.values()) >= 8, areas
    wanted = "mesh gradients parallelize dispatch attention schedules checkpoint data counts"
    assert set(wanted.split()) <= set(areas)


def test_names_of_changes_are_unique() -> None:
    assert len({change.name for change in CHANGES}) == len(CHANGES)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_can_be_made(change: Change) -> None:
    text = (ROOT / change.file).read_text()
    assert text.count(change.old) == 1
    assert change.wrong
    changed = ast.parse(text.replace(change.old, change.new))
    assert ast.dump(changed) != ast.dump(ast.parse(text))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a package of two functions, one of which is hardly tested."""
    root = tmp_path_factory.mktemp("tiny")
    package = root / "packages" / "hp-tiny"
    for folder in (package / "src" / "hp_tiny", package / "tests", root / "integration_tests"):
        folder.mkdir(parents=True)
    (package / "src" / "hp_tiny" / "__init__.py").write_text(SOURCE)
    (package / "tests" / "test_tiny.py").write_text(TESTS)
    (root / "integration_tests" / "test_order.py").write_text(IN_ORDER)
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "reaping.py", root / "tools")
    (root / "changes.toml").write_text(TINY_CHANGES)
    (root / ".gitignore").write_text("known\n__pycache__\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "tiny")
    mutants(root, "record")
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True, timeout=60)


def mutants(root: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = {"--root": root, "--folder": root / "known", "--changes": root / "changes.toml"}
    where = [str(word) for option in places.items() for word in option]
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "mutants", command, *where, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_tests_are_known_by_the_functions_they_enter(repository: Path) -> None:
    """Also those that only a child process enters, which ends without a farewell."""
    known = Map(repository / "known" / "map")
    file = "packages/hp-tiny/src/hp_tiny/__init__.py"
    double, inner, half = (f"{file}:{name}" for name in ("double", "double.inner", "half"))
    names = {"test_in_a_child_process", "test_limit"}
    assert {test.partition("::")[2] for test in known.tests(double)} == names
    assert {test.partition("::")[2] for test in known.tests(inner)} == names
    assert [test.partition("::")[2] for test in known.tests(half)] == ["test_half_is_a_number"]


def test_what_no_test_finds_is_named_and_what_is_known_is_not_tried_again(
    repository: Path,
) -> None:
    ended = mutants(repository, "run", "--workers", "2")
    outcomes = {outcome.name: outcome for outcome in read_outcomes(repository / "known")}
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not found: half-is-a-third" in ended.stdout
    assert outcomes["double-is-a-square"].found_by.endswith("::test_in_a_child_process")
    assert outcomes["limit"].found_by.endswith("::test_limit")
    assert outcomes["half-is-a-third"].everything
    changes = repository / "changes.toml"
    changes.write_text(changes.read_text().replace('"LIMIT = 4"', '"LIMIT = 5"'))
    again = mutants(repository, "run")
    assert "limit: found by" in again.stdout  # another change than the one that is known
    assert "half-is-a-third: " not in again.stdout
    assert "together           3      2" in again.stdout
    changes.write_text(changes.read_text().replace('"LIMIT = 5"', '"LIMIT = 1 / 0"'))
    assert "limit: found by" in mutants(repository, "run").stdout  # no test can be collected


def test_what_took_long_is_run_again_alone_if_alone_it_finds_the_change(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    real = series._failing

    def failing(tree: Path, tests: list[str], known: Map) -> str:
        asked.append([test.partition("::")[2] for test in tests])
        return real(tree, tests, known)

    for variable, value in (("PYTHONPATH", ""), ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(series, "_failing", failing)
    monkeypatch.setattr(series, "_AGAIN_SECONDS", -1.0)
    known = Map(repository / "known" / "map")
    tree = series._tree(repository, repository / "known" / "worker-alone")
    change = read_changes(repository / "changes.toml")[0]
    outcome = series._judge(change, tree, known, everything=False)
    assert outcome.found_by.endswith("::test_in_a_child_process")
    assert set(asked[0]) == {"test_in_a_child_process", "test_limit"}
    assert asked[1:] == [["test_in_a_child_process"]] * 2  # with the change, and without


def test_a_test_that_has_another_name_now_is_no_failure(repository: Path) -> None:
    recorded = next((repository / "known" / "map").glob("*tiny*/tests.jsonl"))
    text = recorded.read_text()
    recorded.write_text(text.replace("::test_limit", "::test_limit[17:04]"))
    changes = repository / "changes.toml"
    changes.write_text(changes.read_text().replace('"x / 3"', '"x / 4"'))
    try:
        ended = mutants(repository, "run")
    finally:
        recorded.write_text(text)
    assert "not there any more: packages/hp-tiny/tests/test_tiny.py::test_limit[17" in ended.stdout
    assert "half-is-a-third: NOT FOUND" in ended.stdout


def test_the_table_counts_by_area() -> None:
    found = [("a", "mesh", "test_x"), ("b", "mesh", ""), ("c", "data", "test_y")]
    outcomes = [
        Outcome(name, name, area, test, 1, 0.0, everything=False) for name, area, test in found
    ]
    rows = [line.split() for line in table(outcomes).splitlines()]
    assert rows[1:] == [
        ["data", "1", "1"],
        ["mesh", "2", "1"],
        ["together", "3", "2"],
        ["not", "found:", "b"],
    ]
