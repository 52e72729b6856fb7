"""Begin the recording of a process: random numbers, float64, and sums in another order.

A layout adds the same terms in another order, and halves of them on different ranks, each rounded
to the dtype of the result. A reference whose products are summed in another order, in two halves,
differs from itself by as much (`Disturbing`).
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hp_platform._internals import TorchDispatchMode
from hp_platform.device import lift
from hp_verify.recording.recorder import Recorder
from hp_verify.recording.request import Request
from hp_verify.recording.second_run import SecondRunRecorder

_aten = torch.ops.aten
_SEEDS = 1 << 32
"""numpy takes smaller ones."""


def begin(request: Request) -> Recorder:
    """Record this process from now on; what is left is written at its end, or by `close` before.

    Args:
        request: Request to the process.
    """
    seed(request.seed)
    if request.float64:
        lift()
    if request.disturb:
        disturb(request.disturb)
    recorder = Recorder(request) if request.focus is None else SecondRunRecorder(request)
    recorder.listen()
    return recorder


def seed(value: int) -> None:
    """Seed the generators of torch, python and, where it is installed, numpy."""
    torch.manual_seed(value)
    random.seed(value)
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415 - not everybody has it

        np.random.seed(value % _SEEDS)  # noqa: NPY002 - the one that jobs use unseen


class Disturbing(TorchDispatchMode):
    """Takes the sums of matrix products in two halves of a random order.

    Args:
        seed: Seed of the random orders.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._orders: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call an operator, products in two halves."""
        if kwargs or not all(type(arg) is Tensor or not isinstance(arg, Tensor) for arg in args):
            return func(*args, **(kwargs or {}))
        if func is _aten.mm.default:
            return self._halves(torch.mm, *args)
        if func is _aten.bmm.default:
            return self._halves(torch.bmm, *args)
        if func in (_aten.addmm.default, _aten.baddbmm.default) and len(args) == 3:
            product = torch.mm if func is _aten.addmm.default else torch.bmm
            return args[0] + self._halves(product, *args[1:])
        return func(*args)

    def _halves(self, product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        size = a.shape[-1]
        if size < 2:
            return product(a, b)
        first, second = self._order(size)
        return product(a[..., first], b[..., first, :]) + product(a[..., second], b[..., second, :])

    def _order(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._orders:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self._seed))
            self._orders[size] = order[: size // 2], order[size // 2 :]
        return self._orders[size]


def disturb(seed: int) -> None:
    """Take sums in another order from now on, in this thread.

    Args:
        seed: Seed of the random orders.
    """
    # torch.compile leaves out what runs under a mode, and would take the recorder's own code.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    Disturbing(seed).__enter__()  # for as long as the program runs
