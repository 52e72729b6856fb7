"""Which part of which of the reference's parameters a rank's parameter is.

Note [Whose values]. A DTensor says where it lies, and is believed. Of any other the first values
tell: a row that is, bit for bit, a row of a reference's parameter is that row, wherever a framework
has put it. So shards, fused and reordered matrices, experts stacked or apart, and other names need
no declaration, as long as both jobs start from the same weights.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_platform.testing.recording import parts_of
from hp_train.jobs.events import Box
from hp_train.jobs.names import Renaming
from hp_train.jobs.sketch import Digest, digest_of


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a local tensor, and what it is of the reference.

    Attributes:
        name: The reference's parameter.
        shape: Its shape.
        local: The part of the local tensor.
        box: The part of the reference's parameter.
        transposed: Whether rows here are columns there.
    """

    name: str
    shape: tuple[int, ...]
    local: Box
    box: Box
    transposed: bool = False

    def of(self, values: Tensor) -> Tensor:
        """Take the part of a local tensor, laid as the reference has it."""
        part = values[tuple(slice(*span) for span in self.local)]
        return part.mT if self.transposed else part

    def digest(self, values: Tensor) -> Digest:
        """Digest the part of a local tensor."""
        return digest_of(self.of(values), self.box)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def placed(tensor: Tensor) -> tuple[Tensor, list[tuple[Box, Box]], tuple[int, ...]]:
    """Say what of a tensor is here, as far as the tensor itself knows.

    Returns:
        The local values; boxes of them beside boxes of the whole; shape of the whole.
    """
    parts = parts_of(tensor.detach())
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    boxes = []
    for part in parts:
        spans = zip(part.offset, part.local.shape, strict=True)
        boxes.append((whole(part.local.shape), tuple((o, o + n) for o, n in spans)))
    return local, boxes, tuple(tensor.shape)


class Reference:
    """The first weights of the reference, to find a rank's in.

    Args:
        weights: Name -> whole tensor.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self._rows: dict[bytes, list[tuple[str, int]]] | None = None

    def find(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, list[Slice]], Renaming]:
        """Say what every parameter of a rank is.

        Args:
            parameters: Local name -> parameter, at its first values.

        Returns:
            Local name -> slices; a name that is not there could not be found. And how modules
            are called there.
        """
        found: dict[str, list[Slice]] = {}
        later: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            slices = self._by_content(name, parameter)
            if slices:
                found[name] = slices
            else:
                later[name] = parameter
        renaming = Renaming((name, slices[0].name) for name, slices in found.items())
        for name, parameter in later.items():
            if slices := self._by_name(name, renaming, parameter, found):
                found[name] = slices
        return found, renaming

    def _by_content(self, name: str, parameter: Tensor) -> list[Slice]:
        """Find a parameter whose values are like no other's."""
        local, boxes, shape = placed(parameter)
        if local.numel() == 0 or _is_constant(local):
            return []
        if name in self.weights and self._is_there(name, local, boxes, shape):
            return [Slice(name, shape, here, there) for here, there in boxes]
        if isinstance(parameter, DTensor):
            for other, theirs in self.weights.items():
                if tuple(theirs.shape) == shape and self._is_there(other, local, boxes, shape):
                    return [Slice(other, shape, here, there) for here, there in boxes]
            return []
        return self._by_rows(local) or self._by_columns(name, local)

    def _is_there(
        self, name: str, local: Tensor, boxes: list[tuple[Box, Box]], shape: tuple[int, ...]
    ) -> bool:
        theirs = self.weights[name]
        if tuple(theirs.shape) != shape:
            return False
        return all(
            torch.equal(_cut(local, here), _cut(theirs, there).to(local)) for here, there in boxes
        )

    def _by_rows(self, local: Tensor) -> list[Slice]:
        if local.ndim < 2:
            return []
        rows = self._all_rows()
        places = [rows.get(text, []) for text in _row_bytes(local)]
        if not all(len(place) == 1 for place in places):
            return []
        slices: list[Slice] = []
        lead = tuple(local.shape[:-1])
        for begin, end, (name, first) in _runs([place[0] for place in places]):
            shape = tuple(self.weights[name].shape)
            slices += _boxes(name, shape, lead, (begin, end), first)
        return slices

    def _by_columns(self, name: str, local: Tensor) -> list[Slice]:
        """Find a matrix whose columns are some of a reference's, that of its name first."""
        if local.ndim != 2:
            return []
        columns = _row_bytes(local.T)
        for other in [name] * (name in self.weights) + [n for n in self.weights if n != name]:
            theirs = self.weights[other]
            if theirs.ndim != 2 or theirs.shape[0] != local.shape[0]:
                continue
            index = {text: i for i, text in enumerate(_row_bytes(theirs.T.to(local.dtype)))}
            if all(text in index for text in columns):
                shape, rows = tuple(theirs.shape), (0, local.shape[0])
                places = [(other, index[text]) for text in columns]
                return [
                    Slice(other, shape, (rows, (b, e)), (rows, (at, at + e - b)))
                    for b, e, (_, at) in _runs(places)
                ]
        return []

    def _by_name(
        self,
        name: str,
        renaming: Renaming,
        parameter: Tensor,
        found: Mapping[str, list[Slice]],
    ) -> list[Slice]:
        """Find a parameter by what its module is called there, and where its weight lies."""
        other = renaming(name)
        if other not in self.weights:
            return []
        local, boxes, shape = placed(parameter)
        theirs = self.weights[other]
        if tuple(theirs.shape) == shape:
            return [Slice(other, shape, here, there) for here, there in boxes]
        weight = found.get(f"{name.rpartition('.')[0]}.weight", [])
        if local.ndim == theirs.ndim == 1 and weight:  # a bias lies as the rows of its matrix
            of = [s for s in weight if s.name.rpartition(".")[0] == other.rpartition(".")[0]]
            return [Slice(other, tuple(theirs.shape), (s.local[0],), (s.box[0],)) for s in of]
        return []

    def _all_rows(self) -> dict[bytes, list[tuple[str, int]]]:
        if self._rows is None:
            self._rows = defaultdict(list)
            for name, weight in self.weights.items():
                if weight.ndim >= 2:
                    for index, text in enumerate(_row_bytes(weight)):
                        self._rows[text].append((name, index))
        return self._rows


