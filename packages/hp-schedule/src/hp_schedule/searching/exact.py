"""Plans and bounds from a solver with proofs: CP-SAT of `hp-schedule[exact]`.

A plan is a start for every step: steps of a rank do not overlap, each comes after what it waits
for, and what microbatches hold fits the memory at every time. Of a large plan a window in time is
solved: what starts before it and behind it keeps its order. A rank alone, with the others as fast
as their steps allow, is a relaxation whose optimum bounds the plan; it joins all stages of the rank
in the one memory that they share.

Times become whole numbers of ticks, rounded down, so that an optimum bounds the true one; plans are
timed anew with the true durations. The effort is CP-SAT's deterministic time, about seconds, and it
runs on one thread: the same arguments give the same result on every machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, inf, isinf, lcm
from types import ModuleType
from typing import TYPE_CHECKING

from hp_schedule.searching.construct import Plan
from hp_schedule.searching.problem import Problem, interchangeable
from hp_schedule.searching.rows import Rows

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_EPSILON = 1e-6
_FINEST = 5_000
"""Ticks that the mean step has at most."""
_WHOLE = 300
"""Steps of a problem that is solved as a whole."""
_WINDOW = 80
"""Steps of a window in a larger one."""
_ROUNDS = 2
"""How often the windows pass over a plan."""
_INSIDE = 1
"""The part of steps in a window; those before it have less, those behind it more."""
_SHARES = 10_000
"""Parts of which memory is counted."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Result of the solver.

    Attributes:
        plan: A plan of the problem, at most as long as the first plan.
        bound: Lower bound of the makespan of plans with the same steps outside of the window.
    """

    plan: Plan
    bound: float


def engine() -> ModuleType:
    """Return the solver's module.

    Raises:
        ValueError: If OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise ValueError(
            "exact (> 0) must have OR-Tools: pip install 'hp-schedule[exact]'"
        ) from error
    return cp_model


def solve(
    problem: Problem,
    plan: Plan,
    *,
    effort: float,
    keep_order: bool = False,
    window: tuple[float, float] = (0.0, inf),
) -> Solution:
    """Make a plan as short as it can be within a window.

    Args:
        problem: Problem of the plan.
        plan: Plan with microbatches that cost the same in order.
        effort: Deterministic time of the solver.
        keep_order: Whether microbatches must not overtake each other.
        window: Steps that start in it, the end not included, may change places.
    """
    rows = Rows(problem, plan, keep_order=keep_order)
    if isinf(rows.makespan):
        return Solution(plan, 0.0)  # steps that take no time stand in an order that cannot be run
    low, high = window
    parts = [(start >= low) + (start >= high) for start in rows.plan().starts]
    model = _Model(problem, range(problem.num_ranks), keep_order=keep_order, parts=parts)
    model.border_on(rows)
    found = model.minimize(effort, rows.plan().starts)
    if found is None:
        return Solution(plan, 0.0)
    starts, bound = found
    # What takes no time comes first: it may give back the memory that the next step takes.
    ends = {step: start + model.duration[step] for step, start in starts.items()}
    inside = sorted(starts, key=lambda step: (starts[step], ends[step], step))
    order = rows.plan().sequence
    ahead, behind = ([step for step in order if parts[step] == part] for part in (0, 2))
    solved = Rows(problem, Plan([], [*ahead, *inside, *behind], inf), keep_order=keep_order)
    if solved.makespan < plan.makespan - _EPSILON and solved.fits():
        plan = solved.plan()
    return Solution(plan, min(bound, plan.makespan))


def solve_in_windows(
    problem: Problem, plan: Plan, *, effort: float, keep_order: bool = False
) -> Solution:
    """Make a plan shorter window by window, or a small one as short as it can be.

    Args:
        problem: Problem of the plan.
        plan: Plan with microbatches that cost the same in order.
        effort: Deterministic time of the solver in all.
        keep_order: Whether microbatches must not overtake each other.
    """
    if problem.num_steps <= _WHOLE:
        return solve(problem, plan, effort=effort, keep_order=keep_order)
    # Each window shares half of its steps with the next one.
    number = 2 * problem.num_steps // _WINDOW
    for index in range(_ROUNDS * number):
        length = 2 * plan.makespan / number
        low = index % number * plan.makespan / number
        share = effort / (_ROUNDS * number)
        window = low, low + length
        plan = solve(problem, plan, effort=share, keep_order=keep_order, window=window).plan
    return Solution(plan, 0.0)


def rank_bound(problem: Problem, rank: int, *, effort: float, keep_order: bool = False) -> float:
    """Return the shortest time in which a rank can do its steps if no other is ever busy.

    Args:
        problem: Problem whose plans are bounded.
        rank: The rank.
        effort: Deterministic time of the solver; if it does not suffice the bound is lower.
        keep_order: Whether microbatches must not overtake each other.
    """
    parts = [_INSIDE] * problem.num_steps
    found = _Model(problem, [rank], keep_order=keep_order, parts=parts).minimize(effort, ())
    return 0.0 if found is None else found[1]


