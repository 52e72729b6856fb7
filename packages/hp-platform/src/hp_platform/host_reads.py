"""Devices that compute nothing, such as hp-dry's, and reads of device memory by the host.

`is_dry` tells whether this process is inside such a device.

Code that reads values of device memory copies them to the host, waits, and passes the copy through
`arrived`, which returns it unchanged on a CPU or a GPU. In a dry run the copy holds zeros, and the
function given to `answering` returns numbers instead: it models the values by their purpose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from hp_platform import _internals

Answer = Callable[[Tensor, object], Tensor]
"""Function of a copy on the host and its purpose; returns the tensor to read instead."""

_answers: list[Answer] = []
_entered = False


def arrived(copy: Tensor, *, purpose: object) -> Tensor:
    """Return the numbers that a copy from the device has brought to the host.

    Args:
        copy: Complete copy of the numbers on the host.
        purpose: Meaning of the numbers, in words, or as data where a model needs facts; a dry run
            chooses its answer by it.

    Returns:
        `copy`; in a dry run a tensor of the same shape and dtype with numbers of a model.
    """
    return _answers[-1](copy, purpose) if _answers else copy


def require_on_device(condition: Tensor, message: str) -> None:
    """Require a condition on the device, without waiting for its value on the host.

    A GPU stops with an assertion error, which the next call that waits for the GPU raises, as for
    an index out of range. A CPU raises at once.

    Args:
        condition: Bool tensor of one element.
        message: Message of the error on a CPU, and text that a GPU prints.

    Raises:
        RuntimeError: On a CPU, if the condition is False.
    """
    _internals.assert_async(condition, message)


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Let `answer` give the numbers that this process reads from the device inside the context."""
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
