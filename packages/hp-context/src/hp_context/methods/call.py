"""The record of a call, from the exchange before the core attention for the one after it.

It rides on the q that the core attention gets, which belongs to this call alone: not on the module
and not on the object that applies context parallelism, which microbatches and threads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hp_context.batch.checks import Dims
from hp_context.batch.layout import CONTIGUOUS, SequenceLayout

if TYPE_CHECKING:
    from hp_context.methods.placement import Placed

_RECORD = "_hp_context_call"


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        head_counts: Query heads of each rank; None: as many each.
        placed: Placement of q as a DTensor; None: it was a plain tensor.
        layout: Positions that each rank has.
    """

    head_counts: tuple[int, ...] | None = None
    placed: Placed | None = None
    layout: SequenceLayout = CONTIGUOUS


def parts_of_rank(qkv: list[Tensor], dims: Dims) -> tuple[list[Tensor], Placed | None]:
    """Return this rank's parts of q, k, v; and the placement of the whole, if they are DTensors.

    Raises:
        ValueError: See `placement.local_parts`.
    """
    if not any(hasattr(x, "placements") for x in qkv):
        return qkv, None
    from hp_context.methods.placement import local_parts  # noqa: PLC0415  # takes seconds

    return local_parts(qkv, seq_dim=dims.seq, head_dim=dims.head)


def remember(q: Tensor, call: Call) -> None:
    """Leave `call` on the q of the core attention."""
    q.__dict__[_RECORD] = call


def recall(q: Tensor) -> Call | None:
    """Return the record that `remember` left on `q`."""
    call: Call | None = q.__dict__.get(_RECORD)
    return call
