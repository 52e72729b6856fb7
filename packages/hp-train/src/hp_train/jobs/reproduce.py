"""Writes and runs the program that shows a first difference, see `programs`."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_train.jobs import events as ev
from hp_train.jobs import programs
from hp_train.jobs.compare import Place
from hp_train.jobs.joined import Step
from hp_train.jobs.keeping import BEFORE, module_of
from hp_train.jobs.kept import Kept, Part
from hp_train.jobs.modules import (
    CannotError,
    ModuleSides,
    Pair,
    distance,
    farthest,
    index_of_largest,
    laid_like,
    times_of,
)
from hp_train.jobs.programs import ModuleCall
from hp_train.jobs.reproduction import MOST_LINES, Reproduction

_SECONDS = 300
_PROGRAM, _RECORD, _MODULE = "reproduce.py", "record.pt", "module.pt"


def reproduce(
    place: Place, pair: Pair, steps: tuple[Step, Step], folder: Path
) -> tuple[Reproduction | None, list[str]]:
    """Write the smallest program that shows a difference, and run it.

    Args:
        place: The first difference.
        pair: Both second runs.
        steps: The job's and the reference's step in the first runs.
        folder: Where the program and what it reads are written; made if it is not there.

    Returns:
        The first program that computes the reference's value again; reasons why others do not.
    """
    title = f"Step {place.step}, {place.phase} {place.name}".rstrip()
    folder.mkdir(parents=True, exist_ok=True)
    why: list[str] = []
    makers = list(_makers(place, pair, steps, title))
    best: Reproduction | None = None
    index = -1
    for number, make in enumerate(makers):
        made = _made(make, folder, why)
        if made is None or (best is not None and not made.output):
            continue
        if not programs.blames_inputs(made.verdict):
            is_better = best is None or number < len(makers) - 1  # the last only shows values
            return (made if is_better else _made(makers[index], folder, [])), why
        if best is None:
            best, index = made, number
    return best and _made(makers[index], folder, []), why


def _made(make: "_Maker", folder: Path, why: list[str]) -> Reproduction | None:
    """Write a program and run it; None, and one more reason, where it does not run."""
    try:
        text, record = make(folder)
    except (CannotError, OSError, ImportError, AttributeError, RuntimeError) as error:
        why.append(f"{error}"[:200])
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


_Made = tuple[str, dict[str, Any]]
_Maker = Callable[[Path], _Made]


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


def _makers(place: Place, pair: Pair, steps: tuple[Step, Step], title: str) -> Iterator[_Maker]:
    """Programs that may show a difference, the one that says most first."""
    phase = place.phase
    if phase in (ev.FORWARD, ev.EVALUATION):
        yield from _forwards(place, pair, title)
    elif phase == ev.BACKWARD:
        yield from _backwards(place, pair, title)
    elif phase == ev.GRADIENT and place.origin == ev.BACKWARD:
        yield from _parameters(place, pair, title)
    yield lambda _: _of_phase(place, pair, steps, title)
    if phase not in (ev.LOSS, ev.RATE, ev.NORM, ev.INPUT):
        yield lambda _: _values(place, pair, title, place.name)


def _of_phase(place: Place, pair: Pair, steps: tuple[Step, Step], title: str) -> _Made:
    """What is no module's: reductions, norms, updates, losses, rates."""
    phase = place.phase
    if phase == ev.GRADIENT:
        return _reduction(place, pair, title)
    if phase == ev.NORM:
        return _norm(place, pair, steps, title)
    if phase == ev.CLIPPED:
        return _clipping(place, pair, steps, title)
    if phase == ev.WEIGHT or phase.startswith(ev.MOMENT):
        return _update(place, pair, title)
    if phase in (ev.LOSS, ev.RATE):
        return _numbers(place, steps, title)
    raise CannotError("batches are not computed" if phase == ev.INPUT else "no module gives it")


# Modules.


def _call(
    sides: ModuleSides, pair: Pair, title: str, module: str, entries: Sequence[Any]
) -> tuple[ModuleCall, dict[str, Any]]:
    """What all programs of a module share."""
    settings = sides.settings()
    prepare = []
    if pair.float64:
        prepare = [
            "torch.set_default_dtype(torch.double); torch.Tensor.float = torch.Tensor.double"
        ]
    elif sides.autocast:
        prepare = [f'torch.autocast("cpu", torch.{sides.autocast}).__enter__()']
    grads = sides.graded(entries[0])
    texts = sides.outputs(entries[0]["call"], entries[0]["times"])
    call = ModuleCall(
        title,
        pair.bound,
        sides.kind,
        module or "the model",
        outputs=[texts[name][0] for name in grads],
        settings=bool(settings),
        is_main=sides.is_main,
        prepare=prepare,
    )
    record: dict[str, Any] = {
        "path": pair.expected.path,
        "settings": [(*_last(name), value) for name, value in settings.items()],
    }
    return call, record


