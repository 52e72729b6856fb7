"""How kernels of Triton are launched; in a dry run, where Triton need not be, they are noted."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hp_platform.own_kernels import launch


def launch_kernel(
    module: str,
    kernel: str,
    grid: tuple[int, ...],
    *,
    made: Sequence[Tensor | None],
    given: Sequence[object],
    updated: Sequence[Tensor | None] = (),
    writes: Sequence[Tensor] | None = None,
    wide: torch.dtype | None = None,
    **constants: Any,
) -> None:
    """Launch a kernel on the current stream of the device of its tensors.

    Args:
        module: Module of this package that has it, and wants Triton.
        kernel: Its name.
        grid: How many programs there are, along each axis.
        made: Its first arguments, which it writes.
        given: Its other arguments, which it reads, and numbers.
        updated: What of `made` it reads as well.
        writes: What it writes, where that is not all of `made`.
        wide: Dtype of the numbers whose sums are kept in its constant WIDE.
        **constants: Its other constants, and options of the launch.
    """

    def run() -> None:
        if wide is not None:
            language = importlib.import_module("triton.language")
            constants["WIDE"] = language.float64 if wide == torch.float64 else language.float32
        with torch.cuda.device_of(made[0]):
            kernels = importlib.import_module(f"hp_expert.kernels.{module}")
            getattr(kernels, kernel)[grid](*made, *given, **constants)

    reads = [t for t in (*given, *updated) if isinstance(t, Tensor)]
    if writes is None:
        writes = [t for t in made if t is not None]
    launch(f"hp_expert.{kernel}", run, reads=reads, writes=writes)


def power_from(number: int) -> int:
    """The least power of two that is not less: how many numbers a program has at once."""
    return 1 << (number - 1).bit_length()
