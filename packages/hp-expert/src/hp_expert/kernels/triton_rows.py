"""Rows to their positions and back, each in one pass over memory.

Traffic is all that these kernels cost. With b bytes per element and S = T * K slots:

| kernel | reads | writes |
|---|---|---|
| `gather_rows` | R * D * b + 8 R | R * D * b |
| `sum_rows` | S * D * b + 8 S, weights 4 S | T * D * b |
| `sum_rows_backward` | 2 R * D * b + 12 R | R * D * b + 4 R |

Note [One program per row]. A program moves one row, or BLOCK columns of one. Every access is then a
run of neighbouring words of 16 bytes (if D * b is a multiple of 16) wherever the permutation leads.
An output has one writer and a sum one order, that of the choices: no atomics, and the same bits in
every run. Products are not contracted into fused multiply-adds, so that sums have the bits of the
torch path on CUDA.

Offsets are 64 bits wide: R * D reaches 2 ** 31 at 262144 rows of 8192.

Shape symbols: T tokens, K choices per token, R positions, D width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 2048  # columns: 16 bytes of bf16 for each of 256 threads
_COLUMNS_PER_WARP = 256


def gather_rows(x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
    """Copy the row of each position's token [R, D]."""
    del holes  # what does not exist is not read in any case
    num_positions, width = token_R.shape[0], x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_positions, width)
    if rows_RD.numel() > 0:
        options = _options(width)
        grid = (num_positions, triton.cdiv(width, options["BLOCK"]))
        with torch.cuda.device_of(x_TD):
            _gather[grid](rows_RD, x_TD.contiguous(), token_R.contiguous(), width, **options)
    return rows_RD


def sum_rows(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None = None, *, holes: bool
) -> Tensor:
    """Sum weight * row over the positions of each token [T, D]."""
    del holes
    (num_tokens, num_choices), width = inverse_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(num_tokens, width)
    if y_TD.numel() > 0:
        options = _options(width) | {"K": num_choices, "WIDE": _wide(rows_RD)}
        grid = (num_tokens, triton.cdiv(width, options["BLOCK"]))
        rows, inverse = rows_RD.contiguous(), inverse_TK.contiguous()
        weights = None if weights_TK is None else weights_TK.contiguous()
        with torch.cuda.device_of(rows_RD):
            _sum[grid](y_TD, rows, inverse, weights, width, **options)
    return y_TD


def sum_rows_backward(
    grad_TD: Tensor, rows_RD: Tensor, slot_R: Tensor, weights_TK: Tensor, *, holes: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows [R, D] and the weights [T, K] of `sum_rows`."""
    del holes
    num_positions, width = rows_RD.shape
    # Contiguous, which those of `empty_like` are not if the originals are not.
    grad_rows_RD = rows_RD.new_empty(rows_RD.shape)
    grad_weights_TK = weights_TK.new_zeros(weights_TK.shape)
    if grad_rows_RD.numel() > 0:
        options = _options(width) | {"K": weights_TK.shape[1], "WIDE": _wide(rows_RD)}
        grad, rows, slot, weights = (t.contiguous() for t in (grad_TD, rows_RD, slot_R, weights_TK))
        with torch.cuda.device_of(rows_RD):
            _sum_backward[(num_positions,)](
                grad_rows_RD, grad_weights_TK, grad, rows, slot, weights, width, **options
            )
    return grad_rows_RD, grad_weights_TK


def _options(width: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    warps = max(1, block // _COLUMNS_PER_WARP)
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}


def _wide(rows: Tensor) -> Any:
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


@triton.jit
def _gather(
    out: tl.tensor,
    x: tl.tensor,
    token_of: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_of + position)
    # What does not exist has no columns.
    here = column < tl.where(token >= 0, width, 0)
    row = tl.load(x + token * width + column, mask=here, other=0.0)
    tl.store(out + position * width + column, row, mask=column < width)


@triton.jit
def _sum(  # noqa: PLR0917  # Triton's launch passes them by position
    out: tl.tensor,
    rows: tl.tensor,
    position_of: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for choice in tl.static_range(K):
        slot = token * K + choice
        position = tl.load(position_of + slot)
        here = column < tl.where(position >= 0, width, 0)
        row = tl.load(rows + position * width + column, mask=here, other=0.0).to(WIDE)
        if weights is not None:
            row *= tl.load(weights + slot, mask=position >= 0, other=0.0).to(WIDE)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _sum_backward(  # noqa: PLR0917
    grad_rows: tl.tensor,
    grad_weights: tl.tensor,
    grad: tl.tensor,
    rows: tl.tensor,
    slot_of: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + position)
    token = slot // K
    weight = tl.load(weights + slot, mask=slot >= 0, other=0.0).to(WIDE)
    end = tl.where(slot >= 0, width, 0)
    dot = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < end
        dy = tl.load(grad + token * width + column, mask=here, other=0.0).to(WIDE)
        row = tl.load(rows + position * width + column, mask=here, other=0.0).to(WIDE)
        dx = (dy * weight).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + position * width + column, dx, mask=column < width)
        dot += dy * row
    grad_weight = tl.sum(dot).to(grad_weights.dtype.element_ty)
    tl.store(grad_weights + slot, grad_weight, mask=slot >= 0)
