"""Whether boxes cut an array exactly: inside it, without a hole, without an overlap."""

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one of each per dimension."""


def tiling_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why `boxes` are no tiling of an array of `shape`; None if they are one.

    Volumes that add up, boxes inside the array and no overlap leave no room for a hole. Integers
    are Python's, so that no product overflows.

    Args:
        shape: Sizes of the array.
        boxes: Non-empty boxes; none for an array without elements.
    """
    volume = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"dimensions of a chunk ({len(sizes)}) must equal those of shape {list(shape)}"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"chunk at {list(offsets)} of {list(sizes)} must lie inside shape {list(shape)}"
        if 0 in sizes:
            return f"chunk at {list(offsets)} of {list(sizes)} must have elements"
        volume += math.prod(sizes)
    if volume != math.prod(shape):
        return f"elements of all chunks ({volume}) must equal those of shape {list(shape)}"
    return _overlap(shape, boxes)


def _overlap(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Sweep along the longest dimension, so that few boxes are compared with each other."""
    if not shape:
        return None  # the volume has already said that there is one box
    axis = max(range(len(shape)), key=lambda dim: shape[dim])
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    active: list[tuple[int, int]] = []  # (end, position in `ordered`), by end
    for position, box in enumerate(ordered):
        start = box[0][axis]
        del active[: bisect_right(active, (start, len(ordered)))]
        for _, other in active:
            if _intersect(box, ordered[other]):
                return f"chunks at {list(ordered[other][0])} and {list(box[0])} must not overlap"
        insort(active, (start + box[1][axis], position))
    return None


def _intersect(a: Box, b: Box) -> bool:
    return all(
        start < other + length and other < start + size
        for start, size, other, length in zip(*a, *b, strict=True)
    )


def gap_error(spans: Sequence[tuple[int, int]]) -> str | None:
    """Say why spans (begin, end), in this order, do not follow each other from 0; None if so."""
    if spans and spans[0][0] != 0:
        return f"first byte ({spans[0][0]}) must equal 0"
    for (_, end), (begin, _) in pairwise(spans):
        if begin != end:
            return f"begin ({begin}) must equal the end before it ({end})"
    return None
