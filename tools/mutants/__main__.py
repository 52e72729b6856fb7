"""Measure what tests find: make small wrong changes, one at a time, and run tests against each.

    python tools/mutants record   # which test enters which function, and how long it takes
    python tools/mutants run      # each change against the tests that enter its function
    python tools/mutants table    # what was found, by area

`changes.toml` lists the changes. Tests that enter the function are run, the quickest first, until
one fails; up to that one they must pass again without the change. A change that they do not find
gets all other tests of the default command. Both `record` and `run` go on where they were stopped.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GOAL = 0.95


@dataclass(frozen=True)
class Change:
    """A small change that makes the packages wrong.

    Args:
        name: Unique name.
        area: What it is part of.
        file: Path from the root of the repository.
        old: Text that occurs once in the file.
        new: What takes its place.
        wrong: What a user sees of it.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    wrong: str

    @property
    def digest(self) -> str:
        """Tells the change from another one of its name."""
        text = f"{self.file}\x00{self.old}\x00{self.new}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def apply(self, tree: Path) -> None:
        """Change the file in a tree.

        Raises:
            ValueError: When the old text does not occur exactly once.
        """
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times, not once")
        _write(tree / self.file, text.replace(self.old, self.new))

    def function(self, tree: Path) -> str:
        """Return the innermost function that the change begins in, as tests are recorded by.

        Returns:
            Path and name (`packages/.../file.py:Class.method`); the path alone outside functions.
        """
        text = (tree / self.file).read_text()
        pairs = enumerate(zip(self.old, self.new, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.old), len(self.new)))
        line = text[: text.index(self.old) + same].count("\n") + 1
        around = [
            f"{self.file}:{name}"
            for name, node in _functions(ast.parse(text))
            if _first_line(node) <= line <= (node.end_lineno or 0)
        ]
        return around[-1] if around else self.file  # an inner one comes after its outer one


@dataclass(frozen=True)
class Outcome:
    """What tests said to a change.

    Args:
        name: Name of the change.
        digest: Digest of the change.
        area: Area of the change.
        found_by: Test that failed; empty if none did.
        chosen: Number of tests that enter the function.
        seconds: What they took, up to the failure.
        everything: Whether all tests were run.
    """

    name: str
    digest: str
    area: str
    found_by: str
    chosen: int
    seconds: float
    everything: bool


def read_changes(file: Path) -> list[Change]:
    """Read the list of changes."""
    return [Change(**table) for table in tomllib.loads(file.read_text())["change"]]


def suites(tree: Path) -> list[str]:
    """Return the folders of tests, each of which has a run of pytest of its own."""
    found = sorted(str(path.relative_to(tree)) for path in tree.glob("packages/*/tests"))
    return [*found, "integration_tests"]


