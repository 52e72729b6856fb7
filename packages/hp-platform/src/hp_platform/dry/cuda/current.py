"""Which dry device this process is inside of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_platform.dry.device.device import DryDevice

entered: list[DryDevice] = []
"""The device that this process is inside of; at most one."""


def is_dry() -> bool:
    """Whether this process is inside a `DryDevice`."""
    return bool(entered)


def active() -> DryDevice:
    """The device that this process is inside of.

    Raises:
        RuntimeError: If it is in none: a stream, an event or a tensor has outlived its device.
    """
    if not entered:
        raise RuntimeError("a stream or an event of a DryDevice is used outside of one")
    return entered[0]
