"""Norms in float64 of tensors of narrower dtypes, without copies of them.

What reduces a tensor in a wider dtype than its own casts all of it first, on a CPU and on CUDA
(`make_reduction` of aten/src/ATen/native/ReduceOpsUtils.h): of gradients in float32 that is twice
their memory. CUDA's kernels for lists of tensors cast what they read. A CPU has none, so pieces are
cast there that stay in its caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

_PIECE = 1 << 17  # elements, a MiB in float64


def float64_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norm of each tensor, added up in float64.

    Args:
        tensors: Of any shapes and floating dtypes, on one device; none may be a DTensor.
        norm_type: p of the p-norm, positive; `math.inf` for the largest absolute value.

    Returns:
        fp64 [] for each: NaN where it has one, 0 where it has no element.
    """
    if not tensors:
        return []
    pieces: list[Tensor] = []
    counts = []
    for x in tensors:
        count = 1
        if x.numel() > _PIECE and x.device.type == "cpu" and x.dtype != torch.float64:
            count = -(-x.numel() // _PIECE)
            pieces += x.reshape(-1).tensor_split(count)
        else:
            pieces.append(x if x.numel() or math.isfinite(norm_type) else x.new_zeros(()))
        counts.append(count)
    of_pieces = iter(torch._foreach_norm(pieces, norm_type, dtype=torch.float64))  # noqa: SLF001
    norms = []
    for count in counts:
        norm = next(of_pieces)
        if count > 1:
            parts = torch.stack([norm, *islice(of_pieces, count - 1)])
            norm = torch.linalg.vector_norm(parts, norm_type)
        norms.append(norm)
    return norms
