"""Devices that compute nothing, as hp-dry has one, and what the host reads of a device.

`is_dry` tells whether this process is inside such a device.

Code that looks at values of device memory copies them to the host, waits, and passes the copy
through `arrived`. On a CPU or a GPU that is all. In a dry run the copy holds zeros, and the numbers
come from what `answering` was given: a model of what the values would be, by their purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from hp_platform import _internals

Answer = Callable[[Tensor, object], Tensor]
"""Takes the copy on the host and the purpose; returns what is to be read instead."""

_answers: list[Answer] = []
_entered = False


def arrived(copy: Tensor, *, purpose: object) -> Tensor:
    """Return numbers that have come from the device, to be read by the host.

    Args:
        copy: Complete copy of the numbers on the host.
        purpose: What they are, in words or, where a model needs facts, as data: what a dry run
            knows them by.

    Returns:
        `copy`; in a dry run a tensor of its shape and dtype, with the numbers of a model.
    """
    return _answers[-1](copy, purpose) if _answers else copy


def require_on_device(condition: Tensor, message: str) -> None:
    """Require a value of the device that the host does not read.

    A GPU ends with its assertion error, which the next call that waits for it raises, as for an
    index out of range. A CPU raises at once.

    Args:
        condition: Bool, of one element.
        message: Message of the error on a CPU, and what a GPU prints.

    Raises:
        RuntimeError: On a CPU, if it is False.
    """
    _internals.assert_async(condition, message)


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Let `answer` say what every thread of this process reads of the device inside the context."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.remove(answer)


def is_dry() -> bool:
    """Tell whether the devices of this process only pretend to compute."""
    return _entered


def set_dry(*, entered: bool) -> None:
    """Say that this process has entered, or left, a device that computes nothing."""
    global _entered  # noqa: PLW0603 - of the process, as the device is
    _entered = entered
