"""The batch that the experts of one rank compute, and the dispatcher of experts that are all local.

Shape symbols: T tokens, K experts per token, N rows, F slots per row, P positions, L local experts,
D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from hp_expert.kernels.triton_sorting import Starts
from hp_expert.permute import (
    Permutation,
    SlotCounts,
    count_slots,
    invalid_experts,
    sort_counted,
    sum_slots,
)
from hp_platform.autograd import autocast_dtype
from hp_platform.dry_device import arrived, require_on_device

FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of rows and routing weights."""
_MOST_INT32: Final = torch.iinfo(torch.int32).max
_GROUPED_PRODUCTS_SINCE = (9, 0)
"""Compute capability from which on `grouped_mm` takes the ends of its groups from the device."""


class Places(NamedTuple):
    """The places of the slots of a batch, as kernels read them.

    Attributes:
        slot: Slot at each position, int64 [P]; any number where there is padding.
        row: Row of that slot, int64 [P]; -1 where there is padding.
        position: Position of each slot, int64 [N, F]; -1 for a slot that has none.
        ends: End of the positions of each expert, int32 [L].
        partial: Whether a slot may have no position.
        padded: Whether there may be padding.
    """

    slot: Tensor
    row: Tensor
    position: Tensor
    ends: Tensor
    partial: bool
    padded: bool

    def first(self, num_positions: int) -> "Places":
        """Return the places without the positions after the first ones, which are all padding."""
        slot, row = self.slot[:num_positions], self.row[:num_positions]
        return self._replace(slot=slot, row=row, padded=False)