def _boxes(
    name: str, shape: tuple[int, ...], lead: tuple[int, ...], span: tuple[int, int], first: int
) -> Iterator[Slice]:
    """Cut a run of rows into boxes of both tensors.

    Args:
        name: The reference's parameter.
        shape: Its shape.
        lead: Sizes of the local tensor before the last dim.
        span: First and last + 1 of the rows here, counted over `lead`.
        first: First of the rows there, counted likewise.
    """
    width = (0, shape[-1])
    inner = min(lead[-1], shape[-2])
    begin, end = span
    while begin < end:
        there = first + begin - span[0]
        size = min(end - begin, inner, lead[-1] - begin % lead[-1], shape[-2] - there % shape[-2])
        yield Slice(
            name,
            shape,
            (*_at(begin, size, lead), width),
            (*_at(there, size, shape[:-1]), width),
        )
        begin += size


def _at(row: int, size: int, lead: Sequence[int]) -> Box:
    """Rows that follow each other in the innermost dim of `lead`, as a box."""
    outer: list[tuple[int, int]] = []
    rest = row // lead[-1]
    for length in reversed(lead[:-1]):
        outer.insert(0, (rest % length, rest % length + 1))
        rest //= length
    return (*outer, (row % lead[-1], row % lead[-1] + size))


def _runs(places: Sequence[tuple[str, int]]) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """Places that follow each other: first and last + 1 here, and the first there."""
    begin = 0
    for i in range(1, len(places) + 1):
        name, at = places[begin]
        if i == len(places) or places[i] != (name, at + i - begin):
            yield begin, i, (name, at)
            begin = i


def _row_bytes(values: Tensor) -> list[bytes]:
    rows = values.detach().reshape(-1, values.shape[-1]).contiguous().cpu()
    raw = rows.view(torch.uint8).numpy()
    return [row.tobytes() for row in raw]


def _cut(values: Tensor, box: Box) -> Tensor:
    return values[tuple(slice(*span) for span in box)]


def _is_constant(values: Tensor) -> bool:
    return bool((values == values.reshape(-1)[0]).all())
