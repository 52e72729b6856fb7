"""Rows to the positions of their slots and back, whichever way the experts are computed.

Shape symbols: N rows, F slots per row, P positions, D width.
"""

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.kernels import kernels_for
from hp_expert.permute import gather_and_sum, invert


def at_positions(rows_ND: Tensor, row_at: Tensor) -> Tensor:
    """Copy the row of each position: [P, D]."""
    return kernels_for(rows_ND).gather_rows(rows_ND, row_at, holes=False)


def sum_over_slots(
    values_PD: Tensor, batch: ExpertBatch, weights_NF: Tensor | None = None
) -> Tensor:
    """Sum weight * value over each row's listed slots [N, D], in fp32 or wider."""
    all_listed = batch.counts is not None and batch.order.numel() == batch.num_slots
    if all_listed:
        position_S = invert(batch.order)
    else:
        positions = torch.arange(batch.order.numel(), device=batch.order.device)
        position_S = batch.at_slots(positions, default=-1)
    position_NF = position_S.view(-1, batch.num_slots_per_row)
    return gather_and_sum(values_PD, position_NF, partial=not all_listed, weights=weights_NF)
