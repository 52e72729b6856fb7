"""What the experts of one rank compute on.

Shape symbols: N rows, F slots per row, P positions, L local experts, D width.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


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

    def valid(self) -> Tensor | None:
        """Which positions are no padding, bool [P]; None if none is."""
        if self.counts is not None:
            return None
        positions = torch.arange(self.order.numel(), device=self.order.device)
        return positions < self.num_tokens_per_expert.sum()

    def slot_at(self) -> Tensor:
        """Slot at each position, int64 [P]; some slot where there is padding."""
        valid = self.valid()
        return self.order if valid is None else self.order.where(valid, 0)

    def row_at(self) -> Tensor:
        """Row of the slot at each position, int64 [P]; some row where there is padding."""
        slot, slots_per_row = self.slot_at(), self.num_slots_per_row
        return slot if slots_per_row == 1 else slot.div(slots_per_row, rounding_mode="floor")

    def at_slots(self, values_P: Tensor, *, default: float) -> Tensor:
        """Put a value for each position to its slot: [N * F]; `default` where a slot has none."""
        valid = self.valid()
        # One slot more than there are takes what belongs to padding.
        slot = self.order if valid is None else self.order.where(valid, self.num_slots)
        values = values_P.new_full((self.num_slots + 1,), default)
        return values.scatter_(0, slot, values_P)[:-1]

    def spans(self) -> list[slice]:
        """Positions of each local expert, if the host knows them."""
        if self.counts is None:
            raise ValueError("counts (None) must be on the host")
        return [slice(*ends) for ends in pairwise(accumulate(self.counts, initial=0))]
