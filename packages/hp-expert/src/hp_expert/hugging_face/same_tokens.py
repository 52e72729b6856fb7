"""Experts where some ranks have the same tokens, as tensor-parallel ranks of transformers have.

Note [Ranks with the same tokens]. Experts that ranks share must see each token once. Where several
of those ranks run the model on the same tokens, each sends a part of them, and what experts give is
put together behind them. The gradient of a token is there on the rank that has sent it, and is put
together in front. What a rank computes of experts is then of tokens of its own.

Shape symbols: T tokens, t of them on a rank, K experts per token, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.dispatch.tensor_sliced import even_sizes
from hp_platform import all_gather_uneven


def of_own_tokens(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: ProcessGroup,
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Call experts with this rank's part of the tokens.

    Args:
        forward: What experts compute, [t, D] to [t, D].
        group: The ranks with the same tokens.
        x_TD: [T, D], the same on all of these ranks.
        experts_TK: Experts of each token, int64 [T, K].
        weights_TK: What each counts [T, K].

    Returns:
        [T, D], the same on all of these ranks.
    """
    sizes = even_sizes(len(experts_TK), group.size())
    own = forward(
        _Part.apply(x_TD, sizes, group),
        _part(experts_TK, sizes, group),
        _Part.apply(weights_TK, sizes, group),
    )
    whole: Tensor = _Whole.apply(own, sizes, group)
    return whole


def _part(x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
    part: Tensor = x.split(sizes)[group.rank()]
    return part.contiguous()


def _whole(x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
    return all_gather_uneven(x.contiguous(), sizes=sizes, group=group)


class _Part(torch.autograd.Function):
    """This rank's rows of what all have; backward puts gradients of all parts together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _part(x, sizes, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _whole(grad, ctx.sizes, ctx.group), None, None


class _Whole(torch.autograd.Function):
    """Rows of all ranks, which go on with the same numbers: backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _whole(x, sizes, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _part(grad, ctx.sizes, ctx.group), None, None
