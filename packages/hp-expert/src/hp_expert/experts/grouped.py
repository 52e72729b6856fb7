"""All experts in one product: `torch.nn.functional.grouped_mm`, for CUDA and bf16.

Its traps, which shape this file: offsets are int32 and nobody checks them; strides are multiples of
16 bytes; rows after the last offset are uninitialised memory (here the last offset is P, always);
gradients must not be expanded; there is no fp64.

Shape symbols: N rows, F slots per row, P positions in expert order, H hidden width, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.types import Activations, ExpertWeights, InputGradients, WeightGradients
from hp_expert.permute import gather_and_sum, invert


def forward(
    batch: ExpertBatch, scale_P: Tensor | None, weights: ExpertWeights
) -> tuple[Tensor, Activations]:
    """Compute the output [N, D] and the pre-activations."""
    offsets_L = _offsets(batch)
    x_PD = batch.rows.index_select(0, batch.row_at())
    gate_PH = F.grouped_mm(x_PD, weights.w1.mT, offs=offsets_L)
    up_PH = F.grouped_mm(x_PD, weights.w3.mT, offs=offsets_L)
    y_PD = F.grouped_mm(F.silu(gate_PH).mul_(up_PH), weights.w2.mT, offs=offsets_L)
    if scale_P is not None:
        y_PD.mul_(scale_P[:, None])
    return _sum_over_slots(y_PD, batch), Activations(gate_PH, up_PH)


def backward(
    batch: ExpertBatch,
    scale_P: Tensor | None,
    weights: ExpertWeights,
    kept: Activations,
    grad_out: Tensor,
    *,
    wanted: WeightGradients,
) -> InputGradients:
    """Compute the gradients of rows and scale; hand the factors of the others to `wanted`."""
    offsets_L, row_at = _offsets(batch), batch.row_at()
    x_PD, dy_PD = batch.rows.index_select(0, row_at), grad_out.index_select(0, row_at)
    dh_PH = F.grouped_mm(dy_PD, weights.w2, offs=offsets_L)
    silu_PH = F.silu(kept.gate)
    h_PH = silu_PH * kept.up
    grad_scale = None
    if scale_P is not None:
        wide = scale_P.dtype
        grad_scale = torch.linalg.vecdot(dh_PH.to(wide), h_PH.to(wide))
        dh_PH.mul_(scale_P[:, None])
        h_PH.mul_(scale_P[:, None])
    dup_PH = silu_PH.mul_(dh_PH)
    dgate_PH = torch.ops.aten.silu_backward(dh_PH.mul_(kept.up), kept.gate)
    dx_PD = F.grouped_mm(dgate_PH, weights.w1, offs=offsets_L)
    dx_PD += F.grouped_mm(dup_PH, weights.w3, offs=offsets_L)
    wanted.w1.add(dgate_PH, x_PD, offsets_L)
    wanted.w3.add(dup_PH, x_PD, offsets_L)
    wanted.w2.add(dy_PD, h_PH, offsets_L)
    return InputGradients(_sum_over_slots(dx_PD, batch), grad_scale)


def _offsets(batch: ExpertBatch) -> Tensor:
    return batch.num_tokens_per_expert.cumsum(0, dtype=torch.int32)


def _sum_over_slots(values_PD: Tensor, batch: ExpertBatch) -> Tensor:
    """Sum the values of each row's listed slots [N, D], in fp32 or wider."""
    num_rows, slots_per_row = batch.rows.shape[0], batch.num_slots_per_row
    if batch.counts is not None and batch.order.numel() == batch.num_slots:
        return gather_and_sum(values_PD, invert(batch.order).view(-1, slots_per_row))
    position_NF = _position_of_slots(batch).view(-1, slots_per_row)
    wide = torch.promote_types(values_PD.dtype, torch.float32)
    total_ND = values_PD.new_zeros(num_rows, values_PD.shape[1], dtype=wide)
    for position_N in position_NF.unbind(1):
        value_ND = values_PD.index_select(0, position_N.clamp(min=0))
        total_ND += value_ND.masked_fill_((position_N < 0)[:, None], 0)
    return total_ND.to(values_PD.dtype)


def _position_of_slots(batch: ExpertBatch) -> Tensor:
    """Position of each slot, -1 where it has none; int64 [N * F]."""
    positions_P = torch.arange(batch.order.numel(), device=batch.order.device)
    valid = batch.valid()
    # One slot more than there are takes what is said of padding.
    order = batch.order if valid is None else batch.order.where(valid, batch.num_slots)
    position_S = torch.full((batch.num_slots + 1,), -1, device=order.device)
    return position_S.scatter_(0, order, positions_P)[:-1]
