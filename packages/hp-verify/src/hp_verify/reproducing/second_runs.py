"""Tensors that second runs have kept, put together over ranks, and calls of modules.

Of both jobs together it is what a program needs to compute a module's value again.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_verify.comparing.recordings import sample_names
from hp_verify.recording import events as ev
from hp_verify.recording.second_run import HELD
from hp_verify.recording.slices import index_of
from hp_verify.recording.values import Part, Whole, offset_of, whole_of


class CannotError(Exception):
    """Why something cannot be put together or computed again."""


class SecondRun:
    """Tensors of a job's second run.

    Args:
        folder: Folder that the job's processes have written.
    """

    def __init__(self, folder: Path) -> None:
        rows = ev.rows_in(folder)
        self._names = names = sample_names(rows, {})
        self._rows = [(int(who.split("-")[1]), row) for who, row in rows if row.phase == ev.FORWARD]
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
        for row, value, shape, box in _by_sample(kept.get("laid", [one])):
            part = Part(value, shape, offset_of(box), rank, adds, call)
            rows.setdefault(names.get((who, step, call, row), row), []).append(part)

    def batches(self, step: int) -> dict[int, list[str]]:
        """Return the names of the samples that each rank is given in a step."""
        found: dict[int, list[str]] = defaultdict(list)
        for rank, row in self._rows:
            if row.step == step:
                found[rank] += [name.removeprefix(ev.REAL) for name in row.rows]
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
        totals: dict[tuple[int, ev.Box], Part] = {}
        for part in self.parts(step, ev.OWN, name).get("", ()):
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
                here = leaf["laid"] if leaf["place"] == place else ()
                for row, value, shape, box in _by_sample(here):
                    part = Part(value, shape, offset_of(box), entry["rank"])
                    found[self._names.get((*entry["key"], row), row)].append(part)
        return found


def _by_sample(laid: Iterable[Any]) -> Iterator[tuple[str, Tensor, tuple[int, ...], ev.Box]]:
    """Yield name, values, shape of the whole and box of each sample's part that was kept."""
    for samples, box, values, shape in laid:
        for row, value in zip(samples, values, strict=True):
            yield row, value, tuple(shape), box


@dataclass(slots=True)
class Pair:
    """Second runs of both jobs.

    Attributes:
        expected: Run of the reference.
        actual: Run of the job.
        step: Step of the difference.
        phase: Phase of the difference.
        bound: Largest error that rounding explains.
        factors: Sample -> factor that undoes the job's scale of the loss.
        float64: Whether both were lifted to it.
    """

    expected: SecondRun
    actual: SecondRun
    step: int
    phase: str
    bound: float
    factors: Mapping[str, float] = field(default_factory=dict)
    float64: bool = False

    def samples(self, name: str, phase: str) -> tuple[list[str], Tensor, Tensor, list[Part]]:
        """Put a module's output, or its gradient, together on both sides.

        Returns:
            Names of samples; the reference's, `[samples, ...]`; the job's; what ranks have of it,
            nothing where these are terms.

        Raises:
            CannotError: When samples, or parts of them, are missing.
        """
        theirs = self.expected.parts(self.step, phase, name)
        mine = self.actual.parts(self.step, phase, name)
        sides = {
            row: (self.scaled(phase, row, mine[row], name), _complete(theirs[row], name))
            for row in theirs
            if row in mine and not (ev.REAL + row in theirs and ev.REAL + row in mine)
        }
        if not sides:
            raise CannotError(f"{phase} {name} was not seen again")
        if any(ours.shape != expected.shape for ours, expected in sides.values()):
            raise CannotError(f"{phase} {name} has other shapes")
        far = {
            row: float((ours - expected).double().norm().nan_to_num(torch.inf))
            for row, (ours, expected) in sides.items()
        }
        worst = max(far, key=far.__getitem__)
        shape = sides[worst][1].shape  # samples may be of other lengths, where they are padded
        rows = [row for row, (_, expected) in sides.items() if expected.shape == shape]
        actual, expected = (torch.stack([sides[row][i] for row in rows]) for i in (0, 1))
        parts = []
        for index, row in enumerate(rows):
            if whole_of(mine[row]).is_sum:
                return rows, expected, actual, []
            factor = self.factors.get(row, 1.0) if phase == ev.BACKWARD else 1.0
            for part in mine[row]:
                values, offset = (part.values * factor)[None], (index, *part.offset)
                parts.append(Part(values, tuple(expected.shape), offset, part.rank))
        return rows, expected, actual, parts

    def scaled(self, phase: str, row: str, parts: Sequence[Part], name: str) -> Tensor:
        """Put the job's sample together, its gradient at the reference's scale of the loss."""
        factor = self.factors.get(row, 1.0) if phase == ev.BACKWARD else 1.0
        return _complete(parts, name) * factor


