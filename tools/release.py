"""Set the one version of all packages, date it, or check it: RELEASING.md says when.

python tools/release.py begin 0.2.0     # after a release: the next version, not released yet
python tools/release.py date            # before the tag: the changelogs get today's date
python tools/release.py check v0.2.0    # at the tag: every package has that version and a date
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
STATED = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
HEADING = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
SIBLING = re.compile(r'"(hp-[a-z]+(?:\[[a-z,]+\])?)>=[\d.]+,<[\d.]+"')
UNRELEASED = "unreleased"


def packages(root: Path) -> list[Path]:
    """Return the folders of all packages."""
    return sorted(file.parent for file in root.glob("packages/*/pyproject.toml"))


def init_of(package: Path) -> Path:
    """Return the file that states the version of a package."""
    [found] = package.glob("src/*/__init__.py")
    return found


def versions(root: Path) -> dict[str, str]:
    """Return name -> stated version of all packages."""
    return {p.name: STATED.findall(init_of(p).read_text())[0] for p in packages(root)}


def range_of(version: Version) -> str:
    """Return the range that packages of a version allow of their siblings."""
    low = f"{version.major}.{version.minor}"
    high = f"{version.major}.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}"
    return f">={low},<{high}"


def begin(root: Path, version: Version) -> None:
    """Give all packages a version, ranges that fit, and a heading in their changelogs.

    Raises:
        ValueError: If the version is not above the one that they have.
    """
    highest = max(map(Version, versions(root).values()))
    if version <= highest:
        raise ValueError(f"version ({version}) must be above that of the packages ({highest})")
    for package in packages(root):
        init, project, log = init_of(package), package / "pyproject.toml", package / "CHANGELOG.md"
        init.write_text(STATED.sub(f'__version__ = "{version}"', init.read_text()))
        project.write_text(SIBLING.sub(rf'"\1{range_of(version)}"', project.read_text()))
        heading = f"# Changelog\n\n## {version} ({UNRELEASED})\n"
        log.write_text(log.read_text().replace("# Changelog\n", heading, 1))


def date(root: Path, today: str) -> None:
    """Put a date in place of "unreleased" into the newest heading of each changelog."""
    for package in packages(root):
        log = package / "CHANGELOG.md"
        log.write_text(log.read_text().replace(f"({UNRELEASED})", f"({today})", 1))


def faults(root: Path, tag: str) -> Iterator[str]:
    """Yield what keeps a tag from being the release of all packages."""
    for name, version in versions(root).items():
        if tag != f"v{version}":
            yield f"{name} ({version}) must have the version of the tag ({tag})"
        heading = HEADING.search((root / "packages" / name / "CHANGELOG.md").read_text())
        if heading is None or heading[1] != version:
            yield f"{name}: CHANGELOG.md must begin with its version ({version})"
        elif heading[2] == UNRELEASED:
            yield f"{name}: CHANGELOG.md must have the date of {version}"


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the exit status."""
    match arguments:
        case ["begin", version]:
            begin(ROOT, Version(version))
        case ["date"]:
            date(ROOT, dt.datetime.now(tz=dt.UTC).date().isoformat())
        case ["check", tag]:
            found = list(faults(ROOT, tag))
            print("\n".join(found) or f"{tag} is the version of {len(packages(ROOT))} packages")
            return 1 if found else 0
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
