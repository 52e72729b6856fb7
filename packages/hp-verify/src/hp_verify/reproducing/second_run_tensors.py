"""Tensors that a second run has kept, put together over ranks, with the rank of every part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_verify.comparing.joined import TERMS, rows_in, sample_names
from hp_verify.recording.events import FORWARD, OWN, REAL, Box
from hp_verify.recording.slices import index_of


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a tensor on a rank.

    Attributes:
        rank: Who has it.
        shape: Shape of the whole.
        box: Where it is there.
        values: What it has.
        adds: Whether ranks may have terms of a sum.
        call: Call of a module, or backward, that it is of.
    """

    rank: int
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    adds: bool = False
    call: int = 0


@dataclass(slots=True, eq=False)
class Whole:
    """A tensor put together.

    Attributes:
        values: All of it; zero where no rank has it.
        parts: Parts of it.
        is_complete: Whether every element is on a rank.
        is_sum: Whether parts were added up because they were not the same.
    """

    values: Tensor
    parts: list[Part] = field(default_factory=list)
    is_complete: bool = False
    is_sum: bool = False


def whole_of(parts: Sequence[Part]) -> Whole:
    """Put parts of one tensor together; of ranks that should have the same, the first counts.

    Args:
        parts: Parts of one tensor, one or more.
    """
    first = parts[0]
    result = Whole(torch.zeros(first.shape, dtype=first.values.dtype), list(parts))
    seen = torch.zeros(first.shape, dtype=torch.bool)
    by_box: dict[Box, list[Tensor]] = defaultdict(list)
    for part in parts:
        if part.shape == first.shape:
            by_box[part.box].append(part.values)
    for box, values in by_box.items():
        total, index = values[0], index_of(box)
        for other in values[1:]:
            if parts[0].adds and _apart(other, total) > TERMS:
                total, result.is_sum = total + other, True
        result.values[index] = torch.where(seen[index], result.values[index], total)
        seen[index] = True
    result.is_complete = bool(seen.all())
    return result


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=1e-300))


class Kept:
    """Tensors of a job's second run.

    Args:
        folder: What its processes have written.
    """

    def __init__(self, folder: Path) -> None:
        rows = rows_in(folder)
        self._names = names = sample_names(rows)
        self._rows = [(int(who.split("-")[1]), row) for who, row in rows if row.phase == FORWARD]
        self._parts: dict[tuple[int, str, str], dict[str, list[Part]]] = defaultdict(dict)
        self.inputs: list[dict[str, Any]] = []
        self.outputs: list[dict[str, Any]] = []
        self.facts: dict[int, dict[str, Any]] = defaultdict(dict)
        self.path: list[str] = []
        self.main = ""
        for path in sorted(folder.glob("kept-*.pt")):
            kept = torch.load(path, weights_only=True)
            who = "rank-" + path.stem.split("-", 2)[2]
            rank, step = kept["rank"], int(path.stem.split("-")[1])
            self.facts[rank].update(kept["facts"])
            self.path, self.main = kept["path"], kept["main"]
            self.outputs += kept["outputs"]
            for part in kept["parts"]:
                self._add(who, rank, part, names)
            for entry in kept["inputs"]:
                key = who, step, entry["call"]
                given = tuple(names.get((*key, row), row) for row in entry["rows"])
                self.inputs.append(entry | {"rows": given, "rank": rank, "key": key})

    def _add(self, who: str, rank: int, kept: Mapping[str, Any], names: Mapping[Any, str]) -> None:
        step = kept["step"]
        rows = self._parts[step, kept["phase"], kept["name"]]
        adds, call = kept.get("adds", False), kept.get("call", 0)
        one = [""], kept.get("box"), [kept.get("values")], kept["shape"]
        for samples, box, values, shape in kept.get("laid", [one]):
            for row, value in zip(samples, values, strict=True):
                name = names.get((who, step, call, row), row)
                rows.setdefault(name, []).append(Part(rank, shape, box, value, adds, call))

    def batches(self, step: int) -> dict[int, list[str]]:
        """Rank -> names of the samples that it is given in a step."""
        found: dict[int, list[str]] = defaultdict(list)
        for rank, row in self._rows:
            if row.step == step:
                found[rank] += [name.removeprefix(REAL) for name in row.rows]
        return found

    def names(self, step: int, phase: str) -> list[str]:
        """Names of what was kept of a phase."""
        return [name for at, kind, name in self._parts if (at, kind) == (step, phase)]

    def phases(self, step: int, name: str) -> list[str]:
        """Phases in which something of a parameter was kept."""
        return [phase for at, phase, other in self._parts if (at, other) == (step, name)]

    def parts(self, step: int, phase: str, name: str) -> Mapping[str, Sequence[Part]]:
        """Sample -> parts of a tensor; that of a parameter is of the sample ""."""
        return self._parts.get((step, phase, name), {})

    def whole(self, step: int, phase: str, name: str, row: str = "") -> Whole | None:
        """A tensor, or one sample of it; None: it was not kept."""
        parts = self.parts(step, phase, name).get(row)
        return whole_of(parts) if parts else None

    def own(self, step: int, name: str) -> list[Part]:
        """Gradients of ranks before they are reduced, all backwards of a step together."""
        totals: dict[tuple[int, Box], Part] = {}
        for part in self.parts(step, OWN, name).get("", ()):
            key = part.rank, part.box
            before = totals[key].values if key in totals else torch.zeros_like(part.values)
            totals[key] = Part(part.rank, part.shape, part.box, before + part.values, adds=True)
        return list(totals.values())

    def given(self, module: str, place: str, times: int) -> Mapping[str, Sequence[Part]]:
        """Sample -> parts of what a module was given at a place of its arguments."""
        found: dict[str, list[Part]] = defaultdict(list)
        for entry in self.inputs:
            if entry["module"] != module or entry["times"] != times:
                continue
            for leaf in entry["leaves"]:
                for samples, box, values, shape in leaf["laid"] if leaf["place"] == place else ():
                    for row, value in zip(samples, values, strict=True):
                        name = self._names.get((*entry["key"], row), row)
                        found[name].append(Part(entry["rank"], shape, box, value))
        return found
