"""Schedules built step by step, from patterns, and made shorter by building them back and forth.

`construct` is list scheduling (a parallel schedule-generation scheme): whenever a rank is free, it
starts the step of best priority that is ready. `tighten` rebuilds a plan backwards in time with
the priorities its own order gives, and forwards again: forward-backward improvement (Li and Willis
1992; Tormos and Lova 2001), here with memory that is taken and given back.

A step that takes memory starts only if there is room for it and, beside it, for the most that each
later stage of its rank may take, less what that stage holds now. So among the microbatches under
way the one that is furthest can always go on, on every rank: whatever stands before it there was
taken by stages before its own, and each of those left room for it or saw its stage hold as much,
for microbatches that have ended since. Stages take microbatches in one order, which makes this hold
backwards in time too, where W takes memory long before F returns it.

A pattern says when each step of one microbatch would run if a new one entered every period: each
stage's F, I and W have a time such that, repeated every period, no two steps of a rank overlap. It
is the building block of Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), here for
any durations and latencies. In the steady state it has no bubble, and the memory it needs is the
sum of how long each stage holds a microbatch, divided by the period. `construct` follows it as a
priority and squeezes the warm-up and the cool-down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, isinf

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.searching.problem import EPSILON, Problem, Units, in_order
from hp_schedule.simulation.recurrence import compute_clock
from hp_schedule.simulation.simulate import Simulation, simulate
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_WEIGHT,
    FWD,
    KIND_MASK,
    MICROBATCH_SHIFT,
    PLACE_MASK,
    encode,
    leaves,
)

_TOUCHING = 1e-7
"""Largest distance of two steps of a pattern that follow each other without a gap."""


@dataclass(frozen=True, slots=True)
class Template:
    """The steps of one microbatch.

    Attributes:
        period: Time between two microbatches.
        offsets: For each part of the problem and each stage the time its step starts.
        ends: For each stage the time at which it gives its memory back.
    """

    period: float
    offsets: tuple[tuple[float, ...], ...]
    ends: tuple[float, ...]

    def priorities(self, num_microbatches: int, *, weight_delay: float) -> list[float]:
        """Return when each step of a problem would start, W put off by some periods."""
        result: list[float] = []
        for part, offsets in enumerate(self.offsets):
            delay = weight_delay * self.period if part == 2 else 0.0
            for offset in offsets:
                first = offset + delay
                result.extend(first + place * self.period for place in range(num_microbatches))
        return result

    def windows(self, problem: Problem, *, fill: float) -> list[int]:
        """Return how many microbatches each stage may hold at once.

        A rank's memory is dealt out to its stages in proportion to how long they hold a
        microbatch.

        Args:
            problem: Problem whose memory limit and activations count; the mean over microbatches is
                taken.
            fill: Share of the memory limit to deal out; above 1 stages compete for the rest,
                infinite is no window at all.
        """
        num = problem.num_microbatches
        if isinf(fill) or isinf(problem.memory_limit):
            return [num] * problem.num_stages
        result = [1] * problem.num_stages
        for rank in range(problem.num_ranks):
            stages = [s for s, place in enumerate(problem.stage_to_rank) if place == rank]
            size = {s: sum(problem.acquires[s * num : (s + 1) * num]) / num for s in stages}
            times = {s: self.ends[s] - self.offsets[0][s] for s in stages}
            memory = sum(times[s] * size[s] for s in stages)
            left = problem.memory_limit * fill
            # Small shares first: what rounding gives or takes is little for the large ones.
            for stage in sorted(stages, key=times.__getitem__):
                share = times[stage] * size[stage] / memory * left if memory > 0 else left
                whole = round(share / size[stage] - _TOUCHING) if size[stage] > 0 else num
                result[stage] = min(num, max(1, whole))
                left -= result[stage] * size[stage]
                memory -= times[stage] * size[stage]
        return result


def template(problem: Problem, *, stretch: float, slack: float) -> Template | None:
    """Return a pattern, each step placed at the first time that is free in every period.

    Args:
        problem: Problem whose mean durations are taken.
        stretch: The period in units of the busiest rank's work for one microbatch.
        slack: Time left between a stage and the next beside the message's, in the same unit.

    Returns:
        The pattern; None if a step finds no gap.
    """
    num = problem.num_microbatches
    mean = [
        sum(problem.duration[start : start + num]) / num
        for start in range(0, problem.num_steps, num)
    ]
    stages = range(problem.num_stages)
    work = [0.0] * problem.num_ranks
    for index, time in enumerate(mean):
        work[problem.stage_to_rank[index % problem.num_stages]] += time
    ring = _Ring(problem.stage_to_rank, max(work) * stretch)
    pause = slack * max(work)
    forward, backward, *weight = (
        mean[i : i + len(stages)] for i in range(0, len(mean), len(stages))
    )
    pauses = [lag + pause for lag in problem.lag[::num]]
    there = _walk(ring, stages, forward, pauses, 0.0)
    if there is None:
        return None
    last = there[-1] + forward[-1]
    pauses = [lag + pause for lag in problem.lag_back[::num]]
    back = _walk(ring, stages[::-1], backward, pauses, last)
    if back is None:
        return None
    inputs = back[::-1]
    ends = [start + time for start, time in zip(inputs, backward, strict=True)]
    if not weight:
        return Template(ring.period, (tuple(there), tuple(inputs)), tuple(ends))
    weights = [0.0] * len(stages)
    for stage in reversed(stages):
        place = ring.take(stage, ends[stage], weight[0][stage])
        weights[stage] = ends[stage] if place is None else place
        ends[stage] = weights[stage] + weight[0][stage]
    return Template(ring.period, (tuple(there), tuple(inputs), tuple(weights)), tuple(ends))


def _walk(
    ring: "_Ring",
    stages: Sequence[int],
    durations: Sequence[float],
    pauses: Sequence[float],
    start: float,
) -> list[float] | None:
    """Place the steps of consecutive stages, each as early as the one before allows."""
    times = []
    for stage in stages:
        time = ring.take(stage, start, durations[stage])
        if time is None:
            return None
        times.append(time)
        start = time + durations[stage] + pauses[stage]
    return times


class _Ring:
    """The ranks' time modulo the period."""

    def __init__(self, stage_to_rank: Sequence[int], period: float) -> None:
        self.period = period
        ranks: dict[int, list[tuple[float, float]]] = {rank: [] for rank in stage_to_rank}
        self._taken = [ranks[rank] for rank in stage_to_rank]

    def take(self, stage: int, earliest: float, duration: float) -> float | None:
        """Occupy the first free time of a stage's rank; None if there is none long enough."""
        taken = self._taken[stage]
        after = [earliest + (start + time - earliest) % self.period for start, time in taken]
        for candidate in sorted([earliest, *after]):
            if all(self._apart(candidate, duration, *other) for other in taken):
                taken.append((candidate, duration))
                return candidate
        return None

    def _apart(self, start: float, duration: float, other: float, other_duration: float) -> bool:
        distance = (start - other) % self.period
        if distance > self.period - _TOUCHING:
            distance = 0.0
        if duration < _TOUCHING or other_duration < _TOUCHING:
            return True
        return other_duration - _TOUCHING <= distance <= self.period - duration + _TOUCHING


