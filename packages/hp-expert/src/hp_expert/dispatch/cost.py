"""Bytes that a dispatch sends, and when it pays to send a token to a rank only once.

With routing that prefers no expert, none of a token's k different experts is among the L = E / W of
a given rank with probability C(E - L, k) / C(E, k). So the token goes to

    r = W * (1 - C(E - L, k) / C(E, k))

ranks. Forward and backward together move each row four times (to the experts and back, twice) and
each routing weight twice:

    plain         k * (4 * row bytes + 2 * weight bytes)
    deduplicated  r * 4 * row bytes + k * (2 * weight bytes + code bytes)

per token, where a code says which of the rank's experts takes the row: one byte for up to 128
experts per rank, four for more. The counts that precede the rows cost the same either way.
"""

import math
from typing import NamedTuple

_LARGEST_BYTE_CODE = 255


class DispatchBytes(NamedTuple):
    """Bytes that one token sends in a layer's forward and backward, on average.

    Attributes:
        plain: Bytes with a row for each expert of the token.
        deduplicated: Bytes with a row for each rank that has any of these experts.
    """

    plain: float
    deduplicated: float


def expected_rows_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the number of ranks that a token goes to on average; at most `top_k`.

    Args:
        num_experts: Number of experts on all ranks, E.
        top_k: Number of different experts of a token, k, at most E.
        num_ranks: Number of ranks, W; divides E.
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
    """Return the bytes of the formula at the top of this file.

    Args:
        num_experts: Number of experts on all ranks, E.
        top_k: Number of experts of a token, k.
        num_ranks: Number of ranks, W; divides E.
        row_bytes: Width of a row times the size of its dtype.
        weight_bytes: Size of a routing weight; 0 without weights.
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

    Arguments are those of `dispatch_bytes`. By default a quarter of the bytes must be saved, as the
    receiving rank has to sort slots and take sums, which it has not with plain rows.
    """
    cost = dispatch_bytes(
        num_experts, top_k, num_ranks, row_bytes=row_bytes, weight_bytes=weight_bytes
    )
    return cost.deduplicated <= largest_share * cost.plain


def code_bytes(num_local_experts: int) -> int:
    """Return the bytes of a code: the local expert of a slot, and whether the slot begins a row."""
    return 1 if 2 * num_local_experts - 1 <= _LARGEST_BYTE_CODE else 4
