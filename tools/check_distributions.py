"""Check what is inside the wheels and sdists of dist/: what belongs there, and nothing else.

Usage: ``python tools/check_distributions.py dist``.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SDIST_FILES = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
KEPT = ("src", "tests", "examples", "action.yml")
"""What an sdist has beside those files, where the package has it."""
OF_HATCHLING = {".gitignore", "PKG-INFO"}
"""What hatchling adds to the files of an sdist."""
OF_WHEELS = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
STATED = ("Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier")


def sources_of(package: Path, kept: Iterable[str]) -> set[str]:
    """Return some files of a package, and those of folders, without what Python and tools leave."""
    paths = [package / name for name in kept]
    files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    names = {str(file.relative_to(package)) for file in files}
    return {n for n in names if "__pycache__" not in n and ".egg-info" not in n and "/." not in n}


def differing(names: set[str], expected: set[str]) -> Iterator[str]:
    """Yield a fault for files that are too many and for those that are missing."""
    for fault, files in (("has", names - expected), ("has no", expected - names)):
        if files:
            yield f"{fault} {', '.join(sorted(files)[:5])}"


def read_metadata(wheel: Path) -> Message:
    """Return the METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def check_wheel(wheel: Path, versions: dict[str, str]) -> Iterator[str]:
    """Yield the faults of one wheel; `versions` are those of all the wheels beside it."""
    module = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if f"{module}/py.typed" not in names:
        yield "has no py.typed: its annotations are invisible to type checkers"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "has no LICENSE"
    foreign = {n.split("/")[0] for n in names if not n.startswith((f"{module}/", f"{module}-"))}
    if foreign:
        yield f"would install {sorted(foreign)} beside {module}"
    if any("/tests/" in name or name.startswith("tests/") for name in names):
        yield "holds tests"
    about = {name.split("/", 1)[1] for name in names if ".dist-info/" in name}
    if about - OF_WHEELS:
        yield f"has {sorted(about - OF_WHEELS)} in its metadata"
    metadata = read_metadata(wheel)
    if not str(metadata.get_payload()).strip():
        yield "has no description"
    yield from (f"states no {field}" for field in STATED if not metadata[field])
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        version = versions.get(requirement.name)
        if version and version not in requirement.specifier:
            yield f"needs {requirement}, but {requirement.name} here is {version}"


def check_sdist(sdist: Path) -> Iterator[str]:
    """Yield the faults of one sdist: it must be enough to build and to test the package."""
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    yield from (f"has no {name}" for name in SDIST_FILES if name not in names)
    if not any(name.startswith("tests/") for name in names):
        yield "has no tests"


def check_files(package: Path, wheel: Path, sdist: Path) -> Iterator[str]:
    """Yield the faults of what a package's wheel and sdist have beside its sources."""
    with zipfile.ZipFile(wheel) as archive:
        installed = {f"src/{n}" for n in archive.namelist() if ".dist-info/" not in n}
    with tarfile.open(sdist) as archived:
        members = [member for member in archived.getmembers() if not member.isdir()]
    kept = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    if len(kept) != len(members):
        yield f"{sdist.name} has links"
    for fault in differing(installed, sources_of(package, ["src"])):
        yield f"{wheel.name} {fault}"
    for fault in differing(kept - OF_HATCHLING, {*SDIST_FILES} | sources_of(package, KEPT)):
        yield f"{sdist.name} {fault}"


def main(dist: Path) -> int:
    """Print every fault; return the exit status."""
    wheels = sorted(dist.glob("*.whl"))
    sdists = sorted(dist.glob("*.tar.gz"))
    packages = sorted(ROOT.glob("packages/*/pyproject.toml"))
    versions: dict[str, str] = {}
    for wheel in wheels:
        metadata = read_metadata(wheel)
        versions[str(metadata["Name"])] = str(metadata["Version"])
    faults = [f"{w.name} {fault}" for w in wheels for fault in check_wheel(w, versions)]
    faults += [f"{s.name} {fault}" for s in sdists for fault in check_sdist(s)]
    for package in packages:
        stem = f"{package.parent.name.replace('-', '_')}-{versions.get(package.parent.name)}"
        wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
        if wheel in wheels and sdist in sdists:
            faults += check_files(package.parent, wheel, sdist)
        else:
            faults.append(f"{stem} must be there as a wheel of pure Python and as an sdist")
    for kind, files in (("wheels", wheels), ("sdists", sdists)):
        if len(files) != len(packages):
            faults.append(f"number of {kind} ({len(files)}) must equal packages ({len(packages)})")
    for fault in faults:
        print(fault)
    print(f"{len(wheels)} wheels and {len(sdists)} sdists, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
