"""Likely causes of a first difference, read from its numbers."""

import math
import statistics
from collections.abc import Iterator, Sequence
from fractions import Fraction

from hp_verify.comparing.findings import NOT_OWN, REDUCTION, UPDATE, Comparison, Difference
from hp_verify.recording import events as ev

_ALONE = {
    ev.START: "the jobs begin with other weights: use --same-start, or seed both in the same way",
    ev.INPUT: "the jobs are given other batches: only what follows from them can be compared",
}
_UNSEEN = {
    ev.LOSS: (ev.FORWARD, "the forward or the loss: outputs were not compared"),
    ev.WEIGHT: (
        ev.GRADIENT,
        "the backward, a reduction or the update: gradients were not compared",
    ),
}
_AFTER = {
    ev.LOSS: "outputs are equal and the loss is not: its mean, its targets, or a sum over ranks",
    ev.BACKWARD: "the backward of what is computed with this output",
    ev.GRADIENT: "the backward of this parameter, or its reduction",
    ev.NORM: "gradients are equal and their norm is not: a part is counted twice, or left out",
    NOT_OWN: "the norm itself, whatever gradients are: a part is counted twice, or left out",
    ev.CLIPPED: "gradients and norm are equal and what is clipped is not",
    ev.RATE: "gradients are equal and the rate is not: its schedule, or the step that it is at",
    UPDATE: "a step that is skipped, data that end, or another number of microbatches to an update",
    ev.WEIGHT: "gradients are equal, the update is not: the optimizer's options, groups or state",
}
_ORIGINS = {
    ev.BACKWARD: "the backward of this parameter: it is wrong before ranks reduce it",
    REDUCTION: "the reduction over ranks: what they reduce is right",
}
_MODULES = {
    ("attn", "attention"): "a mask, positions, heads, or keys of other ranks",
    ("router", "gate"): "scores or choices of the router",
    ("expert", "moe"): "experts, or rows that do not come to them or back",
    ("embed", "wte", "tok"): "the part of the vocabulary that a rank has",
}
"""Words in names of modules, and what is likely wrong there; the first that fit count."""
_RANDOM = (ev.FORWARD, ev.LOSS, ev.BACKWARD, ev.EVALUATION)
"""Phases that dropout changes."""
_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Largest relative error of a sum of two rounded numbers, about."""
_MOST = 1024


def explain(comparison: Comparison) -> list[str]:
    """Name likely mistakes, the likeliest first; none where nothing is known.

    Args:
        comparison: Comparison whose first difference is explained.
    """
    first = comparison.first
    if first is None:
        return []
    dropout = [comparison.random[first.step]] if first.step in comparison.random else []
    return [
        *(comparison.more.get(first.step, ()) if first.phase not in _ALONE else ()),
        *(dropout if first.phase in _RANDOM else []),
        *_reasons(comparison, first, comparison.together),
    ]


def _reasons(
    comparison: Comparison, first: Difference, together: Sequence[Difference]
) -> Iterator[str]:
    if first.phase in _ALONE:
        yield _ALONE[first.phase]
        return
    if first.who:
        yield f"{first.who} should hold the same: a sum over them is missing, or one is stale"
    elif math.isinf(first.error):
        yield "the reference has zeros or the job numbers that are not finite"
    elif scale := _common_scale(together):
        yield _scaled(scale, len(together))
    elif first.rest == 0 and first.factor == 0:
        yield "nothing arrives here: a sum, an expert or a gradient is lost"
    if first.phase in (ev.FORWARD, ev.EVALUATION):
        what, why = first.name or "the model", _of_module(first.name)
        since = ", or weights that were changed after the last update" if first.step > 1 else ""
        yield f"what {what} was given is equal and what it gives is not: {why}{since}"
    elif first.origin:
        yield from _rounded(together) if first.origin == REDUCTION else ()
        yield _ORIGINS[first.origin]
    elif first.phase in _UNSEEN and _UNSEEN[first.phase][0] not in comparison.largest:
        yield _UNSEEN[first.phase][1]
    elif first.phase in _AFTER and not (first.phase == ev.GRADIENT and first.who):
        yield _AFTER.get(first.note, _AFTER[first.phase])


def _rounded(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield whether all errors of a reduction have the size of rounding to a shorter dtype."""
    errors = [difference.error for difference in differences if not difference.who]
    for dtype, step in _STEPS.items():
        are_so = len(errors) == len(differences) and max(errors) < step
        if are_so and statistics.median(errors) > step / 16:
            yield f"errors are as large as those of rounding to {dtype}: ranks may exchange that"
            return


def _of_module(name: str) -> str:
    found = (why for words, why in _MODULES.items() if any(word in name.lower() for word in words))
    return next(found, "its weights' parts, or a sum over ranks")


def _common_scale(differences: Sequence[Difference]) -> Fraction | None:
    """Return the factor that all differences have, if it is a ratio of small numbers.

    What is left of an error beside it must be what rounding explains, and it itself must be more.
    """
    mean = statistics.fmean(difference.factor for difference in differences)
    if not math.isfinite(mean):
        return None
    near = Fraction(round(mean)) if mean > 0.75 else Fraction(mean).limit_denominator(_MOST)
    if near.numerator > 1 and mean < 1:  # near one part of many, but for rounding
        near = Fraction(1, round(1 / mean))
    is_simple = min(near.numerator, near.denominator) == 1 or near == 0
    is_all = all(
        math.hypot(p.rest, p.factor - near) <= p.bound * max(float(near), 1.0)
        and abs(near - 1) > p.bound
        for p in differences
    )
    return near if is_simple and near != 1 and is_all else None


def _scaled(scale: Fraction, count: int) -> str:
    what = "it is" if count == 1 else f"all {count} are"
    if scale > 1:
        return f"{what} {scale} times the reference's: summed in place of a mean, or counted twice"
    if scale == 0:
        return f"{what} zero: a sum, an expert or a gradient is lost"
    return f"{what} {scale} of the reference's: averaged in place of a sum, or terms are lost"
