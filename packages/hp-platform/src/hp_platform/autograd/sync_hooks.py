"""`sync_hook`: call back at one point of forward and at the same point of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_platform.autograd.compiling import outside_graph

Hook = Callable[[], None]


class _SyncHook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Hook | None, backward: Hook | None) -> Tensor:
        ctx.hook = backward
        if forward is not None:
            forward()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.hook is not None:
            ctx.hook()
        return grad, None, None


@outside_graph
def sync_hook(x: Tensor, *, forward: Hook | None = None, backward: Hook | None = None) -> Tensor:
    """Return `x` unchanged; call `forward` now and `backward` when its gradient passes by.

    Neither reads the tensor, so one that nobody has waited for stays so. Without a gradient to
    pass (`x` does not require grad, or grad mode is off) only `forward` is called. A compiled
    region breaks its graph here.

    Args:
        x: Any tensor.
        forward: Called before this returns.
        backward: Called in each backward pass, in the thread that runs this node.
    """
    y: Tensor = _SyncHook.apply(x, forward, backward)
    return y
