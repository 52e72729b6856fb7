"""Targets of multi-token prediction, found before a sequence is split over ranks.

The token some places later may be on another rank, in whatever order ranks share positions. So
tokens and targets are moved while the sequence is whole, and each rank takes those of its own
positions.

Shape symbols: B sequences, S positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Ahead(NamedTuple):
    """For each module of multi-token prediction, depth 1 first, what it reads and predicts.

    Attributes:
        tokens: int64 [B, S], the token `depth` places later; past the end the last one again.
        targets: int64 [B, S], the token `depth + 1` places later, negative where there is none or
            a document ends before it.
        num_targets: Targets of the whole step over all ranks: what sums are divided by.
    """

    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_targets: tuple[int, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Ahead":
        """Return the same with every tensor replaced."""
        tokens, targets = (tuple(map(function, part)) for part in (self.tokens, self.targets))
        return Ahead(tokens, targets, self.num_targets)


def look_ahead(tokens: Tensor, targets: Tensor, num_targets: tuple[int, ...]) -> Ahead:
    """Move tokens and targets of whole sequences.

    Args:
        tokens: int64 [B, S].
        targets: The token after each, int64 [B, S], negative where none is to be learned.
        num_targets: Number of targets of the whole step, for each module.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    aims = targets
    for depth in range(1, len(num_targets) + 1):
        later = place + depth
        is_there, later = later < len(place), later.clamp(max=len(place) - 1)
        # No place in between may be one from which nothing is to be learned.
        aims = targets[:, later].masked_fill(~is_there | (aims < 0), -1)
        found[0].append(tokens[:, later])
        found[1].append(aims)
    return Ahead(tuple(found[0]), tuple(found[1]), num_targets)
