"""Experts one after the other: on CPU as fast as a grouped product, for every dtype and size.

Everything an expert needs is gathered, used and dropped before the next one, so that it stays in
the cache, and no tensor of P rows is made besides the two that are kept for backward.

Shape symbols: N rows, P positions in expert order, n of them of one expert, H hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.types import Activations, ExpertWeights, InputGradients, WeightGradients


def forward(
    batch: ExpertBatch, scale_P: Tensor | None, weights: ExpertWeights
) -> tuple[Tensor, Activations]:
    """Compute the output [N, D] and the pre-activations."""
    rows, row_at = batch.rows, batch.row_at()
    shape = (row_at.shape[0], weights.w1.shape[1])
    kept = Activations(rows.new_empty(shape), rows.new_empty(shape))
    out = _accumulator(batch)
    experts = zip(batch.spans(), *(w.unbind(0) for w in weights), strict=True)
    for span, w1, w3, w2 in experts:
        if span.start == span.stop:
            continue
        row_n = row_at[span]
        x_n = rows.index_select(0, row_n)
        gate_n = torch.mm(x_n, w1.t(), out=kept.gate[span])
        up_n = torch.mm(x_n, w3.t(), out=kept.up[span])
        y_n = torch.mm(F.silu(gate_n).mul_(up_n), w2.t()).to(out.dtype)
        if scale_P is not None:
            y_n.mul_(scale_P[span, None])
        # A router sends a row to an expert once, so no two additions meet.
        out.index_add_(0, row_n, y_n)
    return out.to(rows.dtype), kept


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
    rows, row_at = batch.rows, batch.row_at()
    grad_rows = _accumulator(batch)
    grad_scale = None if scale_P is None else torch.empty_like(scale_P)
    experts = zip(batch.spans(), *(w.unbind(0) for w in weights), strict=True)
    for expert, (span, w1, w3, w2) in enumerate(experts):
        if span.start == span.stop:
            continue
        row_n, gate_n, up_n = row_at[span], kept.gate[span], kept.up[span]
        x_n, dy_n = rows.index_select(0, row_n), grad_out.index_select(0, row_n)
        dh_n = torch.mm(dy_n, w2)
        silu_n = F.silu(gate_n)
        h_n = silu_n * up_n
        if scale_P is not None and grad_scale is not None:
            scale_n = scale_P[span]
            wide = scale_n.dtype
            grad_scale[span] = torch.linalg.vecdot(dh_n.to(wide), h_n.to(wide))
            dh_n.mul_(scale_n[:, None])
            h_n.mul_(scale_n[:, None])
        dup_n = silu_n.mul_(dh_n)
        dgate_n = torch.ops.aten.silu_backward(dh_n.mul_(up_n), gate_n)
        dx_n = torch.mm(dgate_n, w1).addmm_(dup_n, w3)
        grad_rows.index_add_(0, row_n, dx_n.to(grad_rows.dtype))
        wanted.w1.add(dgate_n, x_n, expert)
        wanted.w3.add(dup_n, x_n, expert)
        wanted.w2.add(dy_n, h_n, expert)
    return InputGradients(grad_rows.to(rows.dtype), grad_scale)


def _accumulator(batch: ExpertBatch) -> Tensor:
    """Zeros for sums over a row's slots: fp32 or wider where a row has more than one."""
    dtype = batch.rows.dtype
    if batch.num_slots_per_row > 1:
        dtype = torch.promote_types(dtype, torch.float32)
    return torch.zeros_like(batch.rows, dtype=dtype)
