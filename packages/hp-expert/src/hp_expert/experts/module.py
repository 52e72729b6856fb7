"""Experts with stacked weights."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hp_expert.batch import ExpertBatch, LocalDispatcher, autocast
from hp_expert.dispatch import Dispatcher, dispatching, through_experts
from hp_expert.experts.activation import SWIGLU, Activation, require_activation
from hp_expert.experts.grouped import Grouped, GroupedProducts
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import ExpertWeights, Projections
from hp_expert.placement import ExpertRanks
from hp_platform import outside_graph


class SpreadExperts(nn.Module):
    """The experts of a layer, all of them or the part of this rank, by any computation.

    Attributes:
        dispatcher: Dispatcher that brings rows to the experts' ranks and back.
        first_expert: Global index of the first local expert.
        total_experts: Number of experts on all ranks.
        ranks: The ranks that share the experts; None: the experts were not spread.
    """

    dispatcher: Dispatcher[Any]
    first_expert: int
    total_experts: int
    ranks: ExpertRanks | None


class GroupedExperts(SpreadExperts):
    """Gated experts whose weights are stacked along dim 0.

    A module may hold a part of the experts; a style such as `hp_expert.ExpertParallel` leaves it
    one. The module keeps nothing of a call.

    Attributes:
        hidden_dims: Dim of each parameter that has the hidden width; None: it has none.
        w1: Gate projections [num_local_experts, hidden, dim].
        w2: Down projections [num_local_experts, dim, hidden].
        w3: Up projections [num_local_experts, hidden, dim].
        b1: Biases of the gate projections [num_local_experts, hidden]; None without biases.
        b2: Biases of the down projections [num_local_experts, dim]; None without biases.
        b3: Biases of the up projections [num_local_experts, hidden]; None without biases.
        num_experts: Number of experts on all ranks.
        num_local_experts: Number of experts of this module. FSDP2 may keep only a part of them
            outside of forward.
        first_expert: Global index of the first local expert.
        ranks: The ranks that share the experts; None: the experts were not spread.
        adds_output_bias: Whether outputs contain b2. Where the hidden dim is sharded, and outputs
            are summed over ranks, only the outputs of one rank do.
        activation: Activation between the projections.
        dispatcher: Dispatcher that brings rows to the experts' ranks and back.
        products: Products in a lower precision, for example; None: the fastest of this package.
        cast_of: Function that returns a parameter in the narrower dtype of the computation, cast
            once for many calls, or None for one that has the dtype; it must cast again when
            parameters have changed. None: forward casts all parameters, and backward again.

    Args:
        num_experts: Number of experts.
        dim: Width of a row.
        hidden: Width between the projections.
        bias: Whether the projections have biases.
        activation: Activation between the projections; `ClampedSwiGLU` for gpt-oss.
        device: Device of the weights.
        dtype: Dtype of the weights.

    Raises:
        ValueError: If `activation` is not an `Activation`.
    """

    hidden_dims: ClassVar[Mapping[str, int | None]] = MappingProxyType(
        {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1, "b2": None}
    )
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    b3: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        bias: bool = False,
        activation: Activation = SWIGLU,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_activation(activation)
        self.num_experts = self.total_experts = self.num_local_experts = num_experts
        self.first_expert = 0
        self.adds_output_bias = True
        self.activation = activation
        self.ranks = None
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim, device=device, dtype=dtype))
        for name, width in ("b1", hidden), ("b2", dim), ("b3", hidden):
            value = torch.empty(num_experts, width, device=device, dtype=dtype) if bias else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.dispatcher = LocalDispatcher(num_experts)
        self.products: GroupedProducts | None = None
        self.cast_of: Callable[[Tensor, torch.dtype], Tensor | None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights and biases as `torch.nn.Linear` does."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2), (self.w3, self.b3)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    # Its host read cuts graphs, see `hp_expert.moe`.
    @outside_graph
    def forward(
        self, rows: Tensor | ExpertBatch, num_tokens_per_expert: Tensor | None = None
    ) -> Tensor:
        """Apply experts to rows, on the ranks of the experts.

        Args:
            rows: Rows sorted by expert [R, dim]; or a batch of `Dispatcher.finish_dispatch`, of
                rows that have arrived at the rank of their experts.
            num_tokens_per_expert: Number of rows of each expert, integer [num_experts]; with
                rows only.

        Returns:
            The outputs in the order of the rows [R, dim].

        Raises:
            ValueError: If the counts do not fit the rows or the experts.
            hp_platform.PeerError: If they do not fit on another rank.
        """
        if not isinstance(rows, ExpertBatch):
            return self._sorted(rows, num_tokens_per_expert)
        weights: Projections[Tensor] = Projections((self.w1, self.w3), self.w2)
        biases: Projections[Tensor | None] = Projections((self.b1, self.b3), self.b2)
        experts = ExpertWeights(weights, biases, self.adds_output_bias, self.activation)
        backend = None if self.products is None else Grouped(self.products)
        return routed_swiglu_by(backend, rows, experts, cast_of=self.cast_of)

    def _sorted(self, rows: Tensor, num_tokens_per_expert: Tensor | None) -> Tensor:
        """Bring rows that are sorted by expert to their experts, and the outputs back."""
        if num_tokens_per_expert is None:
            raise TypeError("num_tokens_per_expert must be given with rows")
        expert_R1 = _expert_of_rows(rows, num_tokens_per_expert, self.num_experts)
        dispatcher = self.dispatcher
        try:
            with dispatching(dispatcher):
                prepared, state = dispatcher.prepare(autocast(rows), expert_R1)
        except ValueError as error:
            raise _explain(rows, num_tokens_per_expert, self.num_experts) or error from None
        return through_experts(dispatcher, self.forward, prepared, state)

    def extra_repr(self) -> str:
        """Return the sizes and the indices of the local experts, for `repr`."""
        _, hidden, dim = self.w1.shape
        here = f"{self.first_expert}..{self.first_expert + self.num_local_experts - 1}"
        return f"num_experts={self.num_experts} (here {here}), dim={dim}, hidden={hidden}"


def _expert_of_rows(rows: Tensor, counts_E: Tensor, num_experts: int) -> Tensor:
    """Return the expert of each row, [R, 1]; E, which does not exist, if the counts do not fit.

    The dispatcher then raises an error on all ranks.
    """
    num_rows, device = rows.shape[0], rows.device
    nowhere = torch.full((num_rows,), num_experts, device=device)
    if counts_E.shape != (num_experts,) or counts_E.is_floating_point():
        return nowhere.unsqueeze(1)
    ends_E = counts_E.to(device).cumsum(0)
    expert_R = torch.searchsorted(ends_E, torch.arange(num_rows, device=device), right=True)
    fits = (ends_E[-1] == num_rows) & (counts_E.amin() >= 0)
    return expert_R.where(fits, nowhere).unsqueeze(1)


def _explain(rows: Tensor, counts_E: Tensor, num_experts: int) -> ValueError | None:
    """Return an error if counts do not fit the rows, else None."""
    if counts_E.shape != (num_experts,) or counts_E.is_floating_point():
        return ValueError(
            f"num_tokens_per_expert ({tuple(counts_E.shape)}, {counts_E.dtype}) must be integer "
            f"and [num_experts ({num_experts})]"
        )
    counts = counts_E.tolist()
    if sum(counts) != rows.shape[0] or min(counts) < 0:
        return ValueError(
            f"sum of num_tokens_per_expert ({sum(counts)}) must equal the number of rows "
            f"({rows.shape[0]}), and none may be negative"
        )
    return None
