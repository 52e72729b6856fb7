# ruff: noqa: SLF001  # no public function of torch returns the log-sum-exp
"""Attention of a whole sequence under a mask, and of one block of it with its log-sum-exp.

Note [Backward by blocks]
    A block knows its part of the scores only, but its gradients need the softmax over all of the
    keys. They follow from the final output and the final log-sum-exp of each query: the weights
    are exp(score - lse), so every block is given these two and none needs another block.

Shape symbols: B batch, S sequence, Q queries of a block, K keys of a block, H query heads, G
key/value heads (G divides H), D head size of queries and keys, E head size of values.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_context import cuda_kernels, reference_kernel
from hp_context.masks import BlockKind, Causal, Full, Mask, mask_tensor


class SpreadMask(Mask):
    """A mask that comes with the ranks that the sequence is spread over.

    `masked_attention` leaves the work to it: q, k and v are parts of the sequence then.
    """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float) -> Tensor:
        """Return [B, H, s, E] for this rank's q [B, H, s, D], k [B, G, s, D], v [B, G, s, E]."""


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    seq_dim: int = 1,
    head_dim: int = 2,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend over the whole sequence.

    Args:
        q: [B, S, H, D], or [B, H, S, D] with seq_dim=2 and head_dim=1.
        k: Like `q` with G heads.
        v: Like `k` with head size E.
        mask: Which keys a query may see, by global positions.
        seq_dim: Dimension of S.
        head_dim: Dimension of the heads.
        scale: Factor of the scores; 1/sqrt(D) when None.
        dropout: Probability of dropping an attention weight.

    Returns:
        Like `q` with head size E.

    Raises:
        ValueError: The mask does not fit S.
    """
    to_heads_first = (seq_dim, head_dim), (2, 1)
    q, k, v = (x.movedim(*to_heads_first) for x in (q, k, v))
    if isinstance(mask, SpreadMask):
        scale = q.size(-1) ** -0.5 if scale is None else scale
        return mask.attend(q, k, v, scale=scale, dropout=dropout).movedim(*reversed(to_heads_first))
    mask.check(q.size(2))
    plain = isinstance(mask, Full | Causal)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plain else mask_tensor(mask, q.size(2), device=q.device),
        is_causal=isinstance(mask, Causal),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )
    return out.movedim(*reversed(to_heads_first))


class Attention(nn.Module):
    """A core attention whose mask is a `Mask`; runs alone or under `ContextParallel`.

    Args:
        mask: Which keys a query may see; a call may pass another one as `attn_mask`.
        seq_dim: Dimension of the sequence in q, k, v and the output.
        head_dim: Dimension of the heads.
        scale: Factor of the scores; 1/sqrt(D) when None.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(
        self,
        mask: Mask | None = None,
        *,
        seq_dim: int = 1,
        head_dim: int = 2,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mask: Mask = Full() if mask is None else mask
        self.seq_dim, self.head_dim = seq_dim, head_dim
        self.scale, self.dropout = scale, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None) -> Tensor:
        """Attend; shapes as in `masked_attention`."""
        return masked_attention(
            q,
            k,
            v,
            mask=self.mask if attn_mask is None else attn_mask,
            seq_dim=self.seq_dim,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, *, kind: BlockKind, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over the keys of one block.

    Args:
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, E].
        kind: FULL, CAUSAL (Q = K) or PARTIAL.
        mask: bool [Q, K], true where attention is allowed; None unless `kind` is PARTIAL.
        scale: Factor of the scores.

    Returns:
        Output [B, H, Q, E] in the dtype of `q`; log-sum-exp of the scores [B, H, Q] in float32 or
        wider. A query that sees no key of the block has output 0 and log-sum-exp -inf.
    """
    causal = kind is BlockKind.CAUSAL
    if _cpu_flash_applies(q, v):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_rows(q, k, v), 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scale
        )
    elif q.is_cuda and cuda_kernels.flash_applies(q, v, mask):
        out, lse = cuda_kernels.flash_forward(*_rows(q, k, v), causal=causal, scale=scale)
    elif q.is_cuda and cuda_kernels.efficient_applies(q, v):
        out, lse = cuda_kernels.efficient_forward(
            *_rows(q, k, v), mask=mask, causal=causal, scale=scale
        )
    else:
        return reference_kernel.forward(q, k, v, mask=_triangle(q) if causal else mask, scale=scale)
    if mask is not None:
        unseen = ~mask.any(-1)  # the kernels call their log-sum-exp 0
        out.masked_fill_(unseen[:, None], 0.0)
        lse.masked_fill_(unseen, -torch.inf)
    return out, lse


def block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: BlockKind,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of one block in the gradients; see Note [Backward by blocks].

    Args:
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, E].
        grad_out: [B, H, Q, E].
        out: [B, H, Q, E], over all blocks of these queries.
        lse: [B, H, Q], over all blocks; without -inf, see `merge.for_backward`.
        kind: As in `block_forward`.
        mask: As in `block_forward`.
        scale: As in `block_forward`.

    Returns:
        dq, dk, dv like q, k, v, in their dtype or wider.
    """
    causal = kind is BlockKind.CAUSAL
    grad_out, q, k, v, out = _rows(grad_out, q, k, v, out)
    if _cpu_flash_applies(q, v):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scale
        )
        return dq, dk, dv
    if q.is_cuda and cuda_kernels.flash_applies(q, v, mask):
        return cuda_kernels.flash_backward(
            q, k, v, grad_out=grad_out, out=out, lse=lse, causal=causal, scale=scale
        )
    if q.is_cuda and cuda_kernels.efficient_applies(q, v):
        return cuda_kernels.efficient_backward(
            q, k, v, grad_out=grad_out, out=out, lse=lse, mask=mask, causal=causal, scale=scale
        )
    return reference_kernel.backward(
        q,
        k,
        v,
        grad_out=grad_out,
        out=out,
        lse=lse,
        mask=_triangle(q) if causal else mask,
        scale=scale,
    )


def _cpu_flash_applies(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and v.size(-1) == q.size(-1)


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with the head size in one piece of memory, as kernels want it."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores, [Q, K]: 0 where attention is allowed, -inf elsewhere."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _triangle(q: Tensor) -> Tensor:
    return torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril_()