def _sides(
    sides: ModuleSides, pair: Pair, entries: Sequence[Any], *, with_grads: bool
) -> dict[str, Any]:
    return {
        side: {
            "weights": sides.weights(kept),
            "calls": [
                sides.call(entry, of_job=side == "job", with_grads=with_grads) for entry in entries
            ],
        }
        for side, kept in (("reference", pair.expected), ("job", pair.actual))
    }


def _last(name: str) -> tuple[str, str]:
    path, _, key = name.rpartition(".")
    return path, key


def _save_module(sides: ModuleSides, pair: Pair, folder: Path) -> None:
    (folder / _MODULE).write_bytes(Path(sides.file).read_bytes())
    if sides.is_main:
        source = programs.classes_of(Path(pair.expected.main).read_text(encoding="utf-8"))
        (folder / f"{programs.OWN_CLASSES}.py").write_text(source, encoding="utf-8")


def _worst(
    place: Place, pair: Pair, entries: Sequence[Any], shape_of: Callable[[Any], Sequence[int]]
) -> tuple[Any, Tensor, Tensor]:
    """The call with the largest error, and both values of the output there, as it lays them."""
    rows, expected, actual, _ = pair.samples(place.name, place.phase)
    at = dict(zip(rows, range(len(rows)), strict=True))
    best: tuple[float, Any, Tensor, Tensor] | None = None
    for entry in entries:
        if not entry["rows"] or not all(row in at for row in entry["rows"]):
            continue
        index = [at[row] for row in entry["rows"]]
        theirs, mine = expected[index], actual[index]
        error = float((mine - theirs).double().norm().nan_to_num(torch.inf))
        if best is None or error > best[0]:
            shape = shape_of(entry)
            best = error, entry, laid_like(theirs, shape), laid_like(mine, shape)
    if best is None:
        raise CannotError(f"samples of no call of the reference's {place.name} are in the job")
    return best[1:]


def _values_of(expected: Tensor, actual: Tensor) -> dict[str, Any]:
    return {"expected": expected, "actual": actual, "at": index_of_largest(expected, actual)}


def _with(call: ModuleCall, **changes: Any) -> ModuleCall:
    return dataclasses.replace(call, **changes)


def _forwards(place: Place, pair: Pair, title: str) -> Iterator[_Maker]:
    """Programs of the module that gave an output, and of modules that it is in."""
    for module in (module_of(place.name), *parents_of(module_of(place.name))):
        if any(entry["module"] == module for entry in pair.expected.inputs):
            yield lambda folder, m=module: _forward(place, pair, title, m, folder)  # type: ignore[misc]


def _forward(place: Place, pair: Pair, title: str, module: str, folder: Path) -> _Made:
    """A module's output computed again by the module, or by one that it is in."""
    own, times = module_of(place.name), times_of(place.name)
    sides = ModuleSides(pair, module)
    entries = [e for e in sides.entries if e["times"] == (times if module == own else 0)]
    picks = {e["call"]: e["names"][place.name] for e in _giving(pair, place.name)}
    entries = [entry for entry in entries if entry["call"] in picks]
    entry, expected, actual = _worst(place, pair, entries, lambda e: picks[e["call"]][1])
    call, record = _call(sides, pair, title, module, [entry])
    text = picks[entry["call"]][0]
    if module == own:
        changes: dict[str, Any] = {"result": text}
    else:
        inner = own.removeprefix(f"{module}.") if module else own
        changes = {"result": f"seen[{times}]", "hook": (inner, text)}
    _save_module(sides, pair, folder)
    record |= _values_of(expected, actual) | _sides(sides, pair, [entry], with_grads=False)
    return programs.module_program(_with(call, outputs=(), **changes)), record


def _giving(pair: Pair, name: str) -> list[dict[str, Any]]:
    """Calls of the reference that gave an output."""
    return [entry for entry in pair.expected.outputs if name in entry["names"]]


def _backwards(place: Place, pair: Pair, title: str) -> Iterator[_Maker]:
    """Programs of modules that may have made the gradient of an output, the smallest first."""
    own, times = module_of(place.name), times_of(place.name)
    shapes = {e["call"]: e["names"][place.name] for e in _giving(pair, place.name)}
    if not shapes:
        return

    def shape_of(entry: Any) -> Sequence[int]:
        shape: Sequence[int] = shapes[entry["call"]][1]
        return shape

    users = {
        (entry["module"], leaf["place"])
        for entry in pair.expected.inputs
        for leaf in entry["leaves"]
        if leaf["watched"] and entry["module"] != own
    }
    pick = next(iter(shapes.values()))[0]
    for module, given in sorted(users):
        yield lambda folder, m=module, g=given: _backward(  # type: ignore[misc]
            place, pair, title, m, shape_of, folder, result=f"{g}.grad"
        )
    for module in parents_of(own):
        if any(entry["module"] == module for entry in pair.expected.inputs):
            inner = own.removeprefix(f"{module}.") if module else own
            yield lambda folder, m=module, i=inner: _backward(  # type: ignore[misc]
                place,
                pair,
                title,
                m,
                shape_of,
                folder,
                hook=(i, pick),
                result=f"seen[{times}].grad",
            )


