"""Indices of a parameter that each rank has, and the numbers that two sets of indices share.

An index set is a `range` where its numbers have one step, and a tuple otherwise. Both are ordered:
the position of a number is its place in the local tensor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

Indices = range | tuple[int, ...]


def indices(numbers: Sequence[int]) -> Indices:
    """Return numbers as a range if they ascend by one step, and as a tuple otherwise."""
    if len(numbers) == 0:
        return range(0)
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step > 0:
        found = range(numbers[0], numbers[0] + step * len(numbers), step)
        if all(map(int.__eq__, found, numbers)):
            return found
    return tuple(numbers)


@cache
def meet(held: Indices, wanted: Indices) -> tuple[Indices, Indices]:
    """Return the positions in `held` and in `wanted` of the numbers that both have.

    Both are in the order of `held`.
    """
    if isinstance(held, range) and isinstance(wanted, range) and held.step == wanted.step == 1:
        first, end = max(held.start, wanted.start), min(held.stop, wanted.stop)
        both = range(first, max(first, end))
        return _shifted(both, held.start), _shifted(both, wanted.start)
    places = {number: place for place, number in enumerate(wanted)}
    common = [(place, places[number]) for place, number in enumerate(held) if number in places]
    return indices([here for here, _ in common]), indices([there for _, there in common])


def _shifted(numbers: range, start: int) -> range:
    return range(numbers.start - start, numbers.stop - start)


@dataclass(frozen=True, slots=True)
class Layout:
    """The elements of a parameter that each rank has.

    The parts of any two ranks must be the same or have no element in common.

    Attributes:
        shape: Shape of the whole parameter.
        ranks: Global ranks that have a part of it, ascending.
        held: For each of these ranks and for each dim, the indices in the whole that the rank has.
            A local element is there for every combination of them.

    Raises:
        ValueError: If the different parts together are not as many elements as the whole.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    held: tuple[tuple[Indices, ...], ...]

    def __post_init__(self) -> None:
        parts = sum(math.prod(map(len, part)) for part in {*self.held})
        if parts != math.prod(self.shape) or len(self.held) != len(self.ranks):
            raise ValueError(
                f"elements of all ranks' different parts ({parts}) must equal those of the whole "
                f"({math.prod(self.shape)} of shape {self.shape})"
            )

    @classmethod
    def whole(cls, shape: Sequence[int], ranks: Iterable[int]) -> "Layout":
        """Describe a parameter that each of some ranks has as a whole."""
        everyone = tuple(sorted(ranks))
        all_of_it = tuple(map(range, shape))
        return cls(tuple(shape), everyone, (all_of_it,) * len(everyone))

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Describe a DTensor, or a plain tensor, which nobody else has.

        Raises:
            ValueError: If a placement is a sum of parts, or the local shape is not that of the
                placements.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor.shape, [rank])
        mesh = tensor.device_mesh
        for placement in tensor.placements:
            if placement.is_partial():
                raise ValueError(f"placement ({placement}) of a parameter must not be partial")
        ranks: list[int] = mesh.mesh.flatten().tolist()
        sizes = tuple(mesh.mesh.shape)
        parts: Mapping[int, tuple[Indices, ...]] = {
            rank: _part(tuple(tensor.shape), tuple(tensor.placements), sizes, position)
            for position, rank in enumerate(ranks)
        }
        here = tuple(map(len, parts[rank])) if rank in parts else None
        is_here = tuple(tensor.to_local().shape)
        if here not in {None, is_here}:
            raise ValueError(
                f"local shape {is_here} of {tuple(tensor.shape)} must equal {here}, as placements "
                f"{tensor.placements} say"
            )
        everyone = tuple(sorted(ranks))
        return cls(tuple(tensor.shape), everyone, tuple(parts[rank] for rank in everyone))


def _part(
    shape: tuple[int, ...], placements: Sequence[Placement], sizes: Sequence[int], position: int
) -> tuple[Indices, ...]:
    """Return the indices of the rank at a position of the flattened mesh."""
    part: list[Indices] = [range(size) for size in shape]
    for axis, placement in enumerate(placements):
        dim: int | None = getattr(placement, "dim", None)  # none where ranks have copies
        if dim is not None:
            coordinate = position // math.prod(sizes[axis + 1 :]) % sizes[axis]
            # More than 1 where FSDP cuts what tensor parallelism, a later axis, has cut before.
            factor: int = getattr(placement, "split_factor", 1)
            part[dim] = _cut(part[dim], factor, sizes[axis], coordinate)
    return tuple(part)


@cache
def _cut(whole: Indices, factor: int, ranks: int, coordinate: int) -> Indices:
    """Return a share of each of `factor` chunks, in chunks as those of `torch.chunk`."""
    chunks = [_chunk(whole, factor, place) for place in range(factor)]
    mine = [_chunk(each, ranks, coordinate) for each in chunks]
    return mine[0] if factor == 1 else indices(tuple(chain.from_iterable(mine)))


def _chunk(whole: Indices, count: int, place: int) -> Indices:
    size = -(-len(whole) // count)
    return whole[place * size : (place + 1) * size]
