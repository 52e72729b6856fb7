"""Boxes of tensors: parts with their places, and checks that boxes cover a tensor exactly."""

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
    """A part of a tensor.

    Attributes:
        offsets: First index of the part in each dimension of the whole tensor.
        sizes: Size of the part in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """Return the common part of this box and another one of the same tensor; None: empty."""
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(*self, *other, begins, strict=True)
        )
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor of the values of the box `outer`."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, size, first in zip(*self, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a tensor that one rank has, with its values.

    Attributes:
        local: Values of the box.
        shape: Shape of the whole tensor.
        offset: First index of the box in each dimension of the whole tensor.

    Raises:
        ValueError: If the part does not lie inside the tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a part that is not inside the whole tensor."""
        for begin, size, whole in zip(self.offset, self.local.shape, self.shape, strict=True):
            if begin + size > whole:
                raise ValueError(
                    f"offset {self.offset} + local {tuple(self.local.shape)} must be inside shape "
                    f"{self.shape}"
                )

    @property
    def box(self) -> Box:
        """Return the offsets and sizes of the part."""
        return Box(self.offset, tuple(self.local.shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the local part of a tensor: of a `DTensor` with any sharding, or the whole tensor.

        Raises:
            ValueError: If the local shape of a `DTensor` does not follow from its placements.
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
    """Return the reason why boxes do not contain every element of a tensor once; None if they do.

    If boxes are inside the tensor, do not overlap, and their volumes add up, there is no gap.
    Integers are Python's, so that no product overflows.

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
    """Return an error if boxes overlap, by a sweep along the longest dimension."""
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
    """Return the reason why spans (begin, end) do not follow each other from 0; None if they do."""
    if spans and spans[0][0] != 0:
        return f"first byte ({spans[0][0]}) must equal 0"
    for (_, end), (begin, _) in pairwise(spans):
        if begin != end:
            return f"begin ({begin}) must equal the end before it ({end})"
    return None
