"""What the two ways to compute experts take and return.

Shape symbols: N rows, P positions, L local experts, D width, H hidden width.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.weight_gradient import WeightGradient


class ExpertWeights(NamedTuple):
    """Weights in the dtype of the rows: w1 and w3 [L, H, D], w2 [L, D, H]."""

    w1: Tensor
    w3: Tensor
    w2: Tensor


class Activations(NamedTuple):
    """Pre-activations, each [P, H]."""

    gate: Tensor
    up: Tensor


class InputGradients(NamedTuple):
    """Gradients of rows [N, D] and of the routing weight at each position [P]."""

    rows: Tensor
    scale: Tensor | None


class WeightGradients(NamedTuple):
    """Where the factors of the weight gradients go."""

    w1: WeightGradient
    w3: WeightGradient
    w2: WeightGradient


class Backend(Protocol):
    """A module with these two functions."""

    def forward(
        self, batch: ExpertBatch, scale_P: Tensor | None, weights: ExpertWeights
    ) -> tuple[Tensor, Activations]:
        """Compute the output [N, D] and the pre-activations."""

    def backward(
        self,
        batch: ExpertBatch,
        scale_P: Tensor | None,
        weights: ExpertWeights,
        kept: Activations,
        grad_out: Tensor,
        *,
        wanted: WeightGradients,
    ) -> InputGradients:
        """Compute the gradients of rows and scale; hand the factors of the others to `wanted`."""
