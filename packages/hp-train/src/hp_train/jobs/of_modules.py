"""Reproductions of what modules give: outputs, their gradients, gradients of their parameters."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_train.jobs.compare import Place
from hp_train.jobs.keeping import module_of
from hp_train.jobs.module_programs import OWN_CLASSES, ModuleCall, classes_of, module_program
from hp_train.jobs.modules import CannotError, ModuleSides, Pair, laid_like, times_of
from hp_train.jobs.of_parameters import Made, parameter, values_of

Maker = Callable[[Path], Made]
"""Writes what a program reads beside itself into a folder."""
_MODULE = "module.pt"


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
                sides.call(entry, f"call-{index}.pt", of_job=side == "job", with_grads=with_grads)
                for index, entry in enumerate(entries)
            ],
        }
        for side, kept in (("reference", pair.expected), ("job", pair.actual))
    }


def _last(name: str) -> tuple[str, str]:
    path, _, key = name.rpartition(".")
    return path, key


def _save(sides: ModuleSides, pair: Pair, entries: Sequence[Any], folder: Path) -> None:
    """Copy what a program unpickles: this process does not."""
    for index, entry in enumerate(entries):
        (folder / f"call-{index}.pt").write_bytes(Path(entry["file"]).read_bytes())
    (folder / _MODULE).write_bytes(Path(sides.file).read_bytes())
    if sides.is_main:
        source = classes_of(Path(pair.expected.main).read_text(encoding="utf-8"))
        (folder / f"{OWN_CLASSES}.py").write_text(source, encoding="utf-8")


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


def _with(call: ModuleCall, **changes: Any) -> ModuleCall:
    return dataclasses.replace(call, **changes)


def forwards(place: Place, pair: Pair, title: str) -> Iterator[Maker]:
    """Programs of the module that gave an output, and of modules that it is in."""
    for module in (module_of(place.name), *parents_of(module_of(place.name))):
        if any(entry["module"] == module for entry in pair.expected.inputs):
            yield lambda folder, m=module: _forward(place, pair, title, m, folder)  # type: ignore[misc]


def _forward(place: Place, pair: Pair, title: str, module: str, folder: Path) -> Made:
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
    _save(sides, pair, [entry], folder)
    record |= values_of(expected, actual) | _sides(sides, pair, [entry], with_grads=False)
    return module_program(_with(call, outputs=(), **changes)), record


def _giving(pair: Pair, name: str) -> list[dict[str, Any]]:
    """Calls of the reference that gave an output."""
    return [entry for entry in pair.expected.outputs if name in entry["names"]]


def backwards(place: Place, pair: Pair, title: str) -> Iterator[Maker]:
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
) -> Made:
    sides = ModuleSides(pair, module)
    entries = [e for e in sides.entries if e["times"] == 0]
    entry, expected, actual = _worst(place, pair, entries, shape_of)
    call, record = _call(sides, pair, title, module, [entry])
    if not call.outputs:
        raise CannotError(f"no gradient of what {module or 'the model'} gives was seen")
    _save(sides, pair, [entry], folder)
    record |= values_of(expected, actual) | _sides(sides, pair, [entry], with_grads=True)
    return module_program(_with(call, terms=sides.has_terms, **changes)), record


def gradients(place: Place, pair: Pair, title: str) -> Iterator[Maker]:
    """Programs of modules that may have made a parameter's gradient, the smallest first."""
    for module in parents_of(place.name):
        if any(entry["module"] == module for entry in pair.expected.inputs):
            yield lambda folder, m=module: _parameter(place, pair, title, m, folder)  # type: ignore[misc]


def _parameter(place: Place, pair: Pair, title: str, module: str, folder: Path) -> Made:
    sides = ModuleSides(pair, module)
    call, record = _call(sides, pair, title, module, sides.entries)
    if not call.outputs:
        raise CannotError(f"no gradient of what {module or 'the model'} gives was seen")
    _save(sides, pair, sides.entries, folder)
    expected, actual, _ = parameter(pair, place.phase, place.name)
    record |= values_of(expected, actual) | _sides(sides, pair, sides.entries, with_grads=True)
    inner = place.name.removeprefix(f"{module}.") if module else place.name
    result = f"module.get_parameter({inner!r}).grad"
    return module_program(_with(call, result=result)), record
