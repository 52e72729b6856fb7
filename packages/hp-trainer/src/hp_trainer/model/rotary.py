"""Rotary position embedding, and how it is stretched to longer sequences.

All variants differ in data alone: in the frequencies of the rotated pairs, in a factor on cosine
and sine, and in which channels make up a pair.

Shape symbols: B sequences, S positions, N heads, H rotated width of a head.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_trainer.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines by which positions rotate heads.

    Attributes:
        cos: [S, H / 2], fp64.
        sin: [S, H / 2], fp64.
        neighbours: Whether channels 2i and 2i + 1 are a pair (GPT-J, DeepSeek) instead of i and
            i + H / 2 (GPT-NeoX, Llama). Checkpoints are trained for one of the two.
    """

    cos: Tensor
    sin: Tensor
    neighbours: bool

    def apply(self, *heads: Tensor) -> list[Tensor]:
        """Rotate heads [B, S, N, H] of one dtype, in fp32 or wider; N may differ."""
        dtype = heads[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = self.cos[None, :, None].to(wide), self.sin[None, :, None].to(wide)
        dim, pairs = (-1, (-1, 2)) if self.neighbours else (-2, (2, -1))
        rotated = []
        for x in heads:
            if self.neighbours and not torch.compiler.is_compiling():
                # One pass over memory; a compiler makes one anyway, but not of complex numbers.
                turned: Tensor = _Turn.apply(x.to(wide), torch.complex(cos, sin))
            else:
                one, other = x.to(wide).unflatten(-1, pairs).unbind(dim)
                both = (one * cos - other * sin, other * cos + one * sin)
                turned = torch.stack(both, dim=dim).flatten(-2)
            rotated.append(turned.to(dtype))
        return rotated


class _Turn(torch.autograd.Function):
    """Pairs of neighbours [B, S, N, H] times complex [1, S, 1, H / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        *strides, last = x.stride()
        # A part of the channels of heads is read where it is, if complex numbers can be seen there.
        in_place = last == 1 and not any(each % 2 for each in (*strides, x.storage_offset()))
        if not in_place:  # `contiguous` returns one token as it lies, at an odd place as well
            x = x.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (turn,) = ctx.saved_tensors
        x: Tensor = _Turn.apply(grads[0], turn.conj().resolve_conj())
        return x, None


def rotation(config: ModelConfig, positions: Tensor) -> Rotation:
    """Compute what to rotate by (Su et al., 2021, arXiv:2104.09864).

    Args:
        config: Says which variant.
        positions: Positions of the tokens in their sequence, int64 [S].
    """
    frequencies = inverse_frequencies(config, device=positions.device)
    angle = torch.outer(positions.to(torch.float64), frequencies)
    factor = _yarn_growth(config) if config.rope_scaling == "yarn" else 1.0
    return Rotation(angle.cos() * factor, angle.sin() * factor, config.rope_pairs == "neighbours")


def inverse_frequencies(config: ModelConfig, *, device: torch.device | None = None) -> Tensor:
    """Return the radians per position of each pair, fp64 [H / 2], fastest first."""
    width = config.rotated_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    plain = config.rope_theta**-exponent
    if config.rope_scaling == "none":
        return plain
    share = _llama3_share(config, plain) if config.rope_scaling == "llama3" else _yarn_share(config)
    share = share.to(plain.device)
    return plain / config.rope_factor * share + plain * (1 - share)


def softmax_growth(config: ModelConfig) -> float:
    """Return what the scores of latent attention are multiplied by besides 1/sqrt(head width).

    DeepSeek applies the growth that YaRN asks for to whole heads, with and without position.
    """
    if config.rope_scaling != "yarn" or config.rope_mscale_all_dim == 0:
        return 1.0
    return _growth(config.rope_factor, config.rope_mscale_all_dim) ** 2


def _llama3_share(config: ModelConfig, plain: Tensor) -> Tensor:
    """Say how far each frequency is stretched, 0 to 1 [H / 2]: by its turns in the original length.

    Source: Llama 3.1 (arXiv:2407.21783); the formula is that of Meta's published code.
    """
    turns = config.rope_original_positions * plain / (2 * math.pi)
    low, high = config.rope_low_factor, config.rope_high_factor
    return 1 - ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(config: ModelConfig) -> Tensor:
    """Return the share of YaRN (Peng et al., 2023, arXiv:2309.00071): a ramp over channels."""
    width = config.rotated_head_dim

    def channel_of(turns: float) -> float:
        ratio = config.rope_original_positions / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = channel_of(config.rope_beta_fast), channel_of(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero, as published
    channel = torch.arange(width // 2, dtype=torch.float64)
    return ((channel - low) / (high - low)).clamp(0, 1)


def _yarn_growth(config: ModelConfig) -> float:
    """Say what cosine and sine are multiplied by, which sharpens attention over long sequences."""
    factor, mscale, whole = config.rope_factor, config.rope_mscale, config.rope_mscale_all_dim
    if mscale and whole:
        return _growth(factor, mscale) / _growth(factor, whole)
    return _growth(factor, 1.0)


def _growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
