"""Runs of numbers that follow each other."""

from collections.abc import Sequence
from itertools import pairwise


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """First and last + 1 index of every run of positions that follow each other."""
    breaks = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return list(pairwise([0, *breaks, len(positions)])) if positions else []
