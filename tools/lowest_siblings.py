"""Find, for one package, the lowest version that it allows of each sibling, as a source directory.

The version in the work tree is one candidate; the others are the tags vVERSION, unpacked into a
directory. One line for each sibling: what is tested, and last the directory to install. Usage:
``python tools/lowest_siblings.py 'hp-schedule[runtime]' --into .nox/siblings``.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def declared_version(package: str) -> Version:
    """Return the ``__version__`` that the source of a package states, without importing it."""
    [init] = (ROOT / "packages" / package / "src").glob("*/__init__.py")
    for node in ast.parse(init.read_text()).body:
        match node:
            case ast.Assign([ast.Name("__version__")], ast.Constant(str(version))):
                return Version(version)
    message = f"{init} states no __version__"
    raise ValueError(message)


def tagged_versions(package: str) -> list[Version]:
    """Return the released versions of a package, from the tags of the repository that have it."""
    listing = ["git", "tag", "--list", "v*"]
    tags = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    file = f"packages/{package}/pyproject.toml"
    has = {
        tag: subprocess.run(
            ["git", "cat-file", "-e", f"{tag}:{file}"], cwd=ROOT, check=False, capture_output=True
        )
        for tag in tags.stdout.split()
    }
    return [Version(tag.removeprefix("v")) for tag, done in has.items() if done.returncode == 0]


def sibling_requirements(requirement: Requirement) -> list[Requirement]:
    """Return what a package with some extras requires of other packages of this repository."""
    path = ROOT / "packages" / requirement.name / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    texts = list(project["dependencies"])
    for extra in requirement.extras:
        texts += project["optional-dependencies"][extra]
    needed = map(Requirement, texts)
    return [r for r in needed if (ROOT / "packages" / r.name).is_dir()]


def lowest(requirement: Requirement, candidates: list[Version]) -> Version:
    """Return the lowest of the candidates that a requirement allows.

    Raises:
        ValueError: If it allows none of them.
    """
    allowed = [v for v in candidates if requirement.specifier.contains(v, prereleases=True)]
    if not allowed:
        found = ", ".join(map(str, sorted(candidates)))
        message = f"{requirement} must allow one of the versions there are ({found})"
        raise ValueError(message)
    return min(allowed)


def unpack_tag(package: str, version: Version, into: Path) -> Path:
    """Write the package as it was at its tag into a directory and return that."""
    target = into / f"{package}-{version}"
    archive = subprocess.run(
        ["git", "archive", f"v{version}", f"packages/{package}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return target / "packages" / package


def main() -> int:
    """Print one line for each sibling of the package named on the command line."""
    parser = argparse.ArgumentParser(description="Find the lowest siblings a package allows.")
    parser.add_argument("requirement", type=Requirement)
    parser.add_argument("--into", type=Path, required=True, help="where tags are unpacked")
    arguments = parser.parse_args()
    for sibling in sibling_requirements(arguments.requirement):
        current = declared_version(sibling.name)
        version = lowest(sibling, [current, *tagged_versions(sibling.name)])
        source = ROOT / "packages" / sibling.name
        if version != current:
            source = unpack_tag(sibling.name, version, arguments.into)
        extras = f"[{','.join(sorted(sibling.extras))}]" if sibling.extras else ""
        origin = "the work tree" if version == current else "its tag"
        print(f"{arguments.requirement} with {sibling}: {version} from {origin} {source}{extras}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
