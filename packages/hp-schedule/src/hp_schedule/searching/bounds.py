"""Times that no schedule can beat.

Each bound is a relaxation: it keeps some of the rules and drops the rest, so the best schedule
under it is at most as long as any real one. The largest counts.
"""

from heapq import heappop, heappush
from itertools import pairwise
from math import floor, inf, isinf

from hp_schedule.searching.joined import joined_bound
from hp_schedule.searching.problem import EPSILON, Problem, interchangeable

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
