"""Reproductions of what modules give: outputs, their gradients, gradients of their parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_verify.comparing.findings import Difference
from hp_verify.recording.second_run import module_of
from hp_verify.reproducing.module_programs import (
    OWN_CLASSES,
    ModuleCall,
    classes_of,
    module_program,
)
from hp_verify.reproducing.reproduce_update import Made, parameter, values_of
from hp_verify.reproducing.second_runs import CannotError, ModuleSides, Pair, laid_like, times_of

Maker = Callable[[Path], Made]
"""Writes what a program reads beside itself into a folder."""
_MODULE = "module.pt"


_Given = Mapping[int, tuple[str, Sequence[int]]]
"""Call of a module -> Python that takes an output, and the shape of that."""


def _call(
    sides: ModuleSides,
    pair: Pair,
    title: str,
    entries: Sequence[Any],
    folder: Path,
    *,
    with_grads: bool = True,
) -> tuple[ModuleCall, dict[str, Any]]:
    """Say what all programs of a module share, and return what they read.

    What they unpickle is copied into their folder: this process does not.
    """
    settings, name, one = sides.settings(), sides.module or "the model", entries[0]
    prepare = []
    if pair.float64:
        prepare = [
            "torch.set_default_dtype(torch.double); torch.Tensor.float = torch.Tensor.double"
        ]
    elif one["autocast"]:
        prepare = [f'torch.autocast("cpu", torch.{one["autocast"]}).__enter__()']
    grads = sides.graded(one)
    texts = sides.outputs(one["call"], one["times"])
    call = ModuleCall(
        title,
        pair.bound,
        one["kind"],
        name,
        outputs=[texts[grad][0] for grad in grads] if with_grads else (),
        settings=bool(settings),
        is_main=one["is_main"],
        prepare=prepare,
    )
    if with_grads and not grads:
        raise CannotError(f"no gradient of what {name} gives was seen")
    for index, entry in enumerate(entries):
        (folder / f"call-{index}.pt").write_bytes(Path(entry["file"]).read_bytes())
    (folder / _MODULE).write_bytes(Path(sides.file).read_bytes())
    if one["is_main"]:
        source = classes_of(Path(pair.expected.main).read_text(encoding="utf-8"))
        (folder / f"{OWN_CLASSES}.py").write_text(source, encoding="utf-8")
    parted = ((key.rpartition("."), value) for key, value in settings.items())
    record: dict[str, Any] = {
        "path": pair.expected.path,
        "settings": [(path, key, value) for (path, _, key), value in parted],
    }
    for side, kept in (("reference", pair.expected), ("job", pair.actual)):
        calls = [
            sides.call(entry, f"call-{index}.pt", of_job=side == "job", with_grads=with_grads)
            for index, entry in enumerate(entries)
        ]
        record[side] = {"weights": sides.weights(kept), "calls": calls}
    return call, record


def _worst(
    first: Difference, pair: Pair, entries: Sequence[Any], given: _Given
) -> tuple[Any, Tensor, Tensor]:
    """Return the call with the largest error, and both values of the output in its layout."""
    rows, expected, actual, _ = pair.samples(first.name, first.phase)
    at = dict(zip(rows, range(len(rows)), strict=True))
    best: tuple[float, Any, Tensor, Tensor] | None = None
    for entry in entries:
        if not entry["rows"] or not all(row in at for row in entry["rows"]):
            continue
        index = [at[row] for row in entry["rows"]]
        theirs, mine = expected[index], actual[index]
        error = float((mine - theirs).double().norm().nan_to_num(torch.inf))
        if best is None or error > best[0]:
            _, shape = given[entry["call"]]
            best = error, entry, laid_like(theirs, shape), laid_like(mine, shape)
    if best is None:
        raise CannotError(f"samples of no call of the reference's {first.name} are in the job")
    return best[1:]


def forwards(first: Difference, pair: Pair, title: str) -> Iterator[Maker]:
    """Yield programs of the module that gave an output, and of modules that contain it."""
    own = module_of(first.name)
    for module in _called(pair, [own, *parents_of(own)]):
        yield lambda folder, m=module: _forward(first, pair, title, m, folder)  # type: ignore[misc]


def _forward(first: Difference, pair: Pair, title: str, module: str, folder: Path) -> Made:
    """Compute a module's output again by the module, or by one that contains it."""
    own, times = module_of(first.name), times_of(first.name)
    sides = ModuleSides(pair, module)
    entries = [e for e in sides.entries if e["times"] == (times if module == own else 0)]
    given = _giving(pair, first.name)
    entries = [entry for entry in entries if entry["call"] in given]
    entry, expected, actual = _worst(first, pair, entries, given)
    call, record = _call(sides, pair, title, [entry], folder, with_grads=False)
    text, _ = given[entry["call"]]
    if module == own:
        call = replace(call, result=text)
    else:
        call = replace(call, result=f"seen[{times}]", hook=(_inside(own, module), text))
    return module_program(call), record | values_of(expected, actual)


