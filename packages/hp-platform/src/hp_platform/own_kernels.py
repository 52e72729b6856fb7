"""Kernels that torch does not know, such as Triton's, and a device that computes nothing.

Code launches such a kernel through `launch`, which calls it on a GPU. In a dry run the kernel is
not called, and its compiler need not be installed: the tensors that it would read and write are
recorded instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from torch import Tensor

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
