"""What the experts of one rank compute on.

Shape symbols: N rows, F slots per row, P positions, L local experts, D width.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hp_expert.kernels import kernels_for
from hp_expert.permute import invert


class ExpertBatch(NamedTuple):
    """Rows, and which of this rank's experts take them.

    A row has F slots: K where rows are tokens, one where a row was sent for one expert. A slot is
    one (row, choice) pair, slot = row * F + choice; a position is a slot's place when slots are
    sorted by expert. A slot that has no position is computed by no expert here, because it is
    another rank's or was dropped; it counts nothing and its weight gets a gradient of exactly 0.
    For each row the experts return the sum over its listed slots of weight times output.

    Note [Padding]. Where the host has not read how many slots there are, `counts` is None and P a
    bound: the first `num_tokens_per_expert.sum()` positions are valid, the others are padding, with
    anything in `order`. What is computed for padding is never read: not summed, not multiplied by
    zero (it may be NaN), but masked.

    Attributes:
        rows: [N, D], in any order.
        weights: Routing weight of each slot [N, F]; None: all are one.
        order: Slot at each position, int64 [P], P <= N * F unless padded. Slots differ.
        counts: Positions of each local expert, L numbers on the host; their sum is P.
            None: see Note [Padding].
        num_tokens_per_expert: The same on the device, int64 [L].
        num_slots_per_row: Number of slots per row, F.
    """

    rows: Tensor
    weights: Tensor | None
    order: Tensor
    counts: tuple[int, ...] | None
    num_tokens_per_expert: Tensor
    num_slots_per_row: int = 1

    @property
    def num_slots(self) -> int:
        """Slots of the rows, listed or not: N * F."""
        return self.rows.shape[0] * self.num_slots_per_row

    def slot_at(self, padding: int = 0) -> Tensor:
        """Slot at each position, int64 [P]; `padding` where there is padding."""
        if self.counts is not None:
            return self.order
        positions = torch.arange(self.order.numel(), device=self.order.device)
        return self.order.where(positions < self.num_tokens_per_expert.sum(), padding)

    def row_at(self) -> Tensor:
        """Row of the slot at each position, int64 [P]; some row where there is padding."""
        slot, slots_per_row = self.order, self.num_slots_per_row
        if self.counts is None:
            slot = self.slot_at()
        return slot if slots_per_row == 1 else slot.div(slots_per_row, rounding_mode="floor")

    def at_slots(self, values_P: Tensor, *, default: float) -> Tensor:
        """Put a value for each position to its slot: [N * F]; `default` where a slot has none."""
        num_slots = self.num_slots
        # One slot more than there are takes what belongs to padding.
        values = values_P.new_full((num_slots + 1,), default)
        return values.scatter_(0, self.slot_at(num_slots), values_P)[:-1]

    def sum_over_slots(self, values_PD: Tensor, weights_NF: Tensor | None = None) -> Tensor:
        """Sum weight * value over each row's listed slots [N, D], in fp32 or wider."""
        slots_per_row = self.num_slots_per_row
        num_listed, num_slots = self.order.numel(), self.rows.shape[0] * slots_per_row
        all_listed = self.counts is not None and num_listed == num_slots
        if all_listed:
            position_S = invert(self.order)
        else:
            positions = torch.arange(num_listed, device=self.order.device)
            position_S = self.at_slots(positions, default=-1)
        kernels, position_NF = kernels_for(values_PD), position_S.view(-1, slots_per_row)
        return kernels.sum_rows(values_PD, position_NF, weights_NF, holes=not all_listed)

    def spans(self) -> list[slice]:
        """Positions of each local expert, if the host knows them."""
        if self.counts is None:
            raise ValueError("counts (None) must be on the host")
        return [slice(*ends) for ends in pairwise(accumulate(self.counts, initial=0))]
