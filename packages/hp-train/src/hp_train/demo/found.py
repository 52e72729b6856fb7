"""The zoo under the recorder: which of its bugs are found, and that sound jobs are equal."""

import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path

from hp_train.architectures.forks import prepare, run_ranks
from hp_train.demo.cells import Bred
from hp_train.demo.zoo.bugs import Bug
from hp_train.demo.zoo.job import train
from hp_train.jobs.compare import Comparison, Floor, compare, with_floor
from hp_train.jobs.explain import explain
from hp_train.jobs.joined import Recording, join
from hp_train.jobs.recorder import recording
from hp_train.jobs.request import Request

_SECONDS = 60.0


def look_for(bugs: Iterable[Bug], sound: Iterable[str]) -> Iterator[Bred]:
    """Run jobs with bugs and without, each beside one process.

    Args:
        bugs: Bugs, by name.
        sound: Layouts without a bug, as in `hp_train.demo.zoo.bugs.SOUND`.

    Yields:
        What was found, one after the other.
    """
    prepare()
    with tempfile.TemporaryDirectory(prefix="hp-zoo-") as text:
        judge = _Judge(Path(text))
        for layout in sound:
            began = time.monotonic()
            name, _, tied = layout.partition(" ")
            comparison = judge(name, "", tied=bool(tied))
            yield _bred(layout, "", comparison, began, is_right=comparison.first is None)
        for bug in bugs:
            began = time.monotonic()
            comparison = judge(bug.layout, bug.name, tied=bug.is_tied)
            is_right = _is_named(bug, comparison)
            yield _bred(bug.layout, bug.name, comparison, began, is_right=is_right)


def _is_named(bug: Bug, comparison: Comparison) -> bool:
    first = comparison.first
    return (
        first is not None
        and first.phase == bug.phase
        and re.search(bug.where, first.name) is not None
        and bug.likely in " ".join(explain(comparison))
    )


def _bred(layout: str, bug: str, seen: Comparison, began: float, *, is_right: bool) -> Bred:
    return Bred(
        layout=layout,
        bug=bug,
        is_right=is_right,
        first=str(seen.first or ""),
        likely=tuple(explain(seen)),
        compared=seen.num_compared,
        seconds=round(time.monotonic() - began, 1),
    )


class _Judge:
    """Compares jobs of the zoo with one process, which runs once for a model.

    Args:
        folder: Where runs write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected = cache(self._reference)

    def __call__(self, layout: str, bug: str, *, tied: bool) -> Comparison:
        """Run a job and compare it."""
        expected = self._expected(tied)
        return compare(self._recorded(f"{layout}-{bug}", layout, bug, tied=tied), *expected)

    def _reference(self, tied: bool) -> tuple[Recording, Floor]:
        return with_floor(lambda who, seed: self._recorded(who, "one", tied=tied, disturb=seed))

    def _recorded(
        self, who: str, layout: str, bug: str = "", *, tied: bool, disturb: int = 0
    ) -> Recording:
        place = self._folder / str(tied)
        reference = "" if who == "reference" else str(place / "reference")
        request = Request(str(place / who), reference=reference, disturb=disturb)
        reason = run_ranks(
            partial(_record, request, layout, bug, tied=tied),
            size=1 if layout == "one" else 2,
            folder=place / who,
            seconds=_SECONDS,
        )
        if reason:
            raise RuntimeError(f"{layout} {bug}: {reason}")
        return join(place / who)


def _record(request: Request, layout: str, bug: str, *, tied: bool) -> None:
    with recording(request):
        train(layout, bug, tied=tied)
