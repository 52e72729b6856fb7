"""Autograd Functions: the type of their context, and backwards that run once."""

from collections.abc import Callable
from functools import wraps
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ContextT = TypeVar("ContextT")
R = TypeVar("R")


class Context(Protocol):
    """The context that autograd passes to forward and backward of a Function.

    A Function that keeps more than tensors names it in a subclass.
    """

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and outputs for `saved_tensors` of the backward."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether a gradient that does not exist is zeros or None."""


def differentiable_once(
    backward: Callable[[ContextT, Tensor], R],
) -> Callable[[ContextT, Tensor], R]:
    """Make a backward refuse second derivatives, also of sums, whose gradient is a constant.

    torch's `once_differentiable` lets a backward of such a gradient return constants.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: ContextT, grad: Tensor) -> R:
        if torch.is_grad_enabled():
            grad = grad.detach().requires_grad_()
        return once(ctx, grad)

    return refusing
