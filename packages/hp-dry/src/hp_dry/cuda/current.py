"""The dry device that this process is inside of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_dry.device.device import DryDevice

entered: list[DryDevice] = []
"""The device that this process is inside of; at most one."""


def active() -> DryDevice:
    """Return the device that this process is inside of.

    Raises:
        RuntimeError: If it is in none: a stream, an event or a tensor has outlived its device.
    """
    if not entered:
        raise RuntimeError("a stream or an event of a DryDevice is used outside of one")
    return entered[0]
