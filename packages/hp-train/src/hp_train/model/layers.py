"""The layers of a decoder-only transformer.

Shape symbols: B sequences, S positions, D model width, N query heads, K key/value heads, H head
width, F feed-forward width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_platform import linear
from hp_train.randomness import derive_seed, uniform


class Linear(nn.Module):
    """A matrix without bias whose weight gradient can be computed later than its input gradient.

    Parameters may be kept wider than the activations (fp32 masters under bf16 compute); the
    weight is then cast at use, and its gradient arrives in the parameter's own dtype.
    """

    weight: Tensor  # [out_features, in_features]

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x``."""
        return linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), statistics in fp32 or wider."""

    weight: Tensor  # [D]

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shape and dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class DropoutKey(NamedTuple):
    """Which activations a microbatch drops: the same ones in every layout."""

    seed: int
    step: int
    sequence_index: Tensor  # int64 [B], global


def dropout(x: Tensor, rate: float, key: DropoutKey | None, layer: str) -> Tensor:
    """Zero a share of the activations and scale up the rest.

    Args:
        x: [B, S, D].
        rate: Share to zero, in [0, 1).
        key: None when not training.
        layer: Global name of the place, part of the random key.
    """
    if rate == 0.0 or key is None:
        return x
    purpose = derive_seed(key.seed, "dropout", key.step, layer)
    kept = uniform(purpose, key.sequence_index, x.shape[1], x.shape[2]) >= rate
    return x * kept.to(x.dtype) / (1.0 - rate)


def rotary_angles(
    num_positions: int, head_dim: int, *, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary position embedding (Su et al., 2021), fp64 [S, H / 2] each."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    position = torch.arange(num_positions, dtype=torch.float64, device=device)
    angle = torch.outer(position, theta**-exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by its position's angles.

    Args:
        x: [B, S, N, H].
        cos: [S, H / 2].
        sin: [S, H / 2].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[None, :, None].to(wide), sin[None, :, None].to(wide)
    left, right = x.to(wide).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al., 2023) and RoPE."""

    def __init__(
        self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_theta = rope_theta
        self.wq = Linear(dim, num_heads * head_dim)
        self.wk = Linear(dim, num_kv_heads * head_dim)
        self.wv = Linear(dim, num_kv_heads * head_dim)
        self.wo = Linear(num_heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        B, S, _ = x.shape
        cos, sin = rotary_angles(S, self.head_dim, theta=self.rope_theta, device=x.device)
        q = rotate(self.wq(x).view(B, S, self.num_heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(B, S, self.num_kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(B, S, self.num_kv_heads, self.head_dim)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        out: Tensor = self.wo(y.transpose(1, 2).reshape(B, S, self.num_heads * self.head_dim))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, 2020): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden)
        self.w3 = Linear(dim, hidden)
        self.w2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y
