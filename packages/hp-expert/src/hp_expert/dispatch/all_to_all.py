"""The dispatcher that exchanges rows between ranks by all-to-all.

Note [One host read]. An exchange needs the number of rows for each rank as Python numbers. Counts
sent, counts received and each rank's verdict on its own input travel in one small exchange, which
the local sort and gather hide, and reach the host in one read. Nothing else waits for the device.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, W ranks, L = E / W local
experts, R rows received, D width, C = L + 2 numbers told to a rank, B = E blocks of rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.agreement import Header, input_error, raise_together
from hp_expert.dispatch.counts import count_slots, invalid_experts, read_host
from hp_expert.dispatch.protocol import DispatchState
from hp_expert.permute import gather_slots, permute_slots, sort_by_expert, sum_slots
from hp_platform import all_to_all_lazy, launch_all_to_all, wait_tensor


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Rank r of `group` has experts r * L .. (r + 1) * L - 1; each slot's row is sent there.

    Attributes:
        group: The ranks that share the experts.
        num_experts: E.
    """

    group: ProcessGroup
    num_experts: int

    def __post_init__(self) -> None:
        """Refuse a number of experts that the ranks cannot share equally."""
        if self.num_experts % self.group.size():
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by the size of the expert "
                f"group ({self.group.size()})"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "AllToAllDispatcher":
        """Return itself: copies of a module share the group, which cannot be copied."""
        return self

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, DispatchState]:
        """Sort and gather while counts are exchanged; see `Dispatcher.prepare`."""
        W, L = self.group.size(), self.num_experts // self.group.size()
        error = input_error(x, experts, weights)
        header = Header.of(x, weights) if error is None else Header.failed()
        told_WC = _announcement(experts, header, num_ranks=W, num_local=L, device=x.device)
        exchange = launch_all_to_all(told_WC, group=self.group)
        if error is None:
            permutation = sort_by_expert(experts)
            rows_SD = gather_slots(x, permutation)
            weights_S = None if weights is None else permute_slots(weights, permutation)
        heard_WC = exchange.wait()
        told, heard = read_host(torch.stack([told_WC, heard_WC]))
        if error is None and told[0][L]:
            error = invalid_experts(told[0][L], self.num_experts)
        verdicts = [row[L:] for row in heard]
        raise_together(error, header, verdicts, group=self.group, device=x.device)
        output_splits = tuple(sum(row[:L]) for row in heard)
        counts_WL = heard_WC[:, :L]
        state = DispatchState(
            permutation,
            weights_S,
            order=_by_expert(counts_WL, num_rows=sum(output_splits)),
            counts=tuple(sum(row[e] for row in heard) for e in range(L)),
            num_tokens_per_expert=counts_WL.sum(0),
            input_splits=tuple(sum(row[:L]) for row in told),
            output_splits=output_splits,
        )
        return rows_SD, state

    def launch_dispatch(self, rows: Tensor, state: DispatchState) -> tuple[Tensor, DispatchState]:
        """Launch the exchange of rows, and that of their routing weights."""
        if state.weights is not None:
            state = replace(state, weights=self._send(state.weights, state))
        return self._send(rows, state), state

    def finish_dispatch(self, rows: Tensor, state: DispatchState) -> ExpertBatch:
        """Wait for the rows."""
        weights_R1 = None
        if state.weights is not None:
            weights_R1 = wait_tensor(state.weights).unsqueeze(1)
        return ExpertBatch(
            wait_tensor(rows), weights_R1, state.order, state.counts, state.num_tokens_per_expert
        )

    def launch_combine(self, y: Tensor, state: DispatchState) -> Tensor:
        """Launch the exchange back."""
        return all_to_all_lazy(
            y,
            output_splits=state.input_splits,
            input_splits=state.output_splits,
            group=self.group,
        )

    def finish_combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Wait for the outputs and sum those of each token."""
        return sum_slots(wait_tensor(rows), state.permutation)

    def _send(self, x: Tensor, state: DispatchState) -> Tensor:
        return all_to_all_lazy(
            x,
            output_splits=state.output_splits,
            input_splits=state.input_splits,
            group=self.group,
        )


def _announcement(
    experts: Tensor, header: Header, *, num_ranks: int, num_local: int, device: torch.device
) -> Tensor:
    """What each rank is told: its counts, how many slots are invalid, the header; [W, L + 2]."""
    told = torch.zeros(num_ranks, num_local + 2, dtype=torch.int64, device=device)
    if header.ok:
        num_experts = num_ranks * num_local
        counts = count_slots(experts, num_experts)
        told[:, :num_local] = counts[:num_experts].view(num_ranks, num_local)
        told[:, num_local] = counts[num_experts]
    told[:, num_local + 1] = header.code
    return told


def _by_expert(counts_WL: Tensor, *, num_rows: int) -> Tensor:
    """Row at each position, for rows sorted by (rank, expert) and positions by (expert, rank).

    Blocks move as wholes: a position differs from its row by the shift of its block.
    """
    first_row_WL = (counts_WL.flatten().cumsum(0) - counts_WL.flatten()).view_as(counts_WL)
    counts_B = counts_WL.t().flatten()
    shift_B = first_row_WL.t().flatten() - (counts_B.cumsum(0) - counts_B)
    shift_R = shift_B.repeat_interleave(counts_B, output_size=num_rows)
    return torch.arange(num_rows, device=counts_WL.device) + shift_R
