"""Install and run what the sessions of noxfile.py need, and tell what they took.

Nothing here imports nox, so that its tests need none.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import resource
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    import nox

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / ".nox"
HASHES = ROOT / "tools" / "hashes.txt"
TIMES = SCRATCH / "times"
BYTECODE = SCRATCH / "bytecode"
GROUPS: dict[str, list[str | dict[str, str]]]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
WITHOUT_TORCH = ("hp-base",)
# What the registry's build for Linux needs with its CUDA libraries: measured 4.5 GiB, plus uv's
# cache of the same where hard links are not possible.
CUDA_BUILD_GIB = 10


@dataclass(frozen=True)
class Package:
    """What a package of this repository requires.

    Attributes:
        dependencies: Requirements without extras.
        extras: Further requirements of each extra.
    """

    dependencies: tuple[str, ...]
    extras: Mapping[str, Sequence[str]]


def _packages() -> dict[str, Package]:
    found = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        table = tomllib.loads(file.read_text())["project"]
        extras = table.get("optional-dependencies", {})
        found[table["name"]] = Package(tuple(table["dependencies"]), extras)
    return found


PACKAGES = _packages()
SOURCES = [f"packages/{name}/src" for name in PACKAGES]
TORCH = next(r for r in PACKAGES["hp-platform"].dependencies if r.startswith("torch"))


def with_extras(name: str) -> str:
    """Return a package with its extras, without transformers and clouds, which have sessions."""
    extras = {*PACKAGES[name].extras} - {"transformers", "s3", "gs", "az"}
    return f"{name}[{','.join(sorted(extras))}]" if extras else name


def local_closure(*names: str) -> dict[str, set[str]]:
    """Return the packages of this repository that `names` need and are, with their extras."""
    closure: dict[str, set[str]] = {}
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        known = closure.get(requirement.name)
        if requirement.name not in PACKAGES or (known is not None and requirement.extras <= known):
            continue
        closure.setdefault(requirement.name, set()).update(requirement.extras)
        package = PACKAGES[requirement.name]
        pending += map(Requirement, package.dependencies)
        for extra in requirement.extras:
            pending += map(Requirement, package.extras[extra])
    return closure


def editables(*names: str) -> list[str]:
    """Return the arguments of pip that install packages and their siblings as editable.

    Siblings go into the same command: resolved on their own they would be looked up in a registry.
    """
    arguments: list[str] = []
    for name, extras in sorted(local_closure(*names).items()):
        suffix = f"[{','.join(sorted(extras))}]" if extras else ""
        arguments += ["-e", f"packages/{name}{suffix}"]
    return arguments


def requirements_of(group: str) -> list[str]:
    """Return the requirements of a dependency group and of those that it includes."""
    found: list[str] = []
    for item in GROUPS[group]:
        found += [item] if isinstance(item, str) else requirements_of(item["include-group"])
    return found


def torch_requirement() -> str:
    """Return HP_TORCH as a requirement; a wheel becomes a direct reference."""
    named = os.environ.get("HP_TORCH", "")
    if named.endswith(".whl") and "://" not in named:
        return f"torch @ {Path(named).resolve().as_uri()}"
    return f"torch @ {named}" if "://" in named and "@" not in named else named


def constraints(torch: str, pins: Path | None = None, *, folder: Path = SCRATCH) -> Path:
    """Return the file of the pins, in which `torch` and other pins, if given, take their places.

    Args:
        torch: Requirement of torch; empty: the pin stays.
        pins: File of other pins.
        folder: Folder to write a changed file of pins to.
    """
    pinned = ROOT / "constraints.txt"
    if not torch and pins is None:
        return pinned
    # Each torch has a range of setuptools of its own.
    dropped = ["torch=", "setuptools="] if torch else []
    own = [] if pins is None else [pin for pin in pins.read_text().splitlines() if "==" in pin]
    dropped += [f"{pin.partition('==')[0]}=" for pin in own]
    lines = pinned.read_text().splitlines()
    others = [line for line in lines if not line.startswith(tuple(dropped))]
    named = f"{torch}{pins.parent.name if pins is not None else ''}"
    replaced = folder / f"constraints-{re.sub(r'[^0-9A-Za-z.]+', '-', named)}.txt"
    replaced.parent.mkdir(exist_ok=True)
    replaced.write_text("\n".join([*others, *own, torch, ""]))
    return replaced


def environment(torch: str = "", pins: Path | None = None) -> dict[str, str]:
    """Return what makes pip and uv resolve alike: the pins and the places to look in.

    Raises:
        ValueError: If HP_HASHES is set, and there are other pins than those with hashes.
    """
    torch = torch or torch_requirement()
    obeyed = str(constraints(torch, pins))
    env = {"PIP_CONSTRAINT": obeyed, "UV_CONSTRAINT": obeyed}
    if os.environ.get("HP_HASHES") == "1":
        if torch or pins is not None:
            raise ValueError("HP_HASHES (1) must come without HP_TORCH and other pins")
        env["UV_CONSTRAINT"] = str(HASHES)
    env |= {"PIP_BUILD_CONSTRAINT": obeyed, "UV_BUILD_CONSTRAINT": obeyed}
    # Where it is set, every process would compile torch's sources again: twice the time of import.
    env["PYTHONDONTWRITEBYTECODE"] = ""
    env["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    # Sessions name each sibling that they install, and some take another one than the clone's.
    env["UV_NO_SOURCES"] = "1"
    # uv reads none of pip's variables, and separates places with commas where pip uses spaces.
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    index = os.environ.get("HP_TORCH_INDEX", "")
    if index and "://" not in index:
        links.append(str(Path(index).resolve()))
    elif index:
        env |= {"UV_INDEX": index, "UV_INDEX_STRATEGY": "unsafe-best-match"}
        env["PIP_EXTRA_INDEX_URL"] = f"{os.environ.get('PIP_EXTRA_INDEX_URL', '')} {index}".strip()
    if links:
        env["PIP_FIND_LINKS"] = " ".join(links)
        env["UV_FIND_LINKS"] = ",".join(filter(None, [os.environ.get("UV_FIND_LINKS"), *links]))
    return env


def install(
    session: nox.Session,
    *names: str,
    group: str,
    torch: str = "",
    others: Sequence[str] = (),
    pins: Path | None = None,
) -> None:
    """Install packages of this repository as editable, one dependency group, and others.

    Args:
        session: Session whose environment they go to.
        names: Packages, with the extras that are wanted.
        group: Dependency group of pyproject.toml; empty: none.
        torch: Requirement that takes the place of the pin of torch.
        others: Further requirements.
        pins: File of pins that take the places of those of constraints.txt.
    """
    session.env.update(environment(torch, pins))
    tools = requirements_of(group) if group else ()
    session.install("--no-compile", *editables(*names), *tools, *others)
    share_bytecode(Path(session.virtualenv.location))


def share_bytecode(location: Path) -> None:
    """Let all environments have one cache of what is compiled from site-packages.

    Files that uv links are the same in each of them, and torch's take 6 s of CPU to compile.
    """
    for libraries in location.glob("lib/python*/site-packages"):
        here = BYTECODE / libraries.absolute().relative_to("/")
        here.parent.mkdir(parents=True, exist_ok=True)
        shared = BYTECODE / libraries.parent.name
        shared.mkdir(exist_ok=True)
        if not here.exists():
            here.symlink_to(shared)


def run_pytest(session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pytest; what ranks and servers take, which outlive it, counts as of the session."""
    command = ("tools/reaping.py", "tools/forked.py", "-m", "pytest")
    session.run("python", *command, *arguments, env=env)