@dataclass(frozen=True, slots=True)
class Plan:
    """Start times of all steps of a problem.

    Attributes:
        starts: Start of each step, by step.
        sequence: All steps in the order in which they start.
        makespan: The end of the last.
    """

    starts: list[float]
    sequence: list[int]
    makespan: float

    def order(self) -> list[int]:
        """Return all steps, each after those that it waits for, as each rank runs them."""
        steps = range(len(self.starts))
        return self.sequence or sorted(steps, key=lambda step: (self.starts[step], step))

    def mirrored_priorities(self, duration: Sequence[float]) -> list[float]:
        """Return the priorities that rebuild the plan with time running the other way."""
        return [
            self.makespan - start - time for start, time in zip(self.starts, duration, strict=True)
        ]


def construct(problem: Problem, priority: Sequence[float], *, patience: float = 0.0) -> Plan | None:
    """Build a plan.

    Args:
        problem: Problem of the plan: its steps, their precedence and the memory limit.
        priority: Priority of each step; the lowest number is taken first.
        patience: A rank that could start a step waits instead for a better one that is known to
            arrive within this share of the step's duration, unless a step fits in between.

    Returns:
        The plan; None if the memory limit is below one microbatch's need.
    """
    return _Construction(problem, priority, patience).run()


def tighten(problem: Problem, mirror: Problem, plan: Plan, *, patience: float) -> Plan:
    """Rebuild a plan backwards and forwards as long as it gets shorter.

    Args:
        problem: Problem that the plan solves.
        mirror: `problem.mirror`.
        plan: Any plan of the problem, or of one with fewer restrictions.
        patience: See `construct`.
    """
    best = plan
    while True:
        backward = construct(mirror, plan.mirrored_priorities(problem.duration), patience=patience)
        if backward is None:
            return best
        again = construct(
            problem, backward.mirrored_priorities(problem.duration), patience=patience
        )
        if again is None or again.makespan >= best.makespan - EPSILON:
            return best
        best = plan = again


