"""Tensors that a second run has kept, put together over ranks, with the rank of every part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hp_verify.comparing.recordings import sample_names
from hp_verify.recording.events import FORWARD, OWN, REAL, Box, rows_in
from hp_verify.recording.values import Part, Whole, offset_of, whole_of


class SecondRun:
    """Tensors of a job's second run.

    Args:
        folder: Folder that the job's processes have written.
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
                part = Part(value, tuple(shape), offset_of(box), rank, adds, call)
                rows.setdefault(name, []).append(part)

    def batches(self, step: int) -> dict[int, list[str]]:
        """Return the names of the samples that each rank is given in a step."""
        found: dict[int, list[str]] = defaultdict(list)
        for rank, row in self._rows:
            if row.step == step:
                found[rank] += [name.removeprefix(REAL) for name in row.rows]
        return found

    def names(self, step: int, phase: str) -> list[str]:
        """Return the names of tensors that were kept of a phase."""
        return [name for at, kind, name in self._parts if (at, kind) == (step, phase)]

    def phases(self, step: int, name: str) -> list[str]:
        """Return phases in which something of a parameter was kept."""
        return [phase for at, phase, other in self._parts if (at, other) == (step, name)]

    def parts(self, step: int, phase: str, name: str) -> Mapping[str, Sequence[Part]]:
        """Return a tensor's parts by sample; a parameter is of the sample ""."""
        return self._parts.get((step, phase, name), {})

    def whole(self, step: int, phase: str, name: str, row: str = "") -> Whole | None:
        """Return a tensor, or one sample of it; None: it was not kept."""
        parts = self.parts(step, phase, name).get(row)
        return whole_of(parts) if parts else None

    def own(self, step: int, name: str) -> list[Part]:
        """Return ranks' gradients before the reduction, added up over all backwards of a step."""
        totals: dict[tuple[int, Box], Part] = {}
        for part in self.parts(step, OWN, name).get("", ()):
            key = part.rank, part.box
            before = totals[key].values if key in totals else torch.zeros_like(part.values)
            totals[key] = replace(part, values=before + part.values, adds=True, call=0)
        return list(totals.values())

    def given(self, module: str, place: str, times: int) -> Mapping[str, Sequence[Part]]:
        """Return the parts of a module's argument by sample."""
        found: dict[str, list[Part]] = defaultdict(list)
        for entry in self.inputs:
            if entry["module"] != module or entry["times"] != times:
                continue
            for leaf in entry["leaves"]:
                for samples, box, values, shape in leaf["laid"] if leaf["place"] == place else ():
                    for row, value in zip(samples, values, strict=True):
                        name = self._names.get((*entry["key"], row), row)
                        part = Part(value, tuple(shape), offset_of(box), entry["rank"])
                        found[name].append(part)
        return found
