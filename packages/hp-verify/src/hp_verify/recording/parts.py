"""Search for the part of the reference's parameters that a rank's parameter holds.

A DTensor says where it lies, and is believed. Of any other the first values tell: a row that is,
bit for bit, a row of a reference's parameter is that row, wherever a framework has put it. So
shards, fused and reordered matrices, experts stacked or apart, and other names need no declaration,
as long as both jobs start from the same weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hp_base.runs import runs_in
from hp_verify.recording.digests import digests_of_rows
from hp_verify.recording.events import Box
from hp_verify.recording.names import Renaming
from hp_verify.recording.runs import Runs
from hp_verify.recording.slices import Flat, Slice, index_of, placed, spans_of
from hp_verify.recording.trees import is_dtensor
from hp_verify.recording.values import Part, parts_of, read_parts, whole_of, write_parts

_FIRST = "first weights"


def keep_weights(folder: Path, rank: int, root: int, weights: Mapping[str, Tensor | Flat]) -> None:
    """Write a rank's parts of the first weights.

    Args:
        folder: The same for all ranks, and for all root modules of a rank.
        rank: Rank of this process.
        root: Number of its root module, in the order in which they were called.
        weights: Name -> weight.
    """
    place = folder / _FIRST
    place.mkdir(exist_ok=True)
    parts = ((_FIRST, name, part) for name, each in weights.items() for part in parts_of(each))
    write_parts(place / f"root-{root:04d}-{rank:05d}.json", parts)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Put together what `keep_weights` of all ranks has written; name -> whole weight.

    Of ranks that have the same part of a weight, the first is read.
    """
    found: dict[str, dict[Box, Part]] = defaultdict(dict)
    for index in sorted((folder / _FIRST).glob("root-*.json")):
        for _, name, part in read_parts(index):
            found[name].setdefault(part.box, part)
    return {name: whole_of([*parts.values()]).values for name, parts in found.items()}


@torch.no_grad()
def take_weights(
    tensors: Iterable[tuple[Tensor, Sequence[Slice]]], weights: Mapping[str, Tensor]
) -> None:
    """Give tensors the reference's values.

    Args:
        tensors: Each, changed in place, with its slices of the reference.
        weights: Name -> whole weight of the reference.
    """
    for tensor, slices in tensors:
        local, _, _ = placed(tensor)
        for part in slices:
            part.of(local).copy_(weights[part.name][index_of(part.box)])


