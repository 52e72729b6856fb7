"""Causes among differences, told from what follows from something else or only looks otherwise.

Dropout and a router's choice explain what follows from them, a padding explains samples that are
not found. A mistake beside that is told apart by what neither of them changes.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from hp_verify.comparing.findings import NOT_OWN, REDUCTION, UPDATE, Comparison, Difference
from hp_verify.comparing.recordings import Digests, Recording, Step, distance, numbers_of, size_of
from hp_verify.comparing.ties import excuses
from hp_verify.recording import events as ev

TIMES = 10.0
"""An error is a difference from this many times what rounding explains."""
LEAST = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Smallest bound by dtype."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
TINY = {"float64": 2.0**-47, "float32": 2.0**-18, "bfloat16": 2.0**-6, "float16": 2.0**-9}
"""A tensor may be off by this part of the largest of its phase: one that is zero but for rounding
has no digits to compare."""
_NEAR = 0.05
"""What is off by a whole number, or one over it, and by no more than that beside it, is off by that
number whatever else differs."""
_OF_NO_CHOICE = (ev.START, ev.INPUT, ev.RATE, UPDATE)
"""Phases that follow from no choice of a router: first weights, samples, rates, and updates that
only one of both makes."""
_OF_SAMPLES = (ev.FORWARD, ev.LOSS, ev.BACKWARD, ev.EVALUATION)
_OUTPUTS = (ev.FORWARD, ev.BACKWARD)
_VANISHES = "its gradient is zero but for rounding"
Bound: TypeAlias = Callable[[int, str, str, str], float]
"""Largest error that rounding explains of a step, phase, name and dtype."""


def find_causes(result: Comparison, actual: Recording, expected: Recording, bound: Bound) -> None:
    """Put differences first that follow neither from dropout nor from a router's choice.

    Ranks that hold the same part of a parameter have the same gradients and weights then, too; a
    norm is that of a job's own gradients; and most gradients are no multiple of the reference's.
    What follows from random numbers that both draw, ranks for other samples, is listed.

    Args:
        result: All differences, which the order of computation has sorted.
        actual: The job.
        expected: The reference.
        bound: Largest error of a tensor that rounding explains.
    """
    is_tie = _is_tie(result, expected, bound)
    first, scaled = result.first, Counter[int]()
    for d in result.differences:
        if d.phase == ev.GRADIENT:
            times = max(d.factor, 1.0 / (d.factor or math.inf))
            is_other = times > 1.5 and abs(times / round(times) - 1.0) < _NEAR  # NaN is not
            scaled[d.step] += 1 if is_other and d.rest < d.factor * _NEAR else -1
    causes = {
        id(d)
        for d in result.differences
        if d.phase in _OF_NO_CHOICE
        or (d.phase == ev.NORM and d.note)
        or (d.who and d.phase not in _OF_SAMPLES)
        or (d.phase == ev.GRADIENT and scaled[d.step] > 0)
    }
    result.is_excused = is_tie and not causes
    if is_tie or (first and first.phase in _OF_SAMPLES and first.step in result.random):
        result.differences.sort(key=lambda difference: id(difference) not in causes)
    if first and not is_tie and _is_drawn(result, first, actual, expected):
        where = f"step {first.step}, {first.phase} {first.name}".strip()
        result.unaligned[f"{where}, and all that follows"] = result.random[first.step]
        result.differences = [d for d in result.differences if id(d) in causes]
        kept = (ev.START, ev.INPUT, ev.RATE)
        result.largest = {p: error for p, error in result.largest.items() if p in kept}


def _is_drawn(
    result: Comparison, first: Difference, actual: Recording, expected: Recording
) -> bool:
    """Tell whether a difference follows from a module that draws, on several ranks of the job."""
    if first.step not in result.random or first.phase not in (ev.FORWARD, ev.LOSS):
        return False
    mine, theirs = (recording.steps[first.step] for recording in (actual, expected))
    if len(mine.states) < 2:  # one process draws what the reference does, unless its state is lost
        return False
    drawing = (mine.drawing | theirs.drawing) - {""}
    is_known = bool(drawing) and bool(mine.drawn & theirs.drawn)
    return is_known and not any(_is_before(first.name, name, theirs) for name in drawing)


def _is_tie(result: Comparison, expected: Recording, bound: Bound) -> bool:
    """Tell whether rounding decides the first choice that differs, and differences follow it."""
    flip, first = result.flip, result.first
    if flip is None or first is None:
        return False
    step = expected.steps[flip.step]
    choices = step.choices[flip.name].values()
    if first.step == flip.step:
        if first.phase == ev.EVALUATION:
            return False
        if first.phase == ev.FORWARD and _is_before(first.name, flip.name, step):
            return False
    dtype = max((c.dtype for c in choices), key=lambda dtype: EPSILON.get(dtype, 0.0))
    largest = max(abs(score) for c in choices for score in array("d", c.scores))
    # However far outputs are apart once another choice has flipped in a run with other sums.
    tie = min(bound(flip.step, ev.FORWARD, "", dtype), LEAST["bfloat16"]) * largest
    return dtype != "float64" and excuses(flip, first.step, tie)


def _is_before(output: str, router: str, step: Step) -> bool:
    """Tell whether an output does not follow from a router's choice: its scores do not."""
    name, _, place = output.partition("#")[0].partition(":")
    if name == router:
        return place in {choice.place for choice in step.choices.get(router, {}).values()}
    modules = [_module(each) for each in step.tensors.get(ev.FORWARD, {})]
    return name in modules and router in modules[modules.index(name) + 1 :]


