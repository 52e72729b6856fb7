"""What takes the place of kernels and exchanges of a stage that runs once to be counted.

Shape symbols: B sequences, S positions, N query heads, H width of a head, T tokens, K experts of a
token, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """What counts, in the place of what would be computed or exchanged.

    Attributes:
        attend: Of q, k and v, [B, S, N, H] each, and the positions that a query sees on average;
            returns what attention would.
        mix: Of rows [T, D], their experts [T, K] and weights, the elements of an expert and those
            that its computation keeps of a row; returns what experts would.
        exchange: Of elements that tensor-parallel ranks put together, as if backward had as many.
    """

    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    mix: Callable[..., Tensor]
    exchange: Callable[[float], None]
