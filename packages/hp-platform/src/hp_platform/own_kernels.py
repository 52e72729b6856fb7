"""Kernels that torch does not know, such as Triton's, and a device that computes nothing.

Code that launches one does it through `launch`. On a GPU that is all. In a dry run nothing is
launched, nor has the compiler of the kernel to be there: what the kernel would read and write is
written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from torch import Tensor

Note = Callable[[str, Sequence[Tensor], Sequence[Tensor], str], None]
"""Takes the name of a kernel, what it reads, what it writes, and its variant."""

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
        run: Launches it.
        reads: What it reads.
        writes: What it writes.
        variant: What the compiler makes a kernel of its own for, such as dtypes and constants: each
            is compiled, and loaded on the device, when it is launched first.
    """
    if _notes:
        _notes[-1][0](name, reads, writes, variant)
    else:
        run()


def are_noted() -> bool:
    """Tell whether kernels are written down instead of launched."""
    return bool(_notes)


def device_number() -> int:
    """A number of what kernels are launched on: 0 for GPUs, another one for each dry device.

    Whoever keeps tensors of a device longer than a call keeps the number with them: what was
    copied to a dry device is not there on the next.
    """
    return _notes[-1][1] if _notes else 0


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Give `note` what every thread of this process would launch inside the context."""
    numbered = (note, next(_counter))
    _notes.append(numbered)
    try:
        yield
    finally:
        _notes.remove(numbered)
