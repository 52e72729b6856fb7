"""Environments with a version of a library, and jobs that are compared in them."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
from sessions import ROOT, editables, environment
from versions import install_into, room_for

from integration_tests.jobs.reports.data import FAILED, JOBS, Found, Report, key, told

_SECONDS = 1800.0


def look_at(report: Report, version: str, scratch: Path) -> Found:
    """Compare a report's job with one process in an environment of its own, which is removed.

    Args:
        report: Report of a bug.
        version: Version of its library.
        scratch: Folder of the environment, which is not there yet.
    """
    began = time.monotonic()
    try:
        why_not = _make(report, version, scratch)
        if why_not:
            return Found(
                name=key(report, version), state=FAILED, first=f"no environment: {why_not}"
            )
        status, lines = _compare(report, scratch)
        return msgspec.structs.replace(
            told(key(report, version), lines, status),
            versions=_versions(report, scratch),
            seconds=round(time.monotonic() - began, 1),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make(report: Report, version: str, folder: Path) -> str:
    """Make an environment with hp-verify and a version of a library; return why not, or nothing."""
    found, why_not = room_for(report.python)
    if why_not:
        return why_not
    # The pins are of other versions than those that a report is about: torch keeps its own.
    env = {**os.environ, **environment()}
    env = {name: value for name, value in env.items() if "CONSTRAINT" not in name}
    [torch] = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if "torch==" in line
    ]
    library = f"{report.library}=={version}"
    wanted = [*editables("hp-verify"), *report.requires, library]
    if report.library != "torch":
        wanted.append(torch.partition(";")[0])
    return install_into(folder, found, wanted, env)


def _environ(folder: Path) -> dict[str, str]:
    binaries = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", "")))
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    cache = str(folder.with_name("bytecode"))  # torch's files are the same in each of them
    return {**kept, "PATH": binaries, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": cache}


def _compare(report: Report, folder: Path) -> tuple[int, list[str]]:
    """Run the comparison; return its exit status and the lines that it printed."""
    done = subprocess.run(
        report.command,
        executable=str(folder / "bin" / "hp-verify"),
        cwd=JOBS,
        env=_environ(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    return done.returncode, done.stdout.splitlines()


def _versions(report: Report, folder: Path) -> str:
    """Return the versions of Python, torch and the library in an environment."""
    probe = (
        "import importlib.metadata as m, platform\n"
        f"names = sorted({{'torch', {report.library!r}}})\n"
        "print('Python', platform.python_version(), *(f'{n} {m.version(n)}' for n in names))"
    )
    command = [str(folder / "bin" / "python"), "-c", probe]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
