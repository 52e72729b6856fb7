"""Periodic patterns: when each step of one microbatch would run if a new one entered every period.

A pattern gives each stage's F, I and W a time such that, repeated every period, no two steps of a
rank overlap: the building block of Qi et al. 2024 (Pipeline Parallelism with Controllable Memory),
here for any durations and latencies. In the steady state it has no bubble, and the memory it needs
is the sum of how long each stage holds a microbatch, divided by the period. `construct` follows it
as a priority and squeezes the warm-up and the cool-down.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_schedule.searching.problem import Problem

_EPSILON = 1e-7


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
        if math.isinf(fill) or math.isinf(problem.memory_limit):
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
                whole = round(share / size[stage] - _EPSILON) if size[stage] > 0 else num
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
        if distance > self.period - _EPSILON:
            distance = 0.0
        if duration < _EPSILON or other_duration < _EPSILON:
            return True
        return other_duration - _EPSILON <= distance <= self.period - duration + _EPSILON
