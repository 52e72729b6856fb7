"""What the experts of one rank compute on.

Shape symbols: N rows, F slots per row, P = N * F positions, L local experts, D width.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor


class ExpertBatch(NamedTuple):
    """Rows, and which of this rank's experts take them.

    Every row is taken by F experts: by K where rows are tokens and all experts are here, by one
    where a row was sent for one expert. A slot is one (row, choice) pair, slot = row * F + choice;
    a position is a slot's place when slots are sorted by expert. For each row the experts return
    the sum over its slots of weight times output.

    Attributes:
        rows: [N, D], in any order.
        weights: Routing weight of each slot [N, F]; None: all are one.
        order: Slot at each position, int64 [P].
        counts: Positions of each local expert, L numbers on the host; their sum is P.
        num_tokens_per_expert: The same on the device, int64 [L].
    """

    rows: Tensor
    weights: Tensor | None
    order: Tensor
    counts: tuple[int, ...]
    num_tokens_per_expert: Tensor

    @property
    def num_slots_per_row(self) -> int:
        """F; 1 for an empty batch."""
        return self.order.numel() // max(self.rows.shape[0], 1) or 1

    def row_at(self) -> Tensor:
        """Row of the slot at each position, int64 [P]."""
        slots_per_row = self.num_slots_per_row
        if slots_per_row == 1:
            return self.order
        return self.order.div(slots_per_row, rounding_mode="floor")

    def spans(self) -> list[slice]:
        """Positions of each local expert."""
        return [slice(*ends) for ends in pairwise(accumulate(self.counts, initial=0))]
