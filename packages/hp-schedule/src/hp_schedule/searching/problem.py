"""A schedule to be found, as arrays: input of the constructor and of the bounds.

Steps are numbered

    (part * num_stages + stage) * num_microbatches + place

where part is the index into `Problem.kinds` (F, I, W, or F, B without the split) and place is the
microbatch's place in the order in which every stage takes them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import inf
from random import Random
from typing import Final, NamedTuple

from hp_schedule.costs import Costs, ModelCosts, PerStep, numbers, per_step
from hp_schedule.schedule import Row, Schedule
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_WEIGHT,
    FWD,
    KIND_MASK,
    MICROBATCH_SHIFT,
    PLACE_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    encode_overlap,
    leaves,
)

EPSILON: Final = 1e-9
"""Times closer than this are the same moment: sums of floats in different orders."""


class Problem:
    """Steps with their ranks, durations, precedence and memory.

    Args:
        costs: What the steps cost; a message takes message / bandwidth + latency.
        stage_to_rank: The rank of each stage; one chain of all stages in order.
        order: The microbatches in the order in which every stage takes them.
        memory_limit: What a rank's activations may take at most, in the unit of
            `Costs.activation`.
        split_backward: Whether the backward is two steps, I and W.

    Attributes:
        kinds: The packed kinds of the parts.
        rank: The rank of each step.
        duration: How long it takes.
        successors: Which steps it precedes, each with the time from its end to their start.
        acquires: Memory that each step takes at its start.
        releases: Memory that each step gives back at its end.
        largest: For each stage the most memory that a microbatch takes.
        earlier: Stages before each stage on its rank.
        reserve: For each stage what those behind it on its rank take at most for one microbatch.
        num_predecessors: Number of steps that precede each step.
        lag: For each cell of a forward, the time of its message to the next stage; 0 on one rank.
        lag_back: For each cell of a backward, the time of the gradient's message to the stage
            before; 0 on one rank.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        stage_to_rank: Sequence[int],
        order: Sequence[int],
        memory_limit: float,
        split_backward: bool = True,
    ) -> None:
        self.stage_to_rank = tuple(stage_to_rank)
        self.order = tuple(order)
        self.memory_limit = memory_limit
        self.kinds = (FWD, BWD_INPUT, BWD_WEIGHT) if split_backward else (FWD, BWD)
        self.num_ranks = 1 + max(stage_to_rank)
        self.num_stages = len(stage_to_rank)
        self.num_microbatches = len(order)
        self.part = self.num_stages * self.num_microbatches
        self.num_steps = len(self.kinds) * self.part
        tables = costs.durations(self.num_stages, self.num_microbatches)
        self.duration = [time for kind in self.kinds for time in self._in_order(tables[kind])]
        self.rank = [rank for rank in self.stage_to_rank for _ in order] * len(self.kinds)
        sizes = (self.num_stages, self.num_microbatches)
        activation = self._in_order(per_step("activation", costs.activation, *sizes))
        nothing = [0.0] * (self.num_steps - self.part)
        self.acquires = activation + nothing
        self.releases = nothing + activation
        num = self.num_microbatches
        self.largest = [max(activation[at : at + num]) for at in range(0, self.part, num)]
        self.earlier = [
            [other for other in range(stage) if stage_to_rank[other] == rank]
            for stage, rank in enumerate(stage_to_rank)
        ]
        self.reserve = [0.0] * self.num_stages
        for stage, others in enumerate(self.earlier):
            for other in others:
                self.reserve[other] += self.largest[stage]
        self._set_lags(costs)
        self.follow_with(self.all_successors())

    @cached_property
    def mirror(self) -> "Problem":
        """Return the problem with time running backwards: its schedules are this one's, mirrored.

        Backwards, W takes memory and F gives it back; microbatches pass a stage's steps in the
        opposite order. A rank's stages take a microbatch's memory in their order, which nothing
        else would see to (see "Memory without deadlock").
        """
        mirror = self._copy()
        turned: list[list[tuple[int, float]]] = [[] for _ in range(self.num_steps)]
        for step, successors in enumerate(self.successors):
            for successor, lag in successors:
                turned[successor].append((step, lag))
        last = self.num_steps - self.part
        for after, earlier in enumerate(self.earlier):
            for place in range(self.num_microbatches) if earlier else ():
                taken = last + earlier[-1] * self.num_microbatches + place
                then = last + after * self.num_microbatches + place
                turned[taken].append((then, 0.0))
        mirror.follow_with(turned)
        mirror.acquires, mirror.releases = self.releases, self.acquires
        return mirror

    def with_order(self, order: Sequence[int]) -> "Problem":
        """Return the problem with the microbatches in another order."""
        other = self._copy()
        other.order = tuple(order)
        places = [self.order.index(microbatch) for microbatch in other.order]
        num = self.num_microbatches

        def moved(table: list[float]) -> list[float]:
            return [table[row + place] for row in range(0, len(table), num) for place in places]

        other.duration = moved(self.duration)
        other.acquires, other.releases = moved(self.acquires), moved(self.releases)
        other.lag, other.lag_back = moved(self.lag), moved(self.lag_back)
        if other.lag != self.lag or other.lag_back != self.lag_back:
            other.follow_with(other.all_successors())
        return other

    def with_times(
        self, duration: list[float], *, lag: list[float], lag_back: list[float]
    ) -> "Problem":
        """Return the problem with other durations of its steps and other times of its messages."""
        other = self._copy()
        other.duration, other.lag, other.lag_back = duration, lag, lag_back
        other.follow_with(other.all_successors())
        return other

    def with_windows(self, windows: Sequence[int]) -> "Problem":
        """Return the problem with at most windows[stage] microbatches in each stage at once."""
        narrow = self._copy()
        limited = list(self.successors)
        last = self.num_steps - self.part
        for stage, window in enumerate(windows):
            start = stage * self.num_microbatches
            for place in range(window, self.num_microbatches):
                freed = last + start + place - window
                limited[freed] = [*limited[freed], (start + place, 0.0)]
        narrow.follow_with(limited)
        return narrow

    def schedule(self, sequence: Iterable[int]) -> Schedule:
        """Return the schedule whose rows have the steps in the order of a sequence of all."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for step in sequence:
            part, cell = divmod(step, self.part)
            stage, place = divmod(cell, self.num_microbatches)
            rows[self.rank[step]].append(encode(self.kinds[part], stage, self.order[place]))
        return Schedule(
            steps=tuple(map(Row, rows)),
            stage_to_rank=self.stage_to_rank,
            num_microbatches=self.num_microbatches,
        )

    def step_of(self, code: int) -> int:
        """Return the step of a packed compute step; of a whole backward that is split, its I."""
        kind = code & KIND_MASK
        part = self.kinds.index(kind) if kind in self.kinds else 1
        stage = code >> STAGE_SHIFT & STAGE_MASK
        place = self._place_of[code >> MICROBATCH_SHIFT]
        return (part * self.num_stages + stage) * self.num_microbatches + place

    def chains(self) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        """Return the steps that each step waits for, apart from the order of the microbatches.

        Returns:
            By step the step that it waits for, -1 for none; the time between the two; the steps
            that wait for it, each with that time.
        """
        before, lag = [-1] * self.num_steps, [0.0] * self.num_steps
        after: list[list[tuple[int, float]]] = []
        for step, successors in enumerate(self.successors):
            # The next step may be the same one of the next microbatch.
            is_last = (step + 1) % self.num_microbatches == 0
            mine = [entry for entry in successors if entry[0] != step + 1 or is_last]
            after.append(mine)
            for follower, gap in mine:
                before[follower], lag[follower] = step, gap
        return before, lag, after

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {microbatch: place for place, microbatch in enumerate(self.order)}

    def _copy(self) -> "Problem":
        other = copy(self)
        for name in ("mirror", "_place_of"):
            vars(other).pop(name, None)
        return other

    def follow_with(self, successors: list[list[tuple[int, float]]]) -> None:
        """Set the precedence of the steps."""
        self.successors = successors
        self.num_predecessors = [0] * self.num_steps
        for followers in successors:
            for step, _ in followers:
                self.num_predecessors[step] += 1

    def _in_order(self, table: Sequence[float]) -> list[float]:
        return [
            table[stage * self.num_microbatches + microbatch]
            for stage in range(self.num_stages)
            for microbatch in self.order
        ]

    def _set_lags(self, costs: Costs) -> None:
        transmission = costs.transmission(self.num_stages, self.num_microbatches)
        self.lag = [0.0] * self.part
        self.lag_back = [0.0] * self.part
        place = self.stage_to_rank
        for stage in range(self.num_stages - 1):
            if place[stage] != place[stage + 1]:
                there = costs.latency_of(place[stage], place[stage + 1])
                back = costs.latency_of(place[stage + 1], place[stage])
                cell = stage * self.num_microbatches
                for position, microbatch in enumerate(self.order):
                    sent = transmission[cell + microbatch]
                    self.lag[cell + position] = there + sent
                    self.lag_back[cell + self.num_microbatches + position] = back + sent

    def all_successors(self) -> list[list[tuple[int, float]]]:
        """Return for each step those that wait for it, with the time between them."""
        num, part = self.num_microbatches, self.part
        result: list[list[tuple[int, float]]] = [[] for _ in range(self.num_steps)]
        for cell in range(part):
            stage, place = divmod(cell, num)
            if stage + 1 < self.num_stages:
                result[cell].append((cell + num, self.lag[cell]))
            else:
                result[cell].append((cell + part, 0.0))
            if stage:
                result[cell + part].append((cell + part - num, self.lag_back[cell]))
            if len(self.kinds) == 3:
                result[cell + part].append((cell + 2 * part, 0.0))
            if place + 1 < num:
                for step in range(cell, self.num_steps, part):
                    result[step].append((step + 1, 0.0))
        return result


class Units(NamedTuple):
    """A unit of time and one of memory, in which the numbers of a search are near 1.

    Searches compare sums of floats with one small number. It fits seconds and nanoseconds alike
    only if both are brought to one size first. Units are powers of two: changing them rounds
    nothing.

    Attributes:
        time: Unit of time, in the costs' unit of time.
        memory: Unit of memory, in the costs' unit of memory.
    """

    time: float
    memory: float

    @classmethod
    def fitting(cls, costs: ModelCosts | Costs) -> "Units":
        """Return units between half the largest duration, the largest activation, and all of it."""
        return cls(
            _power_of_two(costs.forward, costs.input_grad, costs.weight_grad),
            _power_of_two(costs.activation),
        )

    def apply(self, costs: Costs) -> Costs:
        """Return costs in these units, apart from the FSDP costs, which no search needs."""
        return replace(
            costs,
            forward=_divided(costs.forward, self.time),
            input_grad=_divided(costs.input_grad, self.time),
            weight_grad=_divided(costs.weight_grad, self.time),
            activation=_divided(costs.activation, self.memory),
            recompute=None if costs.recompute is None else _divided(costs.recompute, self.time),
            kept_input=_divided(costs.kept_input, self.memory),
            offloaded=None if costs.offloaded is None else _divided(costs.offloaded, self.memory),
            host_bandwidth=costs.host_bandwidth * self.time / self.memory,
            latency=(
                {edge: number / self.time for edge, number in costs.latency.items()}
                if isinstance(costs.latency, Mapping)
                else costs.latency / self.time
            ),
            bandwidth=costs.bandwidth * self.time,
        )


def _power_of_two(*values: PerStep) -> float:
    largest = max(number for value in values for number in numbers(value))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


def _divided(value: PerStep, unit: float) -> PerStep:
    if not isinstance(value, Sequence):
        return value / unit
    return [
        [number / unit for number in entry] if isinstance(entry, Sequence) else entry / unit
        for entry in value
    ]


Order = tuple[int, ...]
"""The microbatches, the first one first."""


def first_orders(costs: Costs, num_stages: int, num_microbatches: int) -> list[Order]:
    """Return the orders to begin with: as they come first, and only that if all cost the same.

    The others have the long ones last, first, in the middle and at both ends.
    """
    microbatches = range(num_microbatches)
    work = [0.0] * num_microbatches
    for table in (
        *costs.durations(num_stages, num_microbatches),
        costs.activation_memory(num_stages, num_microbatches).all,
    ):
        for cell, amount in enumerate(table):
            work[cell % num_microbatches] += amount
    rising = tuple(sorted(microbatches, key=work.__getitem__))
    if len(set(work)) == 1:
        return [tuple(microbatches)]
    inside = (*rising[::2], *rising[1::2][::-1])
    outside = (*rising[::-2], *rising[-2::-2][::-1])
    return list(dict.fromkeys([tuple(microbatches), inside, rising, rising[::-1], outside]))


def neighbour(order: Order, random: Random) -> Order:
    """Return an order with one microbatch at another place, or with two that changed places."""
    here, there = random.sample(range(len(order)), 2)
    moved = list(order)
    if random.random() < 0.5:
        moved[here], moved[there] = moved[there], moved[here]
    else:
        moved.insert(there, moved.pop(here))
    return tuple(moved)


def with_order(schedule: Schedule, order: Order) -> Schedule:
    """Return a schedule that takes order[i] wherever another one took the microbatch i."""
    if order == tuple(range(len(order))):
        return schedule
    return schedule.with_rows(
        [_renamed(code, order) for code in row.codes()] for row in schedule.steps
    )


def _renamed(code: int, order: Order) -> int:
    if code < 0:
        return code
    parts = [
        leaf & PLACE_MASK | order[leaf >> MICROBATCH_SHIFT] << MICROBATCH_SHIFT
        for leaf in leaves(code)
    ]
    return parts[0] if len(parts) == 1 else encode_overlap(*parts)


def in_order(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """Return a sequence of all steps with those microbatches in order that cost the same.

    The first of them to come to a stage takes the place of whichever did: by counting, what each
    step waits for is there no later than before.
    """
    num = problem.num_microbatches
    groups = interchangeable(problem)
    group_of = {place: index for index, group in enumerate(groups) for place in group}
    result = []
    reached: dict[tuple[int, int], int] = {}
    for step in sequence:
        row, place = divmod(step, num)
        key = row, group_of[place]
        index = reached.get(key, 0)
        reached[key] = index + 1
        result.append(row * num + groups[group_of[place]][index])
    return result


def interchangeable(problem: Problem) -> list[list[int]]:
    """Return the places of microbatches in groups that cost the same, each in order."""
    num = problem.num_microbatches
    tables = (problem.duration, problem.lag, problem.lag_back, problem.acquires)
    groups: dict[tuple[float, ...], list[int]] = {}
    for place in sorted(range(num), key=problem.order.__getitem__):
        costs = tuple(cost for table in tables for cost in table[place::num])
        groups.setdefault(costs, []).append(place)
    return list(groups.values())


def while_sending(costs: Costs, stage_to_rank: Sequence[int], num_microbatches: int) -> Costs:
    """Return costs in which a step lasts until its message has arrived, and messages no time.

    Args:
        costs: Costs of the stages.
        stage_to_rank: Placement of one chain of stages.
        num_microbatches: Number of microbatches.
    """
    num_stages = len(stage_to_rank)
    tables = costs.durations(num_stages, num_microbatches)
    transmission = costs.transmission(num_stages, num_microbatches)

    def row(kind: int, stage: int, target: int, sender: int) -> list[float]:
        cells = slice(stage * num_microbatches, (stage + 1) * num_microbatches)
        if not 0 <= target < num_stages or stage_to_rank[target] == stage_to_rank[stage]:
            return tables[kind][cells]
        latency = costs.latency_of(stage_to_rank[stage], stage_to_rank[target])
        sent = transmission[sender * num_microbatches : (sender + 1) * num_microbatches]
        return [
            time + (message + latency)
            for time, message in zip(tables[kind][cells], sent, strict=True)
        ]

    stages = range(num_stages)
    return replace(
        costs,
        forward=[row(FWD, stage, stage + 1, stage) for stage in stages],
        input_grad=[row(BWD_INPUT, stage, stage - 1, stage - 1) for stage in stages],
        latency=0.0,
        message=0.0,
        bandwidth=inf,
        recompute=costs.forward if costs.recompute is None else costs.recompute,
    )


def bounded(problem: Problem, free: Problem) -> list[Problem]:
    """Return problems no plan of which is longer than a plan whose messages hold up their ranks.

    A forward and a backward that are one step send their messages at the same time, so that the
    rank stands still for the longer of the two, not for both. In each of the two problems the
    messages of one direction hold up their ranks, and those of the other are only on their way: a
    pair is no shorter than its half without a hold-up followed by its other half.

    Args:
        problem: Problem of the steps priced by `while_sending`.
        free: Problem of the same steps whose messages hold up nobody.
    """
    if problem.num_microbatches == 1:
        return [problem]  # one half of every pair would wait for the other
    part = problem.part
    there, back = slice(0, part), slice(part, 2 * part)
    forward, backward = problem.duration.copy(), problem.duration.copy()
    forward[back], backward[there] = free.duration[back], free.duration[there]
    return [
        problem.with_times(forward, lag=problem.lag, lag_back=free.lag_back),
        problem.with_times(backward, lag=free.lag, lag_back=problem.lag_back),
    ]
