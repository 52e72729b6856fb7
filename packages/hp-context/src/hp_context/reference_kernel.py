"""Attention of one block in plain torch, forward and backward: for what no kernel of torch takes.

All of the scores of the block exist at once. Query heads that share a key/value head are folded
into rows, [B, G, (H/G)*Q, D], so that keys and values are not repeated.

Shape symbols: B batch, Q queries, K keys, H query heads, G key/value heads, D head size of
queries and keys, E head size of values, R = H / G * Q rows.
"""

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, E] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q, k, mask=mask, scale=scale)  # [B, G, R, K]
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    out = (weights @ v.to(wide)).unflatten(2, (-1, q.size(2))).flatten(1, 2)
    return out.to(q.dtype), lse.squeeze(-1).view(q.shape[:-1])


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in float32 or wider; see `kernels.block_backward`."""
    wide, num_kv_heads = torch.promote_types(q.dtype, torch.float32), k.size(1)
    grad_rows, q_rows, out_rows = (
        _fold(x.to(wide), num_kv_heads) for x in (grad_out, q, out)
    )  # [B, G, R, D or E]
    lse_rows = lse.reshape(*grad_rows.shape[:-1], 1)
    weights = (_scores(q, k, mask=mask, scale=scale) - lse_rows).exp_()
    dv = weights.mT @ grad_rows
    delta = (grad_rows * out_rows).sum(-1, keepdim=True)
    dscores = weights.mul_(grad_rows @ v.to(wide).mT - delta).mul_(scale)
    dq = (dscores @ k.to(wide)).unflatten(2, (-1, q.size(2))).flatten(1, 2)
    return dq, dscores.mT @ q_rows, dv


def _scores(q: Tensor, k: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Return the scores [B, G, R, K], -inf where a query must not see a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_fold(q.to(wide), k.size(1)) @ k.to(wide).mT).mul_(scale)
    if mask is not None:
        scores.unflatten(2, (-1, q.size(2))).masked_fill_(~mask, -torch.inf)
    return scores


def _fold(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, Q, D] -> [B, G, R, D]."""
    rows: Tensor = x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return rows