def parents_of(name: str) -> list[str]:
    """Modules that a module or parameter is in, the innermost first; "" is the model."""
    parents = []
    while name:
        name = name.rpartition(".")[0]
        parents.append(name)
    return parents


def _backward(  # noqa: PLR0917
    place: Place,
    pair: Pair,
    title: str,
    module: str,
    shape_of: Callable[[Any], Sequence[int]],
    folder: Path,
    **changes: Any,
) -> _Made:
    sides = ModuleSides(pair, module)
    entries = [e for e in sides.entries if e["times"] == 0]
    entry, expected, actual = _worst(place, pair, entries, shape_of)
    call, record = _call(sides, pair, title, module, [entry])
    if not call.outputs:
        raise CannotError(f"no gradient of what {module or 'the model'} gives was seen")
    _save_module(sides, pair, folder)
    record |= _values_of(expected, actual) | _sides(sides, pair, [entry], with_grads=True)
    return programs.module_program(_with(call, terms=sides.has_terms, **changes)), record


def _parameters(place: Place, pair: Pair, title: str) -> Iterator[_Maker]:
    """Programs of modules that may have made a parameter's gradient, the smallest first."""
    for module in parents_of(place.name):
        if any(entry["module"] == module for entry in pair.expected.inputs):
            yield lambda folder, m=module: _parameter(place, pair, title, m, folder)  # type: ignore[misc]


def _parameter(place: Place, pair: Pair, title: str, module: str, folder: Path) -> _Made:
    sides = ModuleSides(pair, module)
    call, record = _call(sides, pair, title, module, sides.entries)
    if not call.outputs:
        raise CannotError(f"no gradient of what {module or 'the model'} gives was seen")
    _save_module(sides, pair, folder)
    expected, actual, _ = parameter(pair, place.phase, place.name)
    record |= _values_of(expected, actual) | _sides(sides, pair, sides.entries, with_grads=True)
    inner = place.name.removeprefix(f"{module}.") if module else place.name
    result = f"module.get_parameter({inner!r}).grad"
    return programs.module_program(_with(call, result=result)), record


# Parameters.


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


def _reduction(place: Place, pair: Pair, title: str) -> _Made:
    """Own gradients of ranks in the box of the worst error, and what became of them."""
    expected, actual, parts = parameter(pair, place.phase, place.name)
    at = index_of_largest(expected, actual)
    holders = [part for part in parts if _has(part, at)]
    box = holders[0].box
    index = tuple(slice(*span) for span in box)
    after = {part.rank: part.values for part in holders if part.box == box}
    own = {
        part.rank: part.values[_inside(index, part)]
        for part in pair.actual.own(place.step, place.name)
        if all(b <= i and e >= j for (b, e), (i, j) in zip(part.box, box, strict=True))
    }
    if not own:
        raise CannotError(f"gradients of {place.name} before the reduction were not seen")
    record = _values_of(expected[index], actual[index]) | {"own": own, "after": after}
    return programs.reduction_program(f"{title}, {list(box)} of it", pair.bound), record


def _has(part: Part, at: Sequence[int]) -> bool:
    return all(begin <= i < end for i, (begin, end) in zip(at, part.box, strict=True))


def _inside(index: Sequence[slice], part: Part) -> tuple[slice, ...]:
    """Indices of a whole tensor as those of a part that has them."""
    pairs = zip(index, part.box, strict=True)
    return tuple(slice(s.start - begin, s.stop - begin) for s, (begin, _) in pairs)


def _norm(place: Place, pair: Pair, steps: tuple[Step, Step], title: str) -> _Made:
    parts = {
        (name, part.box, part.rank): float(part.values)
        for name in pair.actual.names(place.step, ev.NORM)
        for part in pair.actual.parts(place.step, ev.NORM, name)[""]
    }
    if not parts:
        raise CannotError("gradients that the norm is of were not seen")
    mine, theirs = (_by_rank(step, place) for step in steps)
    actual = {rank: values[-1] for rank, values in mine.items()}
    expected = next(iter(theirs.values()))[-1]
    record = {"expected": torch.tensor(expected), "actual": actual, "parts": parts}
    return programs.norm_program(title, max(pair.bound, 1e-6)), record


