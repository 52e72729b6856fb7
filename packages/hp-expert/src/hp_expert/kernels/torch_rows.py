"""Rows moved to positions and back by torch's operators: for CPU, and as reference of Triton's.

Shape symbols: T tokens, K choices per token, S = T * K slots, R positions, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
    """Copy the row of each position's token [R, D] ([R] if `x_TD` is [T])."""
    return _gather_or_zero(x_TD, token_R) if holes else x_TD.index_select(0, token_R)


def sum_rows(
    rows_RD: Tensor,
    inverse_TK: Tensor,
    weights_TK: Tensor | None = None,
    *,
    holes: bool,
    more_RD: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum weight * row over the positions of each token [T, D] ([T] for [R], K = 1, no weights)."""
    if dtype is not None:
        rows_RD = rows_RD.to(dtype)
    if more_RD is not None:
        rows_RD = rows_RD + more_RD
    if weights_TK is None and inverse_TK.shape[1] == 1:
        return gather_rows(rows_RD, inverse_TK.view(-1), holes=holes)
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    # Bags round ties up when they round to bf16, and sums of two bf16 numbers are often ties.
    is_rounded_well = rows_RD.dtype == wide or (
        rows_RD.dtype == torch.bfloat16 and weights_TK is not None
    )
    if rows_RD.device.type == "cpu" and is_rounded_well:
        return _sum_by_bags(rows_RD, inverse_TK, weights_TK, holes=holes)
    if weights_TK is not None:
        weights_TK = weights_TK.to(wide)
        weights_TK = weights_TK.where(inverse_TK >= 0, 0) if holes else weights_TK
    elif inverse_TK.shape[1] == 2:
        # One addition is computed wide and rounded once, whatever the dtype.
        first_TD, second_TD = (
            gather_rows(rows_RD, position_T, holes=holes) for position_T in inverse_TK.unbind(1)
        )
        return first_TD.add_(second_TD)
    elif rows_RD.device.type == "cpu":
        return _sum_in_blocks(rows_RD, inverse_TK, holes=holes)
    total_TD = rows_RD.new_zeros(inverse_TK.shape[0], rows_RD.shape[1], dtype=wide)
    for choice, position_T in enumerate(inverse_TK.unbind(1)):
        row_TD = gather_rows(rows_RD, position_T, holes=holes)
        total_TD += row_TD if weights_TK is None else row_TD * weights_TK[:, choice, None]
    return total_TD.to(rows_RD.dtype)


def sum_rows_backward(
    grad_TD: Tensor, rows_RD: Tensor, slot_R: Tensor, weights_TK: Tensor, *, holes: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows [R, D] and the weights [T, K] of `sum_rows`."""
    num_slots, num_choices = weights_TK.numel(), weights_TK.shape[1]
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    # Rounding down keeps -1.
    token_R = slot_R.div(num_choices, rounding_mode="floor")
    grad_RD = gather_rows(grad_TD, token_R, holes=holes).to(wide)
    weight_R = gather_rows(weights_TK.reshape(-1), slot_R, holes=holes).to(wide)
    there_RD = rows_RD.masked_fill((slot_R < 0)[:, None], 0) if holes else rows_RD
    product_R = torch.linalg.vecdot(grad_RD, there_RD.to(wide)).to(weights_TK.dtype)
    # One slot more than there are takes what belongs to none.
    target_R = slot_R.where(slot_R >= 0, num_slots)
    grad_weights_S = product_R.new_zeros(num_slots + 1).scatter_(0, target_R, product_R)[:-1]
    grad_rows_RD = (grad_RD * weight_R[:, None]).to(rows_RD.dtype)
    return grad_rows_RD, grad_weights_S.view(weights_TK.shape)


def _sum_in_blocks(rows_RD: Tensor, inverse_TK: Tensor, *, holes: bool) -> Tensor:
    """Sum the rows of a few tokens at a time, so that gathered rows are still in the cache.

    On CPU torch adds narrow numbers in fp32 and rounds once.
    """
    y_TD = rows_RD.new_empty(inverse_TK.shape[0], rows_RD.shape[1])
    for y, inverse in zip(y_TD.split(128), inverse_TK.split(128), strict=True):
        found = gather_rows(rows_RD, inverse.reshape(-1), holes=holes)
        torch.sum(found.unflatten(0, inverse.shape), 1, out=y)
    return y_TD


def _gather_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Return rows of `x`; zeros where the index is -1."""
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    is_absent = (index < 0).view(-1, *[1] * (x.ndim - 1))
    return x.index_select(0, index.clamp_min(0)).masked_fill_(is_absent, 0)


def _sum_by_bags(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, *, holes: bool
) -> Tensor:
    """Sum rows while they are gathered, in fp32 or wider, for bf16 as well, by `embedding_bag`.

    Bags take weights of the dtype of the rows. Two bf16 numbers together have 16 bits of a wider
    number, so for bf16 a slot is listed twice, for the upper and the lower half of its weight.
    """
    if weights_TK is not None and weights_TK.dtype != rows_RD.dtype:
        if rows_RD.dtype == torch.bfloat16:
            T, K = inverse_TK.shape
            halves_T2K = weights_TK.new_empty(T, 2, K, dtype=rows_RD.dtype)
            upper_TK = halves_T2K[:, 0].copy_(weights_TK)
            torch.sub(weights_TK, upper_TK, out=halves_T2K[:, 1])
            inverse_TK = inverse_TK.repeat(1, 2)
            weights_TK = halves_T2K.view(T, 2 * K)
        else:
            weights_TK = weights_TK.to(rows_RD.dtype)
    if holes:
        return _sum_listed(rows_RD, inverse_TK, weights_TK)
    return F.embedding_bag(inverse_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)


def _sum_listed(rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum by bags where slots may lack a position: bags contain the existing positions only."""
    T, K = inverse_TK.shape
    if rows_RD.shape[0] == 0 or T == 0:
        return rows_RD.new_zeros(T, rows_RD.shape[1])
    inverse_S = inverse_TK.reshape(-1)
    is_there_S = inverse_S >= 0
    ends_S = is_there_S.cumsum(0)
    # Many slots may lack a position: they all write to the last place, and none to the first.
    place_S = ends_S.where(is_there_S, T * K + 1)
    listed_S = inverse_S.new_zeros(T * K + 2).scatter_(0, place_S, inverse_S)[1:-1]
    weight_S = None
    if weights_TK is not None:
        weight_S = weights_TK.new_zeros(T * K + 2)
        weight_S = weight_S.scatter_(0, place_S, weights_TK.reshape(-1))[1:-1]
    ends = F.pad(ends_S.view(T, K)[:, -1], (1, 0))
    bags = F.embedding_bag(listed_S, rows_RD, ends, mode="sum", per_sample_weights=weight_S)
    # No view: autograd forbids in-place changes of a view that a Function returns.
    return bags.resize_(T, rows_RD.shape[1])
