"""Positions that ranks have of a sequence, and that they need of each other: as data.

Every rank works all of this out for all ranks from the mask and the layout, so that each knows what
the others send without asking. No tensors here but the rows that `take` copies.

Shape symbols: S whole sequence, N ranks, s = S / N.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
        """The positions of this rank."""
        return self.runs[self.group.rank()]

    @property
    def whole(self) -> range:
        """All positions."""
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
        """A number that differs, almost surely, where other keys are needed: 32 bits."""
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
