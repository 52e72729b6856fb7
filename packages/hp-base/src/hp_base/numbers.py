"""Parsers of numbers for options of the command line, which check a number when it is read."""

import math
from collections.abc import Callable
from typing import TypeVar

from hp_base.errors import ConfigError

T = TypeVar("T")
_LARGEST = 2**31 - 1


def whole(option: str, *, least: int, largest: int = _LARGEST) -> Callable[[str], int]:
    """Return a parser of a whole number.

    Args:
        option: Name of the option as it is given, for messages.
        least: Smallest number that is allowed.
        largest: Largest number that is allowed.

    Returns:
        A `type` for `argparse`; raises `ConfigError`.
    """
    return _reader(
        option,
        int,
        "a whole number",
        (lambda value: value >= least, f"at least {least}"),
        (lambda value: value <= largest, f"at most {largest}"),
    )


def real(option: str, *, below: float = math.inf) -> Callable[[str], float]:
    """Return a parser of a finite number that is not negative.

    Args:
        option: Name of the option as it is given, for messages.
        below: Bound that the number must be less than.

    Returns:
        A `type` for `argparse`; raises `ConfigError`.
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
    """Return a parser of a number of a kind, with rules: a condition and its words for messages."""

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
