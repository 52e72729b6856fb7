"""The small layers of a decoder-only transformer.

Shape symbols: B sequences, S positions, D model width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_platform import linear
from hp_train.randomness import derive_seed, uniform


class WeightCasts:
    """Weights in the dtype that is computed in, each made once for all microbatches of a step.

    Whoever has one clears it when weights change, or are no longer to be held.
    """

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The weight in a dtype; None where it is in it already."""
        if weight.dtype == dtype:
            return None
        found = self._made.get(id(weight))
        if found is None:
            # Two threads may both come here: they make the same.
            found = self._made[id(weight)] = weight.detach().to(dtype)
        return found

    def clear(self) -> None:
        """Let go of all of them."""
        self._made.clear()


def cast_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, casts: WeightCasts | None
) -> Tensor:
    """`torch.nn.functional.linear` in the dtype of ``x``; gradients are those of the parameters.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], as wide as ``x`` or wider.
        bias: [out_features], likewise.
        casts: Where to find the weight; None: it is cast here, and kept for backward.
    """
    if casts is None or torch.compiler.is_compiling():
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return linear(x, weight, bias, cast=casts.of(weight, x.dtype))


class Linear(nn.Module):
    """A matrix whose weight gradient can be computed later than its input gradient.

    Parameters may be kept wider than the activations (fp32 masters under bf16 compute); they are
    then cast at use, and their gradients arrive in the parameter's own dtype.

    Attributes:
        finish: What the product goes through before the bias is added: where the matrix is cut
            over ranks, the sum over them.
        casts: Where the weight is found once it was cast; None: it is cast at every use.
    """

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.finish: Callable[[Tensor], Tensor] | None = None
        self.casts: WeightCasts | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x``."""
        if self.finish is None:
            return cast_linear(x, self.weight, self.bias, casts=self.casts)
        y = self.finish(cast_linear(x, self.weight, casts=self.casts))
        return y if self.bias is None else y + self.bias.to(y.dtype)


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
    positions: Tensor  # int64 [S], in their sequence


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
    kept = uniform(purpose, key.sequence_index, key.positions, x.shape[2]) >= rate
    return x * kept.to(x.dtype) / (1.0 - rate)


class FeedForward(nn.Module):
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