class Map:
    """Which test enters which function, as `record` has found.

    Args:
        folder: Folder of the records.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._tests: defaultdict[str, set[str]] = defaultdict(set)
        for suite in sorted(path.parent for path in folder.glob("*/done")):
            lines = (suite / "tests.jsonl").read_text().splitlines()
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
            failed = {row["test"] for row in rows if row["failed"]}  # as they are recorded, or so
            passed = [row for row in rows if row["test"] not in failed]
            self.seconds |= {row["test"]: row["seconds"] for row in passed}
            names = {str(row["number"]): row["test"] for row in passed}
            for line in set((suite / "entered").read_text().splitlines()):
                number, _, function = line.partition(" ")
                if number in names:
                    self._tests[function].add(names[number])
                    self._tests[function.partition(":")[0]].add(names[number])

    def leave_out(self, gone: AbstractSet[str]) -> None:
        """Forget tests."""
        self.seconds = {test: s for test, s in self.seconds.items() if test not in gone}
        for tests in self._tests.values():
            tests.difference_update(gone)

    def tests(self, function: str) -> list[str]:
        """Return the tests that enter a function or a file, the quickest first."""
        return sorted(self._tests[function], key=lambda test: self.seconds.get(test, 0.0))


def record(root: Path, folder: Path, *, workers: int) -> None:
    """Run all tests, and write down which functions of the packages each enters."""
    tree = _tree(root, folder / "record")

    def work(suite: str) -> None:
        into = folder / "map" / suite.replace("/", "-")
        if (into / "done").exists():
            return
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        environment = _environment(tree, hook=True) | {"HP_TEST_MAP": str(into)}
        command = [*_PYTEST, "-p", "map_plugin", "--tb=short", suite]
        subprocess.run(command, cwd=tree, env=environment, check=False)
        name_functions(into / "entered", tree)
        (into / "done").touch()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, reversed(suites(tree))))  # the integration tests take longest


def name_functions(entered: Path, tree: Path) -> None:
    """Replace first lines of functions by names, which stay when lines above them change."""
    lines = [line.partition(" ") for line in set(entered.read_text().splitlines())]
    names = {
        f"{file}:{_first_line(node)}": f"{file}:{name}"
        for file in {function.partition(":")[0] for _, _, function in lines}
        if (tree / file).is_file()  # no copy that a test makes, and no line that two have written
        for name, node in _functions(ast.parse((tree / file).read_text()))
    }
    rows = [f"{number} {names[line]}\n" for number, _, line in lines if line in names]
    entered.write_text("".join(rows))


def run(root: Path, folder: Path, changes: list[Change], *, workers: int) -> None:
    """Run tests against each change that has no outcome yet, and write the outcomes down."""
    known = Map(folder / "map")
    done = {outcome.digest for outcome in read_outcomes(folder)}
    left = [change for change in changes if change.digest not in done]
    lock = threading.Lock()
    trees = [_tree(root, folder / f"worker-{number}") for number in range(workers)]
    if left:
        known.leave_out(_gone(trees[0], known))

    def work(change: Change, *, everything: bool) -> Outcome:
        with lock:
            tree = trees.pop()
        try:
            outcome = _judge(change, tree, known, everything=everything)
        finally:
            trees.append(tree)
        if outcome.found_by or everything:
            with lock, (folder / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        said = f"found by {outcome.found_by}" if outcome.found_by else "NOT FOUND"
        print(f"{change.name}: {said} ({outcome.seconds:.0f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(workers) as pool:
        quick = list(pool.map(functools.partial(work, everything=False), left))
        missed = [c for c, outcome in zip(left, quick, strict=True) if not outcome.found_by]
        list(pool.map(functools.partial(work, everything=True), missed))


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read what is known so far."""
    file = folder / "outcomes.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def table(outcomes: list[Outcome]) -> str:
    """Return how many changes of each area were found, and the names of those that were not."""
    areas = sorted({outcome.area for outcome in outcomes})
    rows = [(area, [o for o in outcomes if o.area == area]) for area in areas]
    lines = [f"{'area':12} changes  found"]
    lines += [
        f"{area:12} {len(row):7} {sum(bool(o.found_by) for o in row):6}"
        for area, row in [*rows, ("together", outcomes)]
    ]
    lines += [f"not found: {outcome.name}" for outcome in outcomes if not outcome.found_by]
    return "\n".join(lines)


