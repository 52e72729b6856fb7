"""Templates: shares of microbatches with a schedule, searched once for all similar steps.

A schedule that is good for some shares is good for any step whose documents are parted by these
shares; there it is only adapted to the seconds of the parts (`hp_schedule.shorten`). Numbers are
rounded before the search, so that all ranks find the same templates in whatever order they see
steps; and templates are cached.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from hp_packing.costs import Seconds
from hp_packing.planning.linear_program import Rates, best_shares
from hp_packing.pricing import stage_costs
from hp_schedule import Costs, Schedule, search, shorten

_GROWTH = (1.6, 2.2)
"""Ratios of a microbatch to the one before it, at the front."""
_BACK = (0.8, 0.5)
"""Shares of the last microbatches, divided by those in the middle."""
_SMALLEST = 0.03
"""Minimum share of the first microbatch, divided by those in the middle."""
_LOOKED_AT, _FITTED = 8, 6
"""Schedules to try for each choice of shares; choices of shares to adapt, for each number."""
_KEPT, _FEWER = 3, 4
"""Numbers of microbatches to search further; divisor of the schedules of each further search."""
_FAR, _NEAR = (0.7, 0.85, 0.93, 1.07, 1.15, 1.3), (0.9, 0.95, 0.98, 1.02, 1.05, 1.1)
"""Factors by which shares are changed."""
_USUAL = 128
"""Stages times microbatches above which fewer schedules and shares are tried."""
_LESS = 1e-6
"""Relative improvement below which a template is no better."""
_DIGITS = 3
"""Decimals to which parts of the work are rounded."""


class Kind(NamedTuple):
    """A kind of similar steps, in units of the work of the busiest rank.

    Attributes:
        most: Maximum number of microbatches.
        stages: Seconds of all work of a rank of each stage.
        each: Fixed seconds of a microbatch in each stage.
        least: Minimum seconds of a microbatch in each stage.
        message: Seconds of a message of all tokens of a rank.
        memory: Tokens that fit into memory, divided by the tokens of a rank.
        split_backward: Whether weight gradients may be computed later.
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
        """Return the number of stages."""
        return len(self.stages)

    def rounded(self) -> "Kind":
        """Return the kind with rounded numbers, which similar steps share; memory rounds down."""
        return self._replace(
            stages=tuple(Seconds(*(round(x, _DIGITS) for x in each)) for each in self.stages),
            each=tuple(Seconds(*(_coarse(x, 4) for x in each)) for each in self.each),
            least=tuple(Seconds(*map(_coarse, each)) for each in self.least),
            message=_coarse(self.message),
            memory=_below(self.memory),
        )


def _coarse(value: float, numbers: int = 2) -> float:
    """Round to the nearest of a few numbers between each power of two and the next."""
    return 0.0 if value <= 0 else 2.0 ** (round(numbers * math.log2(value)) / numbers)


def _below(value: float) -> float:
    """Round down to a sixty-fourth of a power of two."""
    unit = 2.0 ** (math.floor(math.log2(value)) - 6)
    return math.floor(value / unit) * unit


class Template(NamedTuple):
    """A schedule for microbatches of some shares.

    Attributes:
        seconds: Seconds of a step, in units of the work of the busiest rank.
        shares: Share of each microbatch of the work; they sum to 1.
        schedule: Schedule of the microbatches.
    """

    seconds: float
    shares: tuple[float, ...]
    schedule: Schedule


def part_looked_at(stages: int, microbatches: int) -> float:
    """Return the part of schedules and shares to try, below 1 if there are many microbatches."""
    return min(1.0, _USUAL / (stages * microbatches))


def _some(number: int, part: float) -> int:
    return max(1, round(number * part))


@lru_cache(maxsize=64)
def templates_for(kind: Kind, effort: int) -> tuple[Template, ...]:
    """Search templates for a rounded kind of steps, one for each number of microbatches.

    Args:
        kind: Kind of the steps.
        effort: Schedules to try for the shares of the best numbers; a quarter as many other shares
            near these are tried.

    Returns:
        Templates, the fastest first; none if nothing fits into memory.
    """
    best: dict[int, Template] = {}
    for count in _counts(kind, best):
        found = _best(kind, count)
        if found is not None:
            best[count] = found
    every = sorted(best.values(), key=_seconds)
    kept = _some(_KEPT, part_looked_at(kind.num_stages, len(every[0].shares)) if every else 1.0)
    every[:kept] = [_closely(kind, each, effort) for each in every[:kept]]
    return tuple(sorted(every, key=_seconds))


