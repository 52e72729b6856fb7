"""The dispatcher of experts that are all in one process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.agreement import wrong_input
from hp_expert.dispatch.counts import count_slots, invalid_experts
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
    ) -> tuple[Tensor, ExpertBatch]:
        """Sort; see `Dispatcher.prepare`. What the other calls need to know is the batch."""
        error = wrong_input(x, experts, weights)
        if error is not None:
            raise error
        counted = count_slots(experts, self.num_experts)
        order = counted.keys.reshape(-1).argsort(stable=True)
        counts: tuple[int, ...] | None = None
        if x.is_cuda and stays_on_device(x):
            message = f"experts must be in [0, num_experts ({self.num_experts})), or -1 for none"
            require_on_device(counted.counts[-1] == 0, message)
        else:
            *numbers, _, invalid = counted.counts.tolist()
            if invalid:
                raise invalid_experts(invalid, self.num_experts)
            order, counts = order[: sum(numbers)], tuple(numbers)
        num_tokens = counted.counts[: self.num_experts]
        return x, ExpertBatch(x, weights, order, counts, num_tokens, experts.shape[1])

    def launch_dispatch(self, rows: Tensor, state: ExpertBatch) -> tuple[Tensor, ExpertBatch]:
        """Return both."""
        return rows, state

    def finish_dispatch(self, rows: Tensor, state: ExpertBatch) -> ExpertBatch:
        """Hand the tokens on as they are."""
        return state._replace(rows=rows)

    def launch_combine(self, y: Tensor, state: ExpertBatch) -> Tensor:
        """Return `y`: the experts have summed over the slots of each token."""
        del state
        return y

    def finish_combine(self, rows: Tensor, state: ExpertBatch) -> Tensor:
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
