"""Costs of documents in a TOML file: seconds that somebody has measured."""

import tomllib
from pathlib import Path
from typing import Any

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_packing.costs import StepCosts

_NAMES = ("token", "pair", "microbatch", "key", "far_key", "heads", "message")


def read_costs(path: Path, *, windows: tuple[int | None, ...]) -> StepCosts:
    """Read costs of stages that are equal.

    Args:
        path: A TOML file of numbers, arguments of `StepCosts.equal`: "token" and "pair" at least.
        windows: What layers look at.

    Raises:
        ConfigError: When it cannot be read, lacks one, or has something else.
    """
    try:
        values = tomllib.loads(read_named(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"data.plan_costs ({path}) must be a TOML file: {why_not(error)}"
        ) from None
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _NAMES or not is_number or not 0 <= value < float("inf"):
            raise ConfigError(
                f"data.plan_costs ({path}): {name} = {value!r} must be a number >= 0 of one of "
                f"{', '.join(_NAMES)}"
            )
    if missing := [name for name in _NAMES[:2] if name not in values]:
        raise ConfigError(f"data.plan_costs ({path}) must have {missing[0]}")
    given: dict[str, Any] = {name: float(value) for name, value in values.items()}
    return StepCosts.equal(windows=windows, **given)
