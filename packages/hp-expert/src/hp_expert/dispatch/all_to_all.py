"""The dispatcher that exchanges rows between ranks by all-to-all.

An exchange needs the number of rows for each rank as Python numbers. Counts sent, counts received
and each rank's verdict on its own input are in one small exchange, which overlaps with the local
sort and gather, and reach the host in one read. Nothing else waits for the device.

Beside rows, ranks exchange small tensors: counts, codes, routing weights
and their gradients. On the group of the rows a small exchange waits until all rows launched before
it have arrived, those of another microbatch included, and delays the rows that are launched after
it. On a group of its own (`small_group`) it takes only its own time.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, W ranks, L = E / W local
experts, R rows received, D width, B = E blocks of rows.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, SharesGroups, summed_dtype
from hp_expert.dispatch import DispatchState
from hp_expert.dispatch.deduplicated import (
    Destinations,
    SlotExchange,
    deduplication_pays,
    destinations,
    place_codes,
    sort_codes,
    sort_rows,
    spread,
    unpack,
)
from hp_expert.dispatch.exchange_plan import (
    FAILED,
    ExchangePlan,
    ExchangeRead,
    Header,
    agreed_plans,
    count_block,
    input_error,
    raise_on_all_ranks,
)
from hp_expert.kernels import fuses
from hp_expert.permute import (
    Permutation,
    SlotCounts,
    count_slots,
    gather_rows,
    gather_slots,
    invalid_experts,
    permute_slots,
    sort_counted,
    sum_slots,
)
from hp_platform import Pending, all_to_all_lazy, launch_all_to_all, wait_tensor


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher(SharesGroups):
    """Rank r of `group` has experts r * L .. (r + 1) * L - 1; each slot's row is sent there.

    Attributes:
        group: The ranks that share the experts.
        num_experts: Number of experts, E.
        deduplicate: Whether a token's row goes to a rank once, however many of the token's experts
            are there, instead of once for each. "auto": if `deduplication_pays`.
        small_group: Group of the same ranks in the same order for all exchanges but those of rows,
            so that those need not wait for rows; None: `group`.
    """

    group: ProcessGroup
    num_experts: int
    deduplicate: bool | Literal["auto"] = "auto"
    small_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if ranks cannot share experts equally, or groups have other ranks."""
        if self.small_group is not None:
            ranks, others = map(dist.get_process_group_ranks, (self.group, self.small_group))
            if ranks != others:
                raise ValueError(
                    f"ranks of small_group ({others}) must equal those of group ({ranks})"
                )
        if self.num_experts % self.group.size():
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by the size of the expert "
                f"group ({self.group.size()})"
            )
        if self.deduplicate not in (True, False, "auto"):
            raise ValueError(f"deduplicate ({self.deduplicate}) must be True, False or 'auto'")

    def deduplicates(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> bool:
        """Tell whether tokens [T, D] are sent to a rank once, from shapes and dtypes alone."""
        top_k = experts.shape[1]
        if self.deduplicate != "auto":
            return self.deduplicate and top_k > 1
        return deduplication_pays(
            self.num_experts,
            top_k,
            self.group.size(),
            row_bytes=x.shape[1] * x.element_size(),
            weight_bytes=0 if weights is None else weights.element_size(),
        )

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, DispatchState]:
        """Sort and gather while counts are exchanged; see `Dispatcher.prepare`."""
        return self.finish_prepare(self.start_prepare(x, experts, weights))

    def start_prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> "CountedSlice":
        """Launch the exchange of counts, then sort and gather; see `PreparesInTwo`."""
        return count_slice(self, x, experts, weights)

    def finish_prepare(self, started: "CountedSlice") -> tuple[Tensor, DispatchState]:
        """Wait for the counts, and cut the rows to them; see `PreparesInTwo`."""
        rows, state, _ = agree_on_slices(started)
        return rows, state

    def launch_dispatch(self, rows: Tensor, state: DispatchState) -> tuple[Tensor, DispatchState]:
        """Launch the exchange of rows, after that of their weights and codes."""
        slots, weights, small = state.slots, state.weights, self.small_group or self.group
        if slots is not None:
            slots = replace(slots, codes=_exchange(slots.codes, slots, small))
        if weights is not None:
            weights = _exchange(weights, slots or state, small)
        state = replace(state, slots=slots, weights=weights)
        return _exchange(rows, state, self.group), state

    def finish_dispatch(self, rows: Tensor, state: DispatchState) -> ExpertBatch:
        """Wait for the rows."""
        if state.slots is not None:
            return _shared_batch(rows, state, state.slots)
        assert state.order is not None
        weights = None if state.weights is None else wait_tensor(state.weights).unsqueeze(1)
        return ExpertBatch(
            wait_tensor(rows), weights, state.order, state.counts, state.num_tokens_per_expert
        )

    def launch_combine(self, y: Tensor, state: DispatchState) -> Tensor:
        """Launch the exchange back."""
        if self.group.size() == 1:
            return y
        return all_to_all_lazy(
            y,
            output_splits=state.input_splits,
            input_splits=state.output_splits,
            group=self.group,
        )

    def finish_combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Wait for the outputs and sum those of each token."""
        return sum_slots(wait_tensor(rows), state.permutation, dtype=summed_dtype(rows))


def _exchange(x: Tensor, splits: DispatchState | SlotExchange, group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    return all_to_all_lazy(
        x, output_splits=splits.output_splits, input_splits=splits.input_splits, group=group
    )


@dataclass(frozen=True, slots=True, eq=False)
class CountedSlice:
    """The state between `count_slice` and `agree_on_slices`: counts in flight, rows sorted.

    Attributes:
        over: Dispatcher that exchanges the slices.
        slices: Ranks that have the other slices; None: there is one slice.
        x: Slice of this rank, tokens [T, D].
        weights: Weight of each choice of these tokens [T, K]; None: all are one.
        error: Error in the input of this rank, if any.
        read: Description of the host read that follows, with the header of this rank.
        sent: Blocks of this rank, int64 [W, Z, B].
        exchange: Pending exchange of the blocks.
        ahead: Sorted rows and slots; None where the input is wrong.
    """

    over: AllToAllDispatcher
    slices: ProcessGroup | None
    x: Tensor
    weights: Tensor | None
    error: Exception | None
    read: ExchangeRead
    sent: Tensor
    exchange: Pending[Tensor]
    ahead: "_Ahead | None"


def count_slice(
    over: AllToAllDispatcher,
    x: Tensor,
    experts: Tensor,
    weights: Tensor | None = None,
    *,
    slices: ProcessGroup | None = None,
    num_tokens: int = 0,
) -> CountedSlice:
    """Start `over.prepare` for one slice of the tokens; see `PreparesInTwo`.

    Args:
        over: Dispatcher that exchanges the slices.
        x: Tokens of the slice of this rank; see `Dispatcher.prepare`.
        experts: Experts of these tokens.
        weights: Weights of these tokens' choices.
        slices: Ranks that have the other slices of the same tokens, in order; None: there is one
            slice. With the ranks of `over.group` they form a grid.
        num_tokens: Number of tokens of all slices together, if all ranks of `slices` know it.
    """
    W, L = over.group.size(), over.num_experts // over.group.size()
    error, counted, header = input_error(x, experts, weights), None, FAILED
    if error is None:
        shared = over.deduplicates(x, experts, weights)
        header = Header.of(x, experts, weights, num_experts=over.num_experts, deduplicated=shared)
        counts = count_slots(experts, W * L)
        where = destinations(counts.experts, num_local=L, num_ranks=W) if shared else None
        counted = counts, where
    sent = count_block(
        header,
        *(counted or (None, None)),
        num_ranks=W,
        num_local=L,
        num_tokens=num_tokens,
        device=x.device,
    )
    sent = _with_other_slices(sent, slices)
    exchange = launch_all_to_all(sent, group=over.small_group or over.group)
    ahead = None if counted is None else _sort_and_gather(x, *counted, num_local=L)
    read = ExchangeRead(
        header=header,
        num_tokens=len(x),
        told_tokens=num_tokens,
        top_k=experts.shape[-1],
        num_experts=over.num_experts,
        rank=over.group.rank(),
        num_ranks=W,
    )
    return CountedSlice(over, slices, x, weights, error, read, sent, exchange, ahead)


def agree_on_slices(
    counted: CountedSlice,
) -> tuple[Tensor, DispatchState, list[ExchangePlan]]:
    """Finish `over.prepare` for one slice of the tokens; return also the plans of all slices."""
    over, slices, ahead, error = counted.over, counted.slices, counted.ahead, counted.error
    num_local = over.num_experts // over.group.size()
    plans = agreed_plans(counted.sent, counted.exchange, num_local=num_local, purpose=counted.read)
    mine = plans[0 if slices is None else slices.rank()]
    if error is None and mine.num_invalid:
        error = invalid_experts(mine.num_invalid, over.num_experts)
    verdicts = list(chain.from_iterable(zip(*[p.verdicts for p in plans], strict=True)))
    groups = [over.group] if slices is None else [over.group, slices]
    device = counted.x.device
    raise_on_all_ranks(error, counted.read.header, verdicts, groups=groups, device=device)
    assert ahead is not None  # or an error was raised
    # Slices are joined to one batch later, so their rows have the same number of slots.
    most = max([p.most for p in plans])
    return *_prepared(counted.x, counted.weights, ahead, mine._replace(most=most)), plans


def _with_other_slices(sent: Tensor, slices: ProcessGroup | None) -> Tensor:
    """Gather the blocks of all slices of the same tokens: [W, B] to [W, Z, B]."""
    if slices is None:
        return sent.unsqueeze(1)
    W, num_slices = sent.shape[0], slices.size()
    everyone = launch_all_to_all(sent.repeat(num_slices, 1), group=slices).wait()
    return everyone.view(num_slices, W, -1).transpose(0, 1).contiguous()


class _Ahead(NamedTuple):
    """Rows and slots, sorted before their number is known on the host.

    Attributes:
        rows: Permutation to as many rows as there may be at most.
        gathered: These rows.
        slots: Permutation of as many slots as there may be at most.
        codes: Codes of these slots, uint8 or int32; None unless rows are deduplicated.
    """

    rows: Permutation
    gathered: Tensor
    slots: Permutation
    codes: Tensor | None


def _sort_and_gather(
    x: Tensor, counted: SlotCounts, where: Destinations | None, *, num_local: int
) -> _Ahead:
    if where is None:
        slots = sort_counted(counted)
        return _Ahead(slots, gather_rows(x, slots), slots, None)
    # A token goes to at most as many ranks as there are, and as it has experts.
    rows = sort_rows(where)
    most = min(rows.order.numel(), counted.keys.numel())
    rows = (
        rows.first(most)
        if counted.starts is None
        else rows.without_padding(most)._replace(padded=True)  # some padding is left
    )
    slots, codes = sort_codes(counted, where, num_local=num_local)
    return _Ahead(rows, gather_rows(x, rows), slots, codes)


def _prepared(
    x: Tensor, weights: Tensor | None, ahead: _Ahead, plan: ExchangePlan
) -> tuple[Tensor, DispatchState]:
    """Cut rows and slots that were sorted ahead to their number."""
    num_slots, volume, order, shared = sum(plan.slots.sent), plan.slots, None, None
    if ahead.codes is None:
        order = by_expert(plan.counts_by_rank, num_rows=sum(volume.received))
    else:
        # More than the usual number only if a token chose an expert twice.
        usual = min(ahead.slots.inverse.shape[1], len(plan.counts))
        shared = SlotExchange(ahead.codes[:num_slots], *volume, max(usual, plan.most))
        volume = plan.rows
    by_kernels = ahead.rows.padded  # which leave slots without an expert without a position
    cut = Permutation.without_padding if by_kernels else Permutation.first
    permutation = cut(ahead.rows, sum(volume.sent))
    state = DispatchState(
        permutation,
        None if weights is None else permute_slots(weights, cut(ahead.slots, num_slots)),
        order,
        counts=plan.counts,
        num_tokens_per_expert=plan.counts_by_rank.sum(0),
        input_splits=volume.sent,
        output_splits=volume.received,
        slots=shared,
    )
    return gather_slots(x, permutation, gathered=ahead.gathered), state


def _shared_batch(rows: Tensor, state: DispatchState, slots: SlotExchange) -> ExpertBatch:
    """Number the slots while the rows are still on their way, then wait for the rows."""
    per_row, num_rows = slots.num_slots_per_row, sum(state.output_splits)
    codes, weights, placed = wait_tensor(slots.codes), state.weights, None
    if fuses(codes):
        num_local = state.num_tokens_per_expert.shape[0]
        slot_P, placed = place_codes(
            codes, num_rows=num_rows, num_slots_per_row=per_row, num_local=num_local
        )
        order_P = placed.slot
    else:
        slot_P, order_P = unpack(codes, num_slots_per_row=per_row)
    if weights is not None:
        weights = spread(wait_tensor(weights), slot_P, num_rows=num_rows, num_slots_per_row=per_row)
    return ExpertBatch(
        wait_tensor(rows),
        weights,
        order_P,
        state.counts,
        state.num_tokens_per_expert,
        per_row,
        placed,
    )


def by_expert(counts_WL: Tensor, *, num_rows: int) -> Tensor:
    """Return the row at each position, rows by (rank, expert) and positions by (expert, rank).

    Blocks of rows stay together: a position differs from its row by the shift of its block.
    """
    first_row_WL = (counts_WL.flatten().cumsum(0) - counts_WL.flatten()).view_as(counts_WL)
    counts_B = counts_WL.t().flatten()
    shift_B = first_row_WL.t().flatten() - (counts_B.cumsum(0) - counts_B)
    shift_R = shift_B.repeat_interleave(counts_B, output_size=num_rows)
    return torch.arange(num_rows, device=counts_WL.device) + shift_R
