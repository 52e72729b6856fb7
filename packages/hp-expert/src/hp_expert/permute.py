"""Slots counted and sorted by expert, and rows gathered in expert order and summed back.

The gather of rows and the sum of rows are each other's transpose, so that forward and backward both
only gather: nothing is scattered, no two writes meet, and a rerun gives the same bits on every
device.

Shape symbols: T tokens, K choices per token, S = T * K slots (slot = token * K + choice), E
experts, R positions, D width.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hp_expert.kernels import fuses, kernels_for, triton_sorting
from hp_platform import wait_tensor
from hp_platform.autograd import Context, differentiable_once


class SlotCounts(NamedTuple):
    """The key of each slot, and the number of slots of each key.

    Attributes:
        keys: Expert of each slot [T, K]; E for an expert that does not exist, E + 1 for a slot that
            was dropped (-1). Of the narrowest dtype that contains E + 1, which sorts fastest.
        experts: The same as int64 [T, K].
        counts: Number of slots of each key, int64 [E + 2].
        starts: Result of the counting kernels, if they were used; `keys` and `experts` are then
            the experts as they were given.
    """

    keys: Tensor
    experts: Tensor
    counts: Tensor
    starts: triton_sorting.Starts | None = None


def count_slots(experts_TK: Tensor, num_experts: int) -> SlotCounts:
    """Count the slots of each expert, those of experts that do not exist, and dropped ones."""
    experts_TK = experts_TK.contiguous()  # or tensors made from it would have its strides
    if fuses(experts_TK):
        starts = triton_sorting.count(experts_TK, num_experts)
        return SlotCounts(experts_TK, experts_TK, starts.counts, starts)
    num_keys = num_experts + 2
    # Modulo the number of keys, -1 (dropped) becomes E + 1, and -2 (too small) becomes E.
    bucket_TK = experts_TK.to(torch.int64).clamp(-2, num_experts).remainder_(num_keys)
    counts = bucket_TK.new_zeros(num_keys).scatter_(0, bucket_TK.view(-1), 1, reduce="add")
    return SlotCounts(narrowed(bucket_TK, num_keys), bucket_TK, counts)


def narrowed(keys: Tensor, num_keys: int) -> Tensor:
    """Cast keys 0 .. num_keys - 1 to a dtype that sorts fast."""
    for dtype in (torch.uint8, torch.int16):
        if num_keys <= torch.iinfo(dtype).max:
            return keys.to(dtype)
    return keys.to(torch.int32)


def invalid_experts(num_invalid: int, num_experts: int) -> ValueError:
    """Return the error for slots with experts that do not exist."""
    return ValueError(
        f"experts must be in [0, num_experts ({num_experts})), or -1 for none, but {num_invalid} "
        "are not"
    )


class Permutation(NamedTuple):
    """The slots at positions in expert order, and the positions of slots.

    Attributes:
        order: Slot at each position, int64 [R]; -1 where the position is padding.
        token: Token of that slot, int64 [R]; -1 where the position is padding.
        inverse: Position of each slot, int64 [T, K]; -1 for a slot that has none.
        partial: Whether `inverse` may contain -1. If not, R = S.
        padded: Whether `order` and `token` may contain -1.
    """

    order: Tensor
    token: Tensor
    inverse: Tensor
    partial: bool = False
    padded: bool = False

    def without_padding(self, num_positions: int) -> "Permutation":
        """Return the permutation without the positions after the first ones, which are padding."""
        order, token = self.order[:num_positions], self.token[:num_positions]
        return self._replace(order=order, token=token, padded=False)

    def first(self, num_positions: int) -> "Permutation":
        """Return the permutation without the slots after the first positions."""
        if num_positions == self.order.numel():
            return self
        inverse_TK = self.inverse.where(self.inverse < num_positions, -1)
        order, token = self.order[:num_positions], self.token[:num_positions]
        return Permutation(order, token, inverse_TK, partial=True, padded=self.padded)


def sort_by_expert(experts_TK: Tensor) -> Permutation:
    """Sort the slots of tokens by their expert.

    The sort is stable: slots of one expert stay in token order. Dropped slots (expert -1) come
    last; `Permutation.first` leaves them out.

    Args:
        experts_TK: Expert of each slot, any integer dtype [T, K].
    """
    # 127, the largest int8, may be the index of an expert.
    keys_TK = experts_TK.to(torch.promote_types(experts_TK.dtype, torch.int16))
    return sort_slots(keys_TK.where(keys_TK >= 0, torch.iinfo(keys_TK.dtype).max))


def sort_slots(keys_TK: Tensor) -> Permutation:
    """Sort the slots of tokens stably by keys; keys of a narrow dtype sort faster."""
    order_S = keys_TK.reshape(-1).argsort(stable=True)
    inverse_TK = invert(order_S).view(keys_TK.shape)
    num_choices = keys_TK.shape[1]
    token_S = order_S if num_choices == 1 else order_S.div(num_choices, rounding_mode="floor")
    return Permutation(order_S, token_S, inverse_TK)


def sort_counted(counted: SlotCounts) -> Permutation:
    """Sort counted slots by expert; slots without an expert come last."""
    if counted.starts is None:
        return sort_slots(counted.keys)
    return placed(counted.experts, counted.starts)


def order_of(counted: SlotCounts) -> Tensor:
    """Return the slot at each position, int64 [S]; slots without an expert, or -1, come last."""
    if counted.starts is None:
        return counted.keys.reshape(-1).argsort(stable=True)
    return sort_counted(counted).order


def placed(experts_TK: Tensor, starts: triton_sorting.Starts) -> Permutation:
    """Sort slots that kernels have counted by kernels; slots without an expert get no position."""
    order, token, inverse = triton_sorting.place(experts_TK, starts)
    return Permutation(order, token, inverse, partial=True, padded=True)


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation of 0 .. S - 1, int64 [S]."""
    positions = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def gather_slots(
    x_TD: Tensor, permutation: Permutation, *, gathered: Tensor | None = None
) -> Tensor:
    """Copy each token's row to the positions of its slots. Differentiable any number of times.

    Args:
        x_TD: One row per token [T, D].
        permutation: Permutation of the slots of these tokens.
        gathered: Result of `gather_rows` of `x_TD` for a permutation that begins like this one, of
            which the first rows are returned; None: rows are copied.

    Returns:
        One row per position [R, D]; zeros where there is padding.
    """
    rows_RD: Tensor = _GatherSlots.apply(x_TD, permutation, [gathered])
    return rows_RD


