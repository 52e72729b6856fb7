"""Arguments and results of the backends, the ways to compute experts.

Note [Fused or separate]. The gate and up projections of an expert are two tensors or, as Hugging
Face stores them, one, whose rows 0 .. H are the gate's. `Projections` has an entry for each stored
tensor; a backend multiplies with each stored tensor, or with each projection as rows of a stored
tensor. Weights, biases and gradients are stored alike, so that one backend computes both layouts,
and copies nothing.

Note [A bias is a weight]. A bias is a column of its weight whose input is always one, so its
gradient is one more product: that of the same left factor with a column of ones.

Shape symbols: N rows, F slots per row, P positions, L local experts, D width, H hidden width.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.activation import SWIGLU, Activation
from hp_expert.experts.weight_gradient import WeightGradient

T = TypeVar("T")
CastOf = Callable[[Tensor, torch.dtype], Tensor | None]
"""A function that returns a parameter cast to a dtype; None for one that has the dtype."""


class Projections(NamedTuple, Generic[T]):
    """An entry for each stored tensor of the projections of experts.

    Attributes:
        gate_up: Entries of the gate and of the up projection, or one entry where a tensor stores
            both.
        down: Entry of the down projection.
    """

    gate_up: tuple[T, ...]
    down: T


class ExpertWeights(NamedTuple):
    """The parameters of experts.

    Attributes:
        weights: gate_up [L, 2H, D], or gate [L, H, D] and up [L, H, D]; down [L, D, H].
        biases: gate_up [L, 2H], or gate [L, H] and up [L, H]; down [L, D]. Each may be None.
        adds_output_bias: Whether the output contains the bias of down; its gradient is computed
            in either case.
        activation: Activation between the projections.
    """

    weights: Projections[Tensor]
    biases: Projections[Tensor | None]
    adds_output_bias: bool = True
    activation: Activation = SWIGLU

    @property
    def output_bias(self) -> Tensor | None:
        """Return the bias of down [L, D], if the output contains it, else None."""
        return self.biases.down if self.adds_output_bias else None


class InputGradients(NamedTuple):
    """Gradients of rows [N, D] and of routing weights [N, F]."""

    rows: Tensor
    weights: Tensor | None


class WeightGradients(NamedTuple):
    """The gradients of all parameters, to which backends pass factors; None for a missing bias.

    See Note [A bias is a weight].
    """

    weights: Projections[WeightGradient]
    biases: Projections[WeightGradient | None]


class Backend(Protocol):
    """A way to compute experts: forward, backward, and whether they need `ExpertBatch.counts`."""

    @property
    def reads_counts(self) -> bool:
        """Tell whether `counts` must not be None."""

    def forward(
        self, batch: ExpertBatch, experts: ExpertWeights, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output [N, D], and the tensors to keep for `backward`.

        Args:
            batch: Rows and their routing.
            experts: Parameters in the dtype of the rows.
            dtype: Dtype of the output; None: that of the rows.
        """

    def backward(
        self,
        batch: ExpertBatch,
        experts: ExpertWeights,
        kept: tuple[Tensor, ...],
        grad_out: Tensor,
        *,
        wanted: WeightGradients,
    ) -> InputGradients:
        """Return the gradients of rows and weights; pass factors of the others to `wanted`."""