def list_outputs(result: Comparison, index: int, mine: Step, theirs: Step, num_ranks: int) -> None:
    """List outputs that differ where nothing comes of it.

    Ranks may divide what they later add up, or have zeros for what others compute. A module that
    some calls give other rows than samples may by chance get as many, or lay tokens out without
    padding, or those of two samples in turns. A weight that no loss depends on may drift. Where
    every weight's gradient is equal after that, nothing is wrong; where one is not, or was not
    compared, the outputs stay differences.
    """
    here = [difference for difference in result.differences if difference.step == index]
    is_term = [_is_term(difference, num_ranks) for difference in here]
    has_drifted = _VANISHES in result.unaligned.values()
    idle = _without_effect(result, index, mine, theirs)
    some = [
        d.phase in _OUTPUTS and (has_drifted or d.name in idle or _is_unsure(d, mine, theirs))
        for d in here
    ]
    are_all = here and all(any(pair) for pair in zip(is_term, some, strict=True))
    if not are_all or not are_equal(result, index, theirs):
        return
    for difference, is_one in zip(here, is_term, strict=True):
        parts = "weights drift by rounding" if has_drifted else "its rows are not the samples"
        if is_one:
            parts = f"it is 1/{round(1 / difference.factor)} of the reference's on every rank"
        elif difference.name in idle:
            parts = "the same numbers lie otherwise, what the module around gives is equal"
        result.unaligned.setdefault(
            f"{difference.phase} {difference.name}", f"{parts}, and all gradients are equal"
        )
    result.differences = [
        difference for difference in result.differences if difference.step != index
    ]


def _without_effect(result: Comparison, index: int, mine: Step, theirs: Step) -> set[str]:
    """Return outputs that lie otherwise inside of modules whose own were compared and are equal.

    Their squares, those of all ranks that have other numbers, add up to the reference's.
    """
    ours, expected = (step.tensors.get(ev.FORWARD, {}) for step in (mine, theirs))
    here = (d for d in result.differences if (d.step, d.phase) == (index, ev.FORWARD))
    wrong = {difference.name: difference for difference in here}
    right = {*map(_module, expected)} - {
        _module(n) for n in expected if n in wrong or f"{ev.FORWARD} {n}" in result.unaligned
    }
    return {
        name
        for name, d in wrong.items()
        for parts in [_module(name).split(".")]
        if any(".".join(parts[:end]) in right for end in range(len(parts)))
        and abs(ours[name].total - expected[name].norm) <= d.bound * expected[name].norm
    }


def _module(name: str) -> str:
    """Return the module of an output: without its place, and the number of its call."""
    return re.split("[#:]", name)[0]


def put_back(result: Comparison, index: int, mine: Step, theirs: Step) -> None:
    """Put outputs last of which nothing comes, so that what else differs in the step is named.

    They are those inside of modules that give what they should, and those that differ for samples
    of which the model gives what it should: they lie or are padded otherwise, as what a recurrent
    module is given without padding.
    """
    ours, expected = (step.tensors.get(ev.FORWARD, {}) for step in (mine, theirs))
    given = [name for name in ours.keys() & expected.keys() if re.match("[:#]|$", name)]
    right = {row.removeprefix(ev.REAL) for name in given for row in ours[name].rows}
    for name in given:
        right -= _rows_apart(
            ours[name], expected[name], LEAST.get(expected[name].dtype, 1e-5) / TIMES, of_all=False
        )
    idle = _without_effect(result, index, mine, theirs) | {
        d.name
        for d in result.differences
        if (d.step, d.phase, d.who) == (index, ev.FORWARD, "")
        and d.name not in given
        and _rows_apart(ours[d.name], expected[d.name], d.bound) & right
        and _is_unsure(d, mine, theirs)
    }
    result.differences.sort(
        key=lambda d: (d.step, d.name in idle, d.phase in _OUTPUTS) == (index, True, True)
    )


