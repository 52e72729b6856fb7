"""Whether this process is inside a device that computes nothing, as hp-dry has one."""

_entered = False


def is_dry() -> bool:
    """Tell whether the devices of this process only pretend to compute."""
    return _entered


def set_dry(*, entered: bool) -> None:
    """Say that this process has entered, or left, a device that computes nothing."""
    global _entered  # noqa: PLW0603 - of the process, as the device is
    _entered = entered
