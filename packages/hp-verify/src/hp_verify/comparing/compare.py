"""Two jobs side by side: the first number that differs by more than rounding explains."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from hp_verify.comparing.causes import (
    EPSILON,
    LEAST,
    TIMES,
    TINY,
    are_equal,
    find_causes,
    list_outputs,
    list_vanishing,
    put_back,
    told_by_gradients,
    why_norm,
)
from hp_verify.comparing.findings import REDUCTION, UPDATE, Comparison, Difference
from hp_verify.comparing.recordings import (
    Digests,
    Recording,
    Step,
    distance,
    matched,
    numbers_of,
    size_of,
)
from hp_verify.comparing.ties import first_flip
from hp_verify.recording import events as ev

_MOST_TERMS = 64
_ULPS = 32
"""A loss whose terms cancel may be off by this many units of what rounding makes of one of them."""
_OF_BACKWARD = (ev.BACKWARD, ev.GRADIENT, ev.CLIPPED)
"""Of gradients that overflow, which scalers of losses leave out, only that they do is compared."""


class Floor:
    """Errors that rounding alone makes, measured by runs of a reference with sums in another order.

    Args:
        reference: Recording of the reference.
        others: Recordings of it with other sums.

    Attributes:
        end: Last step that all of them may have come to.
    """

    def __init__(self, reference: Recording, others: Sequence[Recording]) -> None:
        self._errors: dict[tuple[int, str, str], float] = {}
        self.end = min((other.end for other in others), default=math.inf)
        for other in others:
            for index, step in reference.steps.items():
                for phase, name, error in _errors_of(other.steps.get(index, Step()), step):
                    if math.isfinite(error):
                        key = index, phase, name
                        self._errors[key] = max(error, self._errors.get(key, 0.0))
        by_phase: dict[tuple[int, str], list[float]] = defaultdict(list)
        for (index, phase, _), error in self._errors.items():
            by_phase[index, phase].append(error)
        self._typical = {key: statistics.median(errors) for key, errors in by_phase.items()}

    def bound(self, step: int, phase: str, name: str, dtype: str) -> float:
        """Return the largest error of a tensor that rounding explains."""
        near = range(step - 2, step + 3) if phase in (ev.LOSS, ev.NORM) else (step,)
        own = max(self._errors.get((index, phase, name), 0.0) for index in near)
        typical = self._typical.get((step, phase), 0.0)
        return max(TIMES * max(own, typical), LEAST.get(dtype, 1e-5))


def _errors_of(mine: Step, theirs: Step) -> Iterator[tuple[str, str, float]]:
    """Yield phase, name and error of what both have of a step."""
    for phase, names in theirs.tensors.items():
        for name, reference in names.items():
            tensor = mine.tensors.get(phase, {}).get(name)
            if tensor is not None and not (tensor.problem or reference.problem):
                yield phase, name, _error(tensor, reference, phase)
    for phase in (ev.LOSS, ev.NORM):
        error, _ = _error_of_numbers(mine, theirs, phase, "")
        yield phase, "", error


def with_floor(
    record: Callable[[str, int], Recording], seeds: Iterable[int] = (1, 2)
) -> tuple[Recording, Floor]:
    """Run a reference, and some times more with other sums.

    Args:
        record: Runs it by a name and a seed of how sums of products are taken; 0: as they are.
        seeds: Seeds of the runs with other sums, taken one by one after the first run.
    """
    reference = record("reference", 0)
    return reference, Floor(reference, [record(f"reference-{seed}", seed) for seed in seeds])


def compare(actual: Recording, expected: Recording, floor: Floor) -> Comparison:
    """Compare a job with its reference.

    Args:
        actual: The job to judge.
        expected: The reference, to which errors are relative.
        floor: Errors that rounding explains.
    """
    end = min(actual.end, expected.end, floor.end)
    result = Comparison(num_made=expected.num_steps, is_cut=end < math.inf)
    known, last = _known(actual) & _known(expected), 0
    for index in [index for index in expected.steps if index <= end]:
        mine, theirs = actual.steps.get(index), expected.steps[index]
        if mine is None:
            continue
        if mine.is_update and theirs.is_update:
            result.steps.append(index)
        if index == 1:
            _phase(result, 1, ev.START, mine, theirs, floor)
        before = len(result.differences)
        result.more[index] = [*_calls_more(mine, theirs)]
        if reason := _dropout(index, mine, theirs):
            result.random[index] = reason
        for phase in _phases(mine, theirs):
            if phase in (ev.LOSS, ev.NORM, ev.RATE):
                _numbers(result, index, phase, mine, theirs, floor)
            elif phase != ev.START:
                _phase(
                    result, index, phase, mine, theirs, floor, known if phase == ev.GRADIENT else ()
                )
        _batches(result, index, (mine, theirs), before)
        list_vanishing(result, index, mine, theirs)
        list_outputs(result, index, mine, theirs, actual.num_ranks)
        put_back(result, index, mine, theirs)
        _find_scaled(result, index, actual.steps.get(last), expected.steps.get(last))
        _left(result, index, mine, actual.steps.get(last, Step()))
        result.flip, last = result.flip or first_flip(index, mine.choices, theirs.choices), index
    _find_alone(result, (actual, expected, "the job"), end)
    _find_alone(result, (expected, actual, "the reference"), end)
    result.differences.sort(key=lambda difference: difference.step)
    find_causes(result, actual, expected, floor.bound)
    return result


def _find_alone(result: Comparison, sides: tuple[Recording, Recording, str], end: float) -> None:
    """Find steps, up to the last that is compared, that one makes and the other does not."""
    one, other, here = sides
    made = one.updates - other.updates
    for index in (index for index in one.steps if index <= end):
        is_alone = index not in other.steps
        if index in made and (is_alone or other.updates):
            rest = f", the other makes {other.num_steps}" * (other.num_steps < index - 1)
            note = f"only {here} makes it{rest}"
            result.differences.append(Difference(index, UPDATE, "", 1.0, 0.0, note=note))
        elif is_alone:
            result.unaligned[f"step {index}"] = f"only {here} has it"


def _left(result: Comparison, index: int, mine: Step, before: Step) -> None:
    """Find processes that make no more updates while others, which were beside them, go on."""
    gone = before.updated - mine.updated
    if gone and before.updated & mine.updated:
        ranks = " and ".join(str(int(who.split("-")[1])) for who in sorted(gone))
        note = f"rank {ranks} makes it no more, and others do"
        result.differences.append(Difference(index, UPDATE, "", 1.0, 0.0, note=note))


def _phases(mine: Step, theirs: Step) -> Iterator[str]:
    """Yield phases of a step, in the order in which they are computed."""
    there = {*mine.tensors, *mine.numbers, *theirs.tensors, *theirs.numbers}
    for phase in ev.PHASES:
        if phase == ev.MOMENT:
            yield from sorted(p for p in there if p.startswith(ev.MOMENT))
        elif phase in there:
            yield phase


def _dropout(index: int, mine: Step, theirs: Step) -> str:
    """Return how random numbers could explain a difference; empty: they cannot."""
    drawn = sorted(mine.drawn | theirs.drawn)
    if not drawn:
        return ""
    expected = next(iter(theirs.states.values()), {})
    apart = [
        kind
        for kind in drawn
        if any(s.get(kind) != expected.get(kind) for s in mine.states.values())
    ]
    drew = f"the model draws random numbers of {' and '.join(drawn)}"
    if apart:
        return f"dropout could explain it: {drew}, and random state differs at step {index}"
    if len(mine.states) > 1:
        return f"dropout could explain it: {drew}, and ranks draw other shapes than one process"
    return ""


def _batches(result: Comparison, index: int, steps: tuple[Step, Step], before: int) -> None:
    """See that both are given the same samples.

    Where gradients agree they were, in another form; where none is missing, what comes of more of
    them is what is wrong.

    Args:
        result: Comparison of the steps so far.
        index: The step.
        steps: The job's and the reference's.
        before: Number of differences before this step.
    """
    mine, theirs = steps
    if not theirs.rows or mine.rows == theirs.rows:
        return
    if not mine.rows and mine.is_update:  # compiled as a whole, say
        result.unaligned[f"step {index}, {ev.INPUT}"] = "no call of the job's models was seen"
        return
    missing, more = len(theirs.rows - mine.rows), len(mine.rows - theirs.rows)
    if any("." in row for row in mine.rows | theirs.rows):
        result.unaligned[f"step {index}, {ev.INPUT}"] = "no tokens"
        return
    note = f"{missing} of {len(theirs.rows)} samples are missing, {more} are not the reference's"
    here = result.differences[before:]
    if are_equal(result, index, theirs):
        result.unaligned[f"step {index}, {ev.INPUT}"] = f"{note}, and all gradients are equal"
    elif here and not missing:
        told = f"the job gives its models {more} sample{'s' * (more > 1)} more than the reference"
        result.more[index].insert(0, told)
    elif told := told_by_gradients(result, index, theirs):
        result.unaligned[f"step {index}, {ev.INPUT}"] = f"{note}, and {told}"
    else:
        before += sum(difference.phase == ev.EVALUATION for difference in here)
        result.differences.insert(before, Difference(index, ev.INPUT, "", 1.0, 0.0, note=note))


def _calls_more(mine: Step, theirs: Step) -> Iterator[str]:
    """Say which modules the job calls more often, and give its calls the reference's names."""
    for name, count in matched(mine, theirs, _distance).items():
        what = f"{name or 'the model'} {count} time{'s' * (count > 1)} more"
        yield f"the job calls {what} than the reference"
    ours, expected = (step.tensors.get(ev.FORWARD, {}) for step in (mine, theirs))
    apart = [n for n in expected if n in ours and ours[n].lost and not expected[n].lost]
    if apart:
        names = " and ".join(name or "the model" for name in apart)
        yield f"the job calls {names} apart from what the reference computes"


