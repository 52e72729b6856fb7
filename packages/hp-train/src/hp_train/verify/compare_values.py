"""Two recordings of values side by side, step by step and name by name."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from hp_verify.comparing.findings import Difference
from hp_verify.comparing.ties import CHOICES, SCORES, Flip, excuses, first_flip
from hp_verify.recording.events import Choice
from hp_verify.recording.values import RecordedStep, read_steps, widened

_EXPLANATIONS = (CHOICES, SCORES)
Measure: TypeAlias = Callable[[Mapping[str, Tensor]], Callable[[Tensor, Tensor], float]]
"""Given all expected tensors of a quantity: a function of a tensor and the expected one of the same
shape, which returns the error."""
_NORM = " norm"
_SMALLEST = 2.0**-53
"""Error of integers that differ beyond the digits of float64."""
_ROWS = "gradient"
"""The quantity whose names have a row each in a table."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs side by side. `str()` is a table of all names.

    Attributes:
        bound: Largest error that counts as equal.
        slack: Quantity -> factor of the bound, where it is not 1.
        num_steps: Steps that were compared.
        num_values: Numbers of both runs that were compared with each other.
        worst: Quantity -> name -> largest difference; those of error 0 are of step 1.
        first: First difference above the bound, in the order in which things are computed.
        flip: The first top-k that differs.
        excused: Whether `flip` is a tie that rounding may break, and all excess comes after it.
        flaws: Sentences about what is wrong within one of the runs.
    """

    bound: float
    num_steps: int
    num_values: int
    worst: Mapping[str, Mapping[str, Difference]]
    first: Difference | None
    flip: Flip | None = None
    excused: bool = False
    flaws: tuple[str, ...] = ()
    slack: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Tell whether the runs are equal within the bound, or differ by an excused choice only."""
        return not self.flaws and (self.first is None or self.excused)

    @property
    def bitwise(self) -> bool:
        """Tell whether every value of the two runs is the same."""
        names = self.worst.values()
        return not self.flaws and all(each.is_same for some in names for each in some.values())

    @property
    def errors(self) -> Mapping[str, float]:
        """Return the largest error of each quantity."""
        return {
            quantity: max((each.error for each in names.values()), default=0.0)
            for quantity, names in self.worst.items()
        }

    def summary(self) -> str:
        """Say in one line whether the runs are equal, and how far apart."""
        over = f"over {self.num_steps} steps, {self.num_values:,} numbers"
        if self.bitwise:
            return f"bitwise equal {over}"
        errors = {quantity: error for quantity, error in self.errors.items() if error > 0}
        far = ", ".join(f"{quantity} {error:.1e}" for quantity, error in errors.items())
        state = "equal" if self.ok else "NOT EQUAL"
        return f"{state} within {self.bound:g} {over}: {far}"

    def __str__(self) -> str:
        lines = _table(self.worst, self.bound, self.slack)
        lines += [f"flaw: {flaw}" for flaw in self.flaws]
        if self.flip is not None:
            lines.append(f"first other choice: {self.flip}")
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        if self.excused:
            lines.append("excused: it follows from that choice, which rounding decides")
        return "\n".join([*lines, self.summary()])


