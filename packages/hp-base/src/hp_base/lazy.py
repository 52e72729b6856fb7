"""Faces of packages whose names load their modules when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose public names are in modules not imported yet.

    Args:
        package: Name of the package.
        homes: Module of each public name, or `module:name` where it has another name there.

    Returns:
        A function that raises AttributeError for other names.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own = homes[name].partition(":")
        found: object = getattr(import_module(module), own or name)
        return found

    return load
