"""The dispatcher without host reads: buffers of a fixed size, checked once per step.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, W ranks, L = E / W local
experts, C rows per pair of ranks, N = W * C rows of a buffer, D width.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, Places, SharesGroups, summed_dtype
from hp_expert.dispatch.all_to_all import by_expert
from hp_expert.dispatch.exchange_plan import (
    CODE,
    COUNTS,
    FAILED,
    INVALID,
    MOST,
    TOKENS,
    Header,
    block_size,
    count_block,
    input_error,
    raise_if_different,
)
from hp_expert.kernels import fuses, triton_buffers, triton_sorting
from hp_expert.permute import (
    Permutation,
    SlotCounts,
    count_slots,
    gather_slots,
    permute_slots,
    sort_counted,
    sum_slots,
)
from hp_platform import Event, agree, all_to_all, all_to_all_lazy, launch_all_to_all, wait_tensor

_COLUMNS: Final = triton_buffers.Columns(CODE, INVALID, TOKENS, MOST, COUNTS)


class BufferOverflowError(RuntimeError):
    """The error that a rank had more rows for another rank than a buffer holds.

    Attributes:
        rows_needed: Most rows that any rank had for another one.
    """

    def __init__(self, message: str, *, rows_needed: int) -> None:
        super().__init__(message)
        self.rows_needed = rows_needed


def rows_per_pair(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, *, factor: float
) -> int:
    """Return the rows that a buffer needs for `factor` times the load of balanced routing.

    With balanced routing a rank sends T * k / W rows to each rank. At most T * min(k, E / W) can go
    to one rank, unless a token chooses an expert twice: a buffer of this size never overflows.

    Args:
        num_tokens: Most tokens of any rank, T.
        top_k: Number of experts of a token, k.
        num_experts: Number of experts on all ranks, E.
        num_ranks: Number of ranks, W.
        factor: Multiple of the balanced load, at least 1, which leaves no room for imbalance;
            infinity: the worst case.
    """
    if factor < 1:
        raise ValueError(f"factor ({factor}) must be at least 1")
    most = num_tokens * min(top_k, num_experts // num_ranks)
    return math.ceil(min(factor * num_tokens * top_k / num_ranks, most))


class Mark(Protocol):
    """A point in the work of a device, such as `hp_platform.Event`."""

    def record(self) -> None:
        """Mark the end of the work that the device was given so far."""

    def synchronize(self) -> None:
        """Block the host until the device has reached the mark."""


class RunAhead:
    """A bound on the marks that the host may be ahead of the device.

    A layer without host reads never waits for the device. The host then queues the kernels of many
    microbatches, and allocates for all of them before the first has freed anything. One object
    serves a whole model, in any number of threads. It does nothing on a CPU, or while a CUDA graph
    is captured.

    Args:
        limit: Number of marks that the device may not have reached yet, at least 1.
        make_mark: Function that makes a mark for a device; None: `hp_platform.Event`.
    """

    def __init__(
        self, limit: int, *, make_mark: Callable[[torch.device], Mark] | None = None
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit ({limit}) must be at least 1")
        self.limit = limit
        self._make_mark = make_mark
        self._ahead: deque[Mark] = deque()
        self._lock = threading.Lock()

    def mark(self, device: torch.device) -> None:
        """Mark this point, and wait while the device has not reached the one `limit` marks ago."""
        if self._make_mark is None and (
            device.type != "cuda" or torch.cuda.is_current_stream_capturing()
        ):
            return
        mark = (self._make_mark or Event)(device)
        mark.record()
        with self._lock:
            self._ahead.append(mark)
            due = self._ahead.popleft() if len(self._ahead) > self.limit else None
        # Outside the lock: a thread that waits holds up no other.
        if due is not None:
            due.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class BoundedState:
    """The state of one batch between its dispatch and its combine; read-only, on the device.

    Attributes:
        permutation: Slot, and token, of each row of the buffer.
        weights: Routing weights of the rows sent [N], after the launch of the rows received;
            None: all are one.
        order: Received row at each position of expert order, padding last, int64 [N].
        num_tokens_per_expert: Positions of each local expert, int64 [L].
        poison: 1, or NaN if rows of some rank are missing or wrong.
        placed: Places of the received rows, if kernels have found them.
    """

    permutation: Permutation
    weights: Tensor | None
    order: Tensor
    num_tokens_per_expert: Tensor
    poison: Tensor
    placed: Places | None = None


@dataclass(frozen=True, slots=True)
class BoundedAllToAllDispatcher(SharesGroups):
    """`AllToAllDispatcher` with buffers of a fixed size.

    Every rank sends every other rank C rows, whatever the routing: slots sorted by expert, then
    padding. All shapes are known beforehand, so nothing waits for the device, and CUDA graphs can
    contain a dispatch. Where a rank has more than C slots for another one, the rest does not fit:
    it reports this in the exchange before the rows, and every rank makes its outputs NaN, so that
    no sum with missing slots, nor its gradient, is taken for a result. The host learns of it in
    `check`. Routing of NaN means nothing: where the first weight is NaN, as all weights are after
    an overflow in an earlier layer, at most one row too many is reported, so that `rows_needed` is
    of proper routing.

    One object may serve all layers of a model. Call `check` once per step, on every rank. Rows are
    not deduplicated.

    Attributes:
        group: The ranks that share the experts.
        num_experts: Number of experts, E.
        rows_per_pair: Rows of a pair of ranks, C, the same on every rank; see `rows_per_pair`.
        device: Device of the rows. Errors are collected there until `check`.
        control: Group of the same ranks for CPU tensors. With it, ranks agree on shapes, dtypes
            and sizes before each exchange, and all raise if they are wrong on one; without it, a
            rank raises on its own. It costs a round trip between hosts, and no read of the device;
            it is not used while a graph is captured.
        run_ahead: Bound on the host's run-ahead, marked in each `prepare`; None: no bound.
    """

    group: ProcessGroup
    num_experts: int
    rows_per_pair: int
    device: torch.device | str
    control: ProcessGroup | None = None
    run_ahead: RunAhead | None = None
    _found: Tensor = field(init=False, repr=False, compare=False)
    _lock: threading.Lock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes."""
        if self.num_experts % self.group.size():
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by the size of the expert "
                f"group ({self.group.size()})"
            )
        if self.rows_per_pair < 1:
            raise ValueError(f"rows_per_pair ({self.rows_per_pair}) must be at least 1")
        object.__setattr__(self, "_found", torch.zeros(3, dtype=torch.int64, device=self.device))
        object.__setattr__(self, "_lock", threading.Lock())

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, BoundedState]:
        """Sort and gather into a buffer while counts are exchanged; see `Dispatcher.prepare`.

        `check` finds experts that do not exist.
        """
        if self.run_ahead is not None:
            self.run_ahead.mark(x.device)
        header = self._agreed_header(x, experts, weights)
        W, L, C = self.group.size(), self.num_experts // self.group.size(), self.rows_per_pair
        counted = count_slots(experts, self.num_experts)
        counts_WL = counted.counts[: self.num_experts].view(W, L)
        sent = _told(header, counted, counts_WL)
        exchange = launch_all_to_all(sent, group=self.group)
        permutation = _into_buffer(counted, counts_WL, rows_per_pair=C)
        rows_ND = gather_slots(x, permutation)
        weights_N = None if weights is None else permute_slots(weights, permutation)
        found = self._sort(exchange.wait(), header, weights, dtype=x.dtype)
        return rows_ND, BoundedState(permutation, weights_N, *found)

    def launch_dispatch(self, rows: Tensor, state: BoundedState) -> tuple[Tensor, BoundedState]:
        """Launch the exchanges of the routing weights and of the rows."""
        weights = state.weights
        if weights is not None:
            weights = all_to_all_lazy(weights, group=self.group)
        return all_to_all_lazy(rows, group=self.group), replace(state, weights=weights)

    def finish_dispatch(self, rows: Tensor, state: BoundedState) -> ExpertBatch:
        """Wait for the rows."""
        weights = None if state.weights is None else wait_tensor(state.weights).unsqueeze(1)
        return ExpertBatch(
            wait_tensor(rows),
            weights,
            state.order,
            None,
            state.num_tokens_per_expert,
            placed=state.placed,
        )

    def launch_combine(self, y: Tensor, state: BoundedState) -> Tensor:
        """Launch the exchange back."""
        del state
        return all_to_all_lazy(y, group=self.group)

    def finish_combine(self, rows: Tensor, state: BoundedState) -> Tensor:
        """Wait for the outputs and sum those of each token; NaN if some are missing."""
        return (
            sum_slots(wait_tensor(rows), state.permutation, dtype=summed_dtype(rows)) * state.poison
        )

    def check(self) -> None:
        """Read the errors of any rank since the last call, and raise the same on all ranks.

        This waits for the device, and communicates with no rank. Call it once per step, after all
        dispatches in the order of the current stream and before the step of the optimizer.

        Raises:
            BufferOverflowError: If a buffer was too small. All outputs since then may be NaN.
            ValueError: If experts did not exist, or ranks passed different kinds of input.
        """
        most, num_invalid, num_different = self._found.tolist()
        self._found.zero_()
        if num_different:
            raise ValueError(
                "x, experts, weights and num_experts must be of one kind on all ranks of the "
                "expert group; a group as `control` tells which are not"
            )
        if num_invalid:
            raise ValueError(
                f"experts must be in [0, num_experts ({self.num_experts})), or -1 for none, but up "
                f"to {num_invalid} of a rank are not"
            )
        if most:
            raise BufferOverflowError(
                f"rows from one rank to another ({most}) must not exceed rows_per_pair "
                f"({self.rows_per_pair}); outputs since then are NaN on every rank",
                rows_needed=most,
            )

    def _agreed_header(self, x: Tensor, experts: Tensor, weights: Tensor | None) -> Header:
        error, header = input_error(x, experts, weights), FAILED
        if error is None:
            header = Header.of(x, experts, weights, num_experts=self.num_experts)
        capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.control is not None and not capturing:
            self._agree(error, header, self.control)
        elif error is not None:
            raise error
        return header

    def _agree(self, error: Exception | None, header: Header, control: ProcessGroup) -> None:
        agree(error, group=control, where="the exchange of rows between experts")
        mine = torch.tensor([[header.code, self.rows_per_pair]], device="cpu")
        codes, rows = all_to_all(mine.expand(control.size(), -1), group=control).t().tolist()
        raise_if_different(header, codes, rank=control.rank())
        if min(rows) != max(rows):
            raise ValueError(f"rows_per_pair ({rows}) must be the same on all ranks")

    def _sort(
        self, received: Tensor, header: Header, weights: Tensor | None, *, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Places | None]:
        """Sort the received rows, and record errors; return the last fields of `BoundedState`."""
        W, L, C = len(received), self.num_experts // len(received), self.rows_per_pair
        if fuses(received):
            with self._lock:
                row, position, ends, num_tokens, poison = triton_buffers.sort_received(
                    received,
                    _COLUMNS,
                    code=header.code,
                    room=C,
                    num_local=L,
                    weights=weights,
                    found=self._found,
                    dtype=dtype,
                )
            places = Places(row, row, position.unsqueeze(1), ends, partial=True, padded=True)
            return row, num_tokens, poison, places
        poison = self._examine(received, header, weights).to(dtype)
        counts_WL = _clipped(received[:, COUNTS : COUNTS + L], rows_per_pair=C)
        # Padding is one expert more, the last one.
        blocks = torch.cat([counts_WL, C - counts_WL.sum(1, keepdim=True)], dim=1)
        return by_expert(blocks, num_rows=W * C), counts_WL.sum(0), poison, None

    def _examine(self, received: Tensor, header: Header, weights: Tensor | None) -> Tensor:
        """Record the errors of all ranks; return NaN if there are any, else 1."""
        most = received[:, MOST].amax()
        is_different = (received[:, CODE] != header.code).sum()
        excess = most.where(most > self.rows_per_pair, 0)
        if weights is not None and weights.numel() > 0:
            one_more = excess.clamp_max(self.rows_per_pair + 1)
            excess = one_more.where(weights.detach()[0, 0].isnan(), excess)
        found = torch.stack([excess, received[:, INVALID].amax(), is_different])
        places = torch.arange(3, device=found.device)
        with self._lock:  # between threads on a CPU; scatters on a GPU are atomic
            self._found.scatter_reduce_(0, places, found, "amax")
        return torch.where(found.any(), math.nan, 1.0)


