"""Operators that torch composes differently on CUDA than on `meta`.

See Note [what CUDA composes]: `scaled_dot_product_attention`, `dropout` and `rms_norm` are no
kernels but choices between kernels by the device. On `meta` they take the one of the CPU or the
one that holds all scores. Registered for meta tensors, these take the one of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def kernels() -> dict[str, Callable[..., Any]]:
    """What stands for operators of aten, by their names."""
    return {"scaled_dot_product_attention": attention, "dropout": dropout, "rms_norm": rms_norm}


def attention(  # noqa: PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that CUDA would choose."""
    if enable_gqa and k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001
    """Keep the mask as bool, in one kernel, as CUDA does."""
    if not train or p == 0 or x.numel() == 0:
        return x
    return aten.native_dropout(x, p, train)[0]


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel, which keeps the reciprocal of the norm."""
    return aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]
