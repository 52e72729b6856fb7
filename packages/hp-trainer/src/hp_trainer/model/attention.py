"""Attention layers. Each has one submodule, `core`, that attends; the rest is projections.

The core takes q, k and v as [B, S, heads, width] and a mask by keyword, `attn_mask`, so that
`hp_context.ContextParallel` can be put around it.

Shape symbols: B sequences, S positions, D model width, N query heads, K key/value heads, H width
of query and key heads, V width of value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from hp_context import Attention, Causal, EachSequence, Mask, SlidingWindow
from hp_platform import doing, outside_graph
from hp_trainer.config import ModelConfig
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model.layers import Linear, RMSNorm
from hp_trainer.model.parameters import declare
from hp_trainer.model.rotary import Rotation, softmax_growth

Limits = tuple[Mask, ...] | None
"""What limits the keys of a query besides the layer's own mask: a mask for each sequence."""

_LATENT_EPS = 1e-6
"""Of the norms inside latent attention: DeepSeek's code has it whatever the model's eps."""


class GroupedQueryAttention(nn.Module):
    """Self-attention with grouped key/value heads (Ainslie et al., 2023, arXiv:2305.13245).

    Args:
        config: Configuration of the model.
        mask: Which keys a query may see.
    """

    def __init__(self, config: ModelConfig, mask: Mask) -> None:
        super().__init__()
        width = self.head_dim = config.head_dim or config.dim // config.num_heads
        bias = config.attention_bias
        of_q, of_kv = config.num_heads * width, config.num_kv_heads * width
        self.wq = Linear(config.dim, of_q, bias=bias, tp_dim=0, published="q_proj")
        self.wk = Linear(config.dim, of_kv, bias=bias, tp_dim=0, published="k_proj")
        self.wv = Linear(config.dim, of_kv, bias=bias, tp_dim=0, published="v_proj")
        self.wo = _output(of_q, config.dim, bias=bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(width, eps=config.norm_eps, published="q_norm")
            self.k_norm = RMSNorm(width, eps=config.norm_eps, published="k_norm")
        sinks = torch.empty(config.num_heads) if config.attention_sinks else None
        self.core = Attention(mask, scale=width**-0.5, sinks=sinks)
        declare(self.core, sinks=ParameterSpec("bias", tp_dim=0))  # scores of nothing
        declare(self, "self_attn")

    def forward(self, x: Tensor, *, rotation: Rotation, documents: Limits = None) -> Tensor:
        """Map [B, S, D] to [B, S, D].

        Args:
            x: [B, S, D].
            rotation: Rotary cosines and sines of the positions.
            documents: What else limits the keys of a query, in this call, for each sequence.
        """
        # Heads are counted by what the projections give: under tensor parallelism a part of them.
        heads = -1, self.head_dim
        q, k = self.wq(x).unflatten(-1, heads), self.wk(x).unflatten(-1, heads)
        v = self.wv(x).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotation.apply(q, k)
        out: Tensor = self.wo(attend(self.core, q, k, v, documents))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values are made from a narrow latent of each token; a part of the key, the only one
    with a position, is shared by all heads.

    Args:
        config: Configuration of the model.
        mask: Which keys a query may see.
    """

    def __init__(self, config: ModelConfig, mask: Mask) -> None:
        super().__init__()
        self.nope, self.rope = config.nope_head_dim, config.rope_head_dim
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        heads, width = config.num_heads, self.nope + self.rope
        if config.q_lora_rank:
            rank = config.q_lora_rank
            self.wq_a = Linear(config.dim, rank, published="q_a_proj")
            self.q_norm = RMSNorm(rank, eps=_LATENT_EPS, published="q_a_layernorm")
            self.wq_b = Linear(rank, heads * width, tp_dim=0, published="q_b_proj")
        else:
            self.wq = Linear(config.dim, heads * width, tp_dim=0, published="q_proj")
        self.is_compressed = config.q_lora_rank > 0
        of_kv = heads * (self.nope + self.value)
        self.wkv_a = Linear(config.dim, self.latent + self.rope, published="kv_a_proj_with_mqa")
        self.kv_norm = RMSNorm(self.latent, eps=_LATENT_EPS, published="kv_a_layernorm")
        self.wkv_b = Linear(self.latent, of_kv, tp_dim=0, published="kv_b_proj")
        self.wo = _output(heads * self.value, config.dim)
        declare(self, "self_attn")
        self.core = Attention(mask, scale=width**-0.5 * softmax_growth(config))

    def forward(self, x: Tensor, *, rotation: Rotation, documents: Limits = None) -> Tensor:
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
        k_rope, q_rope = rotation.apply(k_rope.unsqueeze(2), q_rope)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        out: Tensor = self.wo(attend(self.core, q, k, v, documents))
        return out


ATTENTION: dict[str, type[GroupedQueryAttention] | type[LatentAttention]] = {
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
}
"""By the name that `model.attention` has in a config."""


def make_attention(config: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    """Build the attention of one layer of a model."""
    mask = SlidingWindow(config.sliding_window - 1) if config.has_window(layer) else Causal()
    return ATTENTION[config.attention](config, mask)


def _output(width: int, dim: int, *, bias: bool = False) -> Linear:
    """Return the output matrix, which adds the results of heads to the residual stream."""
    return Linear(width, dim, bias=bias, tp_dim=1, is_residual=True, published="o_proj")


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Something that is told apart by who it is, never by what it says; held while it is a key."""

    limits: Sequence[Mask]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.limits is other.limits

    def __hash__(self) -> int:
        return id(self.limits)


@lru_cache(maxsize=16)
def _of_batch(documents: _Same) -> EachSequence:
    """Return the limits of a microbatch as one mask, which all layers share.

    Another microbatch of the same lengths gets another: ranks compare each mask once, and one of
    them may have other lengths there; see Note [When ranks compare] in hp_context.
    """
    return EachSequence(tuple(documents.limits))


@outside_graph
def attend(core: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Limits = None) -> Tensor:
    """Attend: to all sequences at once where a kernel does, or one by one if they have limits.

    Args:
        core: Attends.
        q: [B, S, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        documents: `Microbatch.documents`.

    Returns:
        [B, S, N V].
    """
    with doing("attention"):
        if documents is None:
            y: Tensor = core(q, k, v)
            return y.flatten(2)
        if core.takes_batch(q, v, documents):
            y = core(q, k, v, attn_mask=core.mask & _of_batch(_Same(documents)))
            return y.flatten(2)
        rows = zip(*(x.split(1) for x in (q, k, v)), documents, strict=True)
        parts = [core(*row, attn_mask=core.mask & limit) for *row, limit in rows]
        return torch.cat([part.flatten(2) for part in parts])
