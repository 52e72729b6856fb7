"""What kernels may take at most: the committed table, and where a measurement exceeds it."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Resources:
    """What one program of a kernel takes, or the most that several take.

    Attributes:
        registers: Of a thread.
        stack: Of a thread, in bytes: what does not fit into registers is there.
        shared: Of a program, in bytes, without what the driver keeps for itself.
        size: Of the cubin, in bytes.
    """

    registers: int
    stack: int
    shared: int
    size: int

    def most(self, other: Self) -> "Resources":
        """Return the greater of both, each for itself."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Resources(*map(max, pairs))


PATH = Path(__file__).with_name("limits.toml")
Table = dict[str, Resources]
"""By kernel or model, dtype and architecture, one word each."""

_HEAD = """\
# What a program of each kernel takes at most: registers of a thread, bytes of its stack, bytes of
# shared memory, bytes of the cubin without lines of sources. Written by `nox -s cubins -- --write`.
"""


def read(path: Path = PATH) -> tuple[dict[str, str], Table]:
    """Return the versions that limits were written with, and the limits."""
    found = tomllib.loads(path.read_text())
    return found["versions"], {name: Resources(*row) for name, row in found["limits"].items()}


def write(versions: Mapping[str, str], table: Table, path: Path = PATH) -> None:
    """Replace the table."""
    named = [f'{name} = "{version}"' for name, version in sorted(versions.items())]
    rows = [f'"{name}" = {[*vars(most).values()]}' for name, most in sorted(table.items())]
    path.write_text("\n".join([_HEAD, "[versions]", *named, "", "[limits]", *rows, ""]))


def problems(measured: Table, limits: Table, *, kernels: Iterable[str]) -> list[str]:
    """Return a line for each kernel that was not compiled, has no limits or exceeds them.

    Args:
        measured: What compiling gave.
        limits: What it may be.
        kernels: Full names of all kernels that there are.
    """
    compiled = {name.split()[0] for name in measured}
    lines = [
        f"{kernel}: no launch of it is compiled; "
        "integration_tests/acceptance/cubins/launches.py needs one"
        for kernel in sorted(set(kernels) - compiled)
    ]
    lines += [
        f"{name}: has limits and is not compiled" for name in sorted(set(limits) - {*measured})
    ]
    for name, most in sorted(measured.items()):
        if name not in limits:
            lines.append(f"{name}: has no limits; `nox -s cubins -- --write` records them")
            continue
        allowed = vars(limits[name])
        over = [(k, v, allowed[k]) for k, v in vars(most).items() if v > allowed[k]]
        lines += [f"{name}: {k} ({v}) must be <= its limit ({limit})" for k, v, limit in over]
    return lines
