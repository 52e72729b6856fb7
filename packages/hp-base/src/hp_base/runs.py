"""Runs of numbers that follow each other."""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last + 1 index of every run of positions that follow each other."""
    breaks = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return list(pairwise([0, *breaks, len(positions)])) if positions else []


def runs_in(sequences: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, int, slice]]:
    """Yield sequence, first place and slice of entries of each run inside of one sequence.

    Args:
        sequences: Sequence of each entry; negative: the entry is left out.
        places: Place of each entry in its sequence.
    """
    for begin, end in runs_of(places):
        changes = [i for i in range(begin + 1, end) if sequences[i] != sequences[i - 1]]
        for start, stop in pairwise([begin, *changes, end]):
            if sequences[start] >= 0:
                yield sequences[start], places[start], slice(start, stop)