def _told(header: Header, counted: SlotCounts, counts_WL: Tensor) -> Tensor:
    """Return the blocks that this rank sends before the rows, int64 [W, B]."""
    (W, L), device = counts_WL.shape, counts_WL.device
    if counted.starts is not None:
        size, code = block_size(COUNTS + L), header.code
        return triton_buffers.tell(counted.counts, _COLUMNS, code=code, num_ranks=W, size=size)
    sent = count_block(header, counted, None, num_ranks=W, num_local=L, device=device)
    sent[:, MOST] = counts_WL.sum(1).amax()
    return sent


def _into_buffer(counted: SlotCounts, counts_WL: Tensor, *, rows_per_pair: int) -> Permutation:
    """Place the slots for rank r, sorted by expert, from r * C on, as far as they fit."""
    W, L = counts_WL.shape
    if counted.starts is not None:
        sizes = {"num_local": L, "num_ranks": W, "room": rows_per_pair}
        filled = triton_sorting.fill(counted.experts, counted.starts, **sizes)
        return Permutation(*filled, partial=True, padded=True)
    by_key = sort_counted(counted)
    num_W = counts_WL.sum(1)
    start_W = num_W.cumsum(0) - num_W
    rank_TK = counted.experts.div(L, rounding_mode="floor")
    # Dropped and invalid slots have a rank after all others.
    offset_TK = by_key.inverse - F.pad(start_W, (0, 2))[rank_TK]
    fits_TK = (rank_TK < W) & (offset_TK < rows_per_pair)
    inverse_TK = torch.where(fits_TK, rank_TK * rows_per_pair + offset_TK, -1)
    offset_C = torch.arange(rows_per_pair, device=counts_WL.device)
    is_slot_N = (offset_C < num_W[:, None]).view(-1)
    position_N = (start_W[:, None] + offset_C).view(-1).where(is_slot_N, 0)
    if by_key.order.numel() == 0:
        order_N = token_N = torch.full_like(position_N, -1)
    else:
        order_N = by_key.order.index_select(0, position_N).where(is_slot_N, -1)
        token_N = by_key.token.index_select(0, position_N).where(is_slot_N, -1)
    return Permutation(order_N, token_N, inverse_TK, partial=True, padded=True)


def _clipped(counts_WL: Tensor, *, rows_per_pair: int) -> Tensor:
    """Return the counts of the rows that fit: sums over L are at most C, whatever was received."""
    ends_WL = counts_WL.clamp(0, rows_per_pair).cumsum(1).clamp_max(rows_per_pair)
    return ends_WL.diff(dim=1, prepend=ends_WL.new_zeros(len(ends_WL), 1))
