"""Compare the tensors of two runs by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between a tensor and the expected tensor.

    Attributes:
        name: Name of the tensor in both runs.
        error: max|a - b| / max|b|; infinite if the tensors cannot be compared.
        note: Reason why the tensors cannot be compared, or their dtypes if those differ; else
            empty.
    """

    name: str
    error: float
    note: str = ""

    @property
    def is_same(self) -> bool:
        """Tell whether every value is the same, in the same dtype."""
        return self.error == 0.0 and not self.note


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two runs, the largest first. `str()` is a table.

    Attributes:
        differences: Difference of each name in either run.
        bound: Largest error that counts as equal.
    """

    differences: tuple[Difference, ...]
    bound: float

    @property
    def ok(self) -> bool:
        """Tell whether every error is within the bound."""
        return all(d.error <= self.bound for d in self.differences)

    def __str__(self) -> str:
        width = max((len(d.name) for d in self.differences), default=0)
        lines = [
            f"{'ok  ' if d.error <= self.bound else 'FAIL'}  {d.name:<{width}}  {d.error:9.3e}"
            f"  {d.note}".rstrip()
            for d in self.differences
        ]
        failed = sum(d.error > self.bound for d in self.differences)
        lines.append(f"{failed} of {len(self.differences)} exceed {self.bound:g}")
        return "\n".join(lines)


def compare(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, bound: float = 0.0
) -> Comparison:
    """Compare tensors by name; a missing name, another shape and NaN all fail.

    Args:
        actual: Tensors of a run.
        expected: Expected tensors; errors are relative to them.
        bound: Largest error that counts as equal; 0: all values must be the same.
    """
    names = dict.fromkeys([*expected, *actual])
    differences = [_difference(name, actual.get(name), expected.get(name)) for name in names]
    differences.sort(key=lambda d: -d.error)
    return Comparison(tuple(differences), bound)


def _difference(name: str, actual: Tensor | None, expected: Tensor | None) -> Difference:
    if actual is None or expected is None:
        where = "actual" if actual is None else "expected"
        return Difference(name, math.inf, f"missing in {where}")
    if actual.shape != expected.shape:
        shapes = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return Difference(name, math.inf, shapes)
    note = "" if actual.dtype == expected.dtype else f"{actual.dtype} instead of {expected.dtype}"
    return Difference(name, _error(actual, expected), note)


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.numel() == 0:
        return 0.0
    a = actual.detach().cpu().to(torch.float64)
    b = expected.detach().cpu().to(torch.float64)
    if torch.equal(a, b):
        return 0.0
    distance = (a - b).abs().max().item()
    scale = b.abs().max().item()
    error = math.inf if scale == 0 else distance / scale
    return math.inf if math.isnan(error) else error
