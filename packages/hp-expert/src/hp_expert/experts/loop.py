"""Experts one after the other: on CPU faster than a grouped product, for every dtype and size.

Shape symbols: N rows, P positions in expert order, R of them in one chunk, L local experts,
H hidden width, D width, K and M the dims of a product.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.types import ExpertRun, ExpertWeights, InputGradients, WeightGradients
from hp_expert.kernels import kernels_for

reads_counts: Final = True
_ROWS = 1024


def forward(
    batch: ExpertBatch, experts: ExpertWeights, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output [N, D], and the positions of slots and pre-activations of each chunk."""
    rows, kernels = batch.rows, kernels_for(batch.rows)
    row_P, (position_NF, holes) = batch.row_at(), batch.positions(batch.narrow)
    y_PD = rows.new_empty(batch.order.numel(), rows.shape[1])
    pieces = _pieces(batch, experts)
    weights = [experts.weights.gate_up[i][:, part].mT.unbind(0) for i, part in pieces]
    down, activation = experts.weights.down.mT.unbind(0), experts.activation
    output_bias = experts.biases.down if experts.adds_output_bias else None
    kept: list[Tensor] = [position_NF]
    for positions, run in _chunks(batch):
        x_RD = kernels.gather_rows(rows, row_P[positions], holes=False)
        pre = [_times(x_RD, w, run) for w in weights]
        for piece, (i, part) in zip(pre, pieces, strict=True):
            if (bias := experts.biases.gate_up[i]) is not None:
                _add_bias(piece, bias[:, part], run)
        gate_RH, up_RH = pre if len(pre) > 1 else pre[0].chunk(2, 1)
        gated_RH = activation.gate(gate_RH)
        h_RH = activation.product(gated_RH, up_RH, out=gated_RH)
        y_RD = _times(h_RH, down, run, out=y_PD[positions])
        if output_bias is not None:
            _add_bias(y_RD, output_bias, run)
        kept += pre
    out = kernels.sum_rows(y_PD, position_NF, batch.weights, holes=holes, dtype=dtype)
    return out, tuple(kept)


def backward(
    batch: ExpertBatch,
    experts: ExpertWeights,
    kept: tuple[Tensor, ...],
    grad_out: Tensor,
    *,
    wanted: WeightGradients,
) -> InputGradients:
    """Return the gradients of rows and weights; pass factors of the others to `wanted`."""
    (position_NF, *kept_pre), row_P, holes = kept, batch.row_at(), not batch.all_listed
    rows, kernels = batch.rows, kernels_for(batch.rows)
    dx_PD = rows.new_empty(row_P.numel(), rows.shape[1])
    scale_P = by_P = batch.weight_at()
    grad_scale = None if scale_P is None else torch.empty_like(scale_P)
    if by_P is not None and rows.dtype != torch.float16:  # small weights underflow in fp16
        by_P = by_P.to(rows.dtype)  # a product of two dtypes takes three times as long
    pieces = _pieces(batch, experts)
    weights = [experts.weights.gate_up[i][:, part].unbind(0) for i, part in pieces]
    down, activation = experts.weights.down.unbind(0), experts.activation
    output_bias = experts.biases.down if experts.adds_output_bias else None
    for index, (positions, run) in enumerate(_chunks(batch)):
        row_R = row_P[positions]
        x_RD = kernels.gather_rows(rows, row_R, holes=False)
        dy_RD = kernels.gather_rows(grad_out, row_R, holes=False)
        dh_RH = _times(dy_RD, down, run)
        pre = kept_pre[index * len(weights) : (index + 1) * len(weights)]
        gate_RH, up_RH = pre if len(pre) > 1 else pre[0].chunk(2, 1)
        gated_RH = activation.gate(gate_RH)
        h_RH = activation.product(gated_RH, up_RH)
        scale_R1 = None
        if by_P is not None and grad_scale is not None:
            scale_R1 = by_P[positions, None]
            grad_R = _dot(dh_RH, h_RH, out=grad_scale[positions])
            if output_bias is not None:
                grad_R += _dot_bias(dy_RD, output_bias, run, grad_R.dtype)
            dh_RH.mul_(scale_R1)
            h_RH.mul_(scale_R1)
        # In place unless they must be one tensor: memory is reused while it is in the cache.
        dpre = [dh_RH, gated_RH] if len(pre) > 1 else [torch.empty_like(pre[0])]
        dgate_RH, dup_RH = dpre if len(dpre) > 1 else dpre[0].chunk(2, 1)
        activation.backward(dh_RH, gate_RH, up_RH, gated_RH, dgate_RH, dup_RH)
        dx_RD = _times(dpre[0], weights[0], run, out=dx_PD[positions])
        for dpiece, weight in zip(dpre[1:], weights[1:], strict=True):
            _add_times(dx_RD, dpiece, weight, run)
        for left, (i, part) in zip(dpre, pieces, strict=True):
            wanted.weights.gate_up[i].add(left, x_RD, run, part)
            if (bias := wanted.biases.gate_up[i]) is not None:
                bias.add(left, _ones(left), run, part)
        wanted.weights.down.add(dy_RD, h_RH, run, slice(None))
        if wanted.biases.down is not None:
            scale = _ones(dy_RD) if scale_R1 is None else scale_R1
            wanted.biases.down.add(dy_RD, scale, run, slice(None))
    dx = kernels.sum_rows(dx_PD, position_NF, None, holes=holes)
    if grad_scale is None or batch.weights is None:
        return InputGradients(dx, None)
    grad_S = kernels.gather_rows(grad_scale, position_NF.view(-1), holes=holes)
    return InputGradients(dx, grad_S.view_as(batch.weights).to(batch.weights.dtype))


