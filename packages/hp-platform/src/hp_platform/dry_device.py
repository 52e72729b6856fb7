"""Devices that compute nothing, such as hp-dry's: kernels of a package, and reads by the host.

`is_dry` tells whether this process is inside such a device.

Code launches a kernel that torch does not know, such as Triton's, through `launch`, which calls it
on a GPU. In a dry run the kernel is not called, and its compiler need not be installed: the tensors
that it would read and write are recorded instead.

Code that reads values of device memory copies them to the host, waits, and passes the copy through
`arrived`, which returns it unchanged on a CPU or a GPU. In a dry run the copy holds zeros, and the
function given to `answering` returns numbers instead: it models the values by their purpose.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

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


Note = Callable[[str, Sequence[Tensor], Sequence[Tensor], str], None]
"""Function of the name of a kernel, the tensors it reads, those it writes, and its variant."""

_notes: list[tuple[Note, int]] = []
_counter = count(1)


def launch(
    name: str,
    run: Callable[[], object],
    *,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    variant: str = "",
) -> None:
    """Launch a kernel on the current stream.

    Args:
        name: Name of the kernel with its package, such as `"hp_expert.gather_rows"`.
        run: Function that launches the kernel.
        reads: Tensors that the kernel reads.
        writes: Tensors that the kernel writes.
        variant: Dtypes, constants and the like for which the compiler makes separate kernels; each
            variant is compiled, and loaded on the device, at its first launch.
    """
    if _notes:
        _notes[-1][0](name, reads, writes, variant)
    else:
        run()


def are_noted() -> bool:
    """Tell whether kernels are recorded instead of launched."""
    return bool(_notes)


def device_number() -> int:
    """Return the number of the device: 0 for GPUs, another number for each dry device.

    Code that stores tensors of a device for later calls stores the number with them: tensors of one
    dry device do not exist on the next.
    """
    return _notes[-1][1] if _notes else 0


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Pass kernels that this process would launch to `note` instead, inside the context."""
    numbered = (note, next(_counter))
    _notes.append(numbered)
    try:
        yield
    finally:
        _notes.remove(numbered)
