"""Costs of documents in a TOML file: seconds that somebody has measured."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.step_plan.costs import StepCosts

_NAMES = tuple(field.name for field in fields(StepCosts) if field.type in (float, "float"))


def read_costs(path: Path, usual: StepCosts) -> StepCosts:
    """Read costs of a stage; what the file does not have is as usual.

    Args:
        path: A TOML file of numbers by the names of `StepCosts`.
        usual: Costs of the machine.

    Raises:
        ConfigError: When it cannot be read, or has something else.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.plan_costs ({path}) must be a TOML file: {error}") from None
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _NAMES or not is_number or not 0 <= value < float("inf"):
            raise ConfigError(
                f"data.plan_costs ({path}): {name} = {value!r} must be a number >= 0 of one of "
                f"{', '.join(_NAMES)}"
            )
    return replace(usual, **{name: float(value) for name, value in values.items()})


def costs_text(costs: StepCosts) -> str:
    """Costs as `read_costs` reads them."""
    return "".join(f"{name} = {getattr(costs, name)!r}\n" for name in _NAMES)