def _complete(parts: Sequence[Part], name: str) -> Tensor:
    whole = whole_of(parts)
    if not whole.is_complete:
        raise CannotError(f"parts of {name} are on no rank")
    return whole.values


def laid_like(samples: Tensor, shape: Sequence[int]) -> Tensor:
    """Lay samples, `[samples, ...]`, as a module has them.

    Args:
        samples: One sample or more.
        shape: Shape of the module's tensor: samples first, or second, or with their tokens.
    """
    count = len(samples)
    if shape[0] == count:
        return samples.reshape(tuple(shape))
    if len(shape) > 1 and shape[1] == count:
        return samples.transpose(0, 1)
    return samples.flatten(0, 1)


class ModuleSides:
    """Calls of a module of the reference, and the same calls with what the job gave it.

    Args:
        pair: Both second runs.
        module: Its name.

    Raises:
        CannotError: When the module was not called, or could not be pickled.

    Attributes:
        module: Its name.
        has_terms: Whether gradients of ranks did not add up to the reference's, as far as calls
            were put together.
    """

    def __init__(self, pair: Pair, module: str) -> None:
        self._pair, self.module = pair, module
        title = module or "the model"
        self.entries = [e for e in pair.expected.inputs if e["module"] == module]
        if not self.entries:
            raise CannotError(f"the reference does not call {title}")
        if len(pair.expected.facts) > 1:
            raise CannotError(
                "the reference has several processes: none of them has a whole module"
            )
        if not any(e["module"] == module for e in pair.actual.inputs):
            raise CannotError(f"the job does not call {title}")
        facts = pair.expected.facts[self.entries[0]["rank"]]
        self.file: str = facts.get(f"module {module}", "")
        if not self.file or not all(entry["file"] for entry in self.entries):
            raise CannotError(f"{title} cannot be pickled: {facts.get('not pickled', '')}")
        self.has_terms = False

    def settings(self) -> dict[str, Any]:
        """Return the module's numbers and flags in the job that differ from the reference's."""
        theirs = next(iter(self._pair.expected.facts.values())).get("settings", {})
        expected = theirs.get(self.module, {}).items()
        found: dict[str, Any] = {}
        for facts in self._pair.actual.facts.values():
            mine = facts.get("settings", {}).get(self.module, {})
            found |= {k: mine[k] for k, value in expected if k in mine and mine[k] != value}
        return found

    def outputs(self, call: int, times: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return outputs of a call: name -> Python that takes it, and its shape."""
        key = self.module, call, times
        outputs = self._pair.expected.outputs
        given = (e["names"] for e in outputs if (e["module"], e["call"], e["times"]) == key)
        return next(given, {})

    def weights(self, kept: SecondRun) -> dict[str, Tensor]:
        """Return the module's weights in a job; where one is incomplete, the reference's."""
        prefix = f"{self.module}." if self.module else ""
        found, step, expected = {}, self._pair.step, self._pair.expected
        for name in [n for n in expected.names(step, HELD) if n.startswith(prefix)]:
            mine, theirs = kept.whole(step, HELD, name), expected.whole(step, HELD, name)
            here = mine if mine is not None and mine.is_complete else theirs
            if here is not None and here.is_complete and theirs is not None:
                found[name.removeprefix(prefix)] = farthest(here, theirs.values)
        return found

    def call(
        self, entry: Mapping[str, Any], file: str, *, of_job: bool, with_grads: bool
    ) -> dict[str, Any]:
        """Return what one call of the module was given, and the gradients of what it gave.

        Args:
            entry: The reference's call.
            file: Name of the file with the call's arguments.
            of_job: Whether the job's tensors take the places of the reference's.
            with_grads: Whether gradients are wanted.
        """
        tensors = self._of_job(entry) if of_job else {}
        made = {"file": file, "tensors": tensors, "random": entry["random"]}
        if with_grads:
            made["grads"] = [self._grad(name, entry, of_job=of_job) for name in self.graded(entry)]
        return made

    def graded(self, entry: Mapping[str, Any]) -> list[str]:
        """Return outputs of a call whose gradients were seen."""
        names = self.outputs(entry["call"], entry["times"])
        step = self._pair.step
        return [n for n in names if self._pair.expected.parts(step, ev.BACKWARD, n)]

    def _grad(self, name: str, entry: Mapping[str, Any], *, of_job: bool) -> Tensor:
        kept = self._pair.actual if of_job else self._pair.expected
        _, shape = self.outputs(entry["call"], entry["times"])[name]
        parts = kept.parts(self._pair.step, ev.BACKWARD, name)
        rows = []
        for row in entry["rows"]:
            if row not in parts:
                raise CannotError(f"the gradient of {name} is not whole")
            if of_job:
                rows.append(self._pair.scaled(ev.BACKWARD, row, parts[row], name))
                theirs = self._pair.expected.whole(self._pair.step, ev.BACKWARD, name, row)
                if theirs is not None and whole_of(parts[row]).is_sum:
                    self.has_terms |= distance(rows[-1], theirs.values) > self._pair.bound
            else:
                rows.append(_complete(parts[row], name))
        return laid_like(torch.stack(rows), shape)

    def _of_job(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the job's tensor for each tensor that the reference's module was given."""
        found = {}
        for leaf in entry["leaves"]:
            values = self._laid(leaf, entry)
            if values is None:
                values = self._raw(leaf, entry)
            if values is not None and str(values.dtype) == leaf["dtype"]:
                found[leaf["place"]] = values.detach().clone()
        return found

    def _laid(self, leaf: Mapping[str, Any], entry: Mapping[str, Any]) -> Tensor | None:
        parts = self._pair.actual.given(self.module, leaf["place"], entry["times"])
        if not entry["rows"] or not all(row in parts for row in entry["rows"]):
            return None
        wholes = [whole_of(parts[row]) for row in entry["rows"]]
        is_same = len({tuple(whole.values.shape) for whole in wholes}) == 1
        if not is_same or not all(whole.is_complete for whole in wholes):
            return None
        samples = torch.stack([whole.values for whole in wholes])
        if samples.numel() != math.prod(leaf["size"]):
            return None
        return laid_like(samples, leaf["size"])

    def _raw(self, wanted: Mapping[str, Any], entry: Mapping[str, Any]) -> Tensor | None:
        """Return what is not made of samples: of the same call, or the same in all calls."""
        found = [
            (other["rows"] == entry["rows"], leaf["raw"])
            for other in self._pair.actual.inputs
            if (other["module"], other["times"]) == (self.module, entry["times"])
            for leaf in other["leaves"]
            if leaf["place"] == wanted["place"]
            and leaf["raw"] is not None
            and leaf["size"] == wanted["size"]
        ]
        same = [raw for is_same, raw in found if is_same] or [raw for _, raw in found]
        return same[0] if same and all(torch.equal(raw, same[0]) for raw in same) else None


def distance(value: Tensor, other: Tensor) -> float:
    """Return the norm of the difference, relative to that of `other`."""
    value, other = value.double(), other.double()
    return float((value - other).norm() / other.norm().clamp(min=1e-300))


def farthest(whole: Whole, expected: Tensor) -> Tensor:
    """Return a job's values; of ranks' different copies, the one farthest from the reference.

    Args:
        whole: Job's tensor, with the parts of its ranks.
        expected: The reference's, of the same shape.
    """
    actual, scale = whole.values.clone(), float(expected.double().norm())
    for part in whole.parts:
        index = index_of(part.box)
        far = float((part.values - expected[index]).double().norm())
        if far > float((actual[index] - expected[index]).double().norm()) + 1e-9 * scale:
            actual[index] = part.values
    return actual


def index_of_largest(expected: Tensor, actual: Tensor) -> tuple[int, ...]:
    """Return where two tensors are farthest apart."""
    apart = (actual.double() - expected.double()).abs().nan_to_num(torch.inf)
    return tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))


def times_of(name: str) -> int:
    """Return which call of its module within one of the root an output is of."""
    _, _, times = name.partition("#")
    return int(times or 0)