class Reference:
    """The first weights of the reference, to find a rank's in.

    Args:
        read: Reads them: name -> whole tensor.
        are_given: Whether the job is given them, so that its own first values may be any: these
            tell only if all are found. On a CPU each rank draws its part of a DTensor from the
            same numbers, so that some are by chance those of another parameter.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, Tensor]], *, are_given: bool = False
    ) -> None:
        self._read, self._are_given = read, are_given

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Return whole tensors by name, read when they are asked for."""
        return self._read()

    @cached_property
    def _rows(self) -> dict[bytes, list[tuple[int, int]]]:
        """Find rows by their bits: numbers of the weights that have each, and its index there."""
        rows: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for number, weight in enumerate(self.weights.values()):
            for index, text in enumerate(_row_names(weight) if weight.ndim >= 2 else ()):
                rows[text].append((number, index))
        return rows

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self.weights)

    def forget(self) -> None:
        """Free what was read and made of it, until something is to be found again."""
        for name in ("weights", "_rows", "_runs"):
            vars(self).pop(name, None)

    def find(
        self,
        parameters: Mapping[str, Tensor | Flat],
        declared: Mapping[str, list[Slice]] | None = None,
    ) -> tuple[dict[str, list[Slice]], Renaming]:
        """Say what every parameter of a rank is.

        Args:
            parameters: Local name -> parameter, at its first values.
            declared: Slices of other parameters that are known already.

        Returns:
            Local name -> slices; a name that is not there could not be found. And how modules
            are called there. Where neither values nor names tell, shapes do, in the order in which
            the models list their parameters.
        """
        here = {name: self._by_content(name, p) for name, p in parameters.items()}
        if self._are_given and any(
            not here[n] and not _is_constant(p) for n, p in parameters.items()
        ):
            here |= {n: [] for n, p in parameters.items() if self._is_named(n, p)}
        found = {**(declared or {}), **{name: slices for name, slices in here.items() if slices}}
        later = {name: p for name, p in parameters.items() if not here[name]}
        renaming = Renaming((name, slices[0].name) for name, slices in found.items())
        for name, parameter in later.items():
            if slices := self._by_name(name, renaming, parameter, found):
                found[name] = slices
        missing = {n: p for n, p in later.items() if n not in found}
        pairs = self._by_order(missing, {part.name for some in found.values() for part in some})
        for name, other in pairs:
            _, parts, _ = placed(missing[name])
            found[name] = [replace(part, name=other) for part in parts]
        if pairs:
            renaming = Renaming((name, slices[0].name) for name, slices in found.items())
        return found, renaming

    def _by_order(
        self, missing: Mapping[str, Tensor | Flat], taken: set[str]
    ) -> list[tuple[str, str]]:
        """Pair parameters left here with those left there, where equally many have a shape."""
        mine: dict[tuple[int, ...], list[str]] = defaultdict(list)
        theirs: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in missing.items():
            if name not in self.weights:
                mine[tuple(parameter.shape)].append(name)
        for name, weight in self.weights.items():
            if name not in taken:
                theirs[tuple(weight.shape)].append(name)
        return [
            pair
            for shape, names in mine.items()
            if len(names) == len(theirs[shape])
            for pair in zip(names, theirs[shape], strict=True)
        ]

    def _by_content(self, name: str, parameter: Tensor | Flat) -> list[Slice]:
        """Find a parameter whose values are like no other's."""
        if _is_constant(parameter):
            return []
        local, parts, shape = placed(parameter)
        if name in self.weights and self._is_there(name, local, parts, shape):
            return [replace(part, name=name) for part in parts]
        if isinstance(parameter, Flat) or is_dtensor(parameter):
            if found := self._by_shape(local, parts):
                return found
            if is_dtensor(parameter):
                return []
        if local.ndim == 1:
            return self._by_shape(local, parts) or self.runs(local)
        return self._by_rows(local) or self._by_columns(name, local)

    def _is_named(self, name: str, parameter: Tensor | Flat) -> bool:
        """Tell whether the reference has a parameter of this name and shape."""
        return name in self.weights and self.weights[name].shape == tuple(parameter.shape)

    def _by_shape(self, local: Tensor, parts: Sequence[Slice]) -> list[Slice]:
        """Find a parameter among those of its shape."""
        shape = parts[0].shape if parts else ()
        for other in self.weights if parts else ():
            if self._is_there(other, local, parts, shape):
                return [replace(part, name=other) for part in parts]
        return []

    def runs(self, values: Tensor) -> list[Slice]:
        """Say what parts of a flat tensor are; what is not found is left out.

        Args:
            values: First values of some parameters, end to end, `[N]`.
        """
        return self._runs.find(values)

    def _is_there(
        self, name: str, local: Tensor, parts: Sequence[Slice], shape: tuple[int, ...]
    ) -> bool:
        theirs = self.weights[name]
        if tuple(theirs.shape) != shape:
            return False
        return all(torch.equal(p.of(local), theirs[index_of(p.box)].to(local)) for p in parts)

    def _by_rows(self, local: Tensor) -> list[Slice]:
        if local.ndim < 2:
            return []
        places = [self._rows.get(text, []) for text in _row_names(local)]
        if not all(len(place) == 1 for place in places):
            return []
        slices: list[Slice] = []
        names, lead = list(self.weights), tuple(local.shape[:-1])
        numbers, indices = zip(*(place[0] for place in places), strict=True)
        for number, first, run in runs_in(numbers, indices):
            shape = tuple(self.weights[names[number]].shape)
            slices += _boxes(names[number], shape, lead, (run.start, run.stop), first)
        return slices

    def _by_columns(self, name: str, local: Tensor) -> list[Slice]:
        """Find a matrix whose columns are some of a reference's, that of its name first."""
        if local.ndim != 2:
            return []
        columns = _row_names(local.T)
        for other in [name] * (name in self.weights) + [n for n in self.weights if n != name]:
            theirs = self.weights[other]
            if theirs.ndim != 2 or theirs.shape[0] != local.shape[0]:
                continue
            index = {text: i for i, text in enumerate(_row_names(theirs.T.to(local.dtype)))}
            if all(text in index for text in columns):
                shape, rows = tuple(theirs.shape), (0, local.shape[0])
                return [
                    Slice(other, shape, (rows, here), (rows, there))
                    for here, there in spans_of([index[text] for text in columns])
                ]
        return []

    def _by_name(
        self,
        name: str,
        renaming: Renaming,
        parameter: Tensor | Flat,
        found: Mapping[str, list[Slice]],
    ) -> list[Slice]:
        """Find a parameter by what its module is called there, and where its weight lies."""
        other = renaming(name)
        if other not in self.weights:
            return []
        local, parts, shape = placed(parameter)
        theirs = self.weights[other]
        if tuple(theirs.shape) == shape:
            return [replace(part, name=other) for part in parts]
        weight = found.get(f"{name.rpartition('.')[0]}.weight", [])
        if (
            not isinstance(parameter, Flat) and local.ndim == theirs.ndim == 1 and weight
        ):  # a bias lies as the rows of its matrix
            of = [s for s in weight if s.name.rpartition(".")[0] == other.rpartition(".")[0]]
            return [Slice(other, tuple(theirs.shape), (s.local[0],), (s.box[0],)) for s in of]
        return []


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
    """Return consecutive rows in the innermost dim of `lead` as a box."""
    *outer, first = map(int, torch.unravel_index(torch.tensor(row), tuple(lead)))
    return (*((index, index + 1) for index in outer), (first, first + size))


def _is_constant(parameter: Tensor | Flat) -> bool:
    """Tell whether all values here are one number, or none is here."""
    values = placed(parameter)[0].reshape(-1)
    return bool((values == values[:1]).all())


def _row_names(values: Tensor) -> list[bytes]:
    """Name each row by its bits."""
    return digests_of_rows(values.reshape(-1, values.shape[-1]), num_bytes=16)
