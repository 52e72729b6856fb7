"""Additions of other packages to a run, found by entry points; none is imported by name.

| group | what an entry point gives |
|---|---|
| `hp_trainer.models` | a class of stages, which has `tied_parameters` of a config |
| `hp_trainer.weights` | a module with `load_weights` and `require_fit`, for `run.init_from` |
| `hp_trainer.originals` | a function of a run directory and its config: keeps what comes along |
| `hp_trainer.notes` | a function of a config: lines for the first lines of a run |
| `hp_trainer.model_flops` | a function of a config and a vocabulary's size: operations per token |
| `hp_trainer.step_sources` | a class that makes the steps of a run, by the name of `data.packing` |
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hp_base.errors import ConfigError


def find(group: str, name: str, *, asked_by: str, package: str) -> EntryPoint:
    """Find what a package adds to a group under a name.

    Args:
        group: Group of entry points.
        name: Name of the entry point.
        asked_by: What in a config needs it, for the message.
        package: Package to install where it is missing.

    Raises:
        ConfigError: When no installed package has it.
    """
    for point in _points(group):
        if point.name == name:
            return point
    raise ConfigError(f"{asked_by} needs a package that is not installed: pip install {package}")


def plugin(group: str, name: str, *, asked_by: str, package: str) -> Any:
    """Load what `find` finds; arguments and errors are the same."""
    return find(group, name, asked_by=asked_by, package=package).load()


def planned_steps() -> EntryPoint:
    """Find what makes the steps of a run with `data.packing` "planned".

    Raises:
        ConfigError: When no installed package makes such steps.
    """
    asked_by = 'data.packing ("planned")'
    return find("hp_trainer.step_sources", "planned", asked_by=asked_by, package="hp-packing")


def weights_of(folder: str) -> Any:
    """Load what reads the weights of `run.init_from`: `load_weights` and `require_fit`.

    Args:
        folder: Value of the key, for the message.

    Raises:
        ConfigError: When no installed package reads weights.
    """
    asked_by = f"run.init_from ({folder})"
    return plugin(
        "hp_trainer.weights", "hugging_face", asked_by=asked_by, package="hp-transformers"
    )


def plugins(group: str) -> Iterator[Any]:
    """Load and yield all that installed packages add to a group."""
    for point in _points(group):
        yield point.load()


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
