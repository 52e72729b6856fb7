"""Around the first difference both jobs run again: where exactly it lies, and a program for it."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hp_base.errors import HpError
from hp_verify.comparing.compare import scales
from hp_verify.comparing.findings import Comparison, Difference, Exact, Reproduction
from hp_verify.comparing.recordings import Recording, Step
from hp_verify.recording import events as ev
from hp_verify.recording.request import Focus
from hp_verify.recording.second_run import BEFORE, HELD, module_of
from hp_verify.recording.slices import index_of
from hp_verify.recording.values import Part
from hp_verify.reproducing.elements import combinations, exact, ranks_in_words
from hp_verify.reproducing.module_programs import blames_inputs
from hp_verify.reproducing.programs import MOST_LINES
from hp_verify.reproducing.reproduce_module import (
    Maker,
    backwards,
    forwards,
    gradients,
    parents_of,
)
from hp_verify.reproducing.reproduce_update import (
    OF_NUMBERS,
    by_rank,
    of_phase,
    parameter,
    show_values,
)
from hp_verify.reproducing.second_runs import CannotError, Pair, SecondRun

_OF_MODULES = (ev.FORWARD, ev.EVALUATION, ev.BACKWARD)
_SECONDS = 300
_PROGRAM, _RECORD = "reproduce.py", "record.pt"


def focus_of(first: Difference, expected: Recording) -> Focus:
    """Say around what the second run keeps tensors: modules in which it can be computed again.

    Args:
        first: The first difference.
        expected: The reference's first run.
    """
    step, phase, name = first.step, first.phase, first.name
    seen = expected.steps.get(step, Step()).tensors
    called = {module_of(n) for n in [*seen.get(ev.FORWARD, {}), *seen.get(ev.EVALUATION, {})]}
    if phase in _OF_MODULES:
        own = module_of(name)
        inside = [parent for parent in parents_of(own) if parent in called]
        around = dict.fromkeys([*inside[:1], *inside[-1:]])  # its parent, and the model
        return Focus(step, phase, name, modules=(own, *around))
    if phase in OF_NUMBERS or phase == ev.INPUT:
        return Focus(step, phase, name)
    inside = [m for m in parents_of(name) if m in called] if phase == ev.GRADIENT else []
    return Focus(step, phase, name, modules=tuple(inside[:2]), parameters=(name,))


def look_again(
    comparison: Comparison,
    recordings: tuple[Recording, Recording],
    run: Callable[[str, Focus], Path],
    folder: Path,
    *,
    float64: bool = False,
) -> None:
    """Run both jobs again and say what their first difference is.

    Args:
        comparison: Gets what is found.
        recordings: First runs of the job and of the reference.
        run: Runs the "job" or the "reference" with a focus; returns the folder it wrote into.
        folder: Folder that the program is written into.
        float64: Whether both are lifted to it.
    """
    first = comparison.first
    assert first is not None
    actual, expected = recordings
    focus = focus_of(first, expected)
    try:
        theirs, mine = (SecondRun(run(side, focus)) for side in ("reference", "job"))
    except HpError as error:
        comparison.again = f"the second run failed: {error}"
        return
    steps = actual.steps.get(first.step, Step()), expected.steps.get(first.step, Step())
    factors = scales(*steps) if first.phase in (ev.BACKWARD, ev.GRADIENT) else {}
    pair = Pair(theirs, mine, first.step, first.phase, first.bound or 1e-5, factors, float64)
    try:
        comparison.exact = _exact(first, pair, steps)
        comparison.again = "" if comparison.exact else "the difference did not come again"
    except CannotError as error:
        comparison.again = str(error)
    made, why = reproduce(first, pair, steps, folder)
    comparison.reproduction = made
    if made is None:
        comparison.again = "; ".join(dict.fromkeys(filter(None, [comparison.again, *why])))


def _exact(first: Difference, pair: Pair, steps: tuple[Step, Step]) -> Exact | None:
    if first.phase == ev.INPUT:
        return of_batches(pair.actual.batches(first.step), pair.expected.batches(first.step))
    if first.phase in OF_NUMBERS:
        return of_numbers(first, *steps)
    if first.phase in _OF_MODULES:
        _, expected, actual, parts = pair.samples(first.name, first.phase)
        return exact(
            expected,
            actual,
            parts=parts,
            bound=pair.bound,
            others={},
            offsets=_offsets(pair.expected, first),
            dims=["samples", *(f"dim {d}" for d in range(1, expected.ndim))],
        )
    expected, actual, parts = parameter(pair, first.phase, first.name)
    return exact(
        expected,
        actual,
        parts=parts,
        bound=pair.bound,
        others=_others(first, pair, actual, parts),
        offsets={},
        terms=_terms(first, pair, parts),
    )


def of_batches(mine: dict[int, list[str]], theirs: dict[int, list[str]]) -> Exact:
    """Say which samples of the reference ranks are given.

    Args:
        mine: Rank of the job -> names of its samples.
        theirs: The same of the reference.
    """
    expected = list(dict.fromkeys(row for rows in theirs.values() for row in rows))
    number = {row: str(i) for i, row in enumerate(expected)}
    given = [
        f"rank {rank} is given {', '.join(number.get(row, 'another') for row in rows)}"
        for rank, rows in sorted(mine.items())
    ]
    missing = set(expected).difference(*mine.values())
    lost = ", ".join(number[row] for row in expected if row in missing)
    wrong = tuple(
        rank
        for rank, rows in sorted(mine.items())
        if any(row not in number for row in rows)
        or any(set(rows) & set(mine[other]) for other in mine if other < rank)
    )
    sentence = f"of the reference's {len(expected)} samples {'; '.join(given)}"
    sentence += f"; no rank is given {lost}" if lost else ""
    return Exact(
        sentence,
        (),
        len(expected),
        len(expected) - len(missing),
        wrong,
        len(missing),
        len(expected),
    )


def of_numbers(first: Difference, mine: Step, theirs: Step) -> Exact:
    """Say which ranks have another number, such as a norm, than the reference.

    Args:
        first: First difference, of numbers.
        mine: The job's step.
        theirs: The reference's.
    """
    ours = by_rank(mine, first)
    expected = next(iter(theirs.numbers.get(first.phase, {}).get(first.name, {}).values()))
    if first.phase == ev.LOSS:
        sums = [math.fsum(values) for values in ours.values()]
        is_copy = max(sums) - min(sums) <= first.bound * abs(sums[0])  # or ranks have terms
        values = {-1: sums[0] if is_copy else math.fsum(sums)}
        wanted, wrong = math.fsum(expected), tuple(sorted(ours))
        said = f"the losses of {ranks_in_words(wrong)} add up to {values[-1]:.8g}"
        said += " on each" * (is_copy and len(sums) > 1)
        alright = ""
    else:
        at = _worst_of(list(ours.values()), expected)
        values = {rank: numbers[at] for rank, numbers in ours.items()}
        wanted = expected[at]
        apart = {r: abs(v - wanted) / (abs(wanted) or 1.0) for r, v in values.items()}
        wrong = tuple(sorted(r for r, far in apart.items() if not far <= first.bound))
        right = [rank for rank in ours if rank not in wrong]
        said = ", ".join(f"rank {rank} has {values[rank]:.8g}" for rank in wrong)
        alright = f" ({ranks_in_words(right)}: right)" if right else ""
    worst = max(values.values(), key=lambda v: abs(v - wanted))
    sentence = f"{said} in place of {wanted:.8g}{alright}"
    return Exact(sentence, (), wanted, worst, wrong, len(wrong), len(ours))


def _worst_of(ours: Sequence[Sequence[float]], expected: Sequence[float]) -> int:
    """Return the index of a step's number that is the farthest off; the last if counts differ."""
    if any(len(numbers) != len(expected) for numbers in ours):
        return -1
    apart = [
        max(abs(numbers[i] - wanted) / (abs(wanted) or 1.0) for numbers in ours)
        for i, wanted in enumerate(expected)
    ]
    return apart.index(max(apart))


