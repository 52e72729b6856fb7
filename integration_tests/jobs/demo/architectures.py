"""An architecture of transformers in its layouts, each beside one process, under the recorder."""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hp_verify.comparing.compare import Floor, compare, with_floor
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording
from hp_verify.recording import events as ev
from integration_tests.jobs.demo import by_hand, job
from integration_tests.jobs.demo.cells import (
    DIFFERENT,
    DOUBTED,
    EQUAL,
    FAILED,
    LAYOUTS,
    REFUSED,
    WITHOUT,
    Architecture,
    Cell,
    Layout,
)
from integration_tests.jobs.demo.found import SECONDS, FailedError, recorded
from integration_tests.models.architectures.forks import run_ranks
from integration_tests.models.architectures.kept import finite
from integration_tests.models.architectures.tiny import Tiny, versions

_KEPT = 6
_BY_HAND = 1e-4
"""Relative error from which the program by hand, which is lifted nowhere, has seen a difference."""
_JUDGED = (ev.GRADIENT, ev.WEIGHT)


def examine(name: str) -> Architecture:
    """Compare an architecture in all layouts with one process.

    Args:
        name: Type of a model.
    """
    began = time.monotonic()
    made = partial(Architecture, name=name, versions=versions())
    with tempfile.TemporaryDirectory(prefix="hp-demo-") as text:
        folder = Path(text)
        try:
            tiny = Tiny(name)
            tiny.load_code()
        except Exception as error:  # noqa: BLE001 - whatever a config refuses is told
            return made(reason=f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
        reason = _forked(partial(_make, tiny, folder), folder / "make")
        if reason:
            return made(reason=reason, seconds=time.monotonic() - began)
        plans = json.loads((folder / "plans.json").read_text())
        runs = _Runs(folder, name, tiny.fields)
        try:
            cells = tuple(_cell(runs, layout, plans) for layout in LAYOUTS)
        except FailedError as error:
            return made(reason=str(error), seconds=time.monotonic() - began)
        return made(
            cells=cells,
            num_parameters=runs.num_parameters,
            fields=tiny.fields,
            seconds=round(time.monotonic() - began, 1),
        )


def _make(tiny: Tiny, folder: Path) -> None:
    plans = job.plans_of(tiny.make(folder / "model"))
    (folder / "plans.json").write_text(json.dumps(plans))


def _forked(work: Callable[[], object], folder: Path, size: int = 1) -> str:
    return run_ranks(work, size=size, folder=folder, seconds=SECONDS)


class _Runs:
    """Recorded runs of a model.

    Args:
        folder: Where it is, and where they write.
        name: Its type.
        fields: Fields of its config.
    """

    def __init__(self, folder: Path, name: str, fields: Mapping[str, Any]) -> None:
        self._folder, self._name, self._fields = folder, name, fields
        self._expected: dict[bool, tuple[Recording, Floor]] = {}

    @property
    def num_parameters(self) -> int:
        """Tensors of weights."""
        recording, _ = next(iter(self._expected.values()))
        return len(recording.steps[1].tensors.get(ev.START, {}))

    def expected(self, *, float64: bool) -> tuple[Recording, Floor]:
        """One process, and what rounding does to it."""
        if float64 not in self._expected:
            one = Layout({}, float64)
            self._expected[float64] = with_floor(
                lambda who, seed: self.recorded(who, one, disturb=seed)
            )
        return self._expected[float64]

    def recorded(self, who: str, layout: Layout, disturb: int = 0) -> Recording:
        """Train under the recorder."""
        float64 = layout.float64
        folder = self._folder / str(float64) / who.replace(" ", "-")
        train = partial(job.train, self._folder / "model", layout.sizes, float64=float64)
        ranks = 2 if layout.sizes else 1
        return recorded(folder, train, ranks=ranks, steps=2, float64=float64, disturb=disturb)

    def program(self, layout: Layout) -> str:
        """The program that compares by hand."""
        return by_hand.program(self._name, self._fields, layout)

    def by_hand(self, layout: Layout) -> dict[str, float]:
        """Run the program that compares by hand; the largest errors first."""
        sizes = "-".join(layout.sizes)
        folder = self._folder / "by-hand" / f"{sizes}-{layout.float64}"
        text = self.program(layout)
        out = folder / "errors.json"
        if reason := _forked(partial(_by_hand, text, folder, out), folder, 2):
            raise FailedError(reason)
        errors: dict[str, float] = json.loads(out.read_text())
        return dict(sorted(errors.items(), key=lambda item: -_size(item[1])))


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _by_hand(text: str, folder: Path, out: Path) -> None:
    os.chdir(folder)
    space: dict[str, Any] = {}
    exec(compile(text, "by hand", "exec"), space)
    if os.environ["RANK"] == "0":
        sized = {n: e for n, e in space["errors"].items() if space["one"][n].norm() > 1e-12}
        out.write_text(json.dumps(sized))


def _cell(runs: _Runs, layout: str, plans: Mapping[str, bool]) -> Cell:
    asked, began = LAYOUTS[layout], time.monotonic()
    if "ep" in layout and not plans["experts"]:
        return Cell(layout=layout, state=WITHOUT)
    expected = runs.expected(float64=asked.float64)
    judged = partial(Cell, layout=layout)
    comparison, reason = None, ""
    try:
        comparison = compare(runs.recorded(layout, asked), *expected)
        judged = partial(judged, **_told(comparison))
    except FailedError as error:
        reason = str(error)
        if "was requested, but" in reason and "has no" in reason:
            return judged(state=REFUSED, reason=reason)
    if comparison is not None and comparison.first is None:
        return judged(state=EQUAL, seconds=round(time.monotonic() - began, 1))
    seen = _seen(runs, layout, fails=bool(reason))
    state = DOUBTED if seen is None else FAILED if reason else DIFFERENT
    return judged(
        state=state, reason=reason, seconds=round(time.monotonic() - began, 1), **(seen or {})
    )


def _seen(runs: _Runs, layout: str, *, fails: bool) -> dict[str, Any] | None:
    """Fields of a cell about what is seen by hand: in float64, which a model may refuse, or less.

    Args:
        runs: Runs of its model.
        layout: Layout of its cell.
        fails: Whether a failure is what must be seen, and not a difference.

    Returns:
        None: it is not seen.
    """
    for float64 in dict.fromkeys((LAYOUTS[layout].float64, False)):
        asked = Layout(LAYOUTS[layout].sizes, float64)
        found = {"program": runs.program(asked)}
        try:
            errors = runs.by_hand(asked)
        except FailedError as error:
            if fails:
                return {**found, "by_hand_failed": str(error)}
            continue
        if not fails and any(not error <= _BY_HAND for error in errors.values()):
            largest = list(errors.items())[:_KEPT]
            return {**found, "by_hand": {name: finite(error) for name, error in largest}}
    return None


def _told(comparison: Comparison) -> dict[str, Any]:
    """Fields of a cell that a comparison tells."""
    first, missing = comparison.first, comparison.unaligned
    return {
        "error": finite(max(comparison.largest.get(phase, 0.0) for phase in _JUDGED)),
        "first": "" if first is None else str(first),
        "likely": tuple(explain(comparison)),
        "compared": comparison.num_compared,
        "unaligned": dict(list(missing.items())[:_KEPT]),
        "num_unaligned": len(missing),
    }
