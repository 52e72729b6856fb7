"""Faces of packages whose names load what they need when somebody asks for them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package whose public names are in modules not imported yet.

    Args:
        package: Name of the package.
        homes: Public name -> module that has it; `module:name` where it has another name there.

    Returns:
        A function that raises AttributeError for other names.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own = homes[name].partition(":")
        return getattr(import_module(module), own or name)

    return load
