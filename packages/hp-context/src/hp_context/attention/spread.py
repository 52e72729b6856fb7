"""Heads and positions that ranks have of a sequence, and that they need of each other: as data.

Every rank works all of this out for all ranks from the mask and the layout, so that each knows what
the others send without asking. No tensors here but the rows that `take` copies.

Where N divides H, rank r computes query heads r*h ... (r+1)*h - 1 and needs the key/value head of
each: the one of query head i is i * G // H. Runs of t = gcd(h, H/G) query heads of a rank share one
key/value head, so the rank receives h / t of them and its attention is a grouped-query one again.
With G divisible by N that is the plain split; otherwise heads that several ranks need are sent to
each of them, once per run.

Where N does not divide H, ranks get whole groups (a key/value head with its H/G query heads), some
ranks one more than others. With fewer groups than ranks they get query heads, some one more than
others, and the key/value heads of these as above.

Shape symbols: S whole sequence, N ranks, s = S / N, H query heads, G key/value heads (G divides H),
h = H / N.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import gcd
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context.masks import Mask, common

Rows = tuple[range, ...]  # runs of positions, in the order of a tensor

# Of the rows that an all-gather sends. Where ranks need fewer than these, an all-to-all sends them
# alone; above, it would not win back what it packs for each rank.
SPARSE = 2 / 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Positions that the ranks of a group have; together all of a sequence.

    Attributes:
        group: The ranks.
        runs: Positions of each rank, as runs in the order it holds them.
    """

    group: ProcessGroup
    runs: tuple[Rows, ...]

    @property
    def mine(self) -> Rows:
        """Return the positions of this rank."""
        return self.runs[self.group.rank()]

    @property
    def whole(self) -> range:
        """Return all positions."""
        return range(sum(map(length, self.runs)))


@dataclass(frozen=True)
class Needs:
    """Keys that the queries of each rank may see.

    Attributes:
        runs: Positions of each rank, as runs in the order it holds them.
        mask: Which keys a query may see; None for all of them.
    """

    runs: tuple[Rows, ...]
    mask: Mask | None

    @cached_property
    def _seen(self) -> list[list[range]]:
        if self.mask is None:
            return [[range(sum(map(length, self.runs)))] for _ in self.runs]
        return [[self.mask.seen(run) for run in runs] for runs in self.runs]

    def of(self, rank: int, source: int) -> Rows:
        """Return the positions of `source` that `rank` needs, in the order `source` holds them.

        A rank needs all of its own, so that its part is one piece.
        """
        if rank == source:
            return self.runs[source]
        return union([common(run, seen) for seen in self._seen[rank]] for run in self.runs[source])

    def of_others(self, source: int) -> Rows:
        """Return the positions of `source` that any other rank needs, in the same order."""
        rows: Rows = ()
        for rank in range(len(self.runs)):
            if rank != source and rows != self.runs[source]:
                parts = (*rows, *self.of(rank, source))
                rows = union([row for row in parts if row.start in r] for r in self.runs[source])
        return rows

    @property
    def num_fetched(self) -> int:
        """Return how many positions of other ranks all ranks need together."""
        whole = range(sum(map(length, self.runs)))
        return sum(
            length(union([[*mine, *(common(whole, run) for run in seen)]])) - length(mine)
            for mine, seen in zip(self.runs, self._seen, strict=True)
        )

    @property
    def fingerprint(self) -> int:
        """Return 32 bits that differ, almost surely, where other keys are needed."""
        return crc32(repr(self._seen).encode())

    @property
    def dense(self) -> bool:
        """Tell whether ranks need so much of each other's that all of it had better be gathered."""
        sizes = list(map(length, self.runs))
        if len(set(sizes)) > 1:  # an all-gather takes parts of one size
            return False
        return self.num_fetched > SPARSE * sum(sizes) * (len(self.runs) - 1)


def length(rows: Iterable[range]) -> int:
    """Return the number of positions."""
    return sum(map(len, rows))


def union(parts: Iterable[Iterable[range]]) -> Rows:
    """Return runs that cover the given positions, group by group, each group in order."""
    covered: list[range] = []
    for part in parts:
        first = len(covered)
        for run in sorted(filter(len, part), key=lambda run: run.start):
            if len(covered) > first and run.start <= covered[-1].stop:
                covered[-1] = range(covered[-1].start, max(covered[-1].stop, run.stop))
            else:
                covered.append(run)
    return tuple(covered)


def slices(rows: Rows, held: Rows) -> list[slice]:
    """Return the slices of `rows` in a tensor of the positions `held`, one for each run."""
    offsets = [0, *accumulate(map(len, held))]
    starts = [
        next(
            at + row.start - run.start
            for at, run in zip(offsets, held, strict=False)
            if row.start in run
        )
        for row in rows
    ]
    return [slice(a, a + len(row)) for a, row in zip(starts, rows, strict=True)]


def take(x: Tensor, rows: Rows, held: Rows) -> Tensor:
    """Return `rows` of `x` [length(held), ...]; `x` itself where these are all of it, in order."""
    if rows == held:
        return x
    return torch.cat([x[at] for at in slices(rows, held)]) if rows else x[:0]


def add_to(total: Tensor, x: Tensor, rows: Rows, held: Rows) -> None:
    """Add `x`, of the positions `rows`, to `total`, of the positions `held`."""
    start = 0
    for at in slices(rows, held):
        size = at.stop - at.start
        total[at] += x[start : start + size]
        start += size


def in_order(rows: Sequence[range]) -> Rows:
    """Return the runs by position."""
    return tuple(sorted(rows, key=lambda run: run.start))


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
        """Return the key/value heads to send, rank by rank; None for all in order."""
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