def _offsets(kept: SecondRun, first: Difference) -> dict[str, Tensor]:
    """Return vectors among the weights of a module."""
    held = {name: kept.whole(first.step, HELD, name) for name in kept.names(first.step, HELD)}
    return {name: w.values for name, w in held.items() if w is not None and w.values.ndim == 1}


def _others(first: Difference, pair: Pair, actual: Tensor, parts: list[Part]) -> dict[str, Tensor]:
    """Return what a parameter's value may be in place of the reference's."""
    name, step, phase = first.name, first.step, first.phase
    found: dict[str, Tensor] = {}
    if phase == ev.GRADIENT:
        found |= _of_own(pair, first, actual, parts)
        terms = pair.expected.parts(step, ev.OWN, name).get("", ())
        for part in terms if len(terms) > 1 else ():
            found[f"the reference's of backward {part.call + 1} of {len(terms)} alone"] = (
                part.values
            )
    moment = f"{BEFORE} {phase.removeprefix(f'{ev.MOMENT} ')}"
    before = {
        ev.GRADIENT: (step - 1, ev.GRADIENT, "stale: the gradient of the step before"),
        ev.CLIPPED: (step, ev.GRADIENT, "the gradient as it was before clipping"),
        ev.WEIGHT: (step, f"{BEFORE} weight", "stale: the weight before the update"),
    }.get(phase, (step, moment, "stale: the state before the update"))
    whole = pair.actual.whole(before[0], before[1], name)
    if whole is not None and whole.is_complete:
        found[before[2]] = whole.values
    return found


