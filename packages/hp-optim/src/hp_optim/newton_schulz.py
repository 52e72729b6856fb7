"""One matrix: its orthogonal factor by Newton-Schulz, what that costs, and the rate of its step.

The arithmetic is that of `torch.optim.Muon`, operator by operator, so that the bits are the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon)."""
MOST_STEPS = 99


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Settings of the iteration, with the names that `torch.optim.Muon` has for them.

    Attributes:
        ns_coefficients: Factors of X, XX'X and XX'XX'X.
        ns_steps: Number of iterations.
        eps: Least norm that a matrix is divided by.
        dtype: Dtype of the iteration.
    """

    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    ns_steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype = torch.bfloat16


def orthogonalize(matrix: Tensor, settings: NewtonSchulz) -> Tensor:
    """Return the nearest matrix with singular values near 1; `matrix` is not changed.

    Args:
        matrix: `[rows, columns]`, any floating dtype.
        settings: Settings; the iteration and the result have their dtype.

    Returns:
        `[rows, columns]`; a transposed view where there are more rows than columns.
    """
    a, b, c = settings.ns_coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(settings.dtype)
    x = x.T if is_tall else x
    # Not in place, as torch does: that would divide a momentum in bfloat16 itself.
    x = x / x.norm().clamp(min=settings.eps)
    for _ in range(settings.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def flops(shape: tuple[int, int], steps: int) -> int:
    """Count the floating-point operations of the products in `orthogonalize`."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def rate_factor(rule: str | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        rule: `"original"` or None (Keller Jordan), or `"match_rms_adamw"` (Moonshot, 2502.16982).
        shape: Rows (outputs) and columns (inputs).
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1, shape[0] / shape[1]))
