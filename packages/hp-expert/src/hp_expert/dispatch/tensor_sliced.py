"""The dispatcher of experts that are spread over ranks and whose hidden dim is sharded as well.

The ranks of a tp group have the same tokens. Each takes a slice of the tokens and sends it over its
ep group. The rows that arrive are gathered over tp, because every tp rank has a part of the hidden
dim of their experts. On the way back, partial outputs are summed and scattered over tp, return over
ep, and are gathered over tp.

Note [No factor of tp]. Between slice and gather every tp rank works on other tokens, so a gradient
is summed over tp (the backward of a gather) or gathered (the backward of a sum and scatter).
Outside, all tp ranks have the same tokens and the same gradient of them: the backward of the last
gather is therefore a slice instead of a sum, and the backward of the first slice gathers gradients
that are complete.

| | forward | backward |
|---|---|---|
| `prepare` | slice | gather over tp |
| `launch_dispatch` | exchange over ep | exchange over ep |
| `finish_dispatch` | gather over tp | sum and scatter over tp |
| `launch_combine` | sum and scatter over tp, exchange over ep | exchange over ep, gather over tp |
| `finish_combine` | gather over tp | slice |

Shape symbols: T tokens, K experts per token, L local experts, W tp ranks, N rows of a slice that
arrived, P positions, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, SharesGroups
from hp_expert.dispatch import DispatchState
from hp_expert.dispatch.all_to_all import (
    AllToAllDispatcher,
    CountedSlice,
    agree_on_slices,
    by_expert,
    count_slice,
)
from hp_expert.dispatch.exchange_plan import ExchangePlan, input_error
from hp_platform import all_to_all_lazy, wait_tensor

Gather = Callable[[Tensor, Sequence[int], ProcessGroup], Tensor]
"""A function of this rank's slice, the sizes of all slices and their ranks: returns all slices."""


@dataclass(frozen=True, slots=True, eq=False)
class SlicedState:
    """The state of one batch between its dispatch and its combine; read-only.

    Attributes:
        mine: State of the dispatcher over ep, for this rank's slice.
        num_tokens: Number of tokens of each slice, T.
        num_rows: Number of received rows of each slice, N.
        counts: Positions of each local expert, by slice.
        num_tokens_per_expert: Positions of each local expert by slice, on the device, int64 [W, L].
    """

    mine: DispatchState
    num_tokens: tuple[int, ...]
    num_rows: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    num_tokens_per_expert: Tensor


@dataclass(frozen=True, slots=True)
class TensorSlicedDispatcher(SharesGroups):
    """The ranks of `group` share the hidden dim of experts that are spread over `over_ep.group`.

    There is one host read, as without `group`: ranks agree over ep on the plans of all slices. A
    launch ends in an exchange for whose result nothing has waited, in both directions.

    Attributes:
        over_ep: Dispatcher that carries a slice to the experts' ranks and back.
        group: The ranks that share the hidden dim.
        sliced: Whether each rank of `group` passes its own slice of the tokens, and gets the
            outputs of that slice.
    """

    over_ep: AllToAllDispatcher
    group: ProcessGroup
    sliced: bool = False

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, SlicedState]:
        """Slice, sort and gather while counts are exchanged; see `Dispatcher.prepare`."""
        return self.finish_prepare(self.start_prepare(x, experts, weights))

    def start_prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[tuple[int, ...], CountedSlice]:
        """Slice, launch the exchange of counts, then sort and gather; see `PreparesInTwo`."""
        num_tokens, sizes = 0, even_sizes(0, self.group.size())
        if not self.sliced and input_error(x, experts, weights) is None:  # else refused later
            num_tokens, group = len(x), self.group
            sizes = even_sizes(num_tokens, group.size())
            x, experts = _slice(x, sizes, group), _slice(experts, sizes, group)
            weights = None if weights is None else _slice(weights, sizes, group)
        return sizes, count_slice(
            self.over_ep, x, experts, weights, slices=self.group, num_tokens=num_tokens
        )

    def finish_prepare(
        self, started: tuple[tuple[int, ...], CountedSlice]
    ) -> tuple[Tensor, SlicedState]:
        """Wait for the counts, and cut the rows to them; see `PreparesInTwo`."""
        sizes, counted = started
        rows, state, plans = agree_on_slices(counted)
        _require_same_tokens(plans)
        arriving = [p.slots if state.slots is None else p.rows for p in plans]
        return rows, SlicedState(
            state,
            num_tokens=sizes,
            num_rows=tuple(sum(volume.received) for volume in arriving),
            counts=tuple(p.counts for p in plans),
            num_tokens_per_expert=torch.stack([p.counts_by_rank.sum(0) for p in plans]),
        )

    def launch_dispatch(self, rows: Tensor, state: SlicedState) -> tuple[Tensor, SlicedState]:
        """Launch the exchange of rows over ep."""
        rows, mine = self.over_ep.launch_dispatch(rows, state.mine)
        return rows, replace(state, mine=mine)

    def finish_dispatch(self, rows: Tensor, state: SlicedState) -> ExpertBatch:
        """Wait for the rows and gather those of all slices."""
        mine, num_rows = self.over_ep.finish_dispatch(rows, state.mine), state.num_rows
        gathered = _gather(mine.rows, num_rows, self.group)
        weights = None if mine.weights is None else _gather(mine.weights, num_rows, self.group)
        return ExpertBatch(
            wait_tensor(gathered),
            None if weights is None else wait_tensor(weights),
            self._order_of_all(mine, state),
            tuple(map(sum, zip(*state.counts, strict=True))),
            state.num_tokens_per_expert.sum(0),
            mine.num_slots_per_row,
        )

    def launch_combine(self, y: Tensor, state: SlicedState) -> Tensor:
        """Sum the outputs of this rank's slice over tp, and launch the exchange back."""
        mine = _sum_and_scatter(y, state.num_rows, self.group)
        return self.over_ep.launch_combine(mine, state.mine)

    def finish_combine(self, rows: Tensor, state: SlicedState) -> Tensor:
        """Wait for the outputs, sum those of each token, and gather the sums of all slices."""
        mine = self.over_ep.finish_combine(rows, state.mine)
        if self.sliced:
            return mine
        mine = mine.to(rows.dtype)  # exchanged in the dtype of the computation
        y: Tensor = GatherSlices.apply(mine, state.num_tokens, self.group, _gather_now)
        return y

    def _order_of_all(self, mine: ExpertBatch, state: SlicedState) -> Tensor:
        """Return the slot at each position, for the slots of all slices, int64 [P]."""
        first_row = sum(state.num_rows[: self.group.rank()])
        order = mine.order + first_row * mine.num_slots_per_row
        num_positions = [sum(counts) for counts in state.counts]
        by_slice = wait_tensor(_gather(order, num_positions, self.group))
        merged = by_expert(state.num_tokens_per_expert, num_rows=sum(num_positions))
        return by_slice.index_select(0, merged)