class ExpertBatch(NamedTuple):
    """Rows, and the experts of this rank that each row goes to.

    A row has F slots: K where rows are tokens, one where a row was sent for one expert. A slot is
    one (row, choice) pair, slot = row * F + choice. A position is the place of a slot when slots
    are sorted by expert. A slot without a position is computed by no expert here, because its
    expert is on another rank or it was dropped: it adds nothing to a sum, and its weight gets a
    gradient of exactly 0. For each row the experts return the sum of weight times output over the
    slots of the row that have a position.

    Note [Padding]. Where the host has not read the number of slots, `counts` is None and P is an
    upper bound: the first `num_tokens_per_expert.sum()` positions are valid, the others are
    padding, for which `order` may contain any number. Results of padding are never read: they are
    masked, and neither summed nor multiplied by zero, as they may be NaN.

    Attributes:
        rows: Rows [N, D], in any order.
        weights: Routing weight of each slot [N, F]; None: all are one.
        order: Slot at each position, int64 [P], P <= N * F unless padded. Slots differ.
        counts: Positions of each local expert, L numbers on the host; their sum is P.
            None: see Note [Padding].
        num_tokens_per_expert: Positions of each local expert, on the device, int64 [L].
        num_slots_per_row: Number of slots per row, F.
        placed: Places of the slots if kernels have found them already; None: the methods of this
            class find them.
    """

    rows: Tensor
    weights: Tensor | None
    order: Tensor
    counts: tuple[int, ...] | None
    num_tokens_per_expert: Tensor
    num_slots_per_row: int = 1
    placed: Places | None = None

    @property
    def num_slots(self) -> int:
        """Return the number of slots of the rows, with a position or without: N * F."""
        return self.rows.shape[0] * self.num_slots_per_row

    @property
    def narrow(self) -> torch.dtype:
        """Return the integer dtype for slots that are saved: int32 unless there are too many."""
        is_small = self.rows.shape[0] * self.num_slots_per_row <= _MOST_INT32
        return torch.int32 if is_small else torch.int64

    @property
    def all_listed(self) -> bool:
        """Tell whether every slot is known to have a position, and every position a slot."""
        num_slots = self.rows.shape[0] * self.num_slots_per_row
        return self.counts is not None and self.order.numel() == num_slots

    def valid(self) -> Tensor | None:
        """Return a mask of the positions that are not padding, bool [P]; None: there is none."""
        if self.counts is not None:
            return None
        positions = torch.arange(self.order.numel(), device=self.order.device)
        return positions < self.num_tokens_per_expert.sum()

    def slot_at(self, padding: int = 0) -> Tensor:
        """Return the slot at each position, int64 [P]; `padding` where there is padding."""
        valid = None if self.counts is not None else self.valid()
        return self.order if valid is None else self.order.where(valid, padding)

    def row_at(self) -> Tensor:
        """Return the row of the slot at each position, integer [P]; any row for padding."""
        if self.placed is not None and self.counts is not None:
            return self.placed.row
        slot, slots_per_row = self.order, self.num_slots_per_row
        if self.counts is None:
            slot = self.slot_at()
        return slot if slots_per_row == 1 else slot.div(slots_per_row, rounding_mode="floor")

    def at_slots(self, values_P: Tensor, *, default: float) -> Tensor:
        """Move a value of each position to its slot, [N * F]; `default` for slots without one."""
        if self.all_listed:
            return torch.empty_like(values_P).scatter_(0, self.order.to(torch.int64), values_P)
        num_slots = self.num_slots
        slot_P = self.slot_at(num_slots).to(torch.int64)
        # One slot more than there are takes what belongs to padding.
        values = values_P.new_full((num_slots + 1,), default)
        return values.scatter_(0, slot_P, values_P)[:-1]

    def weight_at(self) -> Tensor | None:
        """Return the routing weight at each position [P], fp32 or wider; None: all are one."""
        if self.weights is None:
            return None
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        if self.num_slots == 0:  # all positions are padding
            return self.weights.new_zeros(self.order.numel(), dtype=wide)
        return self.weights.reshape(-1).to(wide).index_select(0, self.slot_at())

    def weight_gradient(self, grad_P: Tensor | None) -> Tensor | None:
        """Return the gradient of the routing weights [N, F], from that at each position [P]."""
        if grad_P is None or self.weights is None:
            return None
        grad_S = self.at_slots(grad_P, default=0)
        return grad_S.view(self.weights.shape).to(self.weights.dtype)

    def positions(self, dtype: torch.dtype = torch.int64) -> tuple[Tensor, bool]:
        """Return the position of each slot [N, F], -1 for none, and whether -1 may occur.

        Args:
            dtype: Dtype of the positions, unless kernels have found them already.
        """
        all_listed = self.all_listed
        if self.placed is not None:
            return self.placed.position, not all_listed
        positions = torch.arange(self.order.numel(), device=self.order.device, dtype=dtype)
        position_S = self.at_slots(positions, default=-1)
        return position_S.view(-1, self.num_slots_per_row), not all_listed

    def places(self) -> Places:
        """Return the places of all slots, found by torch unless kernels have found them."""
        if self.placed is not None:
            return self.placed
        ends = self.num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        padded, row_P = self.counts is None, self.row_at()
        if padded:
            positions = torch.arange(row_P.numel(), device=row_P.device)
            row_P = row_P.masked_fill_(positions >= ends[-1], -1)
        position_NF, partial = self.positions()
        return Places(self.order, row_P, position_NF, ends, partial=partial, padded=padded)

    def sum_over_slots(self, values_PD: Tensor, weights_NF: Tensor | None = None) -> Tensor:
        """Sum weight * value over the slots of each row that have a position, in fp32 or wider.

        Differentiable, so that other experts than `GroupedExperts` can end in it; with weights only
        once.

        Args:
            values_PD: Output of the experts at each position [P, D].
            weights_NF: Factor of each slot's value, such as `weights` [N, F]; None: one.

        Returns:
            Sums [N, D], of the dtype of the values; zeros for a row without a local expert.
        """
        position_NF, partial = self.positions()
        padded, slot_P, row_P = self.counts is None, self.slot_at(-1), self.row_at()
        if padded:
            row_P = row_P.where(slot_P >= 0, -1)
        permutation = Permutation(slot_P, row_P, position_NF, partial=partial, padded=padded)
        return sum_slots(values_PD, permutation, weights_NF)

    def spans(self) -> list[slice]:
        """Return the positions of each local expert; raise ValueError if the host has no counts."""
        if self.counts is None:
            raise ValueError("counts (None) must be on the host")
        return [slice(*ends) for ends in pairwise(accumulate(self.counts, initial=0))]


class SharesGroups:
    """A value that copies of a module share, because process groups cannot be copied."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself."""
        return self


class RowsStay:
    """The calls of a dispatcher between whose ranks no rows are exchanged.

    The state of the calls is the batch, and the experts sum over the slots of each token.
    """

    __slots__ = ()

    def launch_dispatch(self, rows: Tensor, state: ExpertBatch) -> tuple[Tensor, ExpertBatch]:
        """Return the rows and the state unchanged."""
        return rows, state

    def finish_dispatch(self, rows: Tensor, state: ExpertBatch) -> ExpertBatch:
        """Return the batch with these rows."""
        return state._replace(rows=rows)

    def launch_combine(self, y: Tensor, state: ExpertBatch) -> Tensor:
        """Return `y`."""
        del state
        return y


