"""The gradient of one stacked weight: now, later, or never.

Shape symbols: L local experts, n positions of one expert, P positions of all, X and Y the two other
dims of the weight.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_platform import submit_weight_grad


class WeightGradient:
    """Collects left_e^T @ right_e for each expert e, which is the gradient of weight e.

    Note [Now or later]. Backward asks before it computes anything, through
    `hp_platform.submit_weight_grad`: an answer (this object returns any tensor) means now, and
    products are then taken as their factors come. None means that the queue will ask again, and the
    factors are kept until then.

    Args:
        weight: The parameter as it was passed to the Function [L, X, Y].
        dtype: Of the factors; the gradient has that of the weight.
        counts: Positions of each expert. Experts without any get zeros.
        needed: Whether the weight wants a gradient at all.
    """

    def __init__(
        self, weight: Tensor, *, dtype: torch.dtype, counts: Sequence[int], needed: bool
    ) -> None:
        self._weight, self._dtype, self._counts = weight, dtype, counts
        self._needed = needed
        self._now = False
        self._asked = False
        self._total: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor, int | Tensor]] = []
        if needed:
            self._now = submit_weight_grad(weight, self._compute) is not None
        self._asked = True

    def add(self, left: Tensor, right: Tensor, where: int | Tensor) -> None:
        """Take the factors of one expert, or of all.

        Args:
            left: [n, X] or [P, X].
            right: [n, Y] or [P, Y].
            where: The expert, or the end of each expert's positions, int32 [L].
        """
        if self._now:
            self._multiply(left, right, where)
        elif self._needed:
            self._kept.append((left, right, where))

    def result(self) -> Tensor | None:
        """Return the gradient, or None if it comes later or never."""
        return self._finished() if self._now else None

    def _compute(self) -> Tensor:
        if not self._asked:
            return self._weight
        while self._kept:
            self._multiply(*self._kept.pop(0))
        return self._finished()

    def _multiply(self, left: Tensor, right: Tensor, where: int | Tensor) -> None:
        if isinstance(where, int):
            if self._total is None:
                self._total = torch.empty(
                    self._weight.shape, dtype=self._dtype, device=self._weight.device
                )
            torch.mm(left.t(), right, out=self._total[where])
        else:
            self._total = F.grouped_mm(left.t(), right, offs=where)

    def _finished(self) -> Tensor:
        total, self._total = self._total, None
        if total is None:
            return torch.zeros_like(self._weight)
        for expert, count in enumerate(self._counts):
            if count == 0:
                total[expert].zero_()
        return total.to(self._weight.dtype)
