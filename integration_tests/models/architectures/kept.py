"""What is found of architectures, kept in a file for each, so that a run can be cut. No torch."""

import argparse
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

import msgspec

from hp_base.atomic_write import replace_file
from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_base.numbers import whole


class Found(Protocol):
    """What is found of an architecture: a struct of msgspec."""

    @property
    def name(self) -> str:
        """Name of the architecture."""


F = TypeVar("F", bound=Found)


def write(folder: Path, found: Found) -> None:
    """Write what was found of an architecture."""
    replace_file(folder / f"{found.name}.json", msgspec.json.format(msgspec.json.encode(found)))


def read(folder: Path, kind: type[F]) -> dict[str, F]:
    """Read all that was found, as a kind of struct: name -> architecture.

    Raises:
        ConfigError: When a file of the folder is of something else.
    """
    some = [_read(file, kind) for file in sorted(folder.glob("*.json"))]
    return {one.name: one for one in some}


def _read(file: Path, kind: type[F]) -> F:
    try:
        return msgspec.json.decode(read_named(file), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--results: {file} must be of an architecture: {why_not(error)}"
        ) from None


def told(error: float | None) -> str:
    """An error in words."""
    return "not finite" if error is None else f"{error:.1e}"


def finite(error: float) -> float | None:
    """An error as a cell has it."""
    return error if math.isfinite(error) else None


def folder_of(results: str | None, prefix: str) -> AbstractContextManager[str]:
    """The folder of `--results`, or one of a name with this prefix that is removed at the end."""
    return nullcontext(results) if results else TemporaryDirectory(prefix=prefix)


def can_be_cut(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run that can be cut and goes on."""
    parser.add_argument(
        "--minutes", type=whole("--minutes", least=1), help="begin nothing new after so many"
    )
    parser.add_argument(
        "--results", metavar="DIR", help="keep what is found of each architecture, and go on there"
    )
