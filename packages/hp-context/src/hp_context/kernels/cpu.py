# ruff: noqa: SLF001  # no public function of torch returns the log-sum-exp
"""Attention of one block by torch's flash attention of the CPU, forward and backward.

Shape symbols: B batch, Q queries, K keys, H query heads, G key/value heads (G divides H), D head
size of queries, keys and values.
"""

import torch
from torch import Tensor

from hp_context.kernels.reference import Scoring

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def applies(q: Tensor, v: Tensor, *, mask: Tensor | None, softcap: float | None) -> bool:
    """Tell whether flash attention of the CPU takes such a block; any mask will do."""
    del mask
    fits = v.size(-1) == q.size(-1) and q.dtype in DTYPES
    return fits and softcap is None and q.device.type == "cpu"


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, D] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scoring.scale
    )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; see `kernels.block_backward`."""
    bias = _bias(mask, q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scoring.scale
    )
    return dq, dk, dv


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of the scores, [Q, K]: 0 where attention is allowed, -inf elsewhere."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
