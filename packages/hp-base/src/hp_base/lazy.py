"""Faces of packages whose names load their modules when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are in modules not imported yet.

    Args:
        package: Name of the package.
        homes: Module of each public name, or `module:name` where it has another name there.

    Returns:
        A function that loads a name, and raises AttributeError for others; and one that lists all
        names, for `help` and completion.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own = homes[name].partition(":")
        found: object = getattr(import_module(module), own or name)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names
