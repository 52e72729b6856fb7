"""From token order to expert order and back, each by one gather.

The two gathers are each other's transpose, so both directions of autograd are gathers: nothing is
scattered, no two writes meet, and a rerun gives the same bits on every device.

Shape symbols: T tokens, K choices per token, S = T * K slots (slot = token * K + choice), D width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_platform import wait_tensor


class Permutation(NamedTuple):
    """Slots sorted by expert. The sort is stable: slots of one expert stay in token order.

    Attributes:
        order: Slot at each position, int64 [S].
        token: Token of that slot, int64 [S].
        inverse: Position of each slot, int64 [T, K].
    """

    order: Tensor
    token: Tensor
    inverse: Tensor


def sort_by_expert(experts_TK: Tensor) -> Permutation:
    """Sort the slots of tokens by their expert.

    Args:
        experts_TK: Expert of each slot, any integer dtype [T, K].
    """
    order_S = experts_TK.reshape(-1).argsort(stable=True)
    inverse_TK = invert(order_S).view(experts_TK.shape)
    num_choices = experts_TK.shape[1]
    token_S = order_S if num_choices == 1 else order_S.div(num_choices, rounding_mode="floor")
    return Permutation(order_S, token_S, inverse_TK)


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation of 0 .. S - 1, int64 [S]."""
    positions = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def gather_slots(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token's row to the positions of its slots. Differentiable, as often as wanted.

    Args:
        x_TD: One row per token [T, D].
        permutation: Of the slots of these tokens.

    Returns:
        One row per slot in expert order [S, D].
    """
    rows_SD: Tensor = _GatherSlots.apply(x_TD, permutation)
    return rows_SD


def sum_slots(rows_SD: Tensor, permutation: Permutation) -> Tensor:
    """Sum the rows of each token's slots, in the order of its choices. Differentiable.

    Args:
        rows_SD: One row per slot in expert order [S, D].
        permutation: Of the slots.

    Returns:
        One row per token [T, D]. Sums of more than one row are accumulated in fp32 or wider.
    """
    y_TD: Tensor = _SumSlots.apply(rows_SD, permutation)
    return y_TD


def permute_slots(values_TK: Tensor, permutation: Permutation) -> Tensor:
    """Put one value per slot into expert order: [T, K] to [S]. Differentiable."""
    one_choice = permutation._replace(
        token=permutation.order, inverse=permutation.inverse.view(-1, 1)
    )
    values_S: Tensor = _GatherSlots.apply(values_TK.reshape(-1), one_choice)
    return values_S


class _GatherSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return x.index_select(0, permutation.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumSlots.apply(wait_tensor(grad), ctx.permutation), None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return gather_and_sum(rows, permutation.inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherSlots.apply(wait_tensor(grad), ctx.permutation), None


def gather_and_sum(rows: Tensor, inverse_TK: Tensor) -> Tensor:
    """Sum the K rows at the positions of each token, in fp32 or wider; not differentiable."""
    if inverse_TK.shape[1] == 1:
        return rows.index_select(0, inverse_TK.view(-1))
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.device.type == "cpu":
        # Sums while it gathers, without a tensor in between: several times as fast.
        return F.embedding_bag(inverse_TK, rows.to(wide), mode="sum").to(rows.dtype)
    first, *others = inverse_TK.unbind(1)
    total = rows.index_select(0, first).to(wide)
    for position in others:
        total += rows.index_select(0, position)
    return total.to(rows.dtype)
