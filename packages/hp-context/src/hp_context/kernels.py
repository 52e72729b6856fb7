"""Attention of a whole sequence under a mask, on torch's scaled_dot_product_attention.

Shape symbols: B batch, S sequence, H query heads, G key/value heads (G divides H), D head size
of queries and keys, E head size of values.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from hp_context.masks import Causal, Full, Mask, mask_tensor


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
    mask.check(q.size(seq_dim))
    to_heads_first = (seq_dim, head_dim), (2, 1)
    q, k, v = (x.movedim(*to_heads_first) for x in (q, k, v))
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
    return out.movedim((2, 1), (seq_dim, head_dim))


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
