"""Build every package twice, from two copies of the repository, and compare all bytes.

The copies differ in place, umask and times of files, and so do the programs: the first wheel is
built from the sdist by build, the second from the sources by hatchling. A release is what anybody
gets from its tag. Usage: ``python tools/build_distributions.py dist``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(
    "__pycache__", "*.egg-info", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"
)
LATER = 2_000_000_000
"""Time of the files of the second copy, in seconds since the epoch."""


def build(packages: Path, dist: Path) -> None:
    """Build an sdist of every package, and a wheel from that."""
    for project in sorted(packages.iterdir()):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
        subprocess.run([*command, str(project)], check=True, env=environment(), umask=0o022)


def build_again(packages: Path, dist: Path, scratch: Path) -> None:
    """Build an sdist and a wheel of every package from a copy of its sources, made later."""
    for project in sorted(packages.iterdir()):
        copy = scratch / packages.name / project.name
        shutil.copytree(project, copy, ignore=NOT_COPIED)
        shutil.copy(packages.parent / ".gitignore", scratch)  # part of every sdist
        for path in copy.rglob("*"):
            os.utime(path, (LATER, LATER))
            path.chmod(0o700 if path.is_dir() else 0o600)
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(dist)]
        quiet = subprocess.DEVNULL
        subprocess.run(command, cwd=copy, check=True, env=environment(), umask=0o077, stdout=quiet)


def environment() -> dict[str, str]:
    """Return the environment of a build, in which hatchling chooses the times of all files."""
    return {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}


def digests(dist: Path) -> dict[str, str]:
    """Return name -> SHA-256 of the files in a folder."""
    files = sorted(file for file in dist.iterdir() if file.suffix in {".whl", ".gz"})
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each file that is in one folder only, or has other bytes in the other."""
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            places = ("first", "second")
            here = [w for w, found in zip(places, (first, second), strict=True) if name in found]
            yield f"{name}: {'two contents' if len(here) == 2 else f'in the {here[0]} build alone'}"


def main(dist: Path) -> int:
    """Build into `dist`, again elsewhere, and print all digests; return the exit status."""
    packages = ROOT / "packages"
    build(packages, dist)
    with tempfile.TemporaryDirectory(prefix="hp-build-") as folder:
        scratch = Path(folder)
        build_again(packages, scratch / "dist", scratch)
        first, second = digests(dist), digests(scratch / "dist")
    for name, digest in first.items():
        print(f"{digest}  {name}")
    faults = list(differences(first, second))
    for fault in faults:
        print(fault)
    print(f"{len(first)} files built twice, {len(faults)} of them with other bytes")
    return 1 if faults or not first else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
