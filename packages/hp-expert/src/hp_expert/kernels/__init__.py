"""Rows moved, slots sorted and tokens routed, by torch's kernels or on CUDA by Triton's.

Triton comes with the CUDA builds of torch. It is imported when the first rows on CUDA are moved,
and is not required: without it torch's own kernels run, which are also the reference of the tests.

Shape symbols: T tokens, K choices per token, R positions, D width.
"""

import importlib.util
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hp_expert.kernels import torch_rows, triton_rows
from hp_platform.dry_device import are_noted


class RowKernels(Protocol):
    """The functions that move rows, as a module has them; none is differentiable.

    -1 stands for a token, position or slot that does not exist. `holes` says whether -1 may occur.
    """

    def gather_rows(self, x_TD: Tensor, token_R: Tensor, *, holes: bool) -> Tensor:
        """Copy the row of each position's token, [R, D] or [R]; zeros for a token of -1."""

    def sum_rows(
        self,
        rows_RD: Tensor,
        inverse_TK: Tensor,
        weights_TK: Tensor | None,
        *,
        holes: bool,
        more_RD: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Sum weight * row over the positions of each token [T, D], in order, fp32 or wider.

        The sums are of `dtype`, None: that of the rows. With `more_RD`, a row is the sum of both
        tensors' rows. Rows of one value each, [R], are allowed for K = 1 without weights.

        A slot without a position adds nothing: neither a row nor its weight is multiplied by zero.
        """

    def sum_rows_backward(
        self, grad_TD: Tensor, rows_RD: Tensor, slot_R: Tensor, weights_TK: Tensor, *, holes: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows [R, D] and the weights [T, K] of `sum_rows`.

        They are exactly 0 for a position without a slot, and for a slot without a position.
        """


def kernels_for(rows: Tensor) -> RowKernels:
    """Return the module for rows: Triton's if they are on CUDA and Triton is installed."""
    if rows.is_cuda and fuses(rows):
        return triton_rows
    return torch_rows


def fuses(x: Tensor) -> bool:
    """Tell whether kernels of Triton compute on the device of a tensor."""
    return x.is_cuda and (are_noted() or _has_triton())


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "triton is not installed: rows are permuted by torch's own kernels, which pass over "
        "them several times",
        stacklevel=2,
    )
    return False