def even_sizes(num_tokens: int, num_slices: int) -> tuple[int, ...]:
    """Return the number of tokens of each slice: as even as possible, longer ones first."""
    short, longer = divmod(num_tokens, num_slices)
    return tuple(short + (index < longer) for index in range(num_slices))


def _require_same_tokens(plans: Sequence[ExchangePlan]) -> None:
    """Raise ValueError, on every rank, if ranks of a tp group have different numbers of tokens."""
    for first, *others in zip(*(p.tokens for p in plans), strict=True):
        for other in others:
            if other != first:
                raise ValueError(
                    f"tokens of a rank of a tp group ({other}) must be as many as those of its "
                    f"first rank ({first}): they must be the same, or the style be sliced=True"
                )


def _slice(x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
    mine: Tensor = Slice.apply(x, sizes, group, _gather_now)
    return mine


def _gather(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Launch a gather of the rows of all ranks; its backward sums and scatters.

    An all-to-all in which each rank sends the same to all moves as many bytes as an all-gather,
    takes uneven sizes without padding, and is lazy in both directions.
    """
    copies = x.expand(group.size(), *x.shape).flatten(0, 1)
    return all_to_all_lazy(
        copies, output_splits=sizes, input_splits=[len(x)] * group.size(), group=group
    )


def _sum_and_scatter(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Sum the rows of this rank's slice over ranks, in rank order; backward is a lazy gather."""
    mine = sizes[group.rank()]
    parts = all_to_all_lazy(x, output_splits=[mine] * group.size(), input_splits=sizes, group=group)
    by_rank: Tensor = wait_tensor(parts).view(group.size(), mine, *x.shape[1:])
    return by_rank.sum(0, dtype=x.dtype)  # autocast on CUDA would return fp32


def _gather_now(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    return wait_tensor(_gather(wait_tensor(x), sizes, group))


class _SliceContext(Protocol):
    gather: Callable[[Tensor], Tensor]
    call: tuple[tuple[int, ...], ProcessGroup]


class Slice(torch.autograd.Function):
    """Take this rank's slice of a tensor that all ranks have; see Note [No factor of tp]."""

    @staticmethod
    def forward(
        ctx: _SliceContext, x: Tensor, sizes: tuple[int, ...], group: ProcessGroup, gather: Gather
    ) -> Tensor:
        """Keep the rows of this rank's slice."""
        ctx.gather = lambda grad: gather(grad, sizes, group)
        mine: Tensor = x.split(sizes)[group.rank()]
        return mine

    @staticmethod
    @once_differentiable
    def backward(ctx: _SliceContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather the gradients of all slices."""
        return ctx.gather(grad), None, None, None


class GatherSlices(torch.autograd.Function):
    """Give all ranks all slices; see Note [No factor of tp]."""

    @staticmethod
    def forward(
        ctx: _SliceContext, y: Tensor, sizes: tuple[int, ...], group: ProcessGroup, gather: Gather
    ) -> Tensor:
        """Gather the slices of all ranks."""
        ctx.call = (sizes, group)
        return gather(y.detach(), sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SliceContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Keep the gradient of this rank's slice; every rank has the whole gradient."""
        sizes, group = ctx.call
        return wait_tensor(grad).split(sizes)[group.rank()], None, None, None
