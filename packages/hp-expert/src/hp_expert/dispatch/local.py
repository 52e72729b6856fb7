"""The dispatcher of experts that are all in one process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.agreement import input_error
from hp_expert.dispatch.counts import count_slots, invalid_experts, read_host
from hp_expert.dispatch.protocol import DispatchState
from hp_expert.permute import sort_slots
from hp_platform.host_reads import require_on_device

_GROUPED_PRODUCTS_SINCE = (9, 0)
"""Compute capability from which on `grouped_mm` takes the ends of its groups from the device."""


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts are in this process: rows stay where they are, nothing is copied.

    Where the experts' products take their counts from the device, the host reads nothing: slots of
    no expert are padding then (`ExpertBatch`, Note [Padding]), and an expert that does not exist
    ends in an assertion of the device. Elsewhere the host reads the counts, once.

    Attributes:
        num_experts: Number of experts, E.
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
        order: Tensor = permutation.order
        counts: tuple[int, ...] | None = None
        if stays_on_device(x):
            message = f"experts must be in [0, num_experts ({self.num_experts})), or -1 for none"
            require_on_device(counted.counts[-1] == 0, message)
        else:
            *numbers, _, invalid = read_host(counted.counts)
            if invalid:
                raise invalid_experts(invalid, self.num_experts)
            order, counts = order[: sum(numbers)], tuple(numbers)
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


def stays_on_device(rows: Tensor) -> bool:
    """Whether grouped products of such rows need no counts on the host.

    `torch.nn.functional.grouped_mm` has a kernel for that in bf16 from sm_90 on; elsewhere the
    host reads for each product, or the experts are computed one after the other.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(rows.device) >= _GROUPED_PRODUCTS_SINCE
