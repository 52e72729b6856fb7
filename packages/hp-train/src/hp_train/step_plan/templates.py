"""Shares of microbatches and schedules, searched once for all steps that resemble each other.

What is good for the shares of one step is good for any step whose documents are put into parts of
these shares; there it is only made to fit what these take (`hp_schedule.shorten`). Numbers are
rounded before anything is searched, so that all ranks come to the same templates, in whatever order
they see steps; and they are remembered.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from hp_schedule import Costs, Schedule, search, shorten
from hp_train.step_plan.costs import Seconds

_COUNTS = 4
"""Numbers of microbatches that are tried."""
_GROWTH = (1.6, 2.2)
"""Of a microbatch by the one before it, of those at the front."""
_BACK: tuple[tuple[float, ...], ...] = ((), (0.7,), (0.8, 0.5))
"""Shares of the last microbatches, by those in the middle."""
_SMALLEST = 0.03
"""Share of the first microbatch, by those in the middle, below which none is tried."""
_DIGITS = 2
"""Decimals of what parts of the work are taken to be."""
_LOOKED_AT, _KEPT = 4, 3
"""Schedules for each kind of front and back; those that are tried with other numbers, too."""
_VARIED, _NEAR = 8, 2
"""Changes of shares for each schedule that is looked at; numbers on each side of the best."""


class _Ends(NamedTuple):
    """What microbatches at the front and the back have, by those in the middle."""

    front: tuple[float, ...] = ()
    back: tuple[float, ...] = ()

    def shares(self, count: int) -> tuple[float, ...]:
        """Shares of so many microbatches."""
        middle = count - len(self.front) - len(self.back)
        return _scaled((*self.front, *[1.0] * middle, *self.back))

    def alike(self) -> Iterator["_Ends"]:
        """Yield these, and such that are shorter or longer at one end."""
        yield self
        if len(self.front) > 1:
            yield self._replace(front=(self.front[0] ** 2 / self.front[1], *self.front))
        if self.front:
            yield self._replace(front=self.front[1:])
        for back in _BACK:
            if back != self.back:
                yield self._replace(back=back)


class Kind(NamedTuple):
    """What steps have in common that resemble each other, by all that the busiest rank computes.

    Attributes:
        most: Microbatches, at most.
        stages: Seconds of all work of a rank of each stage.
        each: Seconds that each microbatch takes there besides.
        least: Seconds that each microbatch takes there at least.
        latency: Seconds of a message between stages of all tokens of a rank.
        memory: Tokens that fit, by the tokens of a rank.
        split_backward: Whether weight gradients may be put off.
    """

    most: int
    stages: tuple[Seconds, ...]
    each: tuple[Seconds, ...]
    least: tuple[Seconds, ...]
    latency: float
    memory: float
    split_backward: bool = True

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stages)

    def rounded(self) -> "Kind":
        """Nearly the same, as others are too; memory is a bit less, since lengths vary."""
        return self._replace(
            stages=tuple(Seconds(*(round(x, _DIGITS) for x in each)) for each in self.stages),
            each=tuple(Seconds(*(_coarse(x, 4) for x in each)) for each in self.each),
            least=tuple(Seconds(*map(_coarse, each)) for each in self.least),
            latency=_coarse(self.latency),
            memory=_below(self.memory * 0.96),
        )


class Template(NamedTuple):
    """A schedule for microbatches of some shares.

    Attributes:
        seconds: What a step takes, by all that the busiest rank computes.
        shares: Shares of microbatches of the work; they sum to 1.
        schedule: Their schedule.
    """

    seconds: float
    shares: tuple[float, ...]
    schedule: Schedule


class _Found(NamedTuple):
    """Ends, and what was found for them."""

    ends: _Ends
    template: Template


@lru_cache(maxsize=64)
def templates_for(kind: Kind, effort: int) -> tuple[Template, ...]:
    """Search templates for a rounded kind of steps, one for each number of microbatches.

    Args:
        kind: What the steps have in common.
        effort: Schedules, and as many changes of shares, that are looked at for each of them.

    Returns:
        The best first; none if nothing fits.
    """
    counts = _counts(kind)
    ends = list(_fronts(counts[-1]))
    best: dict[int, _Found] = {}
    for count in reversed(counts):
        kept = _best_ends(kind, count, ends)
        if kept:
            best[count] = kept[0]
            ends = [each.ends for each in kept] + [_Ends()]
    if best:
        count, found = min(best.items(), key=lambda each: each[1].template.seconds)
        for near in range(max(counts[0], count - _NEAR), min(counts[-1], count + _NEAR) + 1):
            kept = [] if near in best else _best_ends(kind, near, list(found.ends.alike()))
            if kept:
                best[near] = kept[0]
    every = sorted((each.template for each in best.values()), key=_seconds)
    closely = [_closely(kind, each, effort) for each in every[:_KEPT]]
    return tuple(sorted([*closely, *every[_KEPT:]], key=_seconds))


def _best_ends(kind: Kind, count: int, ends: Sequence[_Ends]) -> list[_Found]:
    """The best of some ends for so many microbatches, the best first."""
    found = []
    for each in ends:
        if len(each.front) + len(each.back) < count:
            template = _searched(kind, each.shares(count), _LOOKED_AT)
            if template is not None:
                found.append(_Found(each, _varied(kind, template, _VARIED)))
    return sorted(found, key=lambda one: one.template.seconds)[:_KEPT]


def _closely(kind: Kind, template: Template, effort: int) -> Template:
    """Look at more schedules for a template, and at more shares."""
    found = _searched(kind, template.shares, effort)
    template = template if found is None else min(template, found, key=_seconds)
    return _varied(kind, template, _VARIED * effort)


def _counts(kind: Kind) -> list[int]:
    """Numbers of microbatches from twice the stages, or what the memory asks for, up."""
    stages = kind.num_stages
    fewest = max(2 * stages if stages > 1 else 1, math.ceil(stages / kind.memory))
    most = min(kind.most, max(7 * stages, 3 * fewest))
    fewest = min(fewest, most)
    steps = range(_COUNTS)
    return sorted({round(fewest + (most - fewest) * i / (_COUNTS - 1)) for i in steps})


def _fronts(count: int) -> Iterator[_Ends]:
    yield _Ends()
    for growth in _GROWTH:
        for length in range(2, count - len(_BACK[-1])):
            if growth**-length < _SMALLEST:
                break
            yield _Ends(tuple(growth**-place for place in range(length, 0, -1)), _BACK[-1])


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    total = sum(shares)
    return tuple(share / total for share in shares)


def _costs(kind: Kind, shares: Sequence[float]) -> Costs:
    columns: list[list[list[float]]] = [
        [
            [max(share * work + each, least) for share in shares]
            for work, each, least in zip(*of_stage, strict=True)
        ]
        for of_stage in zip(kind.stages, kind.each, kind.least, strict=True)
    ]
    forward, input_grad, weight_grad = zip(*columns, strict=True)
    return Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activation=[list(shares)] * kind.num_stages,
        latency=kind.latency * max(shares),
    )


def _searched(kind: Kind, shares: tuple[float, ...], effort: int) -> Template | None:
    try:
        found = search(
            _costs(kind, shares),
            num_ranks=kind.num_stages,
            num_microbatches=len(shares),
            virtual=(1,),
            memory_limit=kind.memory,
            split_backward=kind.split_backward,
            num_candidates=effort,
        )
    except ValueError:  # nothing fits the memory
        return None
    return Template(found.makespan, shares, found.schedule)


def _varied(kind: Kind, template: Template, times: int) -> Template:
    """Change shares as long as that helps, and the schedule with them."""
    random = Random(0)  # noqa: S311 - nothing is secret
    for _ in range(times):
        shares = list(template.shares)
        for place in random.sample(range(len(shares)), min(len(shares), random.choice((1, 2)))):
            shares[place] *= random.choice((0.7, 0.85, 0.93, 1.07, 1.15, 1.3))
        changed = _scaled(shares)
        costs = _costs(kind, changed)
        found = shorten(template.schedule, costs, memory_limit=kind.memory)
        if found is not None and found[1].makespan < template.seconds:
            template = Template(found[1].makespan, changed, found[0])
    return template


def _seconds(template: Template) -> float:
    return template.seconds


def _coarse(value: float, numbers: int = 2) -> float:
    """The nearest of so many numbers from each power of two to the next."""
    return 0.0 if value <= 0 else 2.0 ** (round(numbers * math.log2(value)) / numbers)


def _below(value: float) -> float:
    """The next lower sixteenth part of a power of two."""
    unit = 2.0 ** (math.floor(math.log2(value)) - 4)
    return math.floor(value / unit) * unit