@dataclass(frozen=True, slots=True)
class LocalRead:
    """The host read of a layer whose experts are all here: a purpose of `hp_platform.dry_device`.

    Attributes:
        num_tokens: Number of tokens, T.
        top_k: Number of experts per token, K.
        num_experts: Number of experts, E.
    """

    num_tokens: int
    top_k: int
    num_experts: int

    def __str__(self) -> str:
        """Describe the read in words."""
        return f"slots of {self.num_tokens} tokens x {self.top_k} of {self.num_experts} experts"

    def numbers(self, slots: Sequence[int], *, like: Tensor) -> Tensor:
        """Return the numbers that the host would read in a real run.

        Args:
            slots: Number of slots of each expert, E numbers.
            like: Tensor that the host is about to read, int64 [E + 2].
        """
        without = self.num_tokens * self.top_k - sum(slots)
        return torch.tensor([*slots, 0, without], dtype=like.dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class LocalDispatcher(RowsStay):
    """The dispatcher of experts that are all in this process: rows stay, nothing is copied.

    Where the products of the experts take their counts from the device, the host reads nothing:
    slots without an expert are padding (`ExpertBatch`, Note [Padding]), and an expert that does not
    exist ends in an assertion on the device. Elsewhere the host reads the counts, once.

    Attributes:
        num_experts: Number of experts, E.
    """

    num_experts: int

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, ExpertBatch]:
        """Sort the slots; see `Dispatcher.prepare`. The state of the other calls is the batch."""
        error = wrong_input(x, experts, weights)
        if error is not None:
            raise error
        counted = count_slots(experts, self.num_experts)
        placed = None if counted.starts is None else placed_by_kernels(counted, counted.starts)
        order = counted.keys.reshape(-1).argsort(stable=True) if placed is None else placed.slot
        counts: tuple[int, ...] | None = None
        if stays_on_device(x):
            message = f"experts must be in [0, num_experts ({self.num_experts})), or -1 for none"
            require_on_device(counted.counts[self.num_experts] == 0, message)
        else:
            found = counted.counts
            if found.is_cuda:
                read = LocalRead(len(x), experts.shape[1], self.num_experts)
                found = arrived(found.cpu(), purpose=read)
            *numbers, invalid, _ = found.tolist()
            if invalid:
                raise invalid_experts(invalid, self.num_experts)
            order, counts = order[: sum(numbers)], tuple(numbers)
            placed = None if placed is None else placed.first(sum(numbers))
        num_tokens, num_choices = counted.counts[: self.num_experts], experts.shape[1]
        return x, ExpertBatch(x, weights, order, counts, num_tokens, num_choices, placed)

    def finish_combine(self, rows: Tensor, state: ExpertBatch) -> Tensor:
        """Return `rows`."""
        del state
        return rows


def placed_by_kernels(counted: SlotCounts, starts: Starts) -> Places:
    """Sort the slots of tokens by expert."""
    sort = sort_counted(counted)
    return Places(sort.order, sort.token, sort.inverse, starts.ends, partial=True, padded=True)


def stays_on_device(rows: Tensor) -> bool:
    """Tell whether grouped products of such rows need no counts on the host.

    `torch.nn.functional.grouped_mm` has a kernel for that in bf16 from sm_90 on; elsewhere the
    host reads for each product, or the experts are computed one after the other.
    """
    if not rows.is_cuda or autocast_dtype(rows) != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(rows.device) >= _GROUPED_PRODUCTS_SINCE


def autocast(x: Tensor) -> Tensor:
    """Cast to the dtype in which `torch.autocast`, if it is on, computes products."""
    return x.to(autocast_dtype(x))


def summed_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype of sums of rows: fp32 or wider where `torch.autocast` narrowed the rows."""
    is_narrowed = torch.is_autocast_enabled(rows.device.type) and autocast_dtype(rows) == rows.dtype
    return torch.promote_types(rows.dtype, torch.float32) if is_narrowed else rows.dtype


def wrong_input(x: Tensor, experts: Tensor, weights: Tensor | None) -> ValueError | None:
    """Return an error if tokens [T, D], experts [T, K] or weights [T, K] are wrong, else None."""
    if x.ndim != 2 or x.dtype not in FLOATS:
        return ValueError(f"x ({tuple(x.shape)}, {x.dtype}) must be [T, D] and of a floating dtype")
    if experts.ndim != 2 or experts.dtype not in (torch.int64, torch.int32):
        return ValueError(
            f"experts ({tuple(experts.shape)}, {experts.dtype}) must be [T, K] and int64"
        )
    if experts.shape[0] != x.shape[0] or experts.shape[1] == 0:
        return ValueError(
            f"rows of experts ({experts.shape[0]}) must equal rows of x ({x.shape[0]}), and "
            f"columns of experts ({experts.shape[1]}) be at least 1"
        )
    if weights is not None and (weights.shape != experts.shape or weights.dtype not in FLOATS):
        return ValueError(
            f"weights ({tuple(weights.shape)}, {weights.dtype}) must have the shape of experts "
            f"({tuple(experts.shape)}) and a floating dtype"
        )
    if experts.device != x.device or (weights is not None and weights.device != x.device):
        devices = {t.device for t in (x, experts, weights) if t is not None}
        return ValueError(f"devices of x, experts and weights ({devices}) must be the same")
    return None