def _counts(kind: Kind, best: Mapping[int, Template]) -> Iterator[int]:
    """Yield numbers of microbatches to try, while the caller fills `best` with templates.

    They go up from twice the stages, or the least that memory allows, until two were no better, and
    then approach the best from both sides, less closely if microbatches are many.
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
    closest = 1 + int(step * (1 - part_looked_at(stages, shortest()))) if best else step
    while best and step > closest:
        step //= 2
        middle = shortest()
        for count in (middle - step, middle + step):
            if 1 <= count <= kind.most and count not in best:
                yield count


def _best(kind: Kind, count: int) -> Template | None:
    """Return the best template for a number of microbatches, of all plausible shares."""
    part = part_looked_at(kind.num_stages, count)
    every = [*_shares(count)]
    some = every[:: math.ceil(len(every) / _some(len(every), part))]
    searched = (_searched(kind, shares, _some(_LOOKED_AT, part)) for shares in some)
    found = sorted((each for each in searched if each is not None), key=_seconds)
    found = found[: _some(_FITTED, part)]
    return min((_fitted(kind, each) for each in found), key=_seconds, default=None)


def _closely(kind: Kind, template: Template, effort: int) -> Template:
    """Search further schedules for the shares of a template, and for shares near and far."""
    random = Random(0)  # noqa: S311 - nothing is secret
    shares = template.shares
    effort = _some(effort, part_looked_at(kind.num_stages, len(shares)))
    for turn in range(1 + effort // _FEWER):
        found = _searched(kind, shares, effort if turn == 0 else max(1, effort // _FEWER))
        if found is not None:
            template = min(template, _fitted(kind, found), key=_seconds)
        shares = changed_shares(template.shares, random, _NEAR if turn % 2 else _FAR)
    return template


def _shares(count: int) -> Iterator[tuple[float, ...]]:
    """Yield plausible shares: equal ones, and shares that grow at the front."""
    yield (1 / count,) * count
    for growth in _GROWTH:
        for length in range(2, count - len(_BACK)):
            if growth**-length < _SMALLEST:
                break
            front = [growth**-place for place in range(length, 0, -1)]
            yield scaled([*front, *[1.0] * (count - length - len(_BACK)), *_BACK])


def scaled(shares: Sequence[float]) -> tuple[float, ...]:
    """Scale shares to the sum 1."""
    total = sum(shares)
    return tuple(share / total for share in shares)


def _costs(kind: Kind, shares: Sequence[float]) -> Costs:
    of_stages = [*zip(kind.stages, kind.each, kind.least, strict=True)]
    seconds = [
        [
            Seconds(
                *(max(share * work + each, least) for work, each, least in zip(*of, strict=True))
            )
            for of in of_stages
        ]
        for share in shares
    ]
    return stage_costs(seconds, shares, message=kind.message, num_stages=kind.num_stages)


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


def _fitted(kind: Kind, template: Template) -> Template:
    """Alternate between the best shares for an order and the order for shares, while it helps."""
    count = len(template.shares)
    rates = Rates(
        work=[[seconds] * count for seconds in kind.stages],
        each=kind.each,
        least=kind.least,
        tokens=[1.0] * count,
        message=[kind.message] * count,
        memory=kind.memory,
    )
    while (shares := best_shares(template.schedule, rates)) is not None:
        found = shorten(template.schedule, _costs(kind, shares), memory_limit=kind.memory)
        if found is None or found[1].makespan > template.seconds * (1 - _LESS):
            break
        template = Template(found[1].makespan, shares, found[0])
    return template


def changed_shares(
    shares: Sequence[float], random: Random, factors: Sequence[float] = _NEAR
) -> tuple[float, ...]:
    """Change up to three shares by random factors, and scale all to the sum 1."""
    changed = list(shares)
    for place in random.sample(range(len(shares)), min(len(shares), random.choice((1, 2, 3)))):
        changed[place] *= random.choice(factors)
    return scaled(changed)


def _seconds(template: Template) -> float:
    return template.seconds