def _distance(tensor: Digests, reference: Digests) -> float:
    return math.nan if _why_not(tensor, reference) else _error(tensor, reference)


def _known(recording: Recording) -> set[str]:
    """Return parameters whose first values are known as a whole."""
    first = recording.steps.get(1, Step()).tensors.get(ev.START, {})
    return {name for name, tensor in first.items() if not tensor.problem}


def _filled(
    mine: Mapping[str, Digests], theirs: Mapping[str, Digests], known: Collection[str]
) -> dict[str, Digests]:
    """Return gradients, with zeros for known parameters whose gradient only the other job has."""
    nothing = {"": ((0.0,) * ev.NUM_SIGNS, 0.0)}
    missing = {
        name: Digests(tensor.shape, tensor.dtype, nothing)
        for name, tensor in theirs.items()
        if name in known and name not in mine and not tensor.problem
    }
    return {**mine, **(missing if mine.keys() & known else {})}


def _phase(  # noqa: PLR0917
    result: Comparison,
    index: int,
    phase: str,
    mine: Step,
    theirs: Step,
    floor: Floor,
    known: Collection[str] = (),
) -> None:
    ours, expected = mine.tensors.get(phase, {}), theirs.tensors.get(phase, {})
    ours, expected = _filled(ours, expected, known), _filled(expected, ours, known)
    common = [name for name in expected if name in ours]
    if phase in (ev.GRADIENT, ev.CLIPPED):  # of the end of the model first, as they are computed
        common.reverse()
    scale = max((tensor.norm for tensor in expected.values() if not tensor.problem), default=0.0)
    losses = scales(mine, theirs) if phase == ev.BACKWARD else {}
    for name in common:
        reference = expected[name]
        tensor = ours[name].scaled(losses).beside(reference)
        where = f"{phase} {name}"
        bound = floor.bound(index, phase, name, _shortest(tensor, reference))
        if reason := _why_not(tensor, reference) or _why_mixed(reference, bound):
            result.unaligned.setdefault(where, reason)
            continue
        error = _error(tensor, reference, phase)
        if tensor.is_sum and not error <= bound:
            result.unaligned.setdefault(where, "ranks have different terms of it, or parts")
            continue
        result.num_compared += 1
        tiny = TINY.get(_shortest(tensor, reference), 1e-5) * scale
        if not reference.norm <= tiny:  # of one that is zero but for rounding no digit is right
            result.largest[phase] = max(error, result.largest.get(phase, 0.0))
        if tensor.disagree > bound and tensor.disagree * tensor.norm > tiny:
            origin = _origin(mine, theirs, phase, name, bound)
            result.differences.append(
                Difference(
                    index, phase, name, tensor.disagree, bound, who=tensor.who, origin=origin
                )
            )
        elif (
            not error <= bound
            and not (error * reference.norm if reference.norm else tensor.norm) <= tiny
        ):
            factor, rest = _nearest(_common(tensor, reference))
            origin = _origin(mine, theirs, phase, name, bound, is_scaled=rest <= TIMES * bound)
            result.differences.append(
                Difference(index, phase, name, error, bound, factor, rest, origin=origin)
            )
    lost = {f"{phase} {n}": f"of some calls: {ours[n].lost}" for n in common if ours[n].lost}
    result.unaligned = lost | result.unaligned
    for name in expected.keys() - ours.keys():
        result.unaligned.setdefault(f"{phase} {name}", "the job has not computed it by this name")
    for name in ours.keys() - expected.keys():
        why = ours[name].problem or "the reference has not computed it"
        result.unaligned.setdefault(f"{phase} {name}", why)


