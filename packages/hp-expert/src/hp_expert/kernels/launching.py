"""How kernels of Triton are launched; in a dry run, where Triton need not be, they are noted.

Note [Few variants]. Triton compiles a kernel anew for other dtypes and constants, for pointers that
are no multiple of 16 bytes, and for numbers that are 1 or a multiple of 16. Each is loaded when it
is launched first, which waits for the device. So a number that differs from step to step, as that
of received slots, is not looked at (`do_not_specialize`): what one step has launched is all that
any step launches. Nobody leaves a launch out where there are no rows: Triton then loads the kernel,
and launches nothing.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hp_platform.own_kernels import launch

_ALIGNED = 16


def launch_kernel(
    module: str,
    kernel: str,
    grid: tuple[int, ...],
    *,
    made: Sequence[Tensor | None],
    given: Sequence[object],
    varying: Sequence[int] = (),
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
        given: Its other arguments, which it reads, and numbers that are those of a layer.
        varying: Numbers behind those, which may differ from step to step; see Note [Few variants].
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
            getattr(kernels, kernel)[grid](*made, *given, *varying, **constants)

    reads = [t for t in (*given, *updated) if isinstance(t, Tensor)]
    if writes is None:
        writes = [t for t in made if t is not None]
    variant = _variant((*made, *given), {**constants, "WIDE": wide})
    launch(f"hp_expert.{kernel}", run, reads=reads, writes=writes, variant=variant)


def _variant(arguments: Sequence[object], constants: dict[str, Any]) -> str:
    """Name the variant of a kernel that Triton compiles; see Note [Few variants]."""
    kinds = map(_kind, arguments)
    values = (f"{name}={value}" for name, value in sorted(constants.items()) if value is not None)
    return " ".join((*kinds, *values))


def _kind(argument: object) -> str:
    if isinstance(argument, Tensor):
        is_aligned = argument.storage_offset() * argument.element_size() % _ALIGNED == 0
        return f"{argument.dtype}".removeprefix("torch.") + ("" if is_aligned else "!")
    if not isinstance(argument, int) or argument == 1:
        return str(argument)
    return "16n" if argument % _ALIGNED == 0 else "n"


def power_from(number: int) -> int:
    """The least power of two that is not less: how many numbers a program has at once."""
    return 1 << (number - 1).bit_length()