def compare_runs(
    actual: Path | Iterable[RecordedStep],
    expected: Path | Iterable[RecordedStep],
    *,
    bound: float = 0.0,
    norms_of: Sequence[str] = ("gradient",),
    tie: float = 0.0,
    fixed: Collection[str] = (),
    slack: Mapping[str, float] | None = None,
    measure: Measure | None = None,
) -> RunComparison:
    """Compare two recordings.

    An error is ``max|a - b| / max|b|`` of a tensor. Where that is above the bound although the
    distance is less than one unit in the last place of the largest value of that quantity in that
    step, it is taken relative to the latter: a gradient that is zero but for rounding has no digits
    to compare.

    Args:
        actual: Steps of the run to judge, or the folder of its recorders.
        expected: Steps of the reference run, to which errors are relative, or their folder.
        bound: Largest error that counts as equal; 0: every value is the same.
        norms_of: Quantities of which the 2-norm of each tensor is compared as well.
        tie: An excess is excused where a token chose other experts before it, among scores less
            than this apart; 0: never. Needs the quantities `CHOICES` and `SCORES`.
        fixed: Quantities that follow from no choice, tokens for example: an excess of theirs is not
            excused, nor is anything beside it.
        slack: Quantity -> factor of the bound. An optimizer that divides by the size of gradients
            makes rounding of tiny ones into large differences of weights.
        measure: Another measure of errors; None: as said above.

    Returns:
        What was found. What only one of them has is a difference, and so is NaN, even if both have
        it; runs without a number in common are flawed.

    Raises:
        FileNotFoundError: If one of them is empty.
        ValueError: If a bound is not a number that something can exceed.
    """
    slack = dict(slack or {})
    limits = {"bound": bound, "tie": tie} | {f"slack of {q}": v for q, v in slack.items()}
    for name, value in limits.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} ({value}) must be finite and not negative")
    worst: dict[str, dict[str, Difference]] = {}
    first: Difference | None = None
    flip: Flip | None = None
    flaws: list[str] = []
    measure = measure or (lambda theirs: _largest_errors(theirs, bound))
    num_steps, num_values, may_excuse = 0, 0, True
    sides = (read_steps(run) if isinstance(run, Path) else run for run in (actual, expected))
    for num_steps, (mine, theirs) in enumerate(itertools.zip_longest(*sides), start=1):
        if mine is None or theirs is None or mine.index != theirs.index:
            flaws.append(f"step {num_steps} must be in both runs")
            break
        for side, step in (("", mine), ("expected run, ", theirs)):
            flaws += [f"{side}step {step.index}: {flaw}" for flaw in step.flaws]
        flip = flip or first_flip(theirs.index, _choices_of(mine), _choices_of(theirs))
        num_values += _count_common(mine, theirs)
        for each in _differences(mine, theirs, norms_of, measure):
            names = worst.setdefault(each.phase, {})
            names[each.name] = max(names.get(each.name, each), each, key=_badness)
            if each.error > bound * slack.get(each.phase, 1.0):
                first, may_excuse = first or each, may_excuse and each.phase not in fixed
    if not num_values:
        flaws.append("the runs have no numbers in common")
    excused = may_excuse and excuses(flip, None if first is None else first.step, tie)
    return RunComparison(
        bound, num_steps, num_values, worst, first, flip, excused, tuple(flaws), slack
    )


def _choices_of(step: RecordedStep) -> dict[str, dict[tuple[str, int], Choice]]:
    """Return what a step's layers chose as `first_flip` takes it: all tokens of a layer as one."""
    found = {}
    for name, chosen in step.tensors.get(CHOICES, {}).items():
        rows = chosen.flatten(0, -2).sort(dim=-1).values
        scores = step.tensors.get(SCORES, {}).get(name, chosen[..., :0]).flatten(0, -2).double()
        num = scores.shape[-1]
        taken, scored = (
            some.int().contiguous().numpy().tobytes()
            for some in (rows, torch.arange(num).expand(len(rows), -1))
        )
        values = scores.contiguous().numpy().tobytes()
        one = Choice(
            *(step.index, name, 0, "", 0, "", ""), *(rows.shape[-1], taken, num, scored, values)
        )
        found[name] = {(str(tuple(chosen.shape)), 0): one}
    return found


def _count_common(mine: RecordedStep, theirs: RecordedStep) -> int:
    """Return how many numbers are in both, explanations aside."""
    return sum(
        tensor.numel()
        for quantity, tensors in theirs.tensors.items()
        if quantity not in _EXPLANATIONS
        for name, tensor in tensors.items()
        if name in mine.tensors.get(quantity, {})
    )


def _badness(difference: Difference) -> tuple[float, bool]:
    return difference.error, not difference.is_same


