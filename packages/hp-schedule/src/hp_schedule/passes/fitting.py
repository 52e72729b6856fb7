"""Choice of the microbatches that recompute or offload, so that a schedule fits its memory.

Memory is a matter of one rank's row. It is walked until it holds too much; then, of the
microbatches in flight there, the one whose backward is farthest gives up what it keeps: it makes
room for the longest time, so the fewest have to (Belady 1966). It is copied to the host if that can
be done in time, as far as copies are allowed, and run again otherwise. What turned out to be
needless is taken back, and the kinds of choice are varied as long as the simulator says that it
helps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, get_args

from hp_schedule.costs import ActivationMemory, Costs
from hp_schedule.passes.retention import Retention, offloading, recomputing
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import compute_clock, peak_memory
from hp_schedule.simulation.simulate import simulate
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_WEIGHT,
    FWD,
    KIND_MASK,
    MICROBATCH_SHIFT,
    RETENTION_KINDS,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    leaves,
)

Choice = Mapping[tuple[int, int], Retention]
"""The way of retention by (stage, microbatch); those that are not named keep everything."""

_ROUNDING: Final = 1e-9
_AHEAD: Final = (1, 2, 0)
"""Numbers of compute steps to try between the start of a copy back and its backward."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A schedule that fits its memory.

    Attributes:
        schedule: The schedule with its RECOMPUTE, OFFLOAD and RELOAD steps.
        choice: The microbatches that recompute or offload.
        makespan: Duration of the schedule in the simulator.
    """

    schedule: Schedule
    choice: Choice
    makespan: float


def fit_memory(
    schedule: Schedule,
    costs: Costs,
    memory_limit: float,
    *,
    ways: Sequence[Retention] = ("recompute", "offload"),
    num_tries: int = 64,
) -> Fit | None:
    """Choose microbatches to recompute or to offload, so that memory suffices at little time.

    Args:
        schedule: Schedule without such steps; messages may be there or not.
        costs: Durations, memory and the bandwidth to the host.
        memory_limit: What the activations of a rank may take at most, in the unit of the costs, by
            the rows (`validate`) as well as in time (`simulate`).
        ways: Ways that may be chosen; nothing is added where the schedule fits as it is.
        num_tries: Variations that are simulated after the first plans.

    Returns:
        None if it cannot be made to fit.

    Raises:
        ValueError: If a way is unknown, or the schedule has such steps.
    """
    check_ways(ways)
    if schedule.kinds & RETENTION_KINDS:
        raise ValueError("schedule must have no RECOMPUTE, OFFLOAD and RELOAD steps")
    fitting = _Fitting(schedule, costs, memory_limit)
    best: Fit | None = None
    for plan in _plans(ways):
        best = _better(best, fitting.plan(*plan))
    if best is not None and len(ways) > 1:
        for choice in islice(_variations(best.choice), num_tries):
            best = _better(best, fitting.of(choice))
    return best


def check_ways(ways: Sequence[str]) -> None:
    """Refuse unknown ways to make room.

    Raises:
        ValueError: If one is unknown.
    """
    for way in ways:
        if way not in get_args(Retention):
            raise ValueError(f"retention ({way}) must be {' or '.join(get_args(Retention))}")


def _plans(ways: Sequence[Retention]) -> Iterator[tuple[frozenset[Retention], int]]:
    """Yield pairs of ways that may be chosen and of how early copies come back."""
    if "recompute" in ways:
        yield frozenset({"recompute"}), 1
    for ahead in _AHEAD if "offload" in ways else ():
        yield frozenset({"offload"}), ahead
        if "recompute" in ways:
            yield frozenset(ways), ahead


def _better(best: Fit | None, other: Fit | None) -> Fit | None:
    if best is None or other is None:
        return best or other
    return other if other.makespan < best.makespan else best


def _variations(choice: Choice) -> Iterator[Choice]:
    """Yield choices in which one place, or every second of a stage, gives up the other way."""
    other: dict[Retention, Retention] = {"recompute": "offload", "offload": "recompute"}
    stages = sorted({stage for stage, _ in choice})
    for stage in stages:
        for start, step in ((0, 1), (0, 2), (1, 2)):
            places = sorted(place for place in choice if place[0] == stage)[start::step]
            yield {**choice, **{place: other[choice[place]] for place in places}}
    for place in sorted(choice, key=lambda place: place[::-1]):
        yield {**choice, place: other[choice[place]]}


class _Fitting:
    """Finds choices for one schedule.

    Args:
        schedule: See `fit_memory`.
        costs: See `fit_memory`.
        limit: See `fit_memory`.
    """

    def __init__(self, schedule: Schedule, costs: Costs, limit: float) -> None:
        self._schedule = schedule
        self._costs = costs
        self._limit = limit * (1 + _ROUNDING)
        self._ahead = 1
        self._held: ActivationMemory = costs.activation_memory(
            schedule.num_stages, schedule.num_microbatches
        )
        rows, ends = compute_clock(schedule, costs)
        self._walks = [
            _RowWalk(row, end, schedule.num_microbatches, costs, self._held)
            for row, end in zip(rows, ends, strict=True)
        ]

    def plan(self, ways: frozenset[Retention], ahead: int) -> Fit | None:
        """Choose by walking the rows; see `_plans`."""
        self._ahead = ahead
        choice: dict[tuple[int, int], Retention] = {}
        for walk in self._walks:
            found = walk.choose(self._limit, ways, ahead)
            if found is None:
                return None
            choice |= found
        # What is needless by the rows may be needed in time, while a copy is on its way.
        return _better(self.of(self._thinned(choice)), self.of(choice))

    def of(self, choice: Choice) -> Fit | None:
        """Return the schedule of a choice if it fits, by its rows and in time."""
        rows = [self._row(choice, rank) for rank in range(self._schedule.num_ranks)]
        if any(map(self._is_too_much, rows)):
            return None
        schedule = self._schedule.with_rows(rows)
        result = simulate(schedule, self._costs)
        fits = max(result.peak_activations) <= self._limit
        return Fit(schedule, choice, result.makespan) if fits else None

    def _thinned(self, choice: Choice) -> Choice:
        """Drop those choices without which the rest still fits."""
        left = dict(choice)
        place_of = self._schedule.stage_to_rank
        for place in sorted(choice, key=lambda place: place[::-1]):
            fewer = {other: way for other, way in left.items() if other != place}
            if not self._is_too_much(self._row(fewer, place_of[place[0]])):
                left = fewer
        return left

    def _row(self, choice: Choice, rank: int) -> list[int]:
        """Return the steps of a rank with the steps of a choice inserted."""
        place_of = self._schedule.stage_to_rank
        mine = [key for key in choice if place_of[key[0]] == rank]
        again = {encode(FWD, *key) for key in mine if choice[key] == "recompute"}
        away = {encode(FWD, *key) for key in mine if choice[key] == "offload"}
        row = self._schedule.steps[rank].codes()
        return recomputing(offloading(row, away, self._ahead), again)

    def _is_too_much(self, row: list[int]) -> bool:
        return peak_memory(row, self._held, self._schedule.num_microbatches) > self._limit


class _RowWalk:
    """The compute steps of one rank and when they end.

    Args:
        codes: Packed compute steps in order.
        ends: Times at which they end.
        num_microbatches: Number of microbatches of the schedule.
        costs: Costs whose bandwidth to the host is read.
        held: Memory that microbatches hold.
    """

    def __init__(
        self,
        codes: Sequence[int],
        ends: Sequence[float],
        num_microbatches: int,
        costs: Costs,
        held: ActivationMemory,
    ) -> None:
        self._num = num_microbatches
        self._held = held
        self._bandwidth = costs.host_bandwidth
        self._ends = ends
        self._steps = [
            [(leaf & KIND_MASK, self._index(leaf)) for leaf in leaves(code)] for code in codes
        ]
        # Where a backward begins, by place in the tables.
        self._uses = {
            index: number
            for number, step in enumerate(self._steps)
            for kind, index in step
            if kind in {BWD, BWD_INPUT}
        }

    def choose(
        self, limit: float, ways: frozenset[Retention], ahead: int
    ) -> dict[tuple[int, int], Retention] | None:
        """Choose microbatches so that the row never holds more than the limit.

        Args:
            limit: Largest memory of a rank, in the unit of the costs.
            ways: What may be chosen.
            ahead: Compute steps that a copy back is given.

        Returns:
            None if there is no such choice.
        """
        chosen: dict[int, Retention] = {}
        begun: dict[int, int] = {}  # forwards in flight, with the number of their step
        now = way_out = 0.0
        for number, step in enumerate(self._steps):
            now += self._returning(number, ahead, chosen, begun)
            now += sum(self._held.all[index] for kind, index in step if kind == FWD)
            begun |= {index: number for kind, index in step if kind == FWD}
            while now > limit:
                away = {
                    index: max(way_out, self._ends[begun[index]])
                    + self._held.moved[index] / self._bandwidth
                    for index in self._candidates(number, chosen, begun)
                    if begun[index] < number < self._return(index, ahead, begun)
                }
                found = self._victim(number, self._candidates(number, chosen, begun), away, ways)
                if found is None:
                    return None
                index, way = found
                if way == "offload":
                    way_out = away[index]
                chosen[index] = way
                now -= self._gain(index, way)
            for kind, index in step:
                if kind in {BWD, BWD_WEIGHT}:
                    now -= self._held.all[index]
                    begun.pop(index)
        return {divmod(index, self._num): way for index, way in chosen.items()}

    def _returning(
        self, number: int, ahead: int, chosen: Mapping[int, Retention], begun: Mapping[int, int]
    ) -> float:
        """Return the microbatches whose copies are back from a step on."""
        more = 0.0
        for kind, index in self._steps[number]:
            if kind in {BWD, BWD_INPUT} and chosen.get(index) == "recompute":
                more += self._gain(index, "recompute")
        for index in begun:
            if chosen.get(index) == "offload" and self._return(index, ahead, begun) == number:
                more += self._gain(index, "offload")
        return more

    def _return(self, index: int, ahead: int, begun: Mapping[int, int]) -> int:
        return max(begun[index] + 1, self._uses[index] - ahead)

    def _candidates(
        self, number: int, chosen: Mapping[int, Retention], begun: Mapping[int, int]
    ) -> list[int]:
        """Return the microbatches that keep everything at a step, the farthest backward first."""
        free = [index for index in begun if index not in chosen and self._uses[index] > number]
        return sorted(free, key=lambda index: (-self._uses[index], -index))

    def _victim(
        self,
        number: int,
        candidates: Sequence[int],
        away: Mapping[int, float],
        ways: frozenset[Retention],
    ) -> tuple[int, Retention] | None:
        """Return the microbatch that makes room at a step, and its way.

        Args:
            number: Number of the step in the row.
            candidates: Eligible microbatches, the best one first.
            away: Times at which copies would have reached the host, of those that can be copied.
            ways: What may be chosen.
        """
        start = self._ends[number - 1] if number else 0.0
        copied = [
            index
            for index in candidates
            if "offload" in ways and index in away and self._gain(index, "offload") > 0
        ]
        for index in copied:
            if away[index] <= start * (1 + _ROUNDING):
                return index, "offload"
        for index in candidates if "recompute" in ways else ():
            if self._gain(index, "recompute") > 0:
                return index, "recompute"
        return (copied[0], "offload") if copied else None

    def _gain(self, index: int, way: Retention) -> float:
        if way == "offload":
            return self._held.moved[index]
        return self._held.all[index] - self._held.input[index]

    def _index(self, code: int) -> int:
        return (code >> STAGE_SHIFT & STAGE_MASK) * self._num + (code >> MICROBATCH_SHIFT)