class _Construction:
    """One run of `construct`: the ranks' clocks, memory and steps in waiting."""

    def __init__(self, problem: Problem, priority: Sequence[float], patience: float) -> None:
        ranks = range(problem.num_ranks)
        self._problem = problem
        self._priority = priority
        self._patience = patience
        self._waits_for = problem.num_predecessors.copy()
        self._arrival = [0.0] * problem.num_steps
        # Steps whose inputs exist now, by priority; whose arrival is known, by time; whose memory
        # was not free.
        self._ready: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self._coming: list[list[tuple[float, float, int]]] = [[] for _ in ranks]
        self._blocked: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self._held = [0.0] * problem.num_ranks
        # What each stage holds, and what its rank must keep free for the stages behind it.
        self._held_by = [0.0] * problem.num_stages
        self._reserve = problem.reserve.copy()
        self._free_at = [0.0] * problem.num_ranks
        self._wakes_at = [inf] * problem.num_ranks
        self._events: list[tuple[float, int]] = []

    def run(self) -> Plan | None:
        problem = self._problem
        starts = [0.0] * problem.num_steps
        sequence: list[int] = []
        makespan = 0.0
        for step, waits_for in enumerate(self._waits_for):
            if not waits_for:
                heappush(self._coming[problem.rank[step]], (0.0, self._priority[step], step))
        for rank, coming in enumerate(self._coming):
            if coming:
                self._wake(rank, 0.0)
        duration, wakes_at, events = problem.duration, self._wakes_at, self._events
        while events:
            now, rank = heappop(events)
            if wakes_at[rank] != now:
                continue
            wakes_at[rank] = inf
            step = self._choose(rank, now)
            if step < 0:
                continue
            starts[step] = now
            sequence.append(step)
            end = now + duration[step]
            if end > makespan:  # noqa: PLR1730 - the innermost loop
                makespan = end
            self._start(step, rank, end)
        return Plan(starts, sequence, makespan) if len(sequence) == problem.num_steps else None

    def _choose(self, rank: int, now: float) -> int:
        """Pop the step to start now; -1 if there is none, with the next wake-up set."""
        ready, coming = self._ready[rank], self._coming[rank]
        moment = now + EPSILON
        while coming and coming[0][0] <= moment:
            _, priority, step = heappop(coming)
            heappush(ready, (priority, step))
        room = self._problem.memory_limit + EPSILON - self._held[rank]
        while ready and self._needs(ready[0][1]) > room:
            self._blocked[rank].append(heappop(ready))
        if not ready:
            if coming:
                self._wake(rank, coming[0][0])
            return -1
        priority, step = ready[0]
        if coming and self._patience:
            until = now + self._patience * self._problem.duration[step]
            better = [
                arrival
                for arrival, other, candidate in coming
                if arrival < until and other < priority and self._needs(candidate) <= room
            ]
            if better:
                return self._fill(rank, now, min(better), room)
        heappop(ready)
        return step

    def _fill(self, rank: int, now: float, until: float, room: float) -> int:
        """Pop the best step that ends by the arrival of a better one; -1 to wait for it."""
        duration = self._problem.duration
        ready = self._ready[rank]
        time = until - now + EPSILON
        fitting = [e for e in ready if duration[e[1]] <= time and self._needs(e[1]) <= room]
        if not fitting:
            self._wake(rank, until)
            return -1
        entry = min(fitting)
        ready.remove(entry)
        heapify(ready)
        return entry[1]

    def _start(self, step: int, rank: int, end: float) -> None:
        """Occupy the rank until the end, and tell the steps that follow when they can start."""
        problem = self._problem
        self._free_at[rank] = end
        self._wake(rank, end)
        if problem.acquires[step]:
            self._hold(step, rank, problem.acquires[step])
        elif problem.releases[step]:
            # The rank chooses its next step at the end of this one: then the memory is free.
            self._hold(step, rank, -problem.releases[step])
            for entry in self._blocked[rank]:
                heappush(self._ready[rank], entry)
            self._blocked[rank].clear()
        arrival, waits_for = self._arrival, self._waits_for
        for follower, lag in problem.successors[step]:
            time = end + lag
            if time > arrival[follower]:  # noqa: PLR1730 - the innermost loop
                arrival[follower] = time
            waits_for[follower] -= 1
            if not waits_for[follower]:
                time = arrival[follower]
                there = problem.rank[follower]
                heappush(self._coming[there], (time, self._priority[follower], follower))
                if there != rank:
                    self._wake(there, max(time, self._free_at[there]))

    def _needs(self, step: int) -> float:
        """Return the memory that must be free for a step to start."""
        size = self._problem.acquires[step]
        if not size:
            return 0.0
        return size + self._reserve[step % self._problem.part // self._problem.num_microbatches]

    def _hold(self, step: int, rank: int, more: float) -> None:
        """Allocate memory for a step's stage, or free it."""
        problem, held = self._problem, self._held_by
        self._held[rank] += more
        stage = step % problem.part // problem.num_microbatches
        before = max(0.0, problem.largest[stage] - held[stage])
        held[stage] += more
        change = max(0.0, problem.largest[stage] - held[stage]) - before
        for earlier in problem.earlier[stage] if change else ():
            self._reserve[earlier] += change

    def _wake(self, rank: int, time: float) -> None:
        if time < self._wakes_at[rank]:
            self._wakes_at[rank] = time
            heappush(self._events, (time, rank))


_PATIENCE = 1.0


def shorten(
    schedule: Schedule, costs: Costs, *, memory_limit: float = inf
) -> tuple[Schedule, Simulation] | None:
    """Rebuild a schedule back and forth in time, as long as it gets shorter.

    What a search has found for costs like these is made as good for these ones, in about the time
    of ten simulations.

    Args:
        schedule: Its steps are forwards and backwards, whole or split, of one chain of stages.
        costs: Costs of the stages.
        memory_limit: What the activations of a rank may take at most, in the unit of the costs.

    Returns:
        The shorter of the schedule and what it was rebuilt as, of those that fit the memory, with
        what the simulator says of it; None if neither does.

    Raises:
        ValueError: If it has other steps than those, or other chains.
    """
    if not schedule.kinds <= {FWD, BWD, BWD_INPUT, BWD_WEIGHT} or len(schedule.chains) > 1:
        raise ValueError("schedule must have forwards and backwards of one chain of stages only")
    units = Units.fitting(costs)
    priced = units.apply(costs)
    problem = Problem(
        priced,
        stage_to_rank=schedule.stage_to_rank,
        order=_order_of(schedule),
        memory_limit=memory_limit / units.memory,
        split_backward=BWD_WEIGHT in schedule.kinds,
    )
    starts, makespan = starts_of(problem, schedule, priced)
    plan = Plan(starts, [], makespan)
    rebuilt = tighten(problem, problem.mirror, plan, patience=_PATIENCE)
    schedules = [schedule]
    if rebuilt is not plan:
        schedules.append(problem.schedule(in_order(problem, rebuilt.order())))
    found = [(each, simulate(each, costs)) for each in schedules]
    fitting = [each for each in found if max(each[1].peak_activations) <= memory_limit]
    return min(fitting, key=lambda each: each[1].makespan, default=None)


def starts_of(problem: Problem, schedule: Schedule, costs: Costs) -> tuple[list[float], float]:
    """Return when the steps of a schedule start, and when the last one ends.

    Args:
        problem: Problem whose steps they are; a whole backward is I and then W.
        schedule: Schedule of compute steps.
        costs: Costs of the problem.
    """
    starts, makespan = [0.0] * problem.num_steps, 0.0
    for codes, ends in zip(*compute_clock(schedule, costs), strict=True):
        for code, end in zip(codes, ends, strict=True):
            makespan = max(makespan, end)
            time = end
            for step in reversed([s for leaf in leaves(code) for s in _steps_of(problem, leaf)]):
                time -= problem.duration[step]
                starts[step] = time
    return starts, makespan


def _steps_of(problem: Problem, code: int) -> tuple[int, ...]:
    step = problem.step_of(code)
    if code & KIND_MASK == BWD and len(problem.kinds) == 3:
        return step, step + problem.part
    return (step,)


def _order_of(schedule: Schedule) -> list[int]:
    """Return the microbatches in the order in which the first stage takes them."""
    codes, forward = schedule.steps[schedule.stage_to_rank[0]].codes(), encode(FWD, 0)
    return [code >> MICROBATCH_SHIFT for code in codes if code & PLACE_MASK == forward]
