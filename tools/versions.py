"""Run each package's own tests on several Pythons and torches, an environment at a time.

The lowest Python has the lowest torch of the range that packages declare, the highest the highest,
and each Python between them one between those. Results go to a file, a line of JSON for a package
on a pair; what has passed there is not run again. With uv on PATH::

    python tools/versions.py --results .nox/versions.jsonl                    # all pairs
    python tools/versions.py --results FILE --python 3.13 hp-base hp-overlap  # some of one pair

Interpreters are those that uv finds or installs, and those of pyenv. The environment of a pair and
uv's cache of what is in it take up to 10 GiB beside the results. Both go when the pair ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from sessions import (
    CUDA_BUILD_GIB,
    PACKAGES,
    ROOT,
    TORCH,
    editables,
    environment,
    requirements_of,
    with_extras,
)

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_SECONDS = 3600.0  # for the tests of a package


@dataclass(frozen=True)
class Row:
    """What came of a package's tests on a pair of versions.

    Attributes:
        python: Minor version of Python, "3.13".
        torch: Minor version of torch, "2.14".
        package: Name of the package; empty where no environment could be made.
        passed: Whether pytest ended with status 0.
        found: Versions in full, and the last line of pytest; or why nothing was run.
        seconds: Time that the tests took.
        commit: Commit that was tested.
    """

    python: str
    torch: str
    package: str
    passed: bool
    found: str
    seconds: float
    commit: str


def pairs(torch: str = TORCH, pythons: Sequence[str] = PYTHONS) -> list[tuple[str, str]]:
    """Return pairs of minor versions of Python and of torch, from lowest to highest.

    Args:
        torch: Range of torch, ">=2.A,<2.B" with minor versions of one major version.
        pythons: Minor versions of Python in their order.
    """
    bounds = {s.operator: s.version for s in Requirement(torch).specifier}
    major, first = bounds[">="].split(".")[:2]
    minors = range(int(first), int(bounds["<"].split(".")[1]))
    last = len(pythons) - 1
    places = [round(i * (len(minors) - 1) / last) for i in range(len(pythons))]
    return [(p, f"{major}.{minors[at]}") for p, at in zip(pythons, places, strict=True)]


def passed_in(results: Path) -> set[tuple[str, str, str]]:
    """Return Python, torch and package of what has passed in a file of results."""
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(row.python, row.torch, row.package) for row in rows if row.passed}


def interpreter(python: str) -> str:
    """Return the path of an interpreter that uv or pyenv has, or uv can install; or nothing."""
    find = ["uv", "python", "find", "--no-project", python]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for attempt in range(2):
        done = subprocess.run(find, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        known = sorted(pyenv.glob(f"versions/{python}.*/bin/python"))
        if known:
            return str(known[-1])
        if attempt == 0:
            subprocess.run(["uv", "python", "install", "--quiet", python], check=False)
    return ""


def make(folder: Path, python: str, torch: str, env: dict[str, str]) -> str:
    """Make an environment with all packages and what their tests need; return why not, or nothing.

    Args:
        folder: Folder of the environment, which is not there yet.
        python: Minor version of Python.
        torch: Minor version of torch.
        env: Variables for uv.
    """
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < CUDA_BUILD_GIB:
        return f"free disk ({free:.0f} GiB) is less than {CUDA_BUILD_GIB} GiB"
    found = interpreter(python)
    if not found:
        return f"neither uv nor pyenv has Python {python}, and uv cannot install it"
    wanted = [*editables(*map(with_extras, PACKAGES)), *requirements_of("test-torch")]
    install = ["uv", "pip", "install", "--quiet", "--no-compile", "--python", str(folder)]
    for command in (
        ["uv", "venv", "--quiet", "--python", found, str(folder)],
        [*install, *wanted, f"torch=={torch}.*"],
    ):
        done = subprocess.run(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            return " ".join(done.stderr.split())[-500:]
    return ""


def run_tests(folder: Path, package: str, env: dict[str, str]) -> tuple[bool, str]:
    """Run a package's tests in an environment; return whether they passed, and their last line."""
    python = str(folder / "bin" / "python")
    command = [python, "tools/reaping.py", "tools/forked.py", "-m", "pytest", "-q", "-p"]
    command += ["no:cacheprovider", f"packages/{package}/tests"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {_SECONDS:.0f} s"
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED packages", "ERROR packages"))]
    return done.returncode == 0, "; ".join([lines[-1], *failures[:20]])


def versions_in(folder: Path) -> str:
    """Return the versions of Python and of torch in an environment, in full."""
    probe = "import platform, torch; print(platform.python_version(), torch.__version__)"
    command = [str(folder / "bin" / "python"), "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        "Python {}, torch {}".format(*done.stdout.split()) if done.returncode == 0 else "no torch"
    )


def run_pair(python: str, torch: str, packages: Iterable[str], results: Path) -> list[Row]:
    """Test packages on a pair in an environment that is removed afterwards; return the new rows.

    Args:
        python: Minor version of Python.
        torch: Minor version of torch.
        packages: Names of the packages, in the order in which they are tested.
        results: File that a line for each is added to.
    """
    scratch = results.with_suffix(".environment")
    shutil.rmtree(scratch, ignore_errors=True)
    folder = scratch / "venv"
    env = {**os.environ, **environment(f"torch=={torch}.*")}
    env |= {
        "UV_CACHE_DIR": str(scratch / "cache"),
        "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
    }
    env["PATH"] = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", "")))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        name = row.package or "nothing was run"
        print(f"Python {python}, torch {torch}, {name}: {row.found}", flush=True)

    try:
        why_not = make(folder, python, torch, env)
        if why_not:
            keep(Row(python, torch, "", passed=False, found=why_not, seconds=0.0, commit=commit))
            return rows
        full = versions_in(folder)
        for package in packages:
            began = time.monotonic()
            passed, last = run_tests(folder, package, env)
            seconds = round(time.monotonic() - began, 1)
            keep(Row(python, torch, package, passed, f"{full}: {last}", seconds, commit))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Test what has not passed yet; return 0 if all that was asked for has passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), metavar="PACKAGE")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--python", choices=PYTHONS, help="the pair of this Python alone")
    given = parser.parse_args(arguments)
    unknown = sorted({*given.packages} - {*PACKAGES})
    if unknown:
        parser.error(f"no package is called {', '.join(unknown)}")
    results = given.results.resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    has_passed = passed_in(results)
    rows: list[Row] = []
    for python, torch in pairs():
        asked = given.python in (None, python)
        left = [p for p in given.packages if (python, torch, p) not in has_passed]
        if asked and left:
            rows += run_pair(python, torch, left, results)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
