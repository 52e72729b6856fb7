"""What the exchange after the core attention must know of the one before it.

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
        placed: Where q lay as a DTensor; None: it was a plain tensor.
        layout: Which positions each rank holds.
    """

    head_counts: tuple[int, ...] | None = None
    placed: Placed | None = None
    layout: SequenceLayout = CONTIGUOUS


def parts_of_rank(qkv: list[Tensor], dims: Dims) -> tuple[list[Tensor], Placed | None]:
    """Return what this rank has of q, k, v; and where the whole of them lies, if they are DTensors.

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
    """Return what `remember` left on `q`."""
    call: Call | None = q.__dict__.get(_RECORD)
    return call