def _origin(
    mine: Step, theirs: Step, phase: str, name: str, bound: float, *, is_scaled: bool = True
) -> str:
    """Say whether a gradient was wrong before it was reduced.

    Where ranks' own gradients add up to another multiple of the reference's, their loss may have
    been scaled for a mean, or wrongly: that cannot be told, unless what they were reduced to is no
    multiple (`is_scaled`).
    """
    if phase != ev.GRADIENT:
        return ""
    own, reference = (step.tensors.get(ev.OWN, {}).get(name) for step in (mine, theirs))
    if own is None or reference is None or _why_not(own, reference):
        return ""
    if _error(own, reference) <= bound:
        return REDUCTION
    _, rest = _nearest(_common(own, reference))
    if rest <= TIMES * bound:
        return "" if is_scaled else REDUCTION
    return ev.BACKWARD


def _find_scaled(result: Comparison, index: int, mine: Step | None, theirs: Step | None) -> None:
    """See that ranks' own gradients are multiples which they were not at the step before.

    Where ranks average, a loss that is divided once too often gives gradients that add up to the
    reference's, as if it were a sum that was not taken.

    Args:
        result: A step's differences, those of steps before it, and what is known of them.
        index: The step.
        mine: The job's step before it.
        theirs: The reference's.
    """
    is_first = (
        mine and theirs and all(difference.step == index for difference in result.differences)
    )
    for at, difference in enumerate(result.differences if is_first else ()):
        own, reference = (
            step.tensors.get(ev.OWN, {}).get(difference.name) for step in (mine, theirs) if step
        )
        if difference.origin == REDUCTION and own and reference and not _why_not(own, reference):
            factor, rest = _nearest(_common(own, reference))
            near = [difference.rest, rest, abs(factor * difference.factor - 1)]
            if all(error <= TIMES * difference.bound for error in near):
                result.differences[at] = replace(difference, origin=ev.BACKWARD)