def _by_rank(step: Step, place: Place) -> dict[int, list[float]]:
    by_process = step.numbers.get(place.phase, {}).get(place.name, {})
    return {int(who.split("-")[1]): values for who, values in by_process.items()}


def _clipping(place: Place, pair: Pair, steps: tuple[Step, Step], title: str) -> _Made:
    expected, actual, _ = parameter(pair, place.phase, place.name)
    record: dict[str, Any] = _values_of(expected, actual)
    for side, kept, step in (
        ("job", pair.actual, steps[0]),
        ("reference", pair.expected, steps[1]),
    ):
        gradient = kept.whole(place.step, ev.GRADIENT, place.name)
        most = next(iter(kept.facts.values())).get("max norm")
        norms = [n for some in step.numbers.get(ev.NORM, {}).values() for n in some.values()]
        if gradient is None or most is None or not norms:
            raise CannotError("the gradient before clipping, its norm or the limit was not seen")
        record[side] = {"gradient": gradient.values, "norm": norms[0][-1], "most": most}
    return programs.clipping_program(title, pair.bound), record


def _update(place: Place, pair: Pair, title: str) -> _Made:
    expected, actual, _ = parameter(pair, place.phase, place.name)
    record: dict[str, Any] = _values_of(expected, actual)
    sides = {"job": pair.actual, "reference": pair.expected}
    kinds = {}
    for side, kept in sides.items():
        update = _options(kept, place.name)
        kinds[side] = update["class"]
        options = {k: v for k, v in update["options"].items() if k in _accepted(update["class"])}
        state = {k: torch.tensor(float(v)) for k, v in update["numbers"].items()}
        prefix = f"{BEFORE} "
        for phase in kept.phases(place.step, place.name):
            whole = kept.whole(place.step, phase, place.name)
            if phase.startswith(prefix) and phase != f"{prefix}weight" and whole:
                state[phase.removeprefix(prefix)] = whole.values
        weight = kept.whole(place.step, f"{prefix}weight", place.name)
        gradient = kept.whole(place.step, ev.CLIPPED, place.name)
        gradient = gradient or kept.whole(place.step, ev.GRADIENT, place.name)
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
    key = place.phase.removeprefix(f"{ev.MOMENT} ")
    result = "p" if place.phase == ev.WEIGHT else f"optimizer.state[p][{key!r}]"
    return programs.update_program(title, pair.bound, kinds["job"], result), record


def _other(mine: Any, theirs: Any, bound: float) -> dict[str, Any]:
    """What was not the reference's before an update: options, and errors of tensors."""
    options = theirs["options"]
    found = {k: (v, options.get(k)) for k, v in mine["options"].items() if options.get(k) != v}
    ours, others = (
        side["state"] | {k: side[k] for k in ("weight", "gradient")} for side in (mine, theirs)
    )
    for key in ours.keys() | others.keys():
        if key not in ours or key not in others:
            found[key] = "missing on one side"
        elif (error := distance(ours[key], others[key])) > bound:
            found[key] = f"error {error:.1e}"
    return found


def _options(kept: Kept, name: str) -> dict[str, Any]:
    for facts in kept.facts.values():
        if name in facts.get("updates", {}):
            found: dict[str, Any] = facts["updates"][name]
            return found
    raise CannotError(f"the update of {name} was not seen")


def _accepted(kind: tuple[str, str]) -> set[str]:
    """Names of the options that an optimizer of torch takes."""
    module, name = kind
    if not module.startswith("torch."):
        raise CannotError(f"{name} is not an optimizer of torch")
    return set(inspect.signature(getattr(sys.modules[module], name)).parameters)


# Where nothing is computed again.


def _numbers(place: Place, steps: tuple[Step, Step], title: str) -> _Made:
    said = "the jobs are at other places of their schedules, or have other options"
    if place.phase == ev.LOSS:
        said = "outputs of the model are equal: it is how losses are made of them"
    mine, theirs = (step.numbers.get(place.phase, {}).get(place.name, {}) for step in steps)
    expected = next(iter(theirs.values()))
    record = {"expected": expected, "actual": {w.rpartition("-")[0]: v for w, v in mine.items()}}
    return programs.numbers_program(title, place.bound, said), record


def _values(place: Place, pair: Pair, title: str, name: str) -> _Made:
    if place.phase in (ev.FORWARD, ev.EVALUATION, ev.BACKWARD):
        _, expected, actual, _ = pair.samples(name, place.phase)
    else:
        expected, actual, _ = parameter(pair, place.phase, name)
    said = "nothing is computed again here: these are the values of both jobs"
    return programs.values_program(title, pair.bound, said), _values_of(expected, actual)
