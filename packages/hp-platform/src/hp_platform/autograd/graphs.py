"""Functions outside compiled graphs, and hooks at one point of forward and of backward."""

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
    """Exclude a function, and all that it calls, from compiled graphs: one break for each call.

    Use it for code that cannot be compiled, such as reads of sizes on the host, to choose where
    graphs break. It works like `torch.compiler.disable`, but a program that compiles nothing does
    not import the compiler, which takes seconds.

    Args:
        function: Function or method.
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
    """Return `x` unchanged; call `forward` now and `backward` when the gradient of `x` arrives.

    Nothing reads the tensor, so that the result of a pending collective stays pending. Without a
    gradient (`x` does not require grad, or grad mode is off) only `forward` is called. A compiled
    region breaks its graph here.

    Args:
        x: Any tensor.
        forward: Function that is called before `sync_hook` returns.
        backward: Function that is called in each backward pass, in the thread that runs this node.
    """
    y: Tensor = _SyncHook.apply(x, forward, backward)
    return y
