"""Attention of one block by torch's FlexAttention on CUDA: masks and soft caps in the kernel.

The other kernels of CUDA know no soft cap, and take a mask as a tensor of what is added to the
scores, as large as these. FlexAttention compiles both into its kernel and skips what is masked by
tiles.

Note [Backward of a block that only knows itself]
    Its backward starts from the softmax over the keys of the block, but the weights wanted are of
    all keys; see Note [Backward by blocks]. With `out` and `lse` over all blocks and `out_b` and
    `lse_b` of this one, `out` is the sum of w_b * out_b, where w_b = exp(lse_b - lse). So the
    gradient of `out_b` is w_b * grad_out, and that of `lse_b` is w_b * grad_out . (out_b - out).
    The price is a second forward.

Shape symbols: B batch, H query heads, G key/value heads, Q queries, K keys, D head size of queries
and keys, E head size of values.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from hp_context.kernels.reference import Scoring

MIN_MASK = 1 << 24  # entries; below, a mask tensor costs less than tiles of it
_MIN_HEAD_SIZE = 16
_MAX_HEAD_SIZE = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def applies(q: Tensor, v: Tensor, *, mask: Tensor | None, softcap: float | None) -> bool:
    """Tell whether FlexAttention is the kernel to take such a block."""
    sizes = (q.size(-1), v.size(-1))
    return (
        q.device.type == "cuda"
        and torch.version.hip is None
        and q.dtype in _DTYPES
        and all(_MIN_HEAD_SIZE <= size <= _MAX_HEAD_SIZE for size in sizes)
        and (softcap is not None or (mask is not None and mask.numel() >= MIN_MASK))
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, E] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    # With what backward calls too, so that there is one compilation.
    out, lse = _attend(*_leaves(q, k, v), tiles=_tiles(q, k, mask, causal), scoring=scoring)
    return out.detach(), lse.detach()


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
    """Return dq, dk, dv; see Note [Backward of a block that only knows itself]."""
    leaves = _leaves(q, k, v)
    own_out, own_lse = _attend(*leaves, tiles=_tiles(q, k, mask, causal), scoring=scoring)
    with torch.no_grad():
        weight = (own_lse - lse).exp()
        wide = torch.promote_types(q.dtype, torch.float32)
        grad = weight.unsqueeze(-1) * grad_out.to(wide)
        grad_lse = (grad * (own_out.to(wide) - out.to(wide))).sum(-1)
    dq, dk, dv = torch.autograd.grad((own_out, own_lse), leaves, (grad.to(q.dtype), grad_lse))
    return dq, dk, dv


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


@torch.enable_grad()
def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, tiles: BlockMask | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    out, aux = _attention(q.device.type)(
        q,
        k,
        v,
        score_mod=None if scoring.softcap is None else _bounded(scoring.softcap),
        block_mask=tiles,
        scale=scoring.scale,
        enable_gqa=q.size(1) != k.size(1),
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@cache
def _attention(device_type: str) -> Callable[..., Any]:
    """Return FlexAttention for a device: on CUDA compiled, which makes it a kernel.

    For all sizes at once: torch gives up after eight compilations, and would go on with all scores
    in memory.
    """
    if device_type != "cuda":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _tiles(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> BlockMask | None:
    if mask is None and not causal:
        return None
    sees = _sees_before if mask is None else _sees(mask)
    return create_block_mask(sees, None, None, q.size(2), k.size(2), device=q.device)


def _sees(mask: Tensor) -> Callable[..., Tensor]:
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[query, key]

    return sees


def _sees_before(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _bounded(softcap: float) -> Callable[..., Tensor]:
    def bounded(
        score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bounded
