"""Bringing rows to the ranks of their experts and back, in calls that keep no state.

Note [State travels with the call]. A dispatcher is a value without memory: what a later call must
know is in the `DispatchState` that the earlier one returned. So any number of microbatches may be
between their dispatch and their combine, in any threads, and a recompute disturbs nobody.

Note [Launches are nothing but exchanges]. Between its first argument and its first result, a launch
is one lazy all-to-all: nobody has waited for its result, nor in backward for the gradient of its
argument. What runs next, in either direction, overlaps with the exchange. This is why rows are
sorted and gathered before, in `prepare`, and summed after, in `finish_combine`.

Note [One host read]. An exchange needs the number of rows for each rank as Python numbers. Counts
sent, counts received and each rank's verdict on its own input travel in one small exchange, which
the local sort and gather hide, and reach the host in one read. Nothing else waits for the device.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, W ranks, L = E / W local
experts, R rows received, D width, C = L + 2 numbers told to a rank, B = E blocks of rows.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.agreement import Header, input_error, raise_together
from hp_expert.batch import ExpertBatch
from hp_expert.permute import (
    Permutation,
    gather_slots,
    permute_slots,
    sort_by_expert,
    sum_slots,
)
from hp_platform import all_to_all_lazy, launch_all_to_all, wait_tensor

StateT = TypeVar("StateT")


class Dispatcher(Protocol[StateT]):
    """Four calls between tokens and experts, after a local one that prepares them.

    They are called in this order for one batch; calls for several batches may interleave. A module
    uses whatever `GroupedExperts.dispatcher` is.
    """

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, StateT]:
        """Check and sort.

        Args:
            x: Tokens [T, D].
            experts: The experts of each, int64 [T, K].
            weights: What each expert's output counts [T, K]; None: one.

        Returns:
            Rows to send, and what the other calls need to know.

        Raises:
            ValueError: If the input is wrong.
            hp_platform.PeerError: If that of another rank is.
        """

    def launch_dispatch(self, rows: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Send the prepared rows off; return those on their way here, not to be read yet."""

    def finish_dispatch(self, rows: Tensor, state: StateT) -> ExpertBatch:
        """Wait for the rows and say which experts take them."""

    def launch_combine(self, y: Tensor, state: StateT) -> Tensor:
        """Send the experts' outputs, one for each row of the batch, back; not to be read yet."""

    def finish_combine(self, rows: Tensor, state: StateT) -> Tensor:
        """Wait for the outputs and sum those of each token: [T, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class DispatchState:
    """What one batch's dispatch tells its combine. All of it is read-only.

    Attributes:
        permutation: Of this rank's slots by expert.
        weights: Routing weights of the rows: [T, K] where tokens stay; [S] before the launch where
            they leave, and [R] after it, possibly still on their way.
        order: Slot of the arrived rows at each position of expert order, int64.
        counts: Positions of each local expert, on the host.
        num_tokens_per_expert: The same on the device, int64 [L].
        input_splits: Rows sent to each rank.
        output_splits: Rows received from each rank.
    """

    permutation: Permutation
    weights: Tensor | None
    order: Tensor
    counts: tuple[int, ...]
    num_tokens_per_expert: Tensor
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


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
        counts = count_slots(experts, self.num_experts)
        permutation = sort_by_expert(experts)
        *numbers, invalid = read_host(counts)
        if invalid:
            raise ValueError(_invalid_experts(invalid, self.num_experts))
        state = DispatchState(
            permutation, weights, permutation.order, tuple(numbers), counts[: self.num_experts]
        )
        return x, state

    def launch_dispatch(self, rows: Tensor, state: DispatchState) -> tuple[Tensor, DispatchState]:
        """Return both."""
        return rows, state

    def finish_dispatch(self, rows: Tensor, state: DispatchState) -> ExpertBatch:
        """Hand the tokens on as they are."""
        return ExpertBatch(
            rows, state.weights, state.order, state.counts, state.num_tokens_per_expert
        )

    def launch_combine(self, y: Tensor, state: DispatchState) -> Tensor:
        """Return `y`: the experts have summed over the slots of each token."""
        del state
        return y

    def finish_combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return `rows`."""
        del state
        return rows


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
            error = ValueError(_invalid_experts(told[0][L], self.num_experts))
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


def read_host(numbers: Tensor) -> list[Any]:
    """Wait for the device and read numbers: the only place of a layer that does."""
    values: list[Any] = numbers.tolist()
    return values


def count_slots(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert, and after them the slots of no expert: int64 [E + 1]."""
    expert_S = experts_TK.reshape(-1)
    is_valid = (expert_S >= 0) & (expert_S < num_experts)
    bucket_S = expert_S.where(is_valid, num_experts).to(torch.int64)
    counts = bucket_S.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, bucket_S, torch.ones_like(bucket_S))


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


def _invalid_experts(num_invalid: int, num_experts: int) -> str:
    return f"experts must be in [0, num_experts ({num_experts})), but {num_invalid} are not"