def sum_slots(
    rows_RD: Tensor,
    permutation: Permutation,
    weights_TK: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum the rows of each token's slots, in the order of its choices.

    Differentiable: once with weights, any number of times without.

    Args:
        rows_RD: One row per position [R, D].
        permutation: Permutation of the slots.
        weights_TK: Factor of each slot's row, any floating dtype [T, K]; None: one.
        dtype: Dtype of the sums; None: that of the rows. Without weights only.

    Returns:
        One row per token [T, D], zeros if none of its slots has a position. Products, and sums of
        more than one row, are computed in fp32 or wider.
    """
    y_TD: Tensor = (
        _SumSlots.apply(rows_RD, permutation, dtype)
        if weights_TK is None
        else _SumWeightedSlots.apply(rows_RD, weights_TK, permutation)
    )
    return y_TD


def permute_slots(values_TK: Tensor, permutation: Permutation) -> Tensor:
    """Put one value per slot at its position: [T, K] to [R]. Differentiable."""
    one_choice = permutation._replace(
        token=permutation.order, inverse=permutation.inverse.view(-1, 1)
    )
    values_R: Tensor = _GatherSlots.apply(values_TK.reshape(-1), one_choice, [None])
    return values_R


class _PermutationContext(Context, Protocol):
    permutation: Permutation
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, Tensor]


class _GatherSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _PermutationContext,
        x: Tensor,
        permutation: Permutation,
        gathered: list[Tensor | None],
    ) -> Tensor:
        ctx.permutation = permutation
        rows = gathered[0]  # in a list, so that autograd does not take it for an input
        if rows is None:
            return gather_rows(x, permutation)
        return rows[: permutation.token.numel()]

    @staticmethod
    def backward(ctx: _PermutationContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumSlots.apply(wait_tensor(grad), ctx.permutation, None), None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _PermutationContext, rows: Tensor, permutation: Permutation, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.permutation, ctx.dtype = permutation, rows.dtype
        inverse, partial = permutation.inverse, permutation.partial
        return kernels_for(rows).sum_rows(rows, inverse, None, holes=partial, dtype=dtype)

    @staticmethod
    def backward(ctx: _PermutationContext, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = wait_tensor(grad).to(ctx.dtype)
        return _GatherSlots.apply(grad, ctx.permutation, [None]), None, None


class _SumWeightedSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _PermutationContext, rows: Tensor, weights: Tensor, permutation: Permutation
    ) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(rows, weights)
        return gather_and_sum(
            rows, permutation.inverse, partial=permutation.partial, weights=weights
        )

    @staticmethod
    @differentiable_once
    def backward(ctx: _PermutationContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        slot_R, holes = ctx.permutation.order, ctx.permutation.padded
        grads = kernels_for(rows).sum_rows_backward(
            wait_tensor(grad), rows, slot_R, weights, holes=holes
        )
        return *grads, None


def gather_rows(x: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token's row to the positions of its slots; not differentiable."""
    return kernels_for(x).gather_rows(x.detach(), permutation.token, holes=permutation.padded)


def gather_and_sum(
    rows: Tensor, inverse_TK: Tensor, *, partial: bool = False, weights: Tensor | None = None
) -> Tensor:
    """Sum the rows at the positions of each token, in fp32 or wider; not differentiable.

    Args:
        rows: [R, D], or [R] if K = 1 and there are no weights.
        inverse_TK: Position of each slot, int64 [T, K].
        partial: Whether there may be -1, which adds nothing: not even NaN comes from a row
            without a slot, or from the weight of a slot without a row.
        weights: Factor of each slot's row [T, K]; None: one.
    """
    return kernels_for(rows).sum_rows(rows, inverse_TK, weights, holes=partial)