def _pieces(batch: ExpertBatch, experts: ExpertWeights) -> list[tuple[int, slice]]:
    """Return the stored tensors with the gate and up projections, and the rows of each.

    See Note [Fused or separate]. A fused tensor of a two-byte dtype stays in one piece; in wider
    dtypes strided views would cost more than one product saves.
    """
    if len(experts.weights.gate_up) > 1:
        return [(0, slice(None)), (1, slice(None))]
    hidden = experts.weights.down.shape[2]
    if batch.rows.element_size() == 2:
        return [(0, slice(None))]
    return [(0, slice(hidden)), (0, slice(hidden, 2 * hidden))]


def _chunks(batch: ExpertBatch) -> list[tuple[slice, ExpertRun]]:
    """Return the positions and the experts of each chunk.

    Each product is of one expert; everything else is computed for a run of experts at once, a chunk
    of about `_ROWS` positions. A chunk is long enough that calls cost little beside their work, and
    short enough that the result of one call is still in the cache when the next call reads it.
    Tensors for backward are kept chunk by chunk, and only one other tensor has P rows, the one that
    is summed over slots: for every very large tensor the system maps fresh pages, and touching them
    costs more than computing their values.

    Without rows there is one empty chunk, so that kernels are loaded (Note [Few variants]).
    """
    if batch.counts is None:
        raise ValueError("counts (None) must be on the host to compute one expert after the other")
    chunks, start, size, run = [], 0, 0, ExpertRun([], [])
    for expert, count in enumerate(batch.counts):
        if size > 0 and size + count > _ROWS:
            chunks.append((slice(start, start + size), run))
            start, size, run = start + size, 0, ExpertRun([], [])
        if count > 0:
            run.experts.append(expert)
            run.sizes.append(count)
            size += count
    if size > 0 or not chunks:
        chunks.append((slice(start, start + size), run))
    return chunks


def _times(
    x_RK: Tensor, matrices: Sequence[Tensor], run: ExpertRun, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each expert with its matrix [K, M]: [R, M]."""
    y_RM = x_RK.new_empty(x_RK.shape[0], matrices[0].shape[1]) if out is None else out
    parts = zip(run.experts, x_RK.split(run.sizes), y_RM.split(run.sizes), strict=True)
    for expert, x_n, y_n in parts:
        torch.mm(x_n, matrices[expert], out=y_n)
    return y_RM


def _add_times(y_RM: Tensor, x_RK: Tensor, matrices: Sequence[Tensor], run: ExpertRun) -> None:
    """Add the rows of each expert times its matrix."""
    parts = zip(run.experts, x_RK.split(run.sizes), y_RM.split(run.sizes), strict=True)
    for expert, x_n, y_n in parts:
        y_n.addmm_(x_n, matrices[expert])


def _add_bias(y_RM: Tensor, bias_LM: Tensor, run: ExpertRun) -> None:
    """Add each expert's bias to its rows, in place."""
    for expert, y_n in zip(run.experts, y_RM.split(run.sizes), strict=True):
        y_n.add_(bias_LM[expert])


def _ones(like_RX: Tensor) -> Tensor:
    """Return a factor of one for each row: [R, 1]."""
    return like_RX.new_ones(like_RX.shape[0], 1)


def _dot(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write the dot products of the rows of two tensors to `out` [R], computed in its dtype."""
    if a.dtype == torch.float16:  # products may overflow in fp16
        a, b = a.to(out.dtype), b.to(out.dtype)
    return torch.sum(a * b, 1, dtype=out.dtype, out=out)


def _dot_bias(dy_RD: Tensor, bias_LD: Tensor, run: ExpertRun, dtype: torch.dtype) -> Tensor:
    """Return the dot product of each row with the bias of its expert: [R]."""
    parts = zip(run.experts, dy_RD.split(run.sizes), strict=True)
    nothing = dy_RD.new_empty(0, dtype=dtype)  # there may be no expert
    return torch.cat(
        [nothing, *(dy_n.to(dtype) @ bias_LD[expert].to(dtype) for expert, dy_n in parts)]
    )
