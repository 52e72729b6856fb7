"""Kinds of steps: those whose documents are much work in the same way share one."""

import math
from typing import NamedTuple

from hp_packing.costs import Seconds

_DIGITS = 3
"""Decimals of what parts of the work are taken to be."""


class Kind(NamedTuple):
    """A kind of steps, by all that the busiest rank computes.

    Attributes:
        most: Microbatches, at most.
        stages: Seconds of all work of a rank of each stage.
        each: Seconds that each microbatch takes there besides.
        least: Seconds that each microbatch takes there at least.
        message: Seconds of a message between stages of all tokens of a rank.
        memory: Tokens that fit, by the tokens of a rank.
        split_backward: Whether weight gradients may be put off.
    """

    most: int
    stages: tuple[Seconds, ...]
    each: tuple[Seconds, ...]
    least: tuple[Seconds, ...]
    message: float
    memory: float
    split_backward: bool = True

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stages)

    def rounded(self) -> "Kind":
        """Nearly the same, as others are too; memory is a bit less, since lengths vary."""
        return self._replace(
            stages=tuple(Seconds(*(round(x, _DIGITS) for x in each)) for each in self.stages),
            each=tuple(Seconds(*(_coarse(x, 4) for x in each)) for each in self.each),
            least=tuple(Seconds(*map(_coarse, each)) for each in self.least),
            message=_coarse(self.message),
            memory=_below(self.memory),
        )


def _coarse(value: float, numbers: int = 2) -> float:
    """The nearest of so many numbers from each power of two to the next."""
    return 0.0 if value <= 0 else 2.0 ** (round(numbers * math.log2(value)) / numbers)


def _below(value: float) -> float:
    """The next lower sixty-fourth part of a power of two."""
    unit = 2.0 ** (math.floor(math.log2(value)) - 6)
    return math.floor(value / unit) * unit
