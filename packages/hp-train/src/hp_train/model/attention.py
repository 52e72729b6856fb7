"""Attention layers. Each has one submodule, `core`, that attends; the rest is projections.

The core takes q, k and v as [B, S, heads, width] and a mask by keyword, `attn_mask`, so that
`hp_context.ContextParallel` can be put around it.

Shape symbols: B sequences, S positions, D model width, N query heads, K key/value heads, H width
of query and key heads, V width of value heads.
"""

import math

import torch
from torch import Tensor, nn

from hp_context import Attention, Causal, Mask, SlidingWindow, mask_tensor
from hp_train.config import ModelConfig
from hp_train.model.layers import Linear, RMSNorm
from hp_train.model.rotary import Rotation, softmax_growth

_LATENT_EPS = 1e-6
"""Of the norms inside latent attention: DeepSeek's code has it whatever the model's eps."""


class SinkAttention(nn.Module):
    """A core attention in which a learned score per head takes a share of the softmax (gpt-oss).

    It stands in until `hp_context.Attention` takes sinks: it keeps all scores, [B, N, S, S], and
    cannot be made context parallel.

    Args:
        mask: Which keys a query may see; a call may pass another one.
        scale: Factor of the scores.
    """

    def __init__(self, mask: Mask, *, scale: float) -> None:
        super().__init__()
        self.mask, self.scale = mask, scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None, *, sinks: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            q: [B, S, N, H].
            k: [B, S, K, H].
            v: [B, S, K, V].
            attn_mask: Instead of the mask of the module.
            sinks: [N].

        Returns:
            [B, S, N, V].
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        mask = mask_tensor(attn_mask or self.mask, q.shape[1], device=q.device)
        grouped = q.unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bqkgh,bskh->bkgqs", grouped, k).to(wide) * self.scale
        scores = scores.masked_fill(~mask, -math.inf)
        sink = sinks.to(wide).view(1, k.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        return torch.einsum("bkgqs,bskv->bqkgv", shares.to(v.dtype), v).flatten(2, 3)


class GroupedQueryAttention(nn.Module):
    """Self-attention with grouped key/value heads (Ainslie et al., 2023, arXiv:2305.13245).

    Args:
        config: Of the model.
        mask: Which keys a query may see.
    """

    def __init__(self, config: ModelConfig, mask: Mask) -> None:
        super().__init__()
        width = self.head_dim = config.head_dim or config.dim // config.num_heads
        bias = config.attention_bias
        self.wq = Linear(config.dim, config.num_heads * width, bias=bias)
        self.wk = Linear(config.dim, config.num_kv_heads * width, bias=bias)
        self.wv = Linear(config.dim, config.num_kv_heads * width, bias=bias)
        self.wo = Linear(config.num_heads * width, config.dim, bias=bias)
        self.q_norm = RMSNorm(width, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, eps=config.norm_eps) if config.qk_norm else None
        sinks = nn.Parameter(torch.empty(config.num_heads)) if config.attention_sinks else None
        self.register_parameter("sinks", sinks)
        make = Attention if sinks is None else SinkAttention
        self.core = make(mask, scale=width**-0.5)

    def forward(self, x: Tensor, *, rotation: Rotation, documents: Mask | None = None) -> Tensor:
        """[B, S, D] to [B, S, D].

        Args:
            x: [B, S, D].
            rotation: Of the positions.
            documents: What else limits the keys of a query, in this call.
        """
        # Heads are counted by what the projections give: under tensor parallelism a part of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotation.apply(q), rotation.apply(k)
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        y = self.core(q, k, v, attn_mask=_limited(self.core.mask, documents), **sinks)
        out: Tensor = self.wo(y.flatten(2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values are made from a narrow latent of each token; a part of the key, the only one
    with a position, is shared by all heads.

    Args:
        config: Of the model.
        mask: Which keys a query may see.
    """

    def __init__(self, config: ModelConfig, mask: Mask) -> None:
        super().__init__()
        self.nope, self.rope = config.nope_head_dim, config.rope_head_dim
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        heads, width = config.num_heads, self.nope + self.rope
        if config.q_lora_rank:
            self.wq_a = Linear(config.dim, config.q_lora_rank)
            self.q_norm = RMSNorm(config.q_lora_rank, eps=_LATENT_EPS)
            self.wq_b = Linear(config.q_lora_rank, heads * width)
        else:
            self.wq = Linear(config.dim, heads * width)
        self.is_compressed = config.q_lora_rank > 0
        self.wkv_a = Linear(config.dim, self.latent + self.rope)
        self.kv_norm = RMSNorm(self.latent, eps=_LATENT_EPS)
        self.wkv_b = Linear(self.latent, heads * (self.nope + self.value))
        self.wo = Linear(heads * self.value, config.dim)
        self.core = Attention(mask, scale=width**-0.5 * softmax_growth(config))

    def forward(self, x: Tensor, *, rotation: Rotation, documents: Mask | None = None) -> Tensor:
        """See :meth:`GroupedQueryAttention.forward`."""
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.is_compressed else self.wq(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.nope + self.rope)).split(
            [self.nope, self.rope], dim=-1
        )
        latent, k_rope = self.wkv_a(x).split([self.latent, self.rope], dim=-1)
        k_nope, v = (
            self.wkv_b(self.kv_norm(latent))
            .unflatten(-1, (-1, self.nope + self.value))
            .split([self.nope, self.value], dim=-1)
        )
        k_rope = rotation.apply(k_rope.unsqueeze(2)).expand(*k_nope.shape[:-1], -1)
        q = torch.cat((q_nope, rotation.apply(q_rope)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        y = self.core(q, k, v, attn_mask=_limited(self.core.mask, documents))
        out: Tensor = self.wo(y.flatten(2))
        return out


ATTENTION: dict[str, type[GroupedQueryAttention] | type[LatentAttention]] = {
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
}
"""By the name that `model.attention` has in a config."""


def make_attention(config: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    """Build the attention of one layer of a model."""
    has_window = config.has_window(layer)
    mask = SlidingWindow(config.sliding_window - 1) if has_window else Causal()
    return ATTENTION[config.attention](config, mask)


def _limited(mask: Mask, documents: Mask | None) -> Mask | None:
    return None if documents is None else mask & documents