def scales(mine: Step, theirs: Step) -> dict[str, float]:
    """Return how much larger each sample's part of the loss is there than here.

    A rank may take the gradient of the mean of its own samples, and ranks the mean of gradients.
    Whether that is right is seen in gradients of parameters.
    """
    ours = mine.tensors.get(ev.BACKWARD, {})
    found: dict[str, float] = {}
    for name, reference in theirs.tensors.get(ev.BACKWARD, {}).items():
        if name in ours and not _why_not(ours[name], reference):
            for row, (sums, _) in ours[name].rows.items():
                if row not in found and row in reference.rows:
                    factor, _ = _nearest([(sums, reference.rows[row][0])])
                    found |= {row: 1.0 / factor} if factor and math.isfinite(factor) else {}
    return found


def _why_not(tensor: Digests, reference: Digests) -> str:
    if tensor.problem or reference.problem:
        return tensor.problem or f"of the reference: {reference.problem}"
    common = tensor.rows.keys() & reference.rows.keys()
    for row in common or {""}:
        shape, expected = tensor.shape_of(row), reference.shape_of(row)
        if shape != expected:
            return f"shape {shape} is not {expected} of the reference"
    if not common:
        return "the samples are not the reference's"
    return ""


def _shortest(tensor: Digests, reference: Digests) -> str:
    return max((tensor.dtype, reference.dtype), key=lambda dtype: EPSILON.get(dtype, 0.0))