def files_of(folder: str, patterns: Iterable[str]) -> list[str]:
    """Return the files below a folder of the repository that patterns match, from its root.

    Raises:
        FileNotFoundError: If a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matched = {*(ROOT / folder).glob(pattern)}
        if not matched:
            raise FileNotFoundError(f"no file in {folder} is named {pattern}")
        found |= matched
    return sorted(str(file.relative_to(ROOT)) for file in found)


def session_testing(
    requirement: str, *, only: str = "", without: str = ""
) -> Callable[[nox.Session], None]:
    """Return the session that tests one package with nothing installed but what it declares.

    Args:
        requirement: Name of the package, with the extras that its tests need.
        only: Pattern of the names of the tests to run; empty: all.
        without: Pattern of those not to run, where the package needs no torch.
    """
    tests = f"packages/{Requirement(requirement).name}/tests"

    def session_function(session: nox.Session) -> None:
        has_torch = not without and requirement not in WITHOUT_TORCH
        install(session, requirement, group="test-torch" if has_torch else "test")
        selected = [tests]
        if only or without:
            matched = files_of(tests, [f"**/{only or without}"])
            selected = matched if only else [tests, *(f"--ignore={file}" for file in matched)]
        run_pytest(session, *selected, *session.posargs)

    session_function.__doc__ = f"Test {requirement} installed alone."
    return session_function


@contextmanager
def recorded(name: str, folder: Path) -> Iterator[None]:
    """Write what a session takes, with all it waits for, to a JSON file of its own in `folder`."""
    began, used = time.monotonic(), _children_seconds()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        row = {"name": name, "seconds": seconds, "cpu_seconds": _children_seconds() - used}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(row))


def timed(function: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """Let a session write down the seconds that it takes."""

    @functools.wraps(function)
    def with_record(session: nox.Session) -> None:
        with recorded(session.name, TIMES):
            function(session)

    return with_record


def summarize(folder: Path, *, since: float) -> str:
    """Put the records of a run together, in a file that has the folder's name and `.json`.

    Args:
        folder: Folder of the records, as for `recorded`.
        since: When the run began, in seconds since the epoch; older records are passed over.

    Returns:
        A table; empty if no session was recorded.
    """
    files = [file for file in folder.glob("*.json") if file.stat().st_mtime >= since]
    rows = [json.loads(file.read_text()) for file in files]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row["cpu_seconds"])
    cpu_seconds = sum(row["cpu_seconds"] for row in rows)
    together = {"name": "together", "seconds": time.time() - since, "cpu_seconds": cpu_seconds}
    found = {"sessions": rows, "together": together}
    folder.with_suffix(".json").write_text(json.dumps(found, indent=1))
    width = max(len(row["name"]) for row in [*rows, together])
    lines = [f"{'session':{width}}   seconds  CPU seconds"]
    lines += [
        f"{row['name']:{width}}  {row['seconds']:8.1f}  {row['cpu_seconds']:11.1f}"
        for row in [*rows, together]
    ]
    return "\n".join(lines)


def print_times_at_the_end() -> None:
    """Print a table of what the sessions of this run took, when its first process ends."""
    if os.environ.setdefault("HP_NOX", str(os.getpid())) == str(os.getpid()):
        atexit.register(_print_times, time.time())


def _print_times(began: float) -> None:
    table = summarize(TIMES, since=began)
    if table:
        sys.stdout.write(f"{table}\n")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