def _differences(
    mine: RecordedStep, theirs: RecordedStep, norms_of: Sequence[str], measure: Measure
) -> Iterator[Difference]:
    for quantity in dict.fromkeys([*theirs.tensors, *mine.tensors]):
        if quantity in _EXPLANATIONS:
            continue
        here, there = mine.tensors.get(quantity, {}), theirs.tensors.get(quantity, {})
        yield from _of_quantity(theirs.index, quantity, here, there, measure)
        if quantity in norms_of:
            norms = _norms(here), _norms(there)
            yield from _of_quantity(theirs.index, quantity + _NORM, *norms, measure)


def _of_quantity(
    step: int,
    quantity: str,
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    measure: Measure,
) -> Iterator[Difference]:
    """Yield differences in the order of names; a missing tensor and another shape are such."""
    error_of = measure(theirs)
    for name in dict.fromkeys([*theirs, *mine]):
        actual, expected, error = mine.get(name), theirs.get(name), math.inf
        if actual is None or expected is None:
            note = f"missing in {'actual' if actual is None else 'expected'}"
        elif actual.shape != expected.shape:
            note = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        else:
            error = error_of(actual, expected)
            is_cast = actual.dtype != expected.dtype
            note = f"{actual.dtype} instead of {expected.dtype}" if is_cast else ""
        yield Difference(step, quantity, name, error, 0.0, note=note)


def _largest_errors(
    theirs: Mapping[str, Tensor], bound: float
) -> Callable[[Tensor, Tensor], float]:
    """Measure the largest distance of two elements, see `compare_runs`."""

    @cache
    def largest() -> float:
        return max(map(_largest, theirs.values()))

    def error_of(actual: Tensor, expected: Tensor) -> float:
        is_cast, a, b = actual.dtype != expected.dtype, widened(actual), widened(expected)
        if torch.equal(a, b):  # as may be two integers that float64 does not tell apart
            is_number = expected.is_floating_point() or expected.is_complex()
            return 0.0 if is_cast or is_number or torch.equal(actual, expected) else _SMALLEST
        distance, scale = _largest(a - b), _largest(b)
        error = math.inf if scale == 0 else distance / scale
        may_be_rounding = 0 < bound < error and not is_cast and expected.is_floating_point()
        if may_be_rounding and distance <= largest() * torch.finfo(expected.dtype).eps:
            error = distance / largest()
        return math.inf if math.isnan(error) else error

    return error_of


def _largest(tensor: Tensor) -> float:
    return widened(tensor).abs().max().item() if tensor.numel() else 0.0


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.linalg.vector_norm(widened(tensor)) for name, tensor in tensors.items()}


def _table(
    worst: Mapping[str, Mapping[str, Difference]], bound: float, slack: Mapping[str, float]
) -> list[str]:
    """Return a line per name with a column per quantity that has it; before these the others."""

    def mark(*differences: Difference | None) -> str:
        limits = ((each.error, slack.get(each.phase, 1.0)) for each in differences if each)
        return "FAIL" if any(error > bound * factor for error, factor in limits) else "ok  "

    named = (names for names in worst.values() if any(names))
    shared = worst.get(_ROWS) or next(named, {})
    columns = [q for q, names in worst.items() if (shared.keys() & names.keys()) - {""}]
    rows = dict.fromkeys(name for column in columns for name in worst[column] if name)
    lines = []
    for quantity, names in worst.items():
        if quantity not in columns and names:
            most = max(names.values(), key=lambda each: each.error)
            name = "" if most.is_same else f"  {most.name}"
            lines.append(f"{mark(most)}  {quantity:<15}  {_cell(most)}{name}".rstrip())
    if rows:
        width = max(map(len, rows))
        heads = "  ".join(f"{column:>22}" for column in columns)
        lines.append(f"      {'':<{width}}  {heads}")
    for name in rows:
        found = [worst[column].get(name) for column in columns]
        cells = "  ".join(f"{_cell(each) if each else '-':>22}" for each in found)
        lines.append(f"{mark(*found)}  {name:<{width}}  {cells}")
    return lines


def _cell(difference: Difference) -> str:
    if difference.is_same:
        return "same"
    note = f" {difference.note}" if difference.note else ""
    return f"{difference.error:.3e} at step {difference.step}{note}"
