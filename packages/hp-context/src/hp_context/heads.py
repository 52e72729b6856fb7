"""Which heads go to which rank under grouped-query attention; lists of numbers, no tensors.

Shape symbols: H query heads, G key/value heads (G divides H), N ranks, h = H / N.

Rank r computes query heads r*h ... (r+1)*h - 1 and needs the key/value head of each: the one of
query head i is i * G // H. Runs of t = gcd(h, H/G) query heads of a rank share one key/value
head, so the rank receives h / t of them and its attention is a grouped-query one again. With
G divisible by N that is the plain split; otherwise heads that several ranks need are sent to
each of them, once per run.
"""

from math import gcd


def legal_degrees(num_heads: int) -> list[int]:
    """Return the Ulysses degrees that `num_heads` query heads allow."""
    return [n for n in range(1, num_heads + 1) if num_heads % n == 0]


def kv_heads_per_rank(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return how many key/value heads a rank computes with, replicas counted."""
    local = num_heads // num_ranks
    return local // gcd(local, num_heads // num_kv_heads)


def kv_head_index(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, ...] | None:
    """Return the key/value heads to send, rank by rank, not decreasing; None for all in order.

    Example:
        >>> kv_head_index(8, 2, 4)
        (0, 0, 1, 1)
        >>> kv_head_index(8, 4, 4) is None
        True
    """
    slots = num_ranks * kv_heads_per_rank(num_heads, num_kv_heads, num_ranks)
    index = tuple(slot * num_kv_heads // slots for slot in range(slots))
    return None if index == tuple(range(num_kv_heads)) else index
