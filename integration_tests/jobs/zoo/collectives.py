# ruff: noqa: ARG004 - the interface of autograd functions
"""Collectives with gradients, in plain torch: a job of a stranger has its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Copy(torch.autograd.Function):
    """The same tensor on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return summed(grads[0])


class Reduce(torch.autograd.Function):
    """The sum over ranks, which all use in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Gather(torch.autograd.Function):
    """Chunks of all ranks along a dim, which all use in their own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = summed(grads[0])
        return whole.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


class Split(torch.autograd.Function):
    """This rank's chunk along a dim of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.dim), None


class ReduceSplit(torch.autograd.Function):
    """This rank's chunk along a dim of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return summed(x).chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.dim), None


def summed(x: Tensor) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result)
    return result


def gathered(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)
