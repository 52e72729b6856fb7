"""Numbers given to options of the command line, each checked where it is read."""

import math
from collections.abc import Callable

from hp_train.errors import ConfigError

_LARGEST = 2**31 - 1


def whole(option: str, *, least: int, largest: int = _LARGEST) -> Callable[[str], int]:
    """Make what reads a whole number.

    Args:
        option: Name of the option as it is given, for messages.
        least: Smallest number that is allowed.
        largest: Largest number that is allowed.

    Returns:
        For `argparse`; raises `ConfigError`.
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{option} ({text}) must be a whole number") from None
        if value < least:
            raise ConfigError(f"{option} ({text}) must be at least {least}")
        if value > largest:
            raise ConfigError(f"{option} ({text}) must be at most {largest}")
        return value

    return read


def real(option: str, *, below: float = math.inf) -> Callable[[str], float]:
    """Make what reads a number that is not negative; neither NaN nor infinity is one.

    Args:
        option: Name of the option as it is given, for messages.
        below: What it has to be less than.

    Returns:
        For `argparse`; raises `ConfigError`.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{option} ({text}) must be a number") from None
        if not math.isfinite(value):
            raise ConfigError(f"{option} ({text}) must be a finite number")
        if value < 0:
            raise ConfigError(f"{option} ({text}) must be at least 0")
        if value >= below:
            raise ConfigError(f"{option} ({text}) must be less than {below:g}")
        return value

    return read
