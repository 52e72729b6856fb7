"""Rows moved to positions and back, each in one pass over memory.

The time of these kernels is that of their memory traffic. With b bytes per element and S = T * K
slots:

| kernel | reads | writes |
|---|---|---|
| `gather_rows` | R * D * b + 8 R | R * D * b |
| `gather_values` | R * b + 8 R | R * b |
| `sum_rows` | S * D * b + 8 S, weights 4 S, twice S * D * b of two rows | T * D * b |
| `sum_rows_backward` | 2 R * D * b + 12 R | R * D * b + 4 R |

Shape symbols: T tokens, K choices per token, R positions, D width.
"""

from functools import partial

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_kernels")
_MAX_BLOCK = 2048  # columns: 16 bytes of bf16 for each of 256 threads
_COLUMNS_PER_WARP = 256
_MOST_COLUMNS = 2**30
_VALUES = 512


def gather_rows(x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
    """Copy the row of each position's token [R, D] ([R] if `x_TD` is [T])."""
    del holes  # tokens that do not exist are not read in any case
    if x_TD.ndim == 1:
        return _gather_values(x_TD, token_R)
    num_positions, width = token_R.shape[0], x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_positions, width)
    chosen = options(width)
    _launch(
        "gather_rows",
        (num_positions, num_blocks(width, chosen)),
        made=(rows_RD,),
        given=(x_TD.contiguous(), token_R.contiguous(), width),
        constants=chosen,
    )
    return rows_RD


def sum_rows(
    rows_RD: Tensor,
    inverse_TK: Tensor,
    weights_TK: Tensor | None = None,
    *,
    holes: bool,
    more_RD: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum weight * row, with `more_RD` the row of both, over the positions of each token [T, D].

    Rows of one value each, [R], give [T], for K = 1 without weights and `more_RD`.
    """
    if rows_RD.ndim == 1:
        return gather_rows(rows_RD, inverse_TK.view(-1), holes=holes).to(dtype or rows_RD.dtype)
    (num_tokens, num_choices), width = inverse_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(num_tokens, width, dtype=dtype)
    chosen, tensors = options(width), (rows_RD, more_RD, inverse_TK, weights_TK)
    _launch(
        "sum_rows",
        (num_tokens, num_blocks(width, chosen)),
        made=(y_TD,),
        given=(*(None if t is None else t.contiguous() for t in tensors), width),
        wide=rows_RD.dtype,
        constants={"K": num_choices, **chosen},
    )
    return y_TD


def sum_rows_backward(
    grad_TD: Tensor, rows_RD: Tensor, slot_R: Tensor, weights_TK: Tensor, *, holes: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows [R, D] and the weights [T, K] of `sum_rows`."""
    del holes
    num_positions, width = rows_RD.shape
    # Contiguous, which `empty_like` would not give for tensors that are not.
    grad_rows_RD = rows_RD.new_empty(rows_RD.shape)
    grad_weights_TK = weights_TK.new_zeros(weights_TK.shape)
    tensors = grad_TD, rows_RD, slot_R, weights_TK
    _launch(
        "sum_rows_backward",
        (num_positions,),
        made=(grad_rows_RD, grad_weights_TK),
        given=(*(t.contiguous() for t in tensors), width),
        wide=rows_RD.dtype,
        constants={"K": weights_TK.shape[1], **options(width)},
    )
    return grad_rows_RD, grad_weights_TK


def _gather_values(x_T: Tensor, index_R: Tensor) -> Tensor:
    num_positions = index_R.numel()
    values_R = x_T.new_empty(num_positions)
    _launch(
        "gather_values",
        (-(-num_positions // _VALUES),),
        made=(values_R,),
        given=(x_T.contiguous(), index_R.contiguous()),
        varying=(num_positions,),
        constants={"BLOCK": _VALUES, "num_warps": 4, "enable_fp_fusion": False},
    )
    return values_R


def options(width: int) -> dict[str, int]:
    """Return the block size and launch options of a kernel for rows of a width.

    Raises:
        ValueError: If rows are wider than 2 ** 30: columns of a row are counted in 32 bits.
    """
    if width > _MOST_COLUMNS:
        raise ValueError(f"width ({width}) must be at most {_MOST_COLUMNS}")
    block = min(power_from(width), _MAX_BLOCK)
    warps = max(1, block // _COLUMNS_PER_WARP)
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}


def num_blocks(width: int, options: dict[str, int]) -> int:
    """Return the number of blocks of columns."""
    return -(-width // options["BLOCK"])
