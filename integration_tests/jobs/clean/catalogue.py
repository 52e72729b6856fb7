"""All clean jobs: those of hands, those of other catalogues of this shelf, and drawn ones."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

from integration_tests.jobs.clean.job import SHELF, Clean, Hand, Seeded, World
from integration_tests.jobs.kinds import (
    test_kinds_in_another_form as forms,
)
from integration_tests.jobs.kinds import (
    test_kinds_of_jobs as kinds,
)
from integration_tests.jobs.kinds import (
    test_kinds_reduced_by_hand as reduced,
)
from integration_tests.jobs.kinds.job import Job
from integration_tests.jobs.kinds.job import train as train_kind
from integration_tests.jobs.zoo.bugs import BUGS, FAILS, REPORTS, SOUND, Bug
from integration_tests.jobs.zoo.job import train as train_zoo

NUM_DRAWN = 120
_HANDS: tuple[str, ...] = (
    "padding",
    "order_and_sums",
    "chance",
    "parallel",
    "training",
    "vision_audio",
    "fields",
    "experts",
)
_HANDS += ("engines", "hugging_face")
_NEEDS = {"hugging_face": ("transformers", "accelerate")}


def catalogue() -> dict[str, Clean]:
    """Return all jobs by name; those of libraries that are not installed are left out."""
    found: list[Clean] = []
    for name in _HANDS:
        if all(find_spec(library) for library in _NEEDS.get(name, ())):
            module = importlib.import_module(f"integration_tests.jobs.clean.hands.{name}")
            hand: Hand = module.hand
            found += [
                dataclasses.replace(job, name=f"{name}.{job.name}") for job in hand.jobs.values()
            ]
    drawn = importlib.import_module("integration_tests.jobs.clean.hands.drawn")
    found += [*_of_the_shelf(), *drawn.jobs(NUM_DRAWN).values()]
    return {job.name: job for job in found}


def _of_the_shelf() -> Iterable[Clean]:
    """Yield kinds of loops, layouts of the zoo and jobs of public reports, which have no bug."""
    mistakes = {
        loop: (Seeded("wrong", phase, where.replace(".", "[.]")),)
        for loop, (_, phase, where) in kinds.MISTAKES.items()
    }
    of_others = (kinds.EQUAL, reduced.ODD, forms.PADDED)
    loops = [*kinds.MISTAKES, *(loop for some in of_others for loop in some.values())]
    for loop in dict.fromkeys(loops):
        name = f"kinds.{loop.__name__}"
        work = partial(_run_kind, loop)
        bugs = mistakes.get(loop, ())
        yield Clean(name, "kinds of loops", work, bugs, SHELF, has_group=True)
    for layout in SOUND:
        place, _, tied = layout.partition(" ")
        some = [bug for bug in BUGS if (bug.layout, bug.is_tied) == (place, bool(tied))]
        work = partial(_run_zoo, place, tied=bool(tied))
        yield Clean(f"zoo.{layout}", "zoo", work, tuple(map(_seeded, some)), SHELF)
    for bug in REPORTS:
        bugs = () if bug.phase == FAILS else (_seeded(bug),)
        work = partial(_run_zoo, bug.layout, tied=False)
        yield Clean(f"reports.{bug.layout}", "public reports", work, bugs, SHELF)


def _seeded(bug: Bug) -> Seeded:
    return Seeded(bug.name, bug.phase, bug.where, bug.likely)


def _run_kind(loop: Callable[[Job], None], world: World) -> None:
    train_kind(loop, world.bug)


def _run_zoo(layout: str, world: World, *, tied: bool) -> None:
    is_whole = world.size == 1 and any(layout == sound.partition(" ")[0] for sound in SOUND)
    train_zoo("one" if is_whole else layout, world.bug, tied=tied)
