"""Runs of values of the reference's parameters, found in a flat tensor by the values alone."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_verify.recording.slices import Slice, parts_of_run

_WINDOW = 8
"""Values that are looked up together; shorter runs are not told apart."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MOST = 64
"""Places with the same window that are tried, of which the longest run counts."""

_Found = tuple[int, int, int]
"""First and last + 1 value here, and the first of all of the reference's values."""


class Runs:
    """All values of a reference, end to end, to find a flat tensor's in.

    Args:
        weights: Name -> whole tensor, in the model's order.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names = list(weights)
        self._shapes = [tuple(weights[name].shape) for name in self._names]
        self._starts = [0, *itertools.accumulate(map(math.prod, self._shapes))]
        self._weights = [weights[name].detach().reshape(-1).cpu() for name in self._names]
        self._made: dict[torch.dtype, _Values] = {}

    def find(self, values: Tensor) -> list[Slice]:
        """Say what parts of a flat tensor are; what is not found is left out.

        A run of constants is what lies between its neighbours in the reference, if that is as long
        and has these values.

        Args:
            values: `[N]`.
        """
        if not self._names:
            return []
        here, there = _bits(values.detach().cpu()), self._in(values.dtype)
        found = list(self._longest(here, there))
        found = sorted([*found, *self._between(found, here, there.bits)])
        slices: list[Slice] = []
        for begin, end, first in found:
            for part, start, size in self._parameters(first, end - begin):
                at = begin + self._starts[part] + start - first
                slices += parts_of_run(self._names[part], self._shapes[part], start, size, at)
        return slices

    def _in(self, dtype: torch.dtype) -> "_Values":
        """Return all values rounded to a dtype."""
        if dtype not in self._made:
            weights = [weight.to(dtype) for weight in self._weights]
            self._made[dtype] = _Values(_bits(torch.cat(weights)))
        return self._made[dtype]

    def _longest(self, here: NDArray[np.int64], there: "_Values") -> Iterator[_Found]:
        """Yield runs within parameters that are found, from the first value on."""
        begin, stops = 0, np.array(self._starts[1:])
        hashes = _hashes(here)
        differs = here[1:] != here[:-1]
        while begin < len(hashes):
            if not differs[begin : begin + _WINDOW - 1].any():
                begin += 1
                continue
            size, first = 0, -1
            for place in there.places(hashes[begin]):
                stop = int(stops[np.searchsorted(stops, place, side="right")])
                length = _common(here[begin:], there.bits[place:stop])
                if length > size:
                    size, first = length, place
            if size >= _WINDOW:
                yield begin, begin + size, first
            begin += max(size, 1)

    def _between(
        self, found: list[_Found], here: NDArray[np.int64], there: NDArray[np.int64]
    ) -> Iterator[_Found]:
        """Yield whole parameters that are found by what is before and after them."""
        for before, after in zip([None, *found], [*found, None], strict=True):
            begin = 0 if before is None else before[1]
            end = len(here) if after is None else after[0]
            for guess in self._guesses(before, after, end - begin):
                if np.array_equal(here[begin:end], there[guess : guess + end - begin]):
                    yield begin, end, guess
                    break

    def _guesses(self, before: _Found | None, after: _Found | None, size: int) -> Iterator[int]:
        """Yield where a gap may go on from what is before it, and come to what is after it.

        Parameters may be laid in the model's order or against it, one by one.
        """
        upwards, downwards = [], []
        if before is not None:
            upwards.append(before[2] + before[1] - before[0])
            downwards.append(before[2] - size)
        if after is not None:
            upwards.append(after[2] - size)
            downwards.append(after[2] + after[1] - after[0])
        for guesses in (upwards, downwards) if size else ():
            guess = guesses[0] if len(set(guesses)) == 1 else -1
            if guess in self._starts and guess + size in self._starts:
                parts = self._starts.index(guess + size) - self._starts.index(guess)
                if parts == 1 or guesses is upwards:
                    yield guess

    def _parameters(self, first: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Cut a run of all values into those of parameters: which, its first value, how many."""
        while size > 0:
            part = bisect.bisect_right(self._starts, first) - 1
            taken = min(size, self._starts[part + 1] - first)
            yield part, first - self._starts[part], taken
            first, size = first + taken, size - taken


class _Values:
    """Values of one dtype by their bits, with an index of windows of them."""

    def __init__(self, bits: NDArray[np.int64]) -> None:
        self.bits, hashes = bits, _hashes(bits)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def places(self, window: np.uint64) -> list[int]:
        first = int(np.searchsorted(self._sorted, window))
        last = int(np.searchsorted(self._sorted, window, side="right"))
        return [int(place) for place in self._order[first : min(last, first + _MOST)]]


def _hashes(bits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each window of values."""
    count = len(bits) - _WINDOW + 1
    hashes = np.zeros(max(count, 0), dtype=np.uint64)
    for i in range(_WINDOW if count > 0 else 0):
        hashes = hashes * _FACTOR + bits[i : i + count].astype(np.uint64)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _bits(values: Tensor) -> NDArray[np.int64]:
    """Return the bits of values as whole numbers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits: NDArray[np.int64] = values.contiguous().view(kinds[values.element_size()]).numpy()
    return bits.astype(np.int64)


def _common(here: NDArray[np.int64], there: NDArray[np.int64]) -> int:
    """Return how many values from the first on are the same."""
    size = min(len(here), len(there))
    differs = here[:size] != there[:size]
    return int(differs.argmax()) if differs.any() else size
