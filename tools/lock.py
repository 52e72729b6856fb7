"""Write constraints.txt anew: one version of everything that a session or a package installs.

A version that stands there stays as long as it fits; options are those of ``uv pip compile``. The
hashes of the files of these versions go to tools/hashes.txt: pip takes no packages from a clone as
soon as one requirement has a hash, so the pins themselves have none. With uv on PATH::

    python tools/lock.py                            # after a requirement was added or changed
    python tools/lock.py --upgrade-package ruff     # a newer version of one; --upgrade: of all
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
HASHES = ROOT / "tools" / "hashes.txt"
LOWEST_PYTHON = "3.11"
FROM_TORCH = re.compile(r"^(?:cuda|nvidia|triton)\b", re.IGNORECASE)
"""What belongs to one build of torch: another build, which HP_TORCH names, brings its own."""
HEAD = """\
# Every session obeys these versions of all that it may install. tools/lock.py writes this file.
# torch's own CUDA libraries and Triton are not here. A build of torch brings those that it needs.
"""
HEAD_OF_HASHES = """\
# The pins of constraints.txt with the hashes of their files, for uv (HP_HASHES=1). tools/lock.py
# writes this file.
"""


def compile_pins(excluded: set[str], options: list[str]) -> dict[str, list[str]]:
    """Let uv choose the versions of what all groups and packages require, for any platform.

    Args:
        excluded: Names of distributions to leave out wherever they are required.
        options: Further options of ``uv pip compile``.

    Returns:
        ``name==version``, with a marker where uv sees one -> hashes of the files of that version.

    Raises:
        subprocess.CalledProcessError: If uv fails.
    """
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    sources = [str(file) for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    sources += [argument for group in groups for argument in ("--group", group)]
    with tempfile.TemporaryDirectory() as scratch:
        excludes, output = Path(scratch, "excludes.txt"), Path(scratch, LOCK.name)
        excludes.write_text("\n".join(sorted(excluded)))
        output.write_text(LOCK.read_text())
        arguments = ["--universal", "--python-version", LOWEST_PYTHON, "--all-extras"]
        # One version for all Pythons, unless none fits them all.
        arguments += ["--fork-strategy", "fewest", "--no-header", "--no-annotate", "--quiet"]
        arguments += ["--generate-hashes"]
        arguments += ["--excludes", str(excludes), "--output-file", str(output)]
        command = ["uv", "pip", "compile", *sources, *arguments, *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return with_hashes(output.read_text())


def with_hashes(text: str) -> dict[str, list[str]]:
    """Return pin -> hashes, from lines that a backslash continues."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [line.split(" --hash=") for line in lines]
    return {pin.strip(): [text.strip() for text in hashes] for pin, *hashes in parts}


def name_of(pin: str) -> str:
    """Return the name of the distribution that a line pins."""
    return pin.partition("==")[0]


def as_constraints(pins: Iterable[str]) -> str:
    """Return the text of the lock: see `without_builds`."""
    return HEAD + "".join(f"{line}\n" for line in without_builds(pins))


def as_hashes(pins: Mapping[str, Sequence[str]]) -> str:
    """Return the text of the pins with the hashes of their files."""
    lines = zip(without_builds(pins), pins.values(), strict=True)
    blocks = [" \\\n    --hash=".join((line, *hashes)) for line, hashes in lines]
    return HEAD_OF_HASHES + "".join(f"{block}\n" for block in blocks)


def without_builds(pins: Iterable[str]) -> list[str]:
    """Return pins for every platform and for any build of a version.

    A marker says for whom a distribution is, which constraints need not know: it stays only where
    it tells two versions apart. A local version (``+cpu``) would forbid all other builds.
    """
    pins = [*pins]
    versions = Counter(map(name_of, pins))
    lines = []
    for pin in pins:
        requirement, _, marker = pin.partition(" ; ")
        line = requirement.partition("+")[0]
        lines.append(f"{line} ; {marker}" if versions[name_of(pin)] > 1 else line)
    return lines


def main(options: list[str]) -> int:
    """Write the lock and the hashes; return the exit status."""
    local = {file.parent.name for file in ROOT.glob("packages/*/pyproject.toml")}
    try:
        pins = compile_pins(local, options)
        from_torch = {name for name in map(name_of, pins) if FROM_TORCH.match(name)}
        # Not only left out: what they require in turn goes too, and the forks that they made.
        pins = compile_pins(local | from_torch, options)
    except subprocess.CalledProcessError as error:
        return error.returncode
    LOCK.write_text(as_constraints(pins))
    HASHES.write_text(as_hashes(pins))
    sys.stdout.write(f"{LOCK.name}: {len(pins)} pins\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
