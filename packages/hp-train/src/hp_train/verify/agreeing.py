"""Compare two recorded runs, step by step and name by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from hp_platform.testing.comparing import Difference, compare
from hp_train.verify.recording import RecordedStep, read_steps

CHOICES, SCORES = "expert choice", "expert score"
"""Quantities that explain other differences: experts of each token, and their scores."""
_EXPLANATIONS = (CHOICES, SCORES)
_NORM = " norm"
_ROWS = "gradient"
"""The quantity whose names have a row each in a table."""


@dataclass(frozen=True, slots=True)
class Place:
    """A difference of two runs, and where it is.

    Attributes:
        step: Counted from 1.
        quantity: Kind of what is compared, for example "gradient".
        difference: Difference of one tensor.
    """

    step: int
    quantity: str
    difference: Difference

    def __str__(self) -> str:
        name = f" {self.difference.name}" if self.difference.name else ""
        note = f" ({self.difference.note})" if self.difference.note else ""
        return f"step {self.step}, {self.quantity}{name}: {self.difference.error:.3e}{note}"


@dataclass(frozen=True, slots=True)
class Flip:
    """Tokens whose experts differ, in the first place where any do.

    Attributes:
        step: Counted from 1.
        name: Name of the layer.
        tokens: How many of them.
        margin: The largest difference of the scores of two experts, one of which was taken here
            and the other there; infinite where scores were not recorded.
    """

    step: int
    name: str
    tokens: int
    margin: float

    def __str__(self) -> str:
        verb = "token chooses" if self.tokens == 1 else "tokens choose"
        return (
            f"step {self.step}, {self.name}: {self.tokens} {verb} other experts, "
            f"scores at most {self.margin:.1e} apart"
        )


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs side by side. `str()` is a table of all names.

    Attributes:
        bound: Largest error that counts as equal.
        slack: Quantity -> factor of the bound, where it is not 1.
        num_steps: Compared.
        num_values: Numbers of both runs that were compared with each other.
        worst: Quantity -> name -> where it differs most; places of error 0 are at step 1.
        first: Where the first error above the bound is, in the order in which things are computed.
        flip: The first top-k that differs.
        excused: Whether `flip` is a tie that rounding may break, and all excess comes after it.
        flaws: What is wrong within one of the runs.
    """

    bound: float
    num_steps: int
    num_values: int
    worst: Mapping[str, Mapping[str, Place]]
    first: Place | None
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
        return not self.flaws and all(
            place.difference.is_same for names in self.worst.values() for place in names.values()
        )

    @property
    def errors(self) -> Mapping[str, float]:
        """The largest error of each quantity."""
        return {
            quantity: max((place.difference.error for place in names.values()), default=0.0)
            for quantity, names in self.worst.items()
        }

    def summary(self) -> str:
        """One line: equal or not, and how far apart."""
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
    actual: Path,
    expected: Path,
    *,
    bound: float = 0.0,
    norms_of: Sequence[str] = ("gradient",),
    tie: float = 0.0,
    slack: Mapping[str, float] | None = None,
) -> RunComparison:
    """Compare two recordings.

    An error is ``max|a - b| / max|b|`` of a tensor. Where that is above the bound although the
    distance is less than one unit in the last place of the largest value of that quantity in that
    step, it is taken relative to the latter: a gradient that is zero but for rounding has no digits
    to compare.

    Args:
        actual: Directory of the recorders of the run to judge.
        expected: Directory of the recorders of the reference run, to which errors are relative.
        bound: Largest error that counts as equal; 0: every value is the same.
        norms_of: Quantities of which the 2-norm of each tensor is compared as well.
        tie: An excess is excused where a token chose other experts before it, among scores less
            than this apart; 0: never. Needs the quantities `CHOICES` and `SCORES`.
        slack: Quantity -> factor of the bound. An optimizer that divides by the size of gradients
            makes rounding of tiny ones into large differences of weights.

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
    worst: dict[str, dict[str, Place]] = {}
    first: Place | None = None
    flip: Flip | None = None
    flaws: list[str] = []
    num_steps = num_values = 0
    steps = itertools.zip_longest(read_steps(actual), read_steps(expected))
    for num_steps, (mine, theirs) in enumerate(steps, start=1):
        if mine is None or theirs is None or mine.index != theirs.index:
            flaws.append(f"step {num_steps} must be in both runs")
            break
        for side, step in (("", mine), ("expected run, ", theirs)):
            flaws += [f"{side}step {step.index}: {flaw}" for flaw in step.flaws]
        flip = flip or _first_flip(mine, theirs)
        num_values += _count_common(mine, theirs)
        for place in _places(mine, theirs, norms_of, bound):
            names = worst.setdefault(place.quantity, {})
            name = place.difference.name
            names[name] = max(names.get(name, place), place, key=_badness)
            if first is None and place.difference.error > bound * slack.get(place.quantity, 1.0):
                first = place
    if not num_values:
        flaws.append("the runs have no numbers in common")
    excused = (
        first is not None and flip is not None and flip.step <= first.step and flip.margin < tie
    )
    return RunComparison(
        bound, num_steps, num_values, worst, first, flip, excused, tuple(flaws), slack
    )


def _count_common(mine: RecordedStep, theirs: RecordedStep) -> int:
    """Return how many numbers are in both, explanations aside."""
    return sum(
        tensor.numel()
        for quantity, tensors in theirs.tensors.items()
        if quantity not in _EXPLANATIONS
        for name, tensor in tensors.items()
        if name in mine.tensors.get(quantity, {})
    )


def _badness(place: Place) -> tuple[float, bool]:
    return place.difference.error, not place.difference.is_same


def _places(
    mine: RecordedStep, theirs: RecordedStep, norms_of: Sequence[str], bound: float
) -> Iterable[Place]:
    for quantity in dict.fromkeys([*theirs.tensors, *mine.tensors]):
        if quantity in _EXPLANATIONS:
            continue
        here, there = mine.tensors.get(quantity, {}), theirs.tensors.get(quantity, {})
        for difference in _differences(here, there, bound):
            yield Place(theirs.index, quantity, difference)
        if quantity in norms_of:
            for difference in _differences(_norms(here), _norms(there), bound):
                yield Place(theirs.index, quantity + _NORM, difference)


def _differences(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bound: float
) -> list[Difference]:
    """Differences in the order of names; see `compare_runs` for what they are relative to."""
    found = {d.name: d for d in compare(mine, theirs).differences}
    exceeding = [d for d in found.values() if not d.note and 0 < bound < d.error]
    scale = max((_largest(tensor) for tensor in theirs.values()), default=0.0) if exceeding else 0.0
    for difference in exceeding:
        name = difference.name
        distance = _largest(mine[name].to(torch.float64) - theirs[name].to(torch.float64))
        dtype = theirs[name].dtype
        smallest = scale * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        if distance <= smallest:
            found[name] = replace(difference, error=distance / scale)
    return [found[name] for name in dict.fromkeys([*theirs, *mine])]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.linalg.vector_norm(tensor.to(torch.float64)) for name, tensor in tensors.items()
    }


def _first_flip(mine: RecordedStep, theirs: RecordedStep) -> Flip | None:
    """Look for tokens with other experts in the first layer that has any."""
    here, there = mine.tensors.get(CHOICES, {}), theirs.tensors.get(CHOICES, {})
    scores = theirs.tensors.get(SCORES, {})
    for name in there:
        if name not in here or here[name].shape != there[name].shape:
            continue
        mine_TK, theirs_TK = here[name].flatten(0, -2), there[name].flatten(0, -2)
        differing = (mine_TK.sort(dim=-1).values != theirs_TK.sort(dim=-1).values).any(dim=-1)
        tokens = differing.nonzero().flatten().tolist()
        if tokens:
            margin = math.inf
            if name in scores:
                scores_TE = scores[name].flatten(0, -2)
                margin = max(_margin(scores_TE[t], mine_TK[t], theirs_TK[t]) for t in tokens)
            return Flip(theirs.index, name, len(tokens), margin)
    return None


def _margin(scores_E: Tensor, mine_K: Tensor, theirs_K: Tensor) -> float:
    """Return how far the scores of experts that only one run took are apart."""
    ours, others = set(mine_K.tolist()), set(theirs_K.tolist())
    here, there = sorted(ours - others), sorted(others - ours)
    if not here or not there:  # the same expert twice, or a dropped slot
        return math.inf
    values = scores_E.to(torch.float64)
    return float((values[here][:, None] - values[there][None, :]).abs().max())


def _table(
    worst: Mapping[str, Mapping[str, Place]], bound: float, slack: Mapping[str, float]
) -> list[str]:
    """One line per name with a column per quantity that has these names; before it the others."""

    def mark(*places: Place | None) -> str:
        exceeds = any(
            place.difference.error > bound * slack.get(place.quantity, 1.0)
            for place in places
            if place is not None
        )
        return "FAIL" if exceeds else "ok  "

    named = (names for names in worst.values() if any(names))
    shared = worst.get(_ROWS) or next(named, {})
    columns = [q for q, names in worst.items() if (shared.keys() & names.keys()) - {""}]
    rows = dict.fromkeys(name for column in columns for name in worst[column] if name)
    lines = []
    for quantity, names in worst.items():
        if quantity not in columns and names:
            place = max(names.values(), key=lambda place: place.difference.error)
            name = "" if place.difference.is_same else f"  {place.difference.name}"
            lines.append(f"{mark(place)}  {quantity:<15}  {_cell(place)}{name}".rstrip())
    if rows:
        width = max(map(len, rows))
        heads = "  ".join(f"{column:>22}" for column in columns)
        lines.append(f"      {'':<{width}}  {heads}")
    for name in rows:
        places = [worst[column].get(name) for column in columns]
        cells = "  ".join(f"{_cell(place) if place else '-':>22}" for place in places)
        lines.append(f"{mark(*places)}  {name:<{width}}  {cells}")
    return lines


def _cell(place: Place) -> str:
    if place.difference.is_same:
        return "same"
    note = f" {place.difference.note}" if place.difference.note else ""
    return f"{place.difference.error:.3e} at step {place.step}{note}"
