"""Functions outside compiled graphs, and hooks at one point of forward and of backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hp_platform import _internals

P = ParamSpec("P")
R = TypeVar("R")
Hook = Callable[[], None]


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function, with all it calls, out of compiled graphs: one break for each call.

    For what cannot be compiled, such as reading sizes on the host, so that graphs are cut in one
    place that was chosen. Like `torch.compiler.disable`, but a program that compiles nothing does
    not import the compiler, which takes seconds.

    Args:
        function: May be a method.
    """
    uncompiled = _internals.dynamo_disabled(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (uncompiled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    # torch counts compilations by code object, and stops at eight: each function needs its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return wraps(function)(call)


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