def _common(
    tensor: Digests, reference: Digests
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the sums of each sample that both have."""
    rows = reference.rows.items()
    return [(tensor.rows[row][0], sums) for row, (sums, _) in rows if row in tensor.rows]


def _why_mixed(reference: Digests, bound: float) -> str:
    """Return whether a reference's samples with one name have other values."""
    is_mixed = any(reference.rows) and reference.disagree > bound
    return "samples of the reference with the same input have other values" if is_mixed else ""


def _error(tensor: Digests, reference: Digests, phase: str = "") -> float:
    """Return the norm of the difference of common samples, relative to the reference's."""
    if phase in _OF_BACKWARD and not (tensor.is_finite or reference.is_finite):
        return 0.0
    common = tensor.rows.keys() & reference.rows.keys()
    ours, theirs = ({row: t.rows[row] for row in common} for t in (tensor, reference))
    if any(math.isfinite(ours[row][1]) != math.isfinite(theirs[row][1]) for row in common):
        return math.inf
    difference = math.fsum(distance(a, b) ** 2 for a, b in _common(tensor, reference))
    norm = math.fsum(size_of(sums, norm) ** 2 for sums, norm in theirs.values())
    if math.isnan(difference) or math.isnan(norm):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)


def _nearest(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float]:
    """Return the reference's factor that comes nearest, and the error that is left.

    Args:
        pairs: Sums of samples that both have, see `_common`.
    """
    product = math.fsum(x * y for a, b in pairs for x, y in zip(a, b, strict=True))
    square = math.fsum(y * y for _, b in pairs for y in b)
    if not square or not math.isfinite(product):
        return math.nan, math.nan
    factor = product / square
    rest = math.fsum((x - factor * y) ** 2 for a, b in pairs for x, y in zip(a, b, strict=True))
    return factor, math.sqrt(rest / square)


def _numbers(  # noqa: PLR0917
    result: Comparison, index: int, phase: str, mine: Step, theirs: Step, floor: Floor
) -> None:
    """Compare losses, norms or rates."""
    for name in theirs.numbers.get(phase, {}):
        ours, expected = numbers_of(mine, phase, name), numbers_of(theirs, phase, name)
        where = f"{phase} {name}".strip()
        if not ours:
            result.unaligned.setdefault(where, "the job has not computed it")
            continue
        error, ratio = _error_of_numbers(mine, theirs, phase, name)
        dtypes = mine.dtypes.get(phase, set()) | theirs.dtypes.get(phase, set())
        shortest = max(dtypes or {"float32"}, key=lambda dtype: EPSILON.get(dtype, 0.0))
        bound = floor.bound(index, phase, name, "float64" if phase == ev.RATE else shortest)
        result.num_compared += 1
        is_zero = max(abs(math.fsum(ours)), abs(math.fsum(expected))) <= _rounding_of_loss(theirs)
        if phase == ev.LOSS and is_zero:
            continue  # but for rounding, as where advantages have no mean: no digit is right
        result.largest[phase] = max(error, result.largest.get(phase, 0.0))
        if not error <= bound:
            note = why_norm(mine, theirs, name, bound) if phase == ev.NORM else ""
            result.differences.append(
                Difference(index, phase, name, error, bound, ratio, 0.0, note=note)
            )


