"""Numbers given to options of the command line, each checked where it is read."""

import math
from collections.abc import Callable
from typing import TypeVar

from hp_base.errors import ConfigError

T = TypeVar("T")
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
    return _reader(
        option,
        int,
        "a whole number",
        (lambda value: value >= least, f"at least {least}"),
        (lambda value: value <= largest, f"at most {largest}"),
    )


def real(option: str, *, below: float = math.inf) -> Callable[[str], float]:
    """Make what reads a number that is not negative; neither NaN nor infinity is one.

    Args:
        option: Name of the option as it is given, for messages.
        below: What it has to be less than.

    Returns:
        For `argparse`; raises `ConfigError`.
    """
    return _reader(
        option,
        float,
        "a number",
        (math.isfinite, "a finite number"),
        (lambda value: value >= 0, "at least 0"),
        (lambda value: value < below, f"less than {below:g}"),
    )


def _reader(
    option: str, kind: Callable[[str], T], form: str, *rules: tuple[Callable[[T], bool], str]
) -> Callable[[str], T]:
    """Make what reads a number of a kind; each rule says what the number must be."""

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{option} ({text}) must be {form}") from None
        for is_kept, rule in rules:
            if not is_kept(value):
                raise ConfigError(f"{option} ({text}) must be {rule}")
        return value

    return read
