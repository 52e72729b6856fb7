"""Parts of tensors: boxes, and runs of values in flat buffers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hp_base.runs import runs_of
from hp_verify.recording.events import Box
from hp_verify.recording.trees import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a local tensor, and what it is of the reference.

    Attributes:
        name: The reference's parameter.
        shape: Shape of the parameter.
        local: The part of the local tensor.
        box: The part of the reference's parameter.
        laid: First value of a run of the local tensor's values, and the shape that `local` is a
            part of when they are laid like that; None: `local` is a part of the tensor as it is.
    """

    name: str
    shape: tuple[int, ...]
    local: Box
    box: Box
    laid: tuple[int, tuple[int, ...]] | None = None

    def of(self, values: Tensor) -> Tensor:
        """Take the part of a local tensor, laid as the reference has it."""
        if self.laid is not None:
            first, shape = self.laid
            values = values.reshape(-1)[first : first + math.prod(shape)].view(shape)
        part = values[index_of(self.local)]
        # A dim of one index may be more on either side: an expert alone and in a stack.
        return part.reshape(sizes_of(self.box))

    def moved(self, by: int) -> "Slice":
        """Return this part of a run that begins `by` values later."""
        assert self.laid is not None
        first, shape = self.laid
        return replace(self, laid=(first + by, shape))


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a parameter's values in a flat tensor.

    Attributes:
        name: The parameter, as its model calls it.
        shape: Shape of the parameter.
        first: The first of its values, in row-major order.
        size: Number of values.
        at: Index of the first value in the flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    size: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Values of a parameter that is not there as such.

    Attributes:
        values: Some of its values, `[size]`.
        shape: Shape of the parameter.
        first: The first of them, in row-major order.
    """

    values: Tensor
    shape: tuple[int, ...]
    first: int


def dense(values: Tensor) -> Tensor:
    """Return a sparse tensor as a dense one, any other as it is."""
    return values if values.layout == torch.strided else values.to_dense()


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def index_of(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(*span) for span in box)


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - begin for begin, end in box)


def placed(tensor: Tensor | Flat) -> tuple[Tensor, list[Slice], tuple[int, ...]]:
    """Say what of a tensor is here, as far as the tensor itself knows.

    Returns:
        The local values; parts of them, without a name; shape of the whole.
    """
    if isinstance(tensor, Flat):
        shape, size = tensor.shape, tensor.values.numel()
        parts = list(parts_of_run("", shape, tensor.first, size))
        return tensor.values.detach(), parts, shape
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return tensor.detach(), [Slice("", shape, whole(shape), whole(shape))], shape
    if any(placement.is_partial() for placement in tensor.placements):
        return placed(tensor.full_tensor().detach())
    local = tensor.to_local().detach()
    if not local.numel():
        return local, [], shape
    spans = [spans_of(places.tolist()) for places in _indices(tensor)]
    pairs = [tuple(zip(*some, strict=True)) or ((), ()) for some in product(*spans)]
    return local, [Slice("", shape, here, there) for here, there in pairs], shape


def _indices(tensor: "DTensor") -> list[Tensor]:
    """Return the local indices of the whole tensor for each dim, in the local order.

    A placement cuts what those before it have left. One that is strided, as of fused matrices, has
    a `split_factor`: so many parts, of each of which a rank has its own.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    where = tensor.device_mesh.get_coordinate() or ()
    for axis, (placement, rank) in enumerate(zip(tensor.placements, where, strict=True)):
        dim = getattr(placement, "dim", None)
        if dim is None:  # all of it is here
            continue
        size = tensor.device_mesh.size(axis)
        parts = indices[dim].chunk(getattr(placement, "split_factor", 1))
        mine = [part.chunk(size)[rank] for part in parts if rank < len(part.chunk(size))]
        indices[dim] = torch.cat(mine) if mine else indices[dim][:0]
    return indices


def spans_of(places: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return runs of consecutive indices: span here, span there."""
    return [((b, e), (places[b], places[b] + e - b)) for b, e in runs_of(places)]


def all_of(name: str, tensor: Tensor | Flat) -> list[Slice]:
    """Return what a tensor is of the parameter that it is by its name."""
    _, parts, _ = placed(tensor)
    return [replace(part, name=name) for part in parts]


def parts_of_run(
    name: str, shape: tuple[int, ...], first: int, size: int, at: int = 0
) -> Iterator[Slice]:
    """Say which boxes of a parameter a run of its values is.

    FSDP1, ZeRO and Megatron's distributed optimizer lay parameters end to end and cut the row at
    any value. A run of values in row-major order is a few boxes of the parameter: the rest of a
    row, whole rows, the beginning of the next, in each dim.

    Args:
        name: The parameter.
        shape: Shape of the parameter.
        first: The first of its values, in row-major order.
        size: Number of values.
        at: Index of the first value in the flat tensor.
    """
    return composed(
        [Slice(name, shape, whole(shape), whole(shape))], Run(name, shape, first, size, at)
    )


def composed(slices: Sequence[Slice], run: Run) -> Iterator[Slice]:
    """Say what a run of a parameter's values is of the reference.

    Args:
        slices: What the parameter, which is here as a tensor of `run.shape`, is of it.
        run: The run; what is yielded are parts of the flat tensor that it is in.
    """
    for begin, box in _boxes(run.first, run.first + run.size, run.shape):
        for part in slices:
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part.local, strict=True)
            )
            if all(end > start for start, end in common):
                inside = tuple(
                    (start - origin, end - origin)
                    for (start, end), (origin, _) in zip(common, box, strict=True)
                )
                laid = run.at + begin - run.first, sizes_of(box)
                yield Slice(part.name, part.shape, inside, _there(common, part), laid)


def _there(common: Box, part: Slice) -> Box:
    """Return where a part of a slice is in the reference's parameter.

    Dims of one index may be more here or there: an expert alone and in a stack.
    """
    here = [dim for dim, (a, b) in enumerate(part.local) if b - a != 1]
    there = [dim for dim, (a, b) in enumerate(part.box) if b - a != 1]
    spans = list(part.box)
    for mine, theirs in zip(here, there, strict=True):
        shift = part.box[theirs][0] - part.local[mine][0]
        spans[theirs] = common[mine][0] + shift, common[mine][1] + shift
    return tuple(spans)


def _boxes(begin: int, end: int, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Cut a run of values into boxes; with each the index of its first value."""
    if not shape:
        if end > begin:
            yield begin, ()
        return
    inner = math.prod(shape[1:])
    while begin < end:
        row, inside = divmod(begin, inner)
        if inside or end - begin < inner:
            until = min(end, (row + 1) * inner)
            for first, box in _boxes(inside, until - row * inner, shape[1:]):
                yield row * inner + first, ((row, row + 1), *box)
            begin = until
        else:
            last = end // inner
            yield begin, ((row, last), *whole(shape[1:]))
            begin = last * inner