class _Model:
    """A problem, or a window of it, in the words of CP-SAT.

    Args:
        problem: The problem.
        ranks: Ranks that do one step at a time in their memory; the others have no limits.
        keep_order: Whether microbatches must not overtake each other.
        parts: Whether each step stands before the window (0), in it (1) or behind it (2).

    Attributes:
        duration: Ticks that each step takes.
    """

    def __init__(
        self, problem: Problem, ranks: Iterable[int], *, keep_order: bool, parts: Sequence[int]
    ) -> None:
        self._problem = problem
        self._ranks = tuple(ranks)
        self._parts = parts
        self._tick = _tick(problem)
        self.duration = [self._ticks(time) for time in problem.duration]
        lags = map(self._ticks, (*problem.lag, *problem.lag_back))
        self._horizon = sum(self.duration) + sum(lags)
        self._cp = engine()
        self._model: cp_model.CpModel = self._cp.CpModel()
        self._starts = {
            step: self._model.new_int_var(0, self._horizon, "")
            for step in range(problem.num_steps)
            if parts[step] == _INSIDE
        }
        self._tails = dict.fromkeys(self._starts, 0)
        self._precede(keep_order)

    def border_on(self, rows: Rows) -> None:
        """Let the steps of a window come after those before it, and count those behind it."""
        before, lag, after = self._problem.chains()
        for row in rows.rows:
            ahead = [rows.end[step] for step in row if self._parts[step] == 0]
            behind = [step for step in row if self._parts[step] > _INSIDE]
            rest = max((self._rest(rows, step) for step in behind[:1]), default=0.0)
            for step in row:
                if self._parts[step] != _INSIDE:
                    continue
                first, source = max(ahead, default=0.0), before[step]
                if source >= 0 and self._parts[source] == 0:
                    first = max(first, rows.end[source] + lag[step])
                self._model.add(self._starts[step] >= self._ticks(first))
                tails = [
                    gap + self._rest(rows, follower)
                    for follower, gap in after[step]
                    if self._parts[follower] > _INSIDE
                ]
                self._tails[step] = self._ticks(max([rest, *tails]))

    def minimize(self, effort: float, hint: Sequence[float]) -> tuple[dict[int, int], float] | None:
        """Return starts in ticks and a bound of the makespan; None if nothing was found at all."""
        model = self._model
        for rank in self._ranks:
            self._add_rank(rank)
        makespan = model.new_int_var(0, self._horizon, "")
        for step, start in self._starts.items():
            model.add(makespan >= start + self.duration[step] + self._tails[step])
            if hint:
                model.add_hint(start, self._ticks(hint[step]))
        model.minimize(makespan)
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(model)
        bound = max(0.0, solver.best_objective_bound) * self._tick
        if status not in {self._cp.OPTIMAL, self._cp.FEASIBLE}:
            return None if hint else ({}, bound)
        return {step: solver.value(start) for step, start in self._starts.items()}, bound

    def _rest(self, rows: Rows, step: int) -> float:
        """Return the time from the start of a step behind the window to the end of all."""
        return self._problem.duration[step] + rows.tail[step]

    def _ticks(self, time: float) -> int:
        return int(time / self._tick + _EPSILON)

    def _precede(self, keep_order: bool) -> None:
        """Let each step come after those that it waits for."""
        problem, model, starts = self._problem, self._model, self._starts
        before, lag, _ = problem.chains()
        for step, start in starts.items():
            source = before[step]
            if source in starts:
                gap = self.duration[source] + self._ticks(lag[step])
                model.add(start >= starts[source] + gap)
        num = problem.num_microbatches
        groups = [list(range(num))] if keep_order else interchangeable(problem)
        for group in groups:
            for row in range(0, problem.num_steps, num):
                steps = [row + place for place in group if row + place in starts]
                for step, following in pairwise(steps):
                    model.add(starts[following] >= starts[step] + self.duration[step])

    def _add_rank(self, rank: int) -> None:
        """Let a rank do one step at a time, in its memory."""
        problem, model, starts = self._problem, self._model, self._starts
        interval = model.new_fixed_size_interval_var
        mine = [step for step in starts if problem.rank[step] == rank]
        model.add_no_overlap([interval(starts[s], self.duration[s], "") for s in mine])
        if isinf(problem.memory_limit):
            return
        last = problem.num_steps - problem.part
        unit = max(problem.largest) / _SHARES or 1.0
        room = int(problem.memory_limit / unit + _EPSILON)
        held, sizes = [], []
        for cell in range(problem.part):
            if problem.rank[cell] != rank or not problem.acquires[cell]:
                continue
            size = int(problem.acquires[cell] / unit + _EPSILON)
            taken, given = self._parts[cell], self._parts[last + cell]
            if taken < _INSIDE < given:
                room -= size
            elif _INSIDE in {taken, given}:
                start = starts.get(cell, 0)
                freed = last + cell
                end = starts[freed] + self.duration[freed] if given == _INSIDE else self._horizon
                time = model.new_int_var(0, self._horizon, "")
                held.append(model.new_interval_var(start, time, end, ""))
                sizes.append(size)
        model.add_cumulative(held, sizes, room)


def _tick(problem: Problem) -> float:
    """Return the largest unit of which all times are whole numbers, or a small one."""
    times = {*problem.duration, *problem.lag, *problem.lag_back} - {0.0}
    if not times:
        return 1.0
    mean = sum(problem.duration) / len(problem.duration) or max(times)
    unit = _common([Fraction(time / mean).limit_denominator(_FINEST) for time in sorted(times)])
    is_exact = all(abs(time / mean / unit - round(time / mean / unit)) < _EPSILON for time in times)
    return mean * (unit if is_exact and unit * _FINEST > 1 else 1 / _FINEST)


def _common(values: Sequence[Fraction]) -> float:
    denominator = lcm(*(value.denominator for value in values))
    if denominator > _FINEST**2:
        return 1 / _FINEST
    return gcd(*(int(value * denominator) for value in values)) / denominator
