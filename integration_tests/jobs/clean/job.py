"""The entry of a catalogue: a job, how its ranks differ from its reference, and seeded bugs."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

HAND, SHELF, DRAWN = "by hand", "of the shelf", "drawn"


@dataclass(frozen=True, slots=True)
class World:
    """A rank's place, given to a job.

    Attributes:
        rank: Rank of this process.
        size: Ranks of the job; 1: this is the reference.
        bug: Name of the seeded bug; empty: none, as in every reference.
        form: Form of the job, where it is written for several; a reference is given it too.
    """

    rank: int
    size: int
    bug: str = ""
    form: str = ""


Train: TypeAlias = Callable[[World], object]


@dataclass(frozen=True, slots=True)
class Seeded:
    """A bug that is seeded in a clean job, and the name that it must be given.

    Attributes:
        name: Name that the job is given; "kind:tensor": a change from outside, see `mutations`.
        phase: Pattern of the whole phase of the first difference.
        where: Pattern in the name of the first difference.
        likely: Words of the likely cause.
    """

    name: str
    phase: str
    where: str = ""
    likely: str = ""


@dataclass(frozen=True, slots=True)
class Clean:
    """A job that computes on two ranks what its reference does in one process.

    Attributes:
        name: Name of the job, unique in the catalogue.
        style: Code base or way of writing that it stands for.
        train: Function that trains in one rank.
        bugs: Bugs that may be seeded in it.
        origin: `HAND`, `SHELF`: from another catalogue of this shelf, or `DRAWN`: generated.
        form: Form that the job and its reference are given.
        steps: Most updates that are compared.
        has_group: Whether the reference has a process group of one rank.
    """

    name: str
    style: str
    train: Train
    bugs: tuple[Seeded, ...] = ()
    origin: str = HAND
    form: str = ""
    steps: int = 4
    has_group: bool = False


@dataclass(slots=True)
class Hand:
    """Collects the jobs of a file: `hand = Hand("style")`, and `@hand(("bug", "gradient"))`.

    Attributes:
        style: Style of all of its jobs.
        jobs: Jobs by name.
    """

    style: str
    jobs: dict[str, Clean] = field(default_factory=dict)

    def __call__(
        self, *bugs: tuple[str, ...], forms: tuple[str, ...] = ()
    ) -> Callable[[Train], Train]:
        """Take in a job.

        Args:
            *bugs: Fields of `Seeded`; of a change from outside its name alone.
            forms: Forms of the job; all but the first count as drawn.
        """

        def taken(train: Train) -> Train:
            name = getattr(train, "__name__", "job")
            seeded = tuple(seeded_as(bug) for bug in bugs)
            for form in forms or ("",):
                whole = f"{name}-{form}" if form else name
                origin = HAND if form in forms[:1] or not form else DRAWN
                self.jobs[whole] = Clean(whole, self.style, train, seeded, origin, form)
            return train

        return taken


_OUTSIDE = {
    "forward": "forward|evaluation",
    "gradient": "gradient|clipped gradient",
    "weight": "weight",
    "start": "first weight",
    "rate": "learning rate",
    "input": "input",
}
"""Kind of a change from outside -> pattern of the phase that it must be found in."""


def seeded_as(fields: tuple[str, ...]) -> Seeded:
    """Return a bug; of one that changes a job from outside the name tells what must be found."""
    kind, _, tensor = fields[0].partition(":")
    if len(fields) > 1 or kind not in _OUTSIDE:
        return Seeded(*fields)
    where = "|".join(f"^{re.escape(name)}" for name in tensor.split("|")) if tensor else ""
    return Seeded(fields[0], _OUTSIDE[kind], where)
