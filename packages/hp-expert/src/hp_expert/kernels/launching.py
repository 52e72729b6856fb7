"""The launch of a kernel of Triton; in a dry run, where Triton may be missing, it is recorded.

Note [Few variants]. Triton compiles a variant of a kernel for other dtypes and constants, for
pointers that are not a multiple of 16 bytes, and for numbers that are 1 or a multiple of 16. A
variant is loaded when it is launched first, which waits for the device. So variants do not depend
on numbers that differ from step to step, such as that of received slots (`do_not_specialize`): one
step launches all variants of a run. A kernel is also launched for zero rows: Triton then loads it,
and runs nothing.
"""

import importlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hp_platform.dry_device import launch

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
    constants: Mapping[str, object],
) -> None:
    """Launch a kernel on the current stream of the device of its tensors.

    Args:
        module: Module in `hp_expert.kernels` that has the kernel, and imports Triton.
        kernel: Name of the kernel.
        grid: Number of programs along each axis.
        made: First arguments of the kernel, which it writes.
        given: Next arguments, which it reads, and numbers that are constant in a layer.
        varying: Last arguments, numbers that may differ from step to step; see Note [Few variants].
        updated: Tensors of `made` that it reads as well.
        writes: Tensors that it writes; None: all of `made`.
        wide: Dtype of the numbers that it sums in fp32 or wider, in its constant WIDE.
        constants: Other constants of the kernel, and options of the launch.
    """

    def run() -> None:
        chosen = dict(constants)
        if wide is not None:
            language = importlib.import_module("triton.language")
            chosen["WIDE"] = language.float64 if wide == torch.float64 else language.float32
        with torch.cuda.device_of(made[0]):
            kernels = importlib.import_module(f"hp_expert.kernels.{module}")
            getattr(kernels, kernel)[grid](*made, *given, *varying, **chosen)

    reads = [t for t in (*given, *updated) if isinstance(t, Tensor)]
    if writes is None:
        writes = [t for t in made if t is not None]
    variant = _variant((*made, *given), {**constants, "WIDE": wide})
    launch(f"hp_expert.{kernel}", run, reads=reads, writes=writes, variant=variant)


def _variant(arguments: Sequence[object], constants: Mapping[str, object]) -> str:
    """Return a name of the variant of a kernel; see Note [Few variants]."""
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
    """Return the least power of two that is not less than a number: the size of a block for it."""
    return 1 << (number - 1).bit_length()
