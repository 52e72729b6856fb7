"""Numbers that the host reads of a routing, where no router runs; see `hp_platform.host_reads`."""

from torch import Tensor

from hp_expert import ExchangeRead, LocalRead
from hp_plan.costs.routing import ALL_LAYERS, Skew, rows_per_rank

EVEN = Skew("uniform")


def routed(read: ExchangeRead | LocalRead, copy: Tensor, skew: Skew, *, layer: str) -> Tensor:
    """The numbers that a layer of experts reads.

    Args:
        read: What it reads.
        copy: Where the numbers would be.
        skew: What experts get.
        layer: Name of the layer.
    """
    num_ranks = read.num_ranks if isinstance(read, ExchangeRead) else 1
    slots = skew.slots(
        layer,
        num_tokens=read.num_tokens,
        top_k=read.top_k,
        num_experts=read.num_experts,
        num_ranks=num_ranks,
    )
    if isinstance(read, LocalRead):
        return read.numbers(slots, like=copy)
    rows = rows_per_rank(slots, read.num_tokens, read.top_k, num_ranks)
    return read.numbers(slots, rows, like=copy)


def evenly(copy: Tensor, purpose: object) -> Tensor:
    """An answer: all experts get the same; zeros for all else."""
    if isinstance(purpose, ExchangeRead | LocalRead):
        return routed(purpose, copy, EVEN, layer=ALL_LAYERS)
    return copy
