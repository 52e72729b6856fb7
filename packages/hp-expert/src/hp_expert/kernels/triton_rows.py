"""Rows to their positions and back, each in one pass over memory.

Traffic is all that these kernels cost. With b bytes per element and S = T * K slots:

| kernel | reads | writes |
|---|---|---|
| `gather_rows` | R * D * b + 8 R | R * D * b |
| `gather_values` | R * b + 8 R | R * b |
| `sum_rows` | S * D * b + 8 S, weights 4 S, twice S * D * b of two rows | T * D * b |
| `sum_rows_backward` | 2 R * D * b + 12 R | R * D * b + 4 R |

Shape symbols: T tokens, K choices per token, R positions, D width.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from hp_platform.own_kernels import launch

_MAX_BLOCK = 2048  # columns: 16 bytes of bf16 for each of 256 threads
_COLUMNS_PER_WARP = 256
_VALUES = 512


def gather_rows(x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
    """Copy the row of each position's token [R, D] ([R] if `x_TD` is [T])."""
    del holes  # what does not exist is not read in any case
    if x_TD.ndim == 1:
        return _gather_values(x_TD, token_R)
    num_positions, width = token_R.shape[0], x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_positions, width)
    if rows_RD.numel() > 0:
        chosen = options(width)
        grid = (num_positions, num_blocks(width, chosen))
        x, token = x_TD.contiguous(), token_R.contiguous()

        def run() -> None:
            with torch.cuda.device_of(x_TD):
                _kernels().gather_rows[grid](rows_RD, x, token, width, **chosen)

        launch("hp_expert.gather_rows", run, reads=(x, token), writes=(rows_RD,))
    return rows_RD


def sum_rows(
    rows_RD: Tensor,
    inverse_TK: Tensor,
    weights_TK: Tensor | None = None,
    *,
    holes: bool,
    more_RD: Tensor | None = None,
) -> Tensor:
    """Sum weight * row, of both where there are more, over each token's positions [T, D].

    [T] for [R], K = 1, and neither weights nor more.
    """
    if rows_RD.ndim == 1:
        return gather_rows(rows_RD, inverse_TK.view(-1), holes=holes)
    (num_tokens, num_choices), width = inverse_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(num_tokens, width)
    if y_TD.numel() > 0:
        chosen = options(width)
        grid = (num_tokens, num_blocks(width, chosen))
        rows, inverse = rows_RD.contiguous(), inverse_TK.contiguous()
        weights = None if weights_TK is None else weights_TK.contiguous()
        more = None if more_RD is None else more_RD.contiguous()

        def run() -> None:
            given = rows, more, inverse, weights, width
            sizes = {"K": num_choices, "WIDE": wide(rows.dtype)}
            with torch.cuda.device_of(rows_RD):
                _kernels().sum_rows[grid](y_TD, *given, **chosen, **sizes)

        reads = [t for t in (rows, more, inverse, weights) if t is not None]
        launch("hp_expert.sum_rows", run, reads=reads, writes=(y_TD,))
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
        given = tuple(t.contiguous() for t in (grad_TD, rows_RD, slot_R, weights_TK))
        made = (grad_rows_RD, grad_weights_TK)

        def run() -> None:
            sizes = {"K": weights_TK.shape[1], "WIDE": wide(rows_RD.dtype)}
            with torch.cuda.device_of(rows_RD):
                _kernels().sum_rows_backward[(num_positions,)](
                    *made, *given, width, **options(width), **sizes
                )

        launch("hp_expert.sum_rows_backward", run, reads=given, writes=made)
    return grad_rows_RD, grad_weights_TK


def _gather_values(x_T: Tensor, index_R: Tensor) -> Tensor:
    num_positions = index_R.numel()
    values_R = x_T.new_empty(num_positions)
    if num_positions > 0:
        x, index = x_T.contiguous(), index_R.contiguous()

        def run() -> None:
            block = {"BLOCK": _VALUES, "num_warps": 4, "enable_fp_fusion": False}
            with torch.cuda.device_of(x_T):
                _kernels().gather_values[(-(-num_positions // _VALUES),)](
                    values_R, x, index, num_positions, **block
                )

        launch("hp_expert.gather_values", run, reads=(x, index), writes=(values_R,))
    return values_R


def wide(dtype: torch.dtype) -> Any:
    """What sums of numbers of a dtype are kept in, as Triton calls it."""
    return _kernels().wide(dtype)


def _kernels() -> Any:
    """The module of the kernels, which wants Triton."""
    return importlib.import_module("hp_expert.kernels.triton_kernels")


def options(width: int) -> dict[str, Any]:
    """How a kernel goes through rows of some width."""
    block = min(1 << (width - 1).bit_length(), _MAX_BLOCK)
    warps = max(1, block // _COLUMNS_PER_WARP)
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}


def num_blocks(width: int, options: dict[str, Any]) -> int:
    """How many blocks of columns there are."""
    return -(-width // int(options["BLOCK"]))
