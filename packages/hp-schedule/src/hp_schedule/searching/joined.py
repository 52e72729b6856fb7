"""A time that no schedule can beat: one rank with all its stages in the memory that they share.

The other ranks are as fast as the steps of one microbatch allow, W is cut at will and done while
the rank would stand idle or when memory is needed. What is left is which step comes next. A state
is how many microbatches have passed each step; of the ways to come to one, those are kept that no
other is better than in every respect. Where there are too many, some are merged into one that is as
good as each of them: the result stays a bound.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from hp_schedule.searching.problem import EPSILON, Problem

_STATES = 3_500
"""States from which a rank is left alone."""
_WAYS = 10_000
"""Ways that are gone, of all states together."""
_NEAR = 0.9
"""The share of a known bound from which a rank is looked at closely."""
_KEPT = 24
"""Ways to come to one state that are kept apart at most."""
_FIXED = 2
"""Entries of a way before those of waiting microbatches."""

_Counts = tuple[int, ...]
"""How many microbatches have passed each step of the chain."""
_Way = tuple[float, ...]
"""The less the better: the time; work done of W, negated; for each step of the chain but the first,
when the microbatches that wait for it can start."""


class _Chain(NamedTuple):
    """The steps of one microbatch on a rank, all F and then all I (or B).

    Attributes:
        durations: Seconds that each step takes.
        gaps: Seconds from the end of each step to the earliest start of the next.
        sizes: Memory that each F takes.
        weights: Duration of the W behind each F, in the same order.
        head: Earliest start of the first step.
        tail: What must follow the last one elsewhere.
    """

    durations: tuple[float, ...]
    gaps: tuple[float, ...]
    sizes: tuple[float, ...]
    weights: tuple[float, ...]
    head: float
    tail: float


def joined_bound(problem: Problem, ranks: Iterable[int], *, known: float = 0.0) -> float:
    """Return a bound for problems whose microbatches all cost the same; 0 for large ones.

    Args:
        problem: Problem whose plans are bounded.
        ranks: Ranks, each looked at alone, and the one with the largest bound closely.
        known: A bound that is known: what is much lower is not looked at closely.
    """
    found: list[tuple[float, int, _Ways]] = []
    for rank in ranks:
        stages = [stage for stage, place in enumerate(problem.stage_to_rank) if place == rank]
        ways = _Ways(_chain(problem, stages), problem)
        found.append((*ways.shortest(1), ways))
    bound, num_states, ways = max(found, key=lambda entry: entry[0])
    kept = min(_KEPT, _WAYS // max(1, num_states))
    if kept < 2 or bound < known * _NEAR:
        return bound
    return max(bound, ways.shortest(kept)[0])


def _chain(problem: Problem, stages: Sequence[int]) -> _Chain:
    num, part, last = problem.num_microbatches, problem.part, problem.num_stages - 1
    forward, backward = (problem.duration[at : at + part : num] for at in (0, part))
    weight = problem.duration[2 * part :: num] if len(problem.kinds) == 3 else [0.0] * (last + 1)
    there, back = problem.lag[::num], problem.lag_back[::num]
    # When each step of one microbatch starts and ends if nothing holds it up.
    now, spans = 0.0, []
    for stage in range(last + 1):
        spans.append((now, now + forward[stage]))
        now += forward[stage] + there[stage]
    now = spans[-1][1]
    for stage in range(last, -1, -1):
        spans.append((now, now + backward[stage]))
        now += backward[stage] + back[stage]
    whole = spans[-1][1] + weight[0]
    mine = [*stages, *(2 * last + 1 - stage for stage in reversed(stages))]
    picked = [spans[index] for index in mine]
    return _Chain(
        durations=tuple(until - since for since, until in picked),
        gaps=tuple(start - end for (_, end), (start, _) in pairwise(picked)),
        sizes=tuple(problem.largest[stage] for stage in stages),
        weights=tuple(weight[stage] for stage in stages),
        head=picked[0][0],
        tail=whole - picked[-1][1] if stages[0] else 0.0,
    )


class _Ways:
    """All ways through the steps of a rank.

    Args:
        chain: The steps.
        problem: Its memory and its number of microbatches.
    """

    def __init__(self, chain: _Chain, problem: Problem) -> None:
        self._chain = chain
        self._num = problem.num_microbatches
        self._limit = problem.memory_limit + EPSILON
        self._steps = range(len(chain.durations))
        self._stages = len(chain.sizes)
        self._weights = chain.weights[::-1]  # in the order of the I that they follow
        self._freed = chain.sizes[::-1]
        self._least = min(chain.weights)
        self._most = max(chain.sizes)

    def shortest(self, kept: int) -> tuple[float, int]:
        """Return the bound and the number of states; 0 if there are too many.

        Args:
            kept: Ways to come to one state that are kept apart.
        """
        layer: dict[_Counts, list[_Way]] = {(0,) * len(self._steps): [(self._chain.head, 0.0)]}
        num_states = 0
        for _ in range(self._num * len(self._steps)):
            following: dict[_Counts, list[_Way]] = {}
            for counts, ways in layer.items():
                for way in _best(ways, kept):
                    for target, other in self._next(counts, way):
                        following.setdefault(target, []).append(other)
            layer = following
            num_states += len(layer)
            if num_states > _STATES:
                return 0.0, num_states
        finished = [self._finish(way) for ways in layer.values() for way in ways]
        return min(finished, default=inf), num_states

    def _finish(self, way: _Way) -> float:
        now, work = way
        left = sum(self._weights) * self._num + work
        return now + max(self._chain.tail, left)

    def _next(self, counts: _Counts, way: _Way) -> Iterator[tuple[_Counts, _Way]]:
        """Yield the state and the way after each possible next step."""
        chain, begin = self._chain, _FIXED
        for step in self._steps:
            waiting = counts[step - 1] - counts[step] if step else self._num - counts[step]
            mine = begin
            begin += waiting if step else 0
            if not waiting:
                continue
            ready = way[mine] if step else 0.0
            start = self._start(step, counts, way)
            if start is None:
                continue
            start = max(start, ready)
            end = start + chain.durations[step]
            rest = list(way[_FIXED:])
            if step:
                del rest[mine - _FIXED]
            if step + 1 < len(self._steps):
                # Behind those that wait for the next step already.
                place = begin - _FIXED - (1 if step else 0)
                rest.insert(place + counts[step] - counts[step + 1], end + chain.gaps[step])
            target = (*counts[:step], counts[step] + 1, *counts[step + 1 :])
            done = self._worked(counts, way, start)
            yield target, (end, done, *(max(end, time) for time in rest))

    def _start(self, step: int, counts: _Counts, way: _Way) -> float | None:
        """Return when there can be room for a step, after the W that make it; None if never."""
        now, work, *_ = way
        if step >= self._stages:
            return now
        chain = self._chain
        held = sum(size * number for size, number in zip(chain.sizes, counts, strict=False))
        excess = held + chain.sizes[step] - self._limit
        if excess <= 0:
            return now
        numbers = counts[self._stages :]
        if sum(size * n for size, n in zip(self._freed, numbers, strict=True)) < excess - EPSILON:
            return None
        needed = ceil(excess / self._most - EPSILON) * self._least
        return now + max(0.0, needed + work)

    def _worked(self, counts: _Counts, way: _Way, start: float) -> float:
        """Return the work of W that is done until a start, negated."""
        now, work, *_ = way
        numbers = counts[self._stages :]
        most = sum(time * n for time, n in zip(self._weights, numbers, strict=True))
        return work - min(start - now, most + work)


def _best(ways: list[_Way], most: int) -> list[_Way]:
    """Return the ways that no other is better than; where they are many, the last as one."""
    kept: list[_Way] = []
    for way in sorted(set(ways)):
        if not any(
            all(mine <= other + EPSILON for mine, other in zip(better, way, strict=True))
            for better in kept
        ):
            kept.append(way)
    return kept if len(kept) <= most else [*kept[: most - 1], tuple(map(min, *kept[most - 1 :]))]
