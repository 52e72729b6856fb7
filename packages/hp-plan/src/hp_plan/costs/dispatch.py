"""Bytes that hp-expert's dispatcher sends for a token, by number of ranks; no torch if cached."""

from functools import lru_cache

from msgspec import Struct

from hp_plan.costs.cache import cached


class RowCost(Struct, frozen=True):
    """The bytes of a token in one layer of experts.

    Attributes:
        rows: Mean number of ranks with experts of a token.
        plain: Bytes in forward and backward with a row for each expert.
        deduplicated: Bytes in forward and backward with a row for each rank.
        pays: Whether the dispatcher sends a row for each rank.
    """

    rows: float
    plain: float
    deduplicated: float
    pays: bool


class RowCosts(Struct, frozen=True):
    """The bytes of a token by the number of ranks that share the experts.

    Attributes:
        by_ranks: Costs by number of ranks, for each divisor of the number of experts.
    """

    by_ranks: dict[int, RowCost]


@lru_cache(maxsize=64)
def row_costs(
    num_experts: int, top_k: int, row_bytes: int, weight_bytes: int
) -> dict[int, RowCost]:
    """Return costs by number of ranks: those of hp-expert, or cached ones.

    Args:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        row_bytes: Bytes of a row.
        weight_bytes: Bytes of a routing weight.
    """
    asked = num_experts, top_k, row_bytes, weight_bytes
    return cached(asked, RowCosts, lambda: _learned(*asked)).by_ranks


def _learned(num_experts: int, top_k: int, row_bytes: int, weight_bytes: int) -> RowCosts:
    from hp_expert import (  # noqa: PLC0415 - imports torch
        deduplication_pays,
        dispatch_bytes,
        expected_rows_per_token,
    )

    found = {}
    for ep in (n for n in range(1, num_experts + 1) if num_experts % n == 0):
        shape = num_experts, top_k, ep
        cost = dispatch_bytes(*shape, row_bytes=row_bytes, weight_bytes=weight_bytes)
        found[ep] = RowCost(
            expected_rows_per_token(*shape),
            cost.plain,
            cost.deduplicated,
            deduplication_pays(*shape, row_bytes=row_bytes, weight_bytes=weight_bytes),
        )
    return RowCosts(found)
