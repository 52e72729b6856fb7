"""Backwards of autograd Functions that cannot be differentiated themselves."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """Refuse second derivatives also of sums, whose gradient is a constant.

    torch's `once_differentiable` takes such a gradient as leave to return constants as well.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            grad = grad.detach().requires_grad_()
        gradients: tuple[Tensor | None, ...] = once(ctx, grad)
        return gradients

    return refusing
