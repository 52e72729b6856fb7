"""Rows to their positions and back in torch's operations: for CPU, and to check Triton's against.

Shape symbols: T tokens, K choices per token, S = T * K slots, R positions, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
    """Copy the row of each position's token [R, D] ([R] if `x_TD` is [T])."""
    return _gather_or_zero(x_TD, token_R) if holes else x_TD.index_select(0, token_R)


def sum_rows(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None = None, *, holes: bool
) -> Tensor:
    """Sum weight * row over the positions of each token [T, D] ([T] for [R], K = 1, no weights)."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    if weights_TK is None:
        if inverse_TK.shape[1] == 1:
            return gather_rows(rows_RD, inverse_TK.view(-1), holes=holes)
        if rows_RD.device.type == "cpu" and rows_RD.dtype == wide:
            # Sums while it gathers, without a tensor in between; a copy in fp32 would cost more.
            return _sum_some(rows_RD, inverse_TK) if holes else _sum_all(rows_RD, inverse_TK)
    else:
        weights_TK = weights_TK.to(wide)
        weights_TK = weights_TK.where(inverse_TK >= 0, 0) if holes else weights_TK
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


def _gather_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`; zeros where the index is -1."""
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    is_absent = (index < 0).view(-1, *[1] * (x.ndim - 1))
    return x.index_select(0, index.clamp_min(0)).masked_fill_(is_absent, 0)


def _sum_all(rows_RD: Tensor, inverse_TK: Tensor) -> Tensor:
    return F.embedding_bag(inverse_TK, rows_RD, mode="sum")


def _sum_some(rows_RD: Tensor, inverse_TK: Tensor) -> Tensor:
    """Give each token the positions it has, and those it lacks to one more token, left out."""
    T, K = inverse_TK.shape
    if rows_RD.shape[0] == 0 or T == 0:
        return rows_RD.new_zeros(T, rows_RD.shape[1])
    inverse_S = inverse_TK.reshape(-1)
    is_there_S = inverse_S >= 0
    ends_S = is_there_S.cumsum(0)
    place_S = (ends_S - 1).where(is_there_S, T * K)
    # Many slots may lack a position: they all write to the place that is cut off.
    listed_S = inverse_S.new_zeros(T * K + 1).scatter_(0, place_S, inverse_S)[:-1]
    ends_T = ends_S.view(T, K)[:, -1]
    return F.embedding_bag(listed_S, rows_RD, F.pad(ends_T, (1, 0)), mode="sum")[:-1]
