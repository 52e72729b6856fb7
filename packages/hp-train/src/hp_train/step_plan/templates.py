"""Shares of microbatches and schedules, searched once for all steps that resemble each other.

What is good for the shares of one step is good for any step whose documents are put into parts of
these shares; there it is only made to fit what these take (`hp_schedule.shorten`). Numbers are
rounded before anything is searched, so that all ranks come to the same templates, in whatever order
they see steps; and they are remembered.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from hp_schedule import Costs, Schedule, search, shorten
from hp_train.step_plan.costs import Seconds

_GROWTH = (1.6, 2.2)
"""Of a microbatch by the one before it, of those at the front."""
_BACK = (0.8, 0.5)
"""Shares of the last microbatches, by those in the middle."""
_SMALLEST = 0.03
"""Share of the first microbatch, by those in the middle, below which none is tried."""
_DIGITS = 3
"""Decimals of what parts of the work are taken to be."""
_LOOKED_AT, _KEPT = 4, 3
"""Schedules for each kind of ends; what is varied, and what is looked at closely."""
_VARIED = 4
"""Changes of shares for each schedule that is looked at."""
_FAR, _NEAR = (0.7, 0.85, 0.93, 1.07, 1.15, 1.3), (0.9, 0.95, 0.98, 1.02, 1.05, 1.1)
"""Factors by which a share is changed, at first and at last."""


class Kind(NamedTuple):
    """What steps have in common that resemble each other, by all that the busiest rank computes.

    Attributes:
        most: Microbatches, at most.
        stages: Seconds of all work of a rank of each stage.
        each: Seconds that each microbatch takes there besides.
        least: Seconds that each microbatch takes there at least.
        message: Seconds of a message between stages of all tokens of a rank.
        memory: Tokens that fit, by the tokens of a rank.
        split_backward: Whether weight gradients may be put off.
    """

    most: int
    stages: tuple[Seconds, ...]
    each: tuple[Seconds, ...]
    least: tuple[Seconds, ...]
    message: float
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
            message=_coarse(self.message),
            memory=_below(self.memory),
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


@lru_cache(maxsize=64)
def templates_for(kind: Kind, effort: int) -> tuple[Template, ...]:
    """Search templates for a rounded kind of steps, one for each number of microbatches.

    Args:
        kind: What the steps have in common.
        effort: Schedules, and as many changes of shares, that are looked at for the best numbers;
            four times as many for the best of these.

    Returns:
        The best first; none if nothing fits.
    """
    best: dict[int, Template] = {}
    for count in _counts(kind, best):
        found = _best(kind, count, effort)
        if found is not None:
            best[count] = found
    every = sorted(best.values(), key=_seconds)
    for kept, by in ((_KEPT, 1), (1, 4)):
        every[:kept] = [_closely(kind, each, by * effort) for each in every[:kept]]
        every.sort(key=_seconds)
    return tuple(every)


def _counts(kind: Kind, best: Mapping[int, Template]) -> Iterator[int]:
    """Yield numbers of microbatches to look at, while `best` is filled with what is found.

    They go up from twice the stages, or what the memory asks for, until two were no better, and
    then come close to the best from both sides.
    """

    def shortest() -> int:
        return min(best, key=lambda count: best[count].seconds)

    stages = kind.num_stages
    fewest = max(2 * stages if stages > 1 else 1, math.ceil(stages / kind.memory))
    step = max(2, stages)
    for count in range(min(fewest, kind.most), kind.most + 1, step):
        yield count
        if best and shortest() <= count - 2 * step:
            break
    while best and step > 1:
        step //= 2
        middle = shortest()
        for count in (middle - step, middle + step):
            if 1 <= count <= kind.most and count not in best:
                yield count


def _best(kind: Kind, count: int, effort: int) -> Template | None:
    """The best for so many microbatches, of all shares that are worth a try."""
    searched = (_searched(kind, shares, _LOOKED_AT) for shares in _shares(count))
    found = sorted((each for each in searched if each is not None), key=_seconds)[:_KEPT]
    varied = (_varied(kind, each, _VARIED, _FAR) for each in found)
    best = min(varied, key=_seconds, default=None)
    return None if best is None else _varied(kind, best, effort, _FAR)


def _closely(kind: Kind, template: Template, effort: int) -> Template:
    """Look at more schedules for a template, and at more shares."""
    found = _searched(kind, template.shares, effort)
    template = template if found is None else min(template, found, key=_seconds)
    return _varied(kind, template, _VARIED * effort, _NEAR)


def _shares(count: int) -> Iterator[tuple[float, ...]]:
    """Yield shares that are worth a try: equal ones, and such that grow at the front."""
    yield (1 / count,) * count
    for growth in _GROWTH:
        for length in range(2, count - len(_BACK)):
            if growth**-length < _SMALLEST:
                break
            front = [growth**-place for place in range(length, 0, -1)]
            yield _scaled([*front, *[1.0] * (count - length - len(_BACK)), *_BACK])


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
        message=[[kind.message * share for share in shares]] * kind.num_stages,
        bandwidth=1.0,
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


def _varied(kind: Kind, template: Template, times: int, factors: Sequence[float]) -> Template:
    """Change shares by some factors as long as that helps, and the schedule with them."""
    random = Random(0)  # noqa: S311 - nothing is secret
    for _ in range(times):
        changed = changed_shares(template.shares, random, factors)
        costs = _costs(kind, changed)
        found = shorten(template.schedule, costs, memory_limit=kind.memory)
        if found is not None and found[1].makespan < template.seconds:
            template = Template(found[1].makespan, changed, found[0])
    return template


def changed_shares(
    shares: Sequence[float], random: Random, factors: Sequence[float] = _NEAR
) -> tuple[float, ...]:
    """Up to three shares by some factors more or less, and all others a bit less or more."""
    changed = list(shares)
    for place in random.sample(range(len(shares)), min(len(shares), random.choice((1, 2, 3)))):
        changed[place] *= random.choice(factors)
    return _scaled(changed)


def _seconds(template: Template) -> float:
    return template.seconds


def _coarse(value: float, numbers: int = 2) -> float:
    """The nearest of so many numbers from each power of two to the next."""
    return 0.0 if value <= 0 else 2.0 ** (round(numbers * math.log2(value)) / numbers)


def _below(value: float) -> float:
    """The next lower sixty-fourth part of a power of two."""
    unit = 2.0 ** (math.floor(math.log2(value)) - 6)
    return math.floor(value / unit) * unit