def _rows_apart(
    tensor: Digests, reference: Digests, bound: float, *, of_all: bool = True
) -> set[str]:
    """Return samples that are farther apart than a part of all of them, or of each."""
    ours = tensor.beside(reference).rows
    return {
        row.removeprefix(ev.REAL)
        for row, (sums, norm) in reference.rows.items()
        if row in ours
        and not distance(ours[row][0], sums)
        <= bound * (reference.norm if of_all else size_of(sums, norm))
    }


def _is_unsure(difference: Difference, mine: Step, theirs: Step) -> bool:
    """Tell whether rows of an output may be no samples, or samples have padding of any length."""
    phases = [step.tensors.get(difference.phase, {}) for step in (mine, theirs)]
    return any(
        tensor.shapes or (tensor.lost and name == difference.name)
        for some in phases
        for name, tensor in some.items()
    )


def list_vanishing(result: Comparison, index: int, mine: Step, theirs: Step) -> None:
    """List updates of parameters whose gradients are nothing but rounding, and not zero.

    An optimizer that divides by the size of gradients makes whole updates of them.
    """
    ours, expected = (step.tensors.get(ev.GRADIENT, {}) for step in (mine, theirs))
    largest = max((t.norm for t in expected.values() if not t.problem), default=0.0)
    found = {
        name
        for name, reference in expected.items()
        if name in ours
        and 0
        < max(reference.norm, ours[name].norm)
        <= largest * max(TINY.get(t.dtype, 1e-5) for t in (ours[name], reference))
    }
    for difference in [*result.differences]:
        is_update = difference.phase.startswith((ev.WEIGHT, ev.MOMENT))
        if is_update and difference.step == index and difference.name in found:
            result.unaligned.setdefault(f"{difference.phase} {difference.name}", _VANISHES)
            result.differences.remove(difference)


def _is_term(difference: Difference, num_ranks: int) -> bool:
    if difference.phase not in _OUTPUTS or not difference.factor > 0 or difference.who:
        return False
    parts = round(1 / difference.factor)
    is_part = abs(difference.factor * parts - 1) <= difference.bound
    return 1 < parts <= num_ranks and is_part and difference.rest <= difference.bound


def are_equal(result: Comparison, index: int, theirs: Step) -> bool:
    """Tell whether all gradients of a step were compared, and none differs."""
    gradients = theirs.tensors.get(ev.GRADIENT, {})
    is_listed = any(f"{ev.GRADIENT} {name}" in result.unaligned for name in gradients)
    return (
        bool(gradients)
        and not is_listed
        and not any((d.step, d.phase) == (index, ev.GRADIENT) for d in result.differences)
    )


def told_by_gradients(result: Comparison, index: int, theirs: Step) -> str:
    """Return how many gradients say that samples are the same in another form; empty: too few.

    No other samples give the same gradient, or a multiple of it, unless it is zero.
    """
    wrong = {d.name: d for d in result.differences if (d.step, d.phase) == (index, ev.GRADIENT)}
    names = [
        name
        for name, tensor in theirs.tensors.get(ev.GRADIENT, {}).items()
        if tensor.norm and f"{ev.GRADIENT} {name}" not in result.unaligned
    ]
    near = [
        name
        for name in names
        if (one := wrong.get(name)) is None
        or one.origin == REDUCTION
        or (one.factor and one.rest <= TIMES * one.bound)
    ]
    said = f"{len(near)} of {len(names)} gradients are the reference's, or multiples of them"
    return said if near and len(near) * 2 >= len(names) else ""


def why_norm(mine: Step, theirs: Step, name: str, bound: float) -> str:
    """Return whether a norm is not that of its own gradients, where the reference's is."""
    ratios, bounds = [], [bound]
    for step in (theirs, mine):
        gradients = step.tensors.get(ev.GRADIENT, {}).values()
        if any(tensor.problem or tensor.is_sum for tensor in gradients):
            return ""
        bounds += [LEAST.get(tensor.dtype, 1e-5) for tensor in gradients]
        norm = math.sqrt(math.fsum(tensor.norm**2 for tensor in gradients))
        ratios.append([value / (norm or math.inf) for value in numbers_of(step, ev.NORM, name)])
    expected, actual = (max(abs(ratio - 1.0) for ratio in some) for some in ratios)
    return NOT_OWN if expected <= max(bounds) < actual else ""
