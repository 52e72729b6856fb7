"""What a dispatch costs on the wire, and when it pays to send a token to a rank once only.

With routing that prefers no expert, a token whose k experts differ has none of them among the
L = E / W of a given rank with probability C(E - L, k) / C(E, k). So it goes to

    r = W * (1 - C(E - L, k) / C(E, k))

ranks. Forward and backward together move each row four times (to the experts and back, twice) and
each routing weight twice:

    plain         k * (4 * row bytes + 2 * weight bytes)
    deduplicated  r * 4 * row bytes + k * (2 * weight bytes + code bytes)

per token, where a code says which of the rank's experts takes the row: one byte for up to 128
experts per rank, four for more. The counts that precede the rows cost either way the same.
"""

import math
from typing import NamedTuple

_LARGEST_BYTE_CODE = 255


class DispatchBytes(NamedTuple):
    """Bytes that one token sends in a layer's forward and backward, on average.

    Attributes:
        plain: A row for each of its experts.
        deduplicated: A row for each rank that has any of them.
    """

    plain: float
    deduplicated: float


def expected_rows_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return how many of the ranks a token goes to on average; at most `top_k`.

    Args:
        num_experts: E, on all ranks together.
        top_k: k, different experts of a token, at most E of them.
        num_ranks: W; divides E.
    """
    num_elsewhere = num_experts - num_experts // num_ranks
    top_k = min(top_k, num_experts)
    missed = math.comb(num_elsewhere, top_k) / math.comb(num_experts, top_k)
    return num_ranks * (1 - missed)


def dispatch_bytes(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    row_bytes: int,
    weight_bytes: int = 4,
) -> DispatchBytes:
    """Apply the formula at the top of this file.

    Args:
        num_experts: E, on all ranks together.
        top_k: k, experts of a token.
        num_ranks: W; divides E.
        row_bytes: Width of a row times the size of its dtype.
        weight_bytes: Size of a routing weight; 0 without.
    """
    rows = expected_rows_per_token(num_experts, top_k, num_ranks)
    weights = top_k * 2 * weight_bytes
    codes = top_k * code_bytes(num_experts // num_ranks)
    return DispatchBytes(
        plain=top_k * 4 * row_bytes + weights, deduplicated=rows * 4 * row_bytes + weights + codes
    )


def deduplication_pays(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    row_bytes: int,
    weight_bytes: int = 4,
    largest_share: float = 0.75,
) -> bool:
    """Tell whether deduplicated rows need at most `largest_share` of the bytes of plain ones.

    Arguments are those of `dispatch_bytes`. By default a quarter of the bytes must be saved: the
    receiving rank has slots to sort and sums to take that the plain way does not have.
    """
    cost = dispatch_bytes(
        num_experts, top_k, num_ranks, row_bytes=row_bytes, weight_bytes=weight_bytes
    )
    return cost.deduplicated <= largest_share * cost.plain


def code_bytes(num_local_experts: int) -> int:
    """Bytes that say which local expert a slot has, and whether it begins a row."""
    return 1 if 2 * num_local_experts - 1 <= _LARGEST_BYTE_CODE else 4
