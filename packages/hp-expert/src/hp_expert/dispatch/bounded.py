"""The dispatcher that never reads the host: buffers of a fixed size, checked once per step.

Note [Bounded buffers]. Every rank sends every other C rows, whatever the routing: slots sorted by
expert, then padding. All shapes are known before anything runs, so nothing waits for the device and
CUDA graphs can hold it. Where a rank has more than C slots for another one, those do not fit; it
says so in the exchange that precedes the rows, and every rank makes its outputs NaN, so that no sum
in which slots are missing is taken for a result, nor a gradient of one. The host learns of it when
it asks. What is NaN has no experts to speak of: where the first weight is, which after an overflow
in an earlier layer all are, the rows are too many at most by one, so that `rows_needed` is of
routings alone.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, W ranks, L = E / W local
experts, C rows per pair of ranks, N = W * C rows of a buffer, D width.
"""

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, Places, summed_dtype
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
from hp_expert.dispatch.run_ahead import RunAhead
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
from hp_platform import agree, all_to_all, all_to_all_lazy, launch_all_to_all, wait_tensor

_COLUMNS: Final = triton_buffers.Columns(CODE, INVALID, TOKENS, MOST, COUNTS)


class BufferOverflowError(RuntimeError):
    """More rows were to go from one rank to another than a buffer holds.

    Attributes:
        rows_needed: The most rows of any pair of ranks.
    """

    def __init__(self, message: str, *, rows_needed: int) -> None:
        super().__init__(message)
        self.rows_needed = rows_needed


def rows_per_pair(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, *, factor: float
) -> int:
    """Return how many rows a buffer needs for `factor` times the load of balanced routing.

    A balanced rank sends T * k / W rows to each rank. No more than T * min(k, E / W) can go to
    one, unless a token chooses an expert twice; such a buffer never overflows.

    Args:
        num_tokens: T, the most of any rank.
        top_k: k, experts of a token.
        num_experts: E, on all ranks together.
        num_ranks: Number of ranks, W.
        factor: Multiple of the balanced load, at least 1, which leaves no room for any imbalance;
            infinity: the worst case.
    """
    if factor < 1:
        raise ValueError(f"factor ({factor}) must be at least 1")
    most = num_tokens * min(top_k, num_experts // num_ranks)
    return math.ceil(min(factor * num_tokens * top_k / num_ranks, most))


@dataclass(frozen=True, slots=True, eq=False)
class BoundedState:
    """What one batch's dispatch tells its combine. All of it is read-only and on the device.

    Attributes:
        permutation: Slot, and token, of each row of the buffer.
        weights: Routing weights of the rows, [N] or None; after the launch of those received.
        order: Received row at each position of expert order, padding last, int64 [N].
        num_tokens_per_expert: Positions of each local expert, int64 [L].
        poison: 1, or NaN if what some rank sends is not all or not right.
        placed: Where rows go, if kernels have found it out.
    """

    permutation: Permutation
    weights: Tensor | None
    order: Tensor
    num_tokens_per_expert: Tensor
    poison: Tensor
    placed: Places | None = None


@dataclass(frozen=True, slots=True)
class BoundedAllToAllDispatcher:
    """`AllToAllDispatcher` with buffers of a fixed size; see Note [Bounded buffers].

    One object may serve all layers of a model. Call `check` once per step, on every rank. Rows are
    not deduplicated.

    Attributes:
        group: The ranks that share the experts.
        num_experts: Number of experts, E.
        rows_per_pair: C, the same on every rank; see `rows_per_pair`.
        device: Device of the rows. What went wrong is collected there until `check`.
        control: A group of the same ranks that moves CPU tensors. If there is one, ranks agree on
            shapes, dtypes and sizes before each exchange, and all raise if they are wrong on one;
            without, a rank raises on its own. It costs a round trip between hosts, and no read of
            the device; a captured graph leaves it out.
        run_ahead: Marked at each call of `prepare`.
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
        """Refuse sizes that cannot be."""
        if self.num_experts % self.group.size():
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by the size of the expert "
                f"group ({self.group.size()})"
            )
        if self.rows_per_pair < 1:
            raise ValueError(f"rows_per_pair ({self.rows_per_pair}) must be at least 1")
        object.__setattr__(self, "_found", torch.zeros(3, dtype=torch.int64, device=self.device))
        object.__setattr__(self, "_lock", threading.Lock())

    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundedAllToAllDispatcher":
        """Return itself: copies of a module share the group, which cannot be copied."""
        return self

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, BoundedState]:
        """Sort and gather into a buffer while counts are exchanged; see `Dispatcher.prepare`.

        Experts that do not exist are found by `check`.
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
        """Launch the exchange of rows, and that of their routing weights."""
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
        """Read what went wrong since the last call, on any rank, and raise the same on all of them.

        This waits for the device, and asks no other rank. Call it where the current stream has
        everything behind it that was dispatched: once per step, before the step of the optimizer.

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
        """Sort what was received, and note down what is wrong; see `BoundedState`."""
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
        """Note down what is wrong on any rank; return NaN if anything is, else 1."""
        most = received[:, MOST].amax()
        is_different = (received[:, CODE] != header.code).sum()
        excess = most.where(most > self.rows_per_pair, 0)
        if weights is not None and weights.numel() > 0:
            one_more = excess.clamp_max(self.rows_per_pair + 1)
            excess = one_more.where(weights.detach()[0, 0].isnan(), excess)
        found = torch.stack([excess, received[:, INVALID].amax(), is_different])
        places = torch.arange(3, device=found.device)
        with self._lock:  # of threads, as scatters on a device are atomic, also between streams
            self._found.scatter_reduce_(0, places, found, "amax")
        return torch.where(found.any(), math.nan, 1.0)


def _told(header: Header, counted: SlotCounts, counts_WL: Tensor) -> Tensor:
    """Return what ranks tell each other before rows travel, int64 [W, B]."""
    (W, L), device = counts_WL.shape, counts_WL.device
    if counted.starts is not None:
        size, code = block_size(COUNTS + L), header.code
        return triton_buffers.tell(counted.counts, _COLUMNS, code=code, num_ranks=W, size=size)
    sent = count_block(header, counted, None, num_ranks=W, num_local=L, device=device)
    sent[:, MOST] = counts_WL.sum(1).amax()
    return sent


def _into_buffer(counted: SlotCounts, counts_WL: Tensor, *, rows_per_pair: int) -> Permutation:
    """Place the slots for rank r, sorted by expert, at r * C and after it, as far as they fit."""
    W, L = counts_WL.shape
    if counted.starts is not None:
        sizes = {"num_local": L, "num_ranks": W, "room": rows_per_pair}
        filled = triton_sorting.fill(counted.experts, counted.starts, **sizes)
        return Permutation(*filled, partial=True, padded=True)
    by_key = sort_counted(counted)
    num_W = counts_WL.sum(1)
    start_W = num_W.cumsum(0) - num_W
    rank_TK = counted.experts.div(L, rounding_mode="floor")
    # Slots that were dropped, or are wrong, have a rank after all others.
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
    """Counts of the rows that fit: no sum over L exceeds C, whatever was received."""
    ends_WL = counts_WL.clamp(0, rows_per_pair).cumsum(1).clamp_max(rows_per_pair)
    return ends_WL.diff(dim=1, prepend=ends_WL.new_zeros(len(ends_WL), 1))
