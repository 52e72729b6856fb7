"""Find values of one checkpoint in another under any name: row by row, bit for bit.

So fused and reordered matrices, stacked experts, transposes, tied tables and padded vocabularies
need no declaration. Of each row a digest is held; tensors are read one after the other.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_verify.files.made import Made
from hp_verify.recording.samples import hashes

_LEAST = 0.5
"""Part of the rows that must be found for a tensor to be said to be made of others."""

_Place = tuple[str, int]
"""A tensor, and a row of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Tensors of the other checkpoint that a tensor is made of.

    Attributes:
        ours: Expected values, in the tensor's shape; padding is copied from the tensor.
        parts: Names of the tensors behind it.
        how: Description for people.
    """

    ours: Tensor
    parts: tuple[str, ...]
    how: str


class Rows:
    """Rows of all tensors of a checkpoint, to find others in.

    Args:
        tensors: They are read once, one after the other.
        dtype: Dtype that their values are cast to before they are compared.
    """

    def __init__(self, tensors: Mapping[str, Made], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._counts: dict[str, int] = {}
        for name, made in tensors.items():
            if made.shape and 0 not in made.shape:
                rows = _rows(made.read().to(dtype))
                self._counts[name] = len(rows)
                for index, key in enumerate(hashes(rows)):
                    self._places[key].append((name, index))

    def find(self, values: Tensor) -> Found | None:
        """Say what a tensor is made of; None: most of its rows are nobody's.

        Args:
            values: A tensor of any shape, of the dtype of this index.
        """
        best = self._laid(values)
        if best is None and values.ndim >= 2:
            turned = self._laid(values.mT)
            if turned is not None:
                return Found(turned.ours.mT, turned.parts, f"{turned.how}, transposed")
        return best

    def _laid(self, values: Tensor) -> Found | None:
        if not values.ndim or values.numel() == 0:
            return None
        rows = _rows(values)
        keys = hashes(rows)
        places = self._chosen(keys)
        end = len(places)
        while end and places[end - 1] is None and keys[end - 1] == keys[-1]:
            end -= 1  # rows that are all the same, after the last that is somebody's
        num_padded = len(places) - end
        known = sum(place is not None for place in places[:end])
        if known <= _LEAST * end:
            return None
        self._fill(places, end)
        ours = self._read(rows, places, end)
        names = Counter(place[0] for place in places[:end] if place is not None)
        how = " and ".join(list(names)[:4]) + (f" and {len(names) - 4} more" * (len(names) > 4))
        padded = f", padded by {num_padded} rows" if num_padded else ""
        return Found(ours.reshape(values.shape), tuple(names), f"rows of {how}{padded}")

    def _chosen(self, keys: tuple[str, ...]) -> list[_Place | None]:
        """Choose for each row the place right after that of the row before, else the first."""
        chosen: list[_Place | None] = []
        for key in keys:
            there = self._places.get(key, [])
            before = chosen[-1] if chosen else None
            after = (before[0], before[1] + 1) if before is not None else None
            chosen.append(after if after in there else next(iter(there), None))
        return chosen

    def _fill(self, places: list[_Place | None], end: int) -> None:
        """Take rows that are nobody's for those that neighbours of theirs say they should be."""
        for index in range(end):
            before = places[index - 1] if index else None
            if places[index] is None and before and before[1] + 1 < self._counts[before[0]]:
                places[index] = before[0], before[1] + 1
        for index in reversed(range(end - 1)):
            after = places[index + 1]
            if places[index] is None and after is not None and after[1]:
                places[index] = after[0], after[1] - 1

    def _read(self, rows: Tensor, places: list[_Place | None], end: int) -> Tensor:
        ours = torch.full_like(rows, torch.nan) if rows.is_floating_point() else ~rows
        ours[end:] = rows[end:]
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, place in enumerate(places[:end]):
            if place is not None:
                wanted[place[0]].append((index, place[1]))
        for name, pairs in wanted.items():
            here, there = (torch.tensor(column) for column in zip(*pairs, strict=True))
            theirs = _rows(self._tensors[name].read())[there]
            if theirs.shape[1] == rows.shape[1]:
                ours[here] = theirs.to(self._dtype)
        return ours


def _rows(values: Tensor) -> Tensor:
    """Return a tensor as rows: `[N, last dim]`; a vector is one row."""
    return values.reshape(-1, values.shape[-1])
