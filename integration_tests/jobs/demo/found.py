"""Jobs under the recorder: bugs of the zoo that are found, and sound jobs that are equal."""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

from hp_verify.comparing.compare import Floor, compare, with_floor
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.begin import begin
from hp_verify.recording.request import Request
from integration_tests.jobs.demo.cells import Bred
from integration_tests.jobs.zoo.bugs import FAILS, Bug
from integration_tests.jobs.zoo.job import train
from integration_tests.jobs.zoo.reports import LOOPS
from integration_tests.models.architectures.forks import prepare, run_ranks

SECONDS = 60.0
"""Most that one run may take."""


def look_for(bugs: Iterable[Bug], sound: Iterable[str]) -> Iterator[Bred]:
    """Run jobs with bugs and without, each beside one process.

    Args:
        bugs: Bugs, by name.
        sound: Layouts, or jobs of reports, without a bug, as in
            `integration_tests.jobs.zoo.bugs.SOUND`.

    Yields:
        What was found, one after the other.
    """
    prepare()
    with tempfile.TemporaryDirectory(prefix="hp-zoo-") as text:
        judge = _Judge(Path(text))
        for layout in sound:
            name, _, tied = layout.partition(" ")
            comparison = judge(name, "", tied=bool(tied))
            yield _bred(layout, "", comparison, is_right=comparison.first is None)
        for bug in bugs:
            if bug.phase == FAILS:
                yield _failed(bug, judge)
                continue
            comparison = judge(bug.layout, bug.name, tied=bug.is_tied)
            yield _bred(bug.layout, bug.name, comparison, is_right=_is_named(bug, comparison))


def _is_named(bug: Bug, comparison: Comparison) -> bool:
    first = comparison.first
    return (
        first is not None
        and first.phase == bug.phase
        and re.search(bug.where, first.name) is not None
        and bug.likely in " ".join(explain(comparison))
    )


def _failed(bug: Bug, judge: "_Judge") -> Bred:
    """Run a job that is to fail, and see that the reason is told."""
    try:
        judge(bug.layout, bug.name, tied=False)
    except RuntimeError as error:
        told = str(error)
        is_right = bug.likely in told
        return Bred(layout=bug.layout, bug=bug.name, is_right=is_right, first=told)
    return Bred(layout=bug.layout, bug=bug.name, is_right=False, first="it did not fail")


def _bred(layout: str, bug: str, seen: Comparison, *, is_right: bool) -> Bred:
    return Bred(
        layout=layout,
        bug=bug,
        is_right=is_right,
        first=str(seen.first or ""),
        likely=tuple(explain(seen)),
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
        group = layout if layout in LOOPS else f"tied-{tied}"
        expected = self._expected(group)
        job = partial(train, layout, bug, tied=tied)
        return compare(self._recorded(f"{layout}-{bug}", group, job), *expected)

    def _reference(self, group: str) -> tuple[Recording, Floor]:
        """Run what a group of jobs is compared with."""
        layout = group if group in LOOPS else "one"
        job = partial(train, layout, tied=group == "tied-True")
        return with_floor(lambda who, seed: self._recorded(who, group, job, ranks=1, disturb=seed))

    def _recorded(
        self, who: str, group: str, job: Callable[[], None], *, ranks: int = 2, disturb: int = 0
    ) -> Recording:
        try:
            return recorded(self._folder / group / who, job, ranks=ranks, disturb=disturb)
        except FailedError as error:
            raise RuntimeError(f"{who}: {error}") from None


class FailedError(Exception):
    """A run failed."""


def recorded(
    folder: Path, train: Callable[[], None], *, ranks: int, meets: bool = True, **asked: Any
) -> Recording:
    """Train under the recorder.

    Args:
        folder: Where the run writes; that of a reference is called so, and beside the others.
        train: What every rank does.
        ranks: How many there are.
        meets: Whether their process group is made before they train.
        **asked: What else is asked in the `Request`.

    Raises:
        FailedError: When a rank fails, or takes too long.
    """
    reference = "" if folder.name == "reference" else str(folder.with_name("reference"))
    record = partial(_record, Request(str(folder), reference=reference, **asked), train)
    if reason := run_ranks(record, size=ranks, folder=folder, seconds=SECONDS, meets=meets):
        raise FailedError(reason)
    return join(folder)


def _record(request: Request, train: Callable[[], None]) -> None:
    with closing(begin(request)):
        train()