def _terms(first: Difference, pair: Pair, parts: list[Part]) -> dict[str, Tensor]:
    """Return ranks' own gradients of each backward, where every rank has the whole parameter.

    Where these are wrong themselves, the reference's.
    """
    if first.phase != ev.GRADIENT or not parts:
        return {}
    box = parts[0].box
    if first.origin == ev.BACKWARD:
        theirs = pair.expected.parts(first.step, ev.OWN, first.name).get("", ())
        return {f"backward {part.call + 1} of the reference": part.values for part in theirs}
    own = pair.actual.parts(first.step, ev.OWN, first.name).get("", ())
    if any(part.box != box or part.values.shape != part.shape for part in [*own, *parts]):
        return {}
    return {f"backward {part.call + 1} of rank {part.rank}": part.values for part in own}


def _of_own(pair: Pair, first: Difference, actual: Tensor, parts: list[Part]) -> dict[str, Tensor]:
    """Say what ranks' own gradients may have become, put together over the parts of a parameter."""
    found: dict[str, Tensor] = {}
    own = pair.actual.own(first.step, first.name)
    alone = {(part.rank, part.box): part.values for part in own}
    scale = pair.bound * float(actual.double().square().mean().sqrt())
    is_alone = [
        bool(((alone[part.rank, part.box] - part.values).abs() <= scale).all())
        for part in parts
        if (part.rank, part.box) in alone
    ]
    ranks = {part.rank for part in parts}
    if len(is_alone) == len(parts) and len(ranks) > 1 and all(is_alone):
        found["what each rank has alone, as before the reduction"] = actual
    for box in {part.box for part in own} if len({part.rank for part in own}) > 1 else ():
        index = index_of(box)
        values = {part.rank: part.values for part in own if part.box == box}
        for name, value in combinations(values):
            whole = torch.full_like(actual, torch.nan)
            found.setdefault(f"{name} before the reduction", whole)[index] = value
    return found


def reproduce(
    first: Difference, pair: Pair, steps: tuple[Step, Step], folder: Path
) -> tuple[Reproduction | None, list[str]]:
    """Write the smallest program that shows a difference, and run it.

    Args:
        first: The first difference.
        pair: Both second runs.
        steps: The job's and the reference's step in the first runs.
        folder: Folder for the program and its record; it is made if need be.

    Returns:
        The first program that computes the reference's value again; reasons why others do not.
    """
    title = f"Step {first.step}, {first.phase} {first.name}".rstrip()
    folder.mkdir(parents=True, exist_ok=True)
    why: list[str] = []
    blaming: Maker | None = None
    for make in _of_modules(first, pair, title):
        made = _made(make, folder, why)
        if made is not None and not blames_inputs(made.verdict):
            return made, why
        if made is not None:
            blaming = blaming or make
    rest = (
        [blaming]
        if blaming
        else [
            lambda _: of_phase(first, pair, steps, title),
            lambda _: show_values(first, pair, title),
        ]
    )
    found = (_made(make, folder, why) for make in rest)
    return next((made for made in found if made is not None), None), why


def _made(make: Maker, folder: Path, why: list[str]) -> Reproduction | None:
    """Write a program and run it; None, and one more reason, where it does not run."""
    try:
        text, record = make(folder)
    except CannotError as error:
        why.append(str(error))
        return None
    except Exception as error:  # noqa: BLE001 - a stranger's job; the difference is told without it
        why.append(f"{type(error).__name__}: {error}"[:200])
        return None
    if (count := text.count("\n")) > MOST_LINES:
        why.append(f"its program would have {count} lines")
        return None
    torch.save(record, folder / _RECORD)
    path = folder / _PROGRAM
    path.write_text(text, encoding="utf-8")
    output, failure = _run(path)
    if failure is not None:
        why.append(failure)
        return None
    return Reproduction(path, text, output)


def _run(path: Path) -> tuple[str, str | None]:
    """Run a program: what it printed; and the last line of its error where it failed."""
    try:
        done = subprocess.run(  # noqa: S603 - it was just written
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it ran for {_SECONDS} s"
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return done.stdout, None if done.returncode == 0 else last[0]


def _of_modules(first: Difference, pair: Pair, title: str) -> Iterator[Maker]:
    """Yield programs that compute modules again, the smallest first."""
    if first.phase in (ev.FORWARD, ev.EVALUATION):
        yield from forwards(first, pair, title)
    elif first.phase == ev.BACKWARD:
        yield from backwards(first, pair, title)
    elif first.phase == ev.GRADIENT and first.origin == ev.BACKWARD:
        yield from gradients(first, pair, title)