def _giving(pair: Pair, name: str) -> _Given:
    """Return calls of the reference that gave an output."""
    outputs = pair.expected.outputs
    return {entry["call"]: entry["names"][name] for entry in outputs if name in entry["names"]}


def _called(pair: Pair, modules: Sequence[str]) -> list[str]:
    """Return those modules that the reference has called."""
    seen = {entry["module"] for entry in pair.expected.inputs}
    return [module for module in modules if module in seen]


def _inside(name: str, module: str) -> str:
    """Return the name of a module or parameter inside of another module."""
    return name.removeprefix(f"{module}.") if module else name


def backwards(first: Difference, pair: Pair, title: str) -> Iterator[Maker]:
    """Yield programs of modules that may have made an output's gradient, the smallest first."""
    own, times = module_of(first.name), times_of(first.name)
    given = _giving(pair, first.name)
    if not given:
        return
    users = {
        (entry["module"], leaf["place"])
        for entry in pair.expected.inputs
        for leaf in entry["leaves"]
        if leaf["watched"] and entry["module"] != own
    }
    pick, _ = next(iter(given.values()))
    for module, argument in sorted(users):
        yield lambda folder, m=module, a=argument: _backward(  # type: ignore[misc]
            first, pair, title, m, given, folder, result=f"{a}.grad"
        )
    for module in _called(pair, parents_of(own)):
        hook = _inside(own, module), pick
        yield lambda folder, m=module, h=hook: _backward(  # type: ignore[misc]
            first, pair, title, m, given, folder, hook=h, result=f"seen[{times}].grad"
        )


def parents_of(name: str) -> list[str]:
    """Return the modules around a module or parameter, the innermost first; "" is the model."""
    words = name.split(".") if name else []
    return [".".join(words[:end]) for end in reversed(range(len(words)))]


def _backward(  # noqa: PLR0917
    first: Difference,
    pair: Pair,
    title: str,
    module: str,
    given: _Given,
    folder: Path,
    **changes: Any,
) -> Made:
    sides = ModuleSides(pair, module)
    entries = [e for e in sides.entries if e["times"] == 0]
    entry, expected, actual = _worst(first, pair, entries, given)
    call, record = _call(sides, pair, title, [entry], folder)
    text = module_program(replace(call, terms=sides.has_terms, **changes))
    return text, record | values_of(expected, actual)


def gradients(first: Difference, pair: Pair, title: str) -> Iterator[Maker]:
    """Yield programs of modules that may have made a parameter's gradient, the smallest first."""
    for module in _called(pair, parents_of(first.name)):
        yield lambda folder, m=module: _parameter(first, pair, title, m, folder)  # type: ignore[misc]


def _parameter(first: Difference, pair: Pair, title: str, module: str, folder: Path) -> Made:
    sides = ModuleSides(pair, module)
    call, record = _call(sides, pair, title, sides.entries, folder)
    expected, actual, _ = parameter(pair, first.phase, first.name)
    record |= values_of(expected, actual)
    result = f"module.get_parameter({_inside(first.name, module)!r}).grad"
    return module_program(replace(call, result=result)), record
