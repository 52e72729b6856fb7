"""Reproductions of what follows backwards: reductions, norms, clipping, updates; and of numbers."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_verify.comparing.findings import Difference
from hp_verify.comparing.recordings import Step
from hp_verify.recording import events as ev
from hp_verify.recording.second_run import BEFORE
from hp_verify.recording.slices import index_of
from hp_verify.recording.values import Part
from hp_verify.reproducing import programs
from hp_verify.reproducing.programs import program
from hp_verify.reproducing.second_runs import (
    CannotError,
    Pair,
    SecondRun,
    distance,
    farthest,
    index_of_largest,
)

OF_NUMBERS = (ev.LOSS, ev.NORM, ev.RATE)
Made = tuple[str, dict[str, Any]]
"""A program, and what it reads."""


def of_phase(first: Difference, pair: Pair, steps: tuple[Step, Step], title: str) -> Made:
    """Reproduce what is no module's: reductions, norms, clipping, updates, losses, rates.

    Args:
        first: The first difference.
        pair: Both second runs.
        steps: The job's and the reference's step in the first runs.
        title: Title of the program.

    Raises:
        CannotError: When what it takes was not seen.
    """
    phase = ev.MOMENT if first.phase.startswith(ev.MOMENT) else first.phase
    if phase not in _MAKERS:
        raise CannotError("batches are not computed" if phase == ev.INPUT else "no module gives it")
    return _MAKERS[phase](first, pair, steps, title)


def values_of(expected: Tensor, actual: Tensor) -> dict[str, Any]:
    """Return both values and the index of the largest difference, as programs read them."""
    return {"expected": expected, "actual": actual, "at": index_of_largest(expected, actual)}


def parameter(pair: Pair, phase: str, name: str) -> tuple[Tensor, Tensor, list[Part]]:
    """Put a parameter's value together on both sides; where ranks disagree, a wrong one counts.

    Raises:
        CannotError: When a part of it is missing.
    """
    theirs = pair.expected.whole(pair.step, phase, name)
    mine = pair.actual.whole(pair.step, phase, name)
    if theirs is None or mine is None or theirs.values.shape != mine.values.shape:
        raise CannotError(f"{phase} {name} was not seen again")
    if not (theirs.is_complete and mine.is_complete):
        raise CannotError(f"parts of {phase} {name} are on no rank")
    return theirs.values, farthest(mine, theirs.values), mine.parts


def _reduction(first: Difference, pair: Pair, _steps: tuple[Step, Step], title: str) -> Made:
    """Show ranks' own gradients in the box of the worst error, before and after the reduction."""
    expected, actual, parts = parameter(pair, first.phase, first.name)
    at = index_of_largest(expected, actual)
    holders = [
        part
        for part in parts
        if all(begin <= i < end for i, (begin, end) in zip(at, part.box, strict=True))
    ]
    box = holders[0].box
    index = index_of(box)
    after = {part.rank: part.values for part in holders if part.box == box}
    own = {
        part.rank: part.values[_inside(index, part)]
        for part in pair.actual.own(first.step, first.name)
        if all(b <= i and e >= j for (b, e), (i, j) in zip(part.box, box, strict=True))
    }
    if not own:
        raise CannotError(f"gradients of {first.name} before the reduction were not seen")
    record = values_of(expected[index], actual[index]) | {"own": own, "after": after}
    return program(f"{title}, {list(box)} of it", pair.bound, programs.REDUCTION), record


def _inside(index: Sequence[slice], part: Part) -> tuple[slice, ...]:
    """Translate indices of a whole tensor into those of a part that has them."""
    pairs = zip(index, part.box, strict=True)
    return tuple(slice(s.start - begin, s.stop - begin) for s, (begin, _) in pairs)


def _norm(first: Difference, pair: Pair, steps: tuple[Step, Step], title: str) -> Made:
    parts = {
        (name, part.box, part.rank): float(part.values)
        for name in pair.actual.names(first.step, ev.NORM)
        for part in pair.actual.parts(first.step, ev.NORM, name)[""]
    }
    if not parts:
        raise CannotError("gradients that the norm is of were not seen")
    mine, theirs = (by_rank(step, first) for step in steps)
    actual = {rank: values[-1] for rank, values in mine.items()}
    expected = next(iter(theirs.values()))[-1]
    record = {"expected": torch.tensor(expected), "actual": actual, "parts": parts}
    return program(title, max(pair.bound, 1e-6), programs.NORM), record


def by_rank(step: Step, first: Difference) -> dict[int, list[float]]:
    """Return the numbers of each rank at the place of a difference."""
    by_process = step.numbers.get(first.phase, {}).get(first.name, {})
    return {int(who.split("-")[1]): values for who, values in by_process.items()}


