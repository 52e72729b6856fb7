"""Arguments and results of the backends, the ways to compute experts; gradients now or later.

Note [Fused or separate]. The gate and up projections of an expert are two tensors or, as Hugging
Face stores them, one, whose rows 0 .. H are the gate's. `Projections` has an entry for each stored
tensor; a backend multiplies with each stored tensor, or with each projection as rows of a stored
tensor. Weights, biases and gradients are stored alike, so that one backend computes both layouts,
and copies nothing.

Note [A bias is a weight]. A bias is a column of its weight whose input is always one, so its
gradient is one more product: that of the same left factor with a column of ones.

Shape symbols: N rows, F slots per row, P positions, L local experts, R positions of some of them,
D width, H hidden width, X and Y the two other dims of a weight.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.activation import SWIGLU, Activation
from hp_expert.kernels import fuses, triton_activation
from hp_expert.placement import placed_like
from hp_platform import put_off_weight_grad


class ExpertRun(NamedTuple):
    """Experts whose rows follow each other, and the number of rows of each, at least one."""

    experts: list[int]
    sizes: list[int]


class WeightGradient:
    """The gradient of the weight of each expert e, collected as products left_e^T @ right_e.

    Before it computes anything, backward asks `put_off_weight_grad` of hp-platform. If the gradient
    is not deferred, products are computed when their factors are passed; else the factors are kept
    until the queue asks for the gradient.

    Args:
        weight: Parameter as it was passed to the Function, [L, X, Y] or, for a bias, [L, X].
        shape: Shape of the local part of the parameter.
        dtype: Dtype of the computation; the gradient has that of the weight.
        batch: Batch of which the gradient is computed. Experts without positions get zeros.
        needed: Whether the weight requires a gradient.

    Attributes:
        needed: Same as the argument.
        now: Whether products are computed when their factors are passed.
    """

    def __init__(
        self,
        weight: Tensor,
        shape: torch.Size,
        *,
        dtype: torch.dtype,
        batch: ExpertBatch,
        needed: bool,
    ) -> None:
        self._weight, self._shape, self._dtype = weight, shape, dtype
        self._counts, self._num_tokens_per_expert = batch.counts, batch.num_tokens_per_expert
        self._total: Tensor | None = None
        self._kept: list[Callable[[], None]] = []
        self.needed = needed
        self.now = needed and not put_off_weight_grad(weight, self._compute)

    def add(self, left: Tensor, right: Tensor, run: ExpertRun, part: slice) -> None:
        """Take the factors of a run of experts, for some rows of each one's weight.

        Args:
            left: Left factor [R, rows of the part].
            right: Right factor [R, Y]; Y is one for a bias.
            run: Experts, and the number of the R rows of each.
            part: Rows of the weight to which the product belongs.
        """
        if not self.now:
            if self.needed:
                self._kept.append(partial(self.add, left, right, run, part))
            return
        if self._total is None:
            columns = () if len(self._shape) > 2 else (1,)
            self._total = left.new_empty((*self._shape, *columns), dtype=self._dtype)
        lefts = left.t().to(self._dtype).split(run.sizes, 1)
        rights = right.to(self._dtype).split(run.sizes)
        for expert, left_n, right_n in zip(run.experts, lefts, rights, strict=True):
            torch.mm(left_n, right_n, out=self._total[expert, part])

    def set(self, product: Callable[[], Tensor]) -> None:
        """Take a function that computes the gradients of all experts."""
        if self.now:
            self._total = product()
        elif self.needed:
            self._kept.append(partial(self.set, product))

    def _compute(self) -> Tensor:
        self.now = True
        while self._kept:
            self._kept.pop(0)()
        return self.result()

    def result(self) -> Tensor:
        """Return the gradient from the factors, zero for experts without rows."""
        total, self._total = self._total, None
        if total is None:  # a parameter that FSDP gathers in another dtype has no `zeros_like`
            dtype, device = self._weight.dtype, self._weight.device
            total = torch.zeros(self._shape, dtype=dtype, device=device)
        elif self._counts is not None:
            for expert, count in enumerate(self._counts):
                if count == 0:
                    total[expert].zero_()
        elif fuses(total):
            total = total.contiguous()  # of a bias it is a column of a product
            triton_activation.zero_idle(total, self._num_tokens_per_expert)
        else:
            idle = self._num_tokens_per_expert == 0
            total.masked_fill_(idle.view(-1, *[1] * (total.ndim - 1)), 0)
        gradient = total.view(self._shape).to(self._weight.dtype)
        if isinstance(self._weight, DTensor):
            return placed_like(self._weight, gradient)
        return gradient


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
