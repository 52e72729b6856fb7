"""Heads of each rank under grouped-query attention; lists of numbers, no tensors.

Shape symbols: H query heads, G key/value heads (G divides H), N ranks, h = H / N.

Where N divides H, rank r computes query heads r*h ... (r+1)*h - 1 and needs the key/value head of
each: the one of query head i is i * G // H. Runs of t = gcd(h, H/G) query heads of a rank share one
key/value head, so the rank receives h / t of them and its attention is a grouped-query one again.
With G divisible by N that is the plain split; otherwise heads that several ranks need are sent to
each of them, once per run.

Where N does not divide H, ranks get whole groups (a key/value head with its H/G query heads), some
ranks one more than others. With fewer groups than ranks they get query heads, some one more than
others, and the key/value heads of these as above.
"""

from dataclasses import dataclass
from itertools import chain, pairwise
from math import gcd


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one rank.

    Attributes:
        own: Numbers of the heads.
        total: Number of heads of all ranks together.
    """

    own: range
    total: int


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads of each rank.

    Attributes:
        query: Query heads by rank.
        kv: Key/value heads by rank, as often as their attention needs them.
    """

    query: tuple[range, ...]
    kv: tuple[tuple[int, ...], ...]

    @property
    def query_counts(self) -> tuple[int, ...] | None:
        """Return how many query heads each rank gets; None: all the same."""
        return _unless_equal([len(heads) for heads in self.query])

    @property
    def kv_counts(self) -> tuple[int, ...] | None:
        """Return how many key/value heads each rank gets; None: all the same."""
        return _unless_equal([len(heads) for heads in self.kv])

    @property
    def kv_index(self) -> tuple[int, ...] | None:
        """The key/value heads to send, rank by rank; None for all in order."""
        index = tuple(chain.from_iterable(self.kv))
        return None if index == tuple(range(index[-1] + 1)) else index

    def share(self, rank: int) -> HeadShare:
        """Return the query heads of a rank."""
        return HeadShare(self.query[rank], self.query[-1].stop)


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadSplit:
    """Return the heads of each rank; there must be as many query heads as ranks.

    Example:
        >>> split_heads(8, 2, 4).kv
        ((0,), (0,), (1,), (1,))
        >>> split_heads(6, 3, 2).query
        (range(0, 2), range(2, 6))
    """
    group = num_heads // num_kv_heads
    if num_heads % num_ranks == 0:
        query = _cut(num_heads, num_ranks)
        run = gcd(num_heads // num_ranks, group)
        kv = (tuple(head // group for head in heads[::run]) for heads in query)
        return HeadSplit(query, tuple(kv))
    if num_kv_heads >= num_ranks:
        groups = _cut(num_kv_heads, num_ranks)
        query = tuple(range(g.start * group, g.stop * group) for g in groups)
        return HeadSplit(query, tuple(tuple(g) for g in groups))
    query = _cut(num_heads, num_ranks)
    return HeadSplit(query, tuple(_kv_heads(heads, group) for heads in query))


def _cut(count: int, num_ranks: int) -> tuple[range, ...]:
    ends = [rank * count // num_ranks for rank in range(num_ranks + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def _kv_heads(heads: range, group: int) -> tuple[int, ...]:
    """Return the key/value head of each run of query heads that are alike in all groups."""
    cuts = [heads.start, *(i for i in heads[1:] if i % group == 0), heads.stop]
    run = gcd(*(b - a for a, b in pairwise(cuts)))
    return tuple(head // group for head in heads[::run])


def _unless_equal(counts: list[int]) -> tuple[int, ...] | None:
    return None if len(set(counts)) == 1 else tuple(counts)
