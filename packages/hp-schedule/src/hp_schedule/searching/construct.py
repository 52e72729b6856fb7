"""Schedules built step by step, and made shorter by building them back and forth.

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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from hp_schedule.searching.problem import EPSILON, Problem


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