def _clipping(first: Difference, pair: Pair, steps: tuple[Step, Step], title: str) -> Made:
    expected, actual, _ = parameter(pair, first.phase, first.name)
    record: dict[str, Any] = values_of(expected, actual)
    for side, kept, step in (
        ("job", pair.actual, steps[0]),
        ("reference", pair.expected, steps[1]),
    ):
        gradient = kept.whole(first.step, ev.GRADIENT, first.name)
        most = next(iter(kept.facts.values())).get("max norm")
        norms = [n for some in step.numbers.get(ev.NORM, {}).values() for n in some.values()]
        if gradient is None or most is None or not norms:
            raise CannotError("the gradient before clipping, its norm or the limit was not seen")
        record[side] = {"gradient": gradient.values, "norm": norms[0][-1], "most": most}
    return program(title, pair.bound, programs.CLIPPING), record


def _update(first: Difference, pair: Pair, _steps: tuple[Step, Step], title: str) -> Made:
    expected, actual, _ = parameter(pair, first.phase, first.name)
    record: dict[str, Any] = values_of(expected, actual)
    kinds = {}
    for side, kept in (("job", pair.actual), ("reference", pair.expected)):
        update = _options(kept, first.name)
        kinds[side] = update["class"]
        options = {k: v for k, v in update["options"].items() if k in _accepted(update["class"])}
        state = {k: torch.tensor(float(v)) for k, v in update["numbers"].items()}
        prefix = f"{BEFORE} "
        for phase in kept.phases(first.step, first.name):
            whole = kept.whole(first.step, phase, first.name)
            if phase.startswith(prefix) and phase != f"{prefix}weight" and whole:
                state[phase.removeprefix(prefix)] = whole.values
        weight = kept.whole(first.step, f"{prefix}weight", first.name)
        gradient = kept.whole(first.step, ev.CLIPPED, first.name)
        gradient = gradient or kept.whole(first.step, ev.GRADIENT, first.name)
        if weight is None or gradient is None:
            raise CannotError("what the update is made of was not seen")
        record[side] = {
            "weight": weight.values,
            "gradient": gradient.values,
            "options": options,
            "state": state,
        }
    if kinds["job"] != kinds["reference"]:
        raise CannotError(f"the optimizers are {kinds['job']} and {kinds['reference']}")
    record["others"] = _other(record["job"], record["reference"], pair.bound)
    key = first.phase.removeprefix(f"{ev.MOMENT} ")
    result = "p" if first.phase == ev.WEIGHT else f"optimizer.state[p][{key!r}]"
    return program(title, pair.bound, programs.of_update(kinds["job"], result)), record


def _other(mine: dict[str, Any], theirs: dict[str, Any], bound: float) -> dict[str, Any]:
    """Return what was not the reference's before an update: options, and errors of tensors."""
    options = theirs["options"]
    found: dict[str, Any] = {
        k: (v, options.get(k)) for k, v in mine["options"].items() if options.get(k) != v
    }
    ours, others = (
        side["state"] | {k: side[k] for k in ("weight", "gradient")} for side in (mine, theirs)
    )
    for key in ours.keys() | others.keys():
        if key not in ours or key not in others:
            found[key] = "missing on one side"
        elif (error := distance(ours[key], others[key])) > bound:
            found[key] = f"error {error:.1e}"
    return found


def _options(kept: SecondRun, name: str) -> dict[str, Any]:
    for facts in kept.facts.values():
        if name in facts.get("updates", {}):
            return dict(facts["updates"][name])
    raise CannotError(f"the update of {name} was not seen")


def _accepted(kind: tuple[str, str]) -> set[str]:
    """Return names of the options that an optimizer of torch takes."""
    module, name = kind
    if not module.startswith("torch."):
        raise CannotError(f"{name} is not an optimizer of torch")
    return set(inspect.signature(getattr(sys.modules[module], name)).parameters)


def _numbers(first: Difference, _pair: Pair, steps: tuple[Step, Step], title: str) -> Made:
    said = "the jobs are at other places of their schedules, or have other options"
    if first.phase == ev.LOSS:
        said = "outputs of the model are equal: it is how losses are made of them"
    mine, theirs = (step.numbers.get(first.phase, {}).get(first.name, {}) for step in steps)
    expected = next(iter(theirs.values()))
    record = {"expected": expected, "actual": {w.rpartition("-")[0]: v for w, v in mine.items()}}
    return program(title, first.bound, f"{programs.NUMBERS}print({said!r})\n"), record


_MAKERS: dict[str, Callable[[Difference, Pair, tuple[Step, Step], str], Made]] = {
    ev.GRADIENT: _reduction,
    ev.NORM: _norm,
    ev.CLIPPED: _clipping,
    ev.WEIGHT: _update,
    ev.MOMENT: _update,
    ev.LOSS: _numbers,
    ev.RATE: _numbers,
}


def show_values(first: Difference, pair: Pair, title: str) -> Made:
    """Show both values, where nothing can be computed again."""
    name = first.name
    if first.phase in (*OF_NUMBERS, ev.INPUT):
        raise CannotError("it is no tensor")
    if first.phase in (ev.FORWARD, ev.EVALUATION, ev.BACKWARD):
        _, expected, actual, _ = pair.samples(name, first.phase)
    else:
        expected, actual, _ = parameter(pair, first.phase, name)
    said = "nothing is computed again here: these are the values of both jobs"
    made = program(title, pair.bound, f"\n{programs.VALUES}print({said!r})\n")
    return made, values_of(expected, actual)