_PYTEST = [sys.executable, "tools/reaping.py", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
_TEXT: dict[str, Any] = {"capture_output": True, "text": True}
_AGAIN_SECONDS = 15.0  # about what it takes to start twice
_START_SECONDS = 300.0  # on a busy machine, with the collection of all tests


def _gone(tree: Path, known: Map) -> set[str]:
    """Tests that were recorded and are not there now, under that name; they would fail."""
    there: set[str] = set()
    for suite in suites(tree):
        command = [*_PYTEST, "--collect-only", suite]
        found = subprocess.run(command, cwd=tree, env=_environment(tree), check=True, **_TEXT)
        there.update(found.stdout.splitlines())
    gone = set(known.seconds) - there
    for test in sorted(gone):
        print(f"not there any more: {test}", flush=True)
    return gone


def _judge(change: Change, tree: Path, known: Map, *, everything: bool) -> Outcome:
    """Run the tests that enter a change's function, or all others, against the change."""
    _restore(tree)
    tests = known.tests(change.function(tree))
    chosen = len(tests)
    if everything:
        tests = sorted(set(known.seconds) - set(tests), key=known.seconds.__getitem__)
    change.apply(tree)
    began = time.monotonic()
    found_by = ""
    own = "/".join(change.file.split("/")[:2])
    for suite in sorted(suites(tree), key=lambda suite: not suite.startswith(own)):
        of_suite = [test for test in tests if test.startswith(f"{suite}/")]
        failed = _failing(tree, of_suite, known)
        if failed:
            again = of_suite[: of_suite.index(failed) + 1] if failed in of_suite else []
            # With all before it, on which it may depend, unless alone it finds the change as well.
            takes_long = sum(known.seconds[test] for test in again) > _AGAIN_SECONDS
            if takes_long and _failing(tree, again[-1:], known):
                again = again[-1:]
            _restore(tree)
            flaky = _failing(tree, again, known)
            change.apply(tree)
            if not flaky:
                found_by = failed
                break
    seconds = time.monotonic() - began
    _restore(tree)
    who = (change.name, change.digest, change.area)
    return Outcome(*who, found_by, chosen, round(seconds, 1), everything)


def _failing(tree: Path, tests: list[str], known: Map) -> str:
    """Run tests until one fails; return its name, or an empty text."""
    if not tests:
        return ""
    arguments = tree.with_suffix(".tests")
    arguments.write_text("\n".join(tests))
    limit = _START_SECONDS + 5 * sum(known.seconds[test] for test in tests)
    command = [*_PYTEST, "-x", "--tb=no", f"@{arguments}"]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return "(time-out)"
    if process.returncode == 0:
        return ""
    failed = [
        line.split(" - ")[0].split(" ", 1)[1]
        for line in output.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return failed[0] if failed else f"(pytest ended with {process.returncode})"


def _tree(root: Path, tree: Path) -> Path:
    """Return a checkout of the last commit, which tests may change."""
    if not tree.exists():
        _git(root, "worktree", "add", "--force", "--detach", str(tree), "HEAD")
    head = _git(root, "rev-parse", "HEAD").strip()
    _git(tree, "checkout", "--force", "--detach", head)
    for compiled in (".recorded", ".compiled"):  # of files that the checkout gives another time
        shutil.rmtree(tree.with_suffix(compiled), ignore_errors=True)
    return tree


def _git(tree: Path, *arguments: str) -> str:
    return str(subprocess.run(["git", *arguments], cwd=tree, check=True, **_TEXT).stdout)


def _restore(tree: Path) -> None:
    for name in _git(tree, "diff", "--name-only").splitlines():
        _write(tree / name, _git(tree, "show", f"HEAD:{name}"))


def _write(file: Path, text: str) -> None:
    """Write a source file with a new time: compiled files are looked up by whole seconds."""
    after = file.stat().st_mtime + 2
    file.write_text(text)
    os.utime(file, (after, after))


def _environment(tree: Path, *, hook: bool = False) -> dict[str, str]:
    paths = [*([HERE / "hook"] if hook else []), *sorted(tree.glob("packages/*/src")), tree]
    compiled = tree.with_suffix(".recorded" if hook else ".compiled")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONPYCACHEPREFIX": str(compiled),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each function with its name and those of what it is in (`Class.method.inner`)."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}".removeprefix(".")
        if isinstance(node, ast.FunctionDef):
            yield name, node
        yield from _functions(node, name)


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def main() -> int:
    """Run the command line; return 1 if fewer changes were found than `GOAL`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["record", "run", "table"])
    parser.add_argument("names", nargs="*", help="changes to run; all, if none is named")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="repository")
    parser.add_argument("--changes", type=Path, default=HERE / "changes.toml")
    parser.add_argument("--folder", type=Path, help="what is known so far; .nox/mutants of --root")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    root, folder = arguments.root.resolve(), arguments.folder
    folder = (folder or root / ".nox" / "mutants").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "record":
        record(root, folder, workers=arguments.workers)
        return 0
    changes = read_changes(arguments.changes)
    if arguments.command == "run":
        wanted = [c for c in changes if not arguments.names or c.name in arguments.names]
        run(root, folder, wanted, workers=arguments.workers)
    current = {change.digest for change in changes}
    outcomes = [outcome for outcome in read_outcomes(folder) if outcome.digest in current]
    print(table(outcomes))
    found = sum(bool(outcome.found_by) for outcome in outcomes)
    return int(found < GOAL * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
