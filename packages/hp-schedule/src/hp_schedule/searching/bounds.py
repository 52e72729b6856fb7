"""Times that no schedule can beat.

Each bound is a relaxation: it keeps some of the rules and drops the rest, so the best schedule
under it is at most as long as any real one. The largest counts.

The joined bound is of one rank with all its stages in the memory that they share. The other ranks
are as fast as the steps of one microbatch allow, W is cut at will and done while the rank would
stand idle or when memory is needed. What is left is which step comes next. A state is how many
microbatches have passed each step; of the ways to come to one, those are kept that no other is
better than in every respect. Where there are too many, some are merged into one that is as good as
each of them: the result stays a bound.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, floor, inf, isinf
from typing import NamedTuple

from hp_schedule.searching.problem import EPSILON, Problem, interchangeable

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
    is_told = kept < 2 or bound < known * _NEAR
    return bound if is_told else max(bound, ways.shortest(kept)[0])


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


_SMALL = 150
"""Steps up to which all ranks are looked at."""
_LARGE = 20_000
"""Steps from which the one bound that takes long is worked out for some ranks only."""


def lower_bound(problem: Problem) -> float:
    """Return a proven lower bound of the makespan of every plan of a problem.

    The largest of:

    - for each rank, in large problems for the two ends and the busiest, the shortest preemptive
      schedule of its steps alone, each not before the work that must precede it elsewhere, and
      followed by the work that must come after it (Jackson's preemptive schedule; Carlier 1982);
    - for each rank, its work plus the time it must stand idle because its memory is full before the
      first input gradient can come back, or, seen from the end, before the last forward;
    - for each stage, microbatches one after another in as many slots as fit its memory;
    - for each rank, the memory its microbatches hold times how long, over the memory there is;
    - for the two ends, in small problems for each rank, all its stages in the memory they share,
      where microbatches cost the same (`joined_bound`).
    """
    heads, tails = _heads_and_tails(problem)
    bounds = [0.0]
    of_rank: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for step, rank in enumerate(problem.rank):
        of_rank[rank].append(step)
    work = [sum(problem.duration[step] for step in steps) for steps in of_rank]
    telling = set(range(problem.num_ranks))
    if problem.num_steps > _LARGE:
        telling = {0, problem.num_ranks - 1, work.index(max(work))}
    for rank, steps in enumerate(of_rank):
        if rank in telling:
            bounds.append(_one_machine(problem, steps, heads, tails))
        parts = [
            [step for step in steps if step // problem.part == part]
            for part in range(len(problem.kinds))
        ]
        bounds.append(_memory_full(problem, parts, heads))
        bounds.append(_memory_full(problem, parts[::-1], tails))
        bounds.append(_held(problem, rank, heads, tails))
    bounds.extend(_slots(problem, stage, heads) for stage in range(problem.num_stages))
    if _are_equal(problem) and _is_scarce(problem):
        every, ends = range(problem.num_ranks), {0, problem.num_ranks - 1}
        joined = every if problem.num_steps <= _SMALL else ends
        bounds.append(joined_bound(problem, joined, known=max(bounds)))
    return max(bounds)


def _is_scarce(problem: Problem) -> bool:
    """Return whether some rank cannot hold all microbatches at once."""
    sizes = [0.0] * problem.num_ranks
    for size, rank in zip(problem.acquires, problem.rank, strict=True):
        sizes[rank] += size
    return max(sizes) > problem.memory_limit + EPSILON


def _heads_and_tails(problem: Problem) -> tuple[list[float], list[float]]:
    """Return for each step how long the steps before it, and those after it, take at least.

    Microbatches that cost the same are interchangeable, so that any plan can be renamed into one
    with their order in every stage; others may overtake each other as far as this bound goes.
    """
    any_order = problem.num_microbatches > 1 and not _are_equal(problem)
    duration, successors = problem.duration, problem.successors
    heads = [0.0] * problem.num_steps
    waits_for = problem.num_predecessors.copy()
    sequence = [step for step, count in enumerate(waits_for) if count == 0]
    for step in sequence:
        end = heads[step] + duration[step]
        for follower, lag in successors[step]:
            if not (any_order and abs(follower - step) == 1):
                heads[follower] = max(heads[follower], end + lag)
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                sequence.append(follower)
    tails = [0.0] * problem.num_steps
    for step in reversed(sequence):
        for follower, lag in successors[step]:
            if not (any_order and abs(follower - step) == 1):
                tails[step] = max(tails[step], lag + duration[follower] + tails[follower])
    return heads, tails


def _are_equal(problem: Problem) -> bool:
    """Return whether all microbatches cost the same."""
    return len(interchangeable(problem)) == 1


def _one_machine(
    problem: Problem, steps: list[int], heads: list[float], tails: list[float]
) -> float:
    """Always run the available step with the longest tail, interrupting others for it."""
    steps = sorted(steps, key=heads.__getitem__)
    left = {step: problem.duration[step] for step in steps}
    now, bound, position = 0.0, 0.0, 0
    ready: list[tuple[float, int]] = []
    while ready or position < len(steps):
        if not ready:
            now = max(now, heads[steps[position]])
        while position < len(steps) and heads[steps[position]] <= now + EPSILON:
            heappush(ready, (-tails[steps[position]], steps[position]))
            position += 1
        tail, step = ready[0]
        until = heads[steps[position]] if position < len(steps) else inf
        if now + left[step] <= until:
            now += left[step]
            heappop(ready)
            bound = max(bound, now - tail)
        else:
            left[step] -= until - now
            now = until
    return bound


def _memory_full(problem: Problem, parts: list[list[int]], heads: list[float]) -> float:
    """Bound the idle time before a rank's steps of each later part can start.

    Until then the rank has only the parts before it to run, each for as many microbatches as fit
    its memory. With tails for heads and the parts reversed, the same holds from the end.
    """
    work = sum(problem.duration[step] for part in parts for step in part)
    first = min(heads[step] for step in parts[0])
    bound = first + work
    possible = 0.0
    for before, part in pairwise(parts):
        possible += _most_work(problem, before)
        start = min(heads[step] for step in part)
        bound = max(bound, start + work - min(possible, start - first))
    return bound


def _most_work(problem: Problem, steps: list[int]) -> float:
    """Return an upper bound of the work in steps of one part whose memory fits the limit."""
    room = problem.memory_limit + EPSILON
    memory = {step: problem.acquires[step % problem.part] for step in steps}
    sizes = set(memory.values())
    if len(sizes) == 1 and (size := sizes.pop()) > 0:
        durations = sorted((problem.duration[step] for step in steps), reverse=True)
        return sum(durations if isinf(room) else durations[: floor(room / size)])
    total = 0.0
    for step in sorted(steps, key=lambda s: memory[s] / max(problem.duration[s], EPSILON)):
        share = min(1.0, room / memory[step]) if memory[step] > 0 else 1.0
        total += problem.duration[step] * share
        room = max(0.0, room - memory[step])
    return total


def _holds(problem: Problem, stage: int, place: int) -> float:
    """Return how long a stage holds a microbatch at least."""
    num, part = problem.num_microbatches, problem.part
    cells = [later * num + place for later in range(stage, problem.num_stages)]
    there = sum(problem.duration[cell] for cell in cells)
    back = sum(problem.duration[cell + part] for cell in cells)
    lags = sum(problem.lag[cell] for cell in cells[:-1])
    lags += sum(problem.lag_back[cell] for cell in cells[1:])
    own = problem.duration[cells[0] + 2 * part] if len(problem.kinds) == 3 else 0.0
    return there + back + lags + own


def _held(problem: Problem, rank: int, heads: list[float], tails: list[float]) -> float:
    num = problem.num_microbatches
    held, first, last = 0.0, inf, inf
    final = problem.num_steps - problem.part
    for stage, place in enumerate(problem.stage_to_rank):
        if place == rank:
            cells = range(stage * num, (stage + 1) * num)
            held += sum(problem.acquires[c] * _holds(problem, stage, c % num) for c in cells)
            first = min(first, *(heads[cell] for cell in cells), inf)
            last = min(last, *(tails[final + cell] for cell in cells), inf)
    return first + last + held / problem.memory_limit if held else 0.0


def _slots(problem: Problem, stage: int, heads: list[float]) -> float:
    num = problem.num_microbatches
    cells = range(stage * num, (stage + 1) * num)
    size = min(problem.acquires[cell] for cell in cells)
    if size <= 0 or isinf(problem.memory_limit):
        return 0.0
    slots = floor((problem.memory_limit + EPSILON) / size)
    if slots < 1:
        return inf
    times = [_holds(problem, stage, place) for place in range(num)]
    longest = max(sum(times) / slots, -(-num // slots) * min(times))
    return min(heads[cell] for cell in cells) + longest
