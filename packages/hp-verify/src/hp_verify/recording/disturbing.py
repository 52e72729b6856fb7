"""Products whose sums are taken in another order, in two halves: what rounding does to a job.

A layout adds the same terms in another order, and halves of them on different ranks, each rounded
to the dtype of the result. A reference that is run again like this differs from itself by as much.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_platform._internals.modes import TorchDispatchMode

_aten = torch.ops.aten


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
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
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
            generator = torch.Generator().manual_seed(self._seed)
            order = torch.randperm(size, generator=generator)
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
