"""Boxes of tensors: what part of which tensor, and whether boxes cover a tensor exactly."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, gt
from typing import NamedTuple, Self

from torch import Tensor
from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A part of a tensor, one number of each per dimension.

    Attributes:
        offsets: Where it begins in the whole tensor.
        sizes: Size of the part in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """Return the box that both have, which lies in the same tensor; None: there is none."""
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(*self, *other, begins, strict=True)
        )
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that has `outer` alone."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, size, first in zip(*self, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Box of a tensor that one rank has, with its values.

    Attributes:
        local: The values that are here.
        shape: Shape of the whole tensor.
        offset: Where the part begins in it.

    Raises:
        ValueError: If the part does not lie inside the tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a part that is not inside the whole."""
        for begin, size, whole in zip(self.offset, self.local.shape, self.shape, strict=True):
            if begin + size > whole:
                raise ValueError(
                    f"offset {self.offset} + local {tuple(self.local.shape)} must be inside shape "
                    f"{self.shape}"
                )

    @property
    def box(self) -> Box:
        """Offsets and sizes of the part."""
        return Box(self.offset, tuple(self.local.shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Take what is here of a tensor: of a `DTensor` with any sharding its part, else all of it.

        Raises:
            ValueError: If the part of a `DTensor` is not what its placements give.
        """
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
        [chunk] = tensor.__create_chunk_list__()
        local = tensor.to_local().detach()
        if local.shape != chunk.sizes:
            raise ValueError(
                f"shape of the local part ({list(local.shape)}) must be what its placements give"
            )
        return cls(local, tuple(tensor.shape), tuple(chunk.offsets))


def coverage_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why `boxes` do not have every element of a tensor once; None if they do.

    Volumes that add up, boxes inside the tensor and no overlap leave no room for a hole. Integers
    are Python's, so that no product overflows.

    Args:
        shape: Shape of the tensor.
        boxes: Non-empty boxes; none for a tensor without elements.
    """
    volume = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"dimensions of a chunk ({len(sizes)}) must equal those of shape {list(shape)}"
        if any(map(gt, map(add, offsets, sizes), shape)):
            return f"chunk at {list(offsets)} of {list(sizes)} must lie inside shape {list(shape)}"
        if 0 in sizes:
            return f"chunk at {list(offsets)} of {list(sizes)} must have elements"
        volume += math.prod(sizes)
    if volume != math.prod(shape):
        return f"elements of all chunks ({volume}) must equal those of shape {list(shape)}"
    return _overlap_error(shape, boxes) if len(boxes) > 1 else None


def _overlap_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Sweep along the longest dimension, so that few boxes are compared with each other."""
    axis = max(range(len(shape)), key=lambda dim: shape[dim])
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    active: list[tuple[int, int]] = []  # (end, position in `ordered`), by end
    for position, box in enumerate(ordered):
        start = box[0][axis]
        del active[: bisect_right(active, (start, len(ordered)))]
        for _, other in active:
            if Box.overlap(ordered[other], box):
                return f"chunks at {list(ordered[other][0])} and {list(box[0])} must not overlap"
        insort(active, (start + box[1][axis], position))
    return None


def gap_error(spans: Sequence[tuple[int, int]]) -> str | None:
    """Say why spans (begin, end), in this order, do not follow each other from 0; None if so."""
    if spans and spans[0][0] != 0:
        return f"first byte ({spans[0][0]}) must equal 0"
    for (_, end), (begin, _) in pairwise(spans):
        if begin != end:
            return f"begin ({begin}) must equal the end before it ({end})"
    return None
