"""The dispatcher of experts that are all in one process."""

from dataclasses import dataclass

from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.agreement import input_error
from hp_expert.dispatch.counts import count_slots, invalid_experts, read_host
from hp_expert.dispatch.protocol import DispatchState
from hp_expert.permute import sort_slots


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts are in this process: rows stay where they are, nothing is copied.

    Attributes:
        num_experts: E.
    """

    num_experts: int

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, DispatchState]:
        """Sort; see `Dispatcher.prepare`."""
        error = input_error(x, experts, weights)
        if error is not None:
            raise error
        counted = count_slots(experts, self.num_experts)
        permutation = sort_slots(counted.keys)
        *numbers, _, invalid = read_host(counted.counts)
        if invalid:
            raise invalid_experts(invalid, self.num_experts)
        order, counts = permutation.order[: sum(numbers)], tuple(numbers)
        state = DispatchState(
            permutation, weights, order, counts, counted.counts[: self.num_experts]
        )
        return x, state

    def launch_dispatch(self, rows: Tensor, state: DispatchState) -> tuple[Tensor, DispatchState]:
        """Return both."""
        return rows, state

    def finish_dispatch(self, rows: Tensor, state: DispatchState) -> ExpertBatch:
        """Hand the tokens on as they are."""
        assert state.order is not None
        return ExpertBatch(
            rows,
            state.weights,
            state.order,
            state.counts,
            state.num_tokens_per_expert,
            num_slots_per_row=state.permutation.inverse.shape[1],
        )

    def launch_combine(self, y: Tensor, state: DispatchState) -> Tensor:
        """Return `y`: the experts have summed over the slots of each token."""
        del state
        return y

    def finish_combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return `rows`."""
        del state
        return rows
