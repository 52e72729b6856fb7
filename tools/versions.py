"""Run each package's own tests on several Pythons and torches, and programs beside them.

Each package is installed alone, with what it declares, in an environment that is removed then.

The lowest Python has the lowest torch of the range that packages declare, the highest the highest,
and each Python between them one between those. Results go to a file, a line of JSON for a package
on a pair; what has passed there is not run again. The programs are the example of its README and,
of hp-verify, the job of its guide with and without a mistake, and the demo. With uv on PATH::

    python tools/versions.py --results .nox/versions.jsonl                # all pairs
    python tools/versions.py --results FILE --python 3.14 hp-verify       # a package on one pair

Interpreters are those that uv finds or installs, and those of pyenv. An environment and uv's cache
of what is in it take up to 10 GiB beside the results. The cache goes when the pair ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from readme_example import first_python_block
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
        package: Name of the package; empty where there was no Python or no space on the disk.
        passed: Whether the tests passed, and each program ended with its status.
        found: Versions in full, the last line of pytest, and what came of the programs; or why
            nothing was run.
        seconds: Time that tests and programs took.
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


def room_for(python: str) -> tuple[str, str]:
    """Return the path of an interpreter, and why it can have no environment here, or nothing."""
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < CUDA_BUILD_GIB:
        return "", f"free disk ({free:.0f} GiB) is less than {CUDA_BUILD_GIB} GiB"
    found = interpreter(python)
    why_not = "" if found else f"neither uv nor pyenv has Python {python}, and uv cannot install it"
    return found, why_not


def make(folder: Path, python: str, package: str, torch: str, env: dict[str, str]) -> str:
    """Make an environment with a package and what its tests need; return why not, or nothing.

    Args:
        folder: Folder of the environment, which is made anew.
        python: Path of an interpreter.
        package: Name of the package.
        torch: Minor version of torch.
        env: Variables for uv.
    """
    tested = [*editables(with_extras(package)), *requirements_of("test-torch")]
    return install_into(folder, python, [*tested, f"torch=={torch}.*"], env)


def install_into(
    folder: Path, python: str, requirements: Iterable[str], env: Mapping[str, str]
) -> str:
    """Make an environment anew and install into it; return why not, or nothing.

    Args:
        folder: Folder of the environment.
        python: Path of an interpreter.
        requirements: Arguments of uv that say what is wanted.
        env: Variables for uv, all of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    install = ["uv", "pip", "install", "--quiet", "--no-compile", "--python", str(folder)]
    for command in (
        ["uv", "venv", "--quiet", "--python", python, str(folder)],
        [*install, *requirements],
    ):
        done = subprocess.run(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            return " ".join(done.stderr.split())[-500:]
    return ""


def _run(command: Sequence[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command at the repository's root; return its status and what it printed, in lines."""
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
        return -1, [f"not done after {_SECONDS:.0f} s"]
    return done.returncode, [*done.stderr.splitlines(), *done.stdout.splitlines()]


def run_tests(package: str, env: dict[str, str]) -> tuple[bool, str]:
    """Run a package's tests in an environment; return whether they passed, and their last line."""
    command = ["python", "tools/reaping.py", "tools/forked.py", "-m", "pytest", "-q", "-p"]
    status, lines = _run([*command, "no:cacheprovider", f"packages/{package}/tests"], env)
    failures = [line for line in lines if line.startswith(("FAILED packages", "ERROR packages"))]
    return status == 0, "; ".join([*lines[-1:], *failures[:20]])


def programs(package: str, scratch: Path) -> list[tuple[list[str], int]]:
    """Return commands that show a package at work, each with the status that it must end with.

    Args:
        package: Name of the package.
        scratch: Folder for what they write.
    """
    readme = ["python", "tools/readme_example.py", f"packages/{package}/README.md"]
    if package != "hp-verify":
        return [(readme, 0)]
    job = scratch / "job.py"
    job.write_text(first_python_block((ROOT / "docs/how-to/verify-any-job.md").read_text()))
    run = ["hp-verify", "--once", "--", "torchrun", "--standalone", "--nproc-per-node", "2"]
    against = ["--against", "--", "python", str(job), "--batch", "8"]
    return [
        (readme, 0),
        (["hp-verify", "--help"], 0),
        ([*run, str(job), "--batch", "4", *against], 0),
        ([*run, str(job), "--batch", "4", "--scale", "2", *against], 8),
        (["python", "-m", "integration_tests.jobs.demo", "--output", str(scratch / "demo")], 0),
    ]


def run_programs(package: str, scratch: Path, env: dict[str, str]) -> tuple[bool, str]:
    """Run a package's programs; return whether each ended as it must, and what came of them."""
    asked = programs(package, scratch)
    last = ""
    for command, wanted in asked:
        status, lines = _run(command, env)
        if status != wanted:
            return False, f"{' '.join(command)}: status {status}: {' '.join(lines)[-500:]}"
        last = next((line for line in lines if line.startswith("zoo: ")), "")
    return True, f"programs: {len(asked)}{f' ({last})' if last else ''}"


def versions_in(folder: Path) -> str:
    """Return the versions of Python and of torch in an environment, in full."""
    probe = "import platform, torch; print(platform.python_version(), torch.__version__)"
    command = [str(folder / "bin" / "python"), "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        "Python {}, torch {}".format(*done.stdout.split()) if done.returncode == 0 else "no torch"
    )


def run_pair(python: str, torch: str, packages: Iterable[str], results: Path) -> list[Row]:
    """Test packages on a pair, each in an environment of its own; return the new rows.

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

    found, why_not = room_for(python)
    if why_not:
        keep(Row(python, torch, "", passed=False, found=why_not, seconds=0.0, commit=commit))
        return rows
    try:
        for package in packages:
            began = time.monotonic()
            why_not = make(folder, found, package, torch, env)
            passed, what = not why_not, why_not
            if passed:
                tested, last = run_tests(package, env)
                shown, came = run_programs(package, scratch, env)
                passed, what = tested and shown, f"{versions_in(folder)}: {last}; {came}"
            seconds = round(time.monotonic() - began, 1)
            keep(Row(python, torch, package, passed, what, seconds, commit))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Test what has not passed yet; return 0 if all that was asked for has passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), metavar="PACKAGE")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--python", choices=PYTHONS, help="the pair of this Python alone")
    parser.add_argument("--torch", metavar="2.N", help="another torch than that of the pairs")
    given = parser.parse_args(arguments)
    unknown = sorted({*given.packages} - {*PACKAGES})
    if unknown:
        parser.error(f"no package is called {', '.join(unknown)}")
    results = given.results.resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    has_passed = passed_in(results)
    rows: list[Row] = []
    for python, own in pairs():
        torch = given.torch or own
        asked = given.python in (None, python)
        left = [p for p in given.packages if (python, torch, p) not in has_passed]
        if asked and left:
            rows += run_pair(python, torch, left, results)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