def _rounding_of_loss(step: Step) -> float:
    """Return what rounding of outputs, or of weights, makes of a loss, by their gradients."""
    made = 0.0
    for values, gradients in ((ev.FORWARD, ev.BACKWARD), (ev.WEIGHT, ev.GRADIENT)):
        for name, value in step.tensors.get(values, {}).items():
            gradient = step.tensors.get(gradients, {}).get(name)
            if gradient is not None and gradient.is_finite and value.is_finite:
                made = max(made, EPSILON.get(value.dtype, 0.0) * value.norm * gradient.norm)
    return _ULPS * made


def _error_of_numbers(mine: Step, theirs: Step, phase: str, name: str) -> tuple[float, float]:
    """Return how far numbers of a phase are from the reference's, and the ratio of both."""
    ours, expected = numbers_of(mine, phase, name), numbers_of(theirs, phase, name)
    if phase == ev.LOSS:
        return _apart(ours, expected)
    mean = statistics.fmean(expected or [0.0])
    ratio = statistics.fmean(ours) / mean if mean and ours else math.nan
    lists = [[*step.numbers.get(phase, {}).get(name, {}).values()] for step in (mine, theirs)]
    if len({len(some) for some in lists[0] + lists[1]}) == 1:
        pairs = zip(zip(*lists[0], strict=True), zip(*lists[1], strict=True), strict=True)
        return max(_farthest(*pair) for pair in pairs), ratio  # of several each with its own
    # Some ranks have nothing of a group, or clip a group in several calls: each has its like.
    apart = [[_farthest([mine], [one]) for one in expected] for mine in ours]
    nearest = (min(some, default=math.inf) for some in [*apart, *zip(*apart, strict=True)])
    return max(nearest, default=math.inf), ratio


def _farthest(ours: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest distance of ranks' numbers from the reference's."""
    if not expected:
        return math.inf
    theirs = statistics.fmean(expected)
    if not math.isfinite(theirs):
        return math.inf if any(map(math.isfinite, ours)) else 0.0
    errors = [abs(value - theirs) / (abs(theirs) or 1.0) for value in ours]
    return max((math.inf if math.isnan(e) else e for e in errors), default=math.inf)


def _apart(ours: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Return the distance of losses of ranks and microbatches from those of the reference.

    They may be terms of a sum or of a mean, and may have been multiplied by a number of ranks or
    microbatches, or by a power of two: what is made of them is seen in gradients. Where terms
    cancel, the distance is relative to these: so is what rounding makes of them.

    Returns:
        Distance, and the ratio of both beside what they may have been multiplied by.
    """
    mine, theirs = math.fsum(ours), math.fsum(expected)
    if not ours or not expected or math.isfinite(mine) != math.isfinite(theirs):
        return math.inf, math.nan
    if not math.isfinite(mine):
        return 0.0, 1.0
    lost, gone = (math.fsum(map(abs, some)) - abs(math.fsum(some)) for some in (ours, expected))
    if not mine or not theirs:
        return abs(mine - theirs) / max(1.0, lost, gone), math.nan
    ratio = mine / theirs
    near = Fraction(ratio).limit_denominator(_MOST_TERMS)
    numbers = sorted((abs(near.numerator), near.denominator))
    scales = [1.0]
    if ratio > 0:
        scales += [2.0 ** round(math.log2(ratio))] + [float(near)] * (numbers[0] == 1)
    return min(
        (abs(mine - by * theirs) / (by * abs(theirs) + max(lost, by * gone)), ratio / by)
        for by in scales
    )
