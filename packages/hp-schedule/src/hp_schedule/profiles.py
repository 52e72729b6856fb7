"""Costs as text: a profile of a model's stages, of every microbatch if they differ.

JSON, version 1::

    {"version": 1, "forward": [[1.0, 4.0], [1.1, 4.2]], "input_grad": [1.0, 1.1],
     "weight_grad": 0.9, "latency": [[0, 1, 0.05], [1, 0, 0.05]]}

Keys are the fields of `hp_schedule.Costs`, which says what is meant and what stands for those left
out: one number for every step, one per stage, or one per stage and microbatch. A latency is one
number, or a source rank, a destination rank and a number for every edge.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from hp_schedule.costs import Costs, Latency

_VERSION: Final = 1
_NAMES: Final = tuple(field.name for field in fields(Costs))
_DEPTH: Final = {"latency": 0, "bandwidth": 0, "host_bandwidth": 0, "unshard": 1, "reduce_grad": 1}
_PER_STEP: Final = 2
"""How deep lists may be, of these and of all others: stages, and microbatches in them."""


_LISTS: Final = ("", ", or one per stage", ", or one per stage, or per stage and microbatch")


def costs_to_json(costs: Costs) -> str:
    """Return costs as JSON; defaults are left out."""
    document: dict[str, object] = {"version": _VERSION}
    for field in fields(Costs):
        value = getattr(costs, field.name)
        if value == field.default:
            continue
        if isinstance(value, Mapping):
            value = [[*edge, latency] for edge, latency in value.items()]
        document[field.name] = _listed(value)
    return json.dumps(document) + "\n"


def costs_from_json(text: str) -> Costs:
    """Read costs from JSON.

    Raises:
        ValueError: If the text is no such profile, or a cost is out of its range.
    """
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise ValueError(f"costs must be JSON: {error}") from None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f'costs must be a JSON object with "version": {_VERSION}')
    for key in document:
        if key not in {"version", *_NAMES}:
            raise ValueError(f"key ({key!r}) must be one of {', '.join(_NAMES)}")
    values = {name: value for name, value in document.items() if name != "version"}
    for name, value in values.items():
        if name == "latency" and isinstance(value, list):
            values[name] = _edges(value)
        else:
            _check(name, value, _DEPTH.get(name, _PER_STEP))
    return Costs(**values)


def num_stages_of(costs: Costs) -> int | None:
    """Return the number of stages that costs have lists for; None if they have none."""
    values = (getattr(costs, name) for name in _NAMES if name != "latency")
    return next((len(value) for value in values if isinstance(value, Sequence)), None)


def _listed(value: object) -> object:
    return [_listed(entry) for entry in value] if isinstance(value, Sequence) else value


def _edges(entries: list[object]) -> Latency:
    found: dict[tuple[int, int], float] = {}
    for entry in entries:
        match entry:
            case [int(source), int(destination), int() | float() as latency]:
                found[source, destination] = latency
            case _:
                raise ValueError(
                    f"latency ({reprlib.repr(entry)}) must be [source, destination, latency]"
                )
    return found


def _check(name: str, value: object, depth: int) -> None:
    if isinstance(value, list) and depth:
        for entry in value:
            _check(name, entry, depth - 1)
    elif not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(
            f"{name} ({reprlib.repr(value)}) must be a number{_LISTS[_DEPTH.get(name, _PER_STEP)]}"
        )
