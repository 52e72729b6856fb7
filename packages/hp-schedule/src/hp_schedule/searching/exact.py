"""Plans and bounds from a solver that proves what it finds: CP-SAT of `hp-schedule[exact]`.

A plan is a start for every step: steps of a rank do not overlap, each comes after what it waits
for, and what microbatches hold fits the memory at every time. Of a large plan a window in time is
solved: what starts before it and behind it keeps its order. A rank alone, with the others as fast
as their steps allow, is a relaxation whose optimum bounds the plan; it joins all stages of the rank
in the one memory that they share.

Times become whole numbers of ticks, rounded down, so that an optimum bounds the true one; plans are
timed anew with the true durations. The effort is CP-SAT's deterministic time, about seconds, and it
runs on one thread: the same arguments give the same result on every machine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, inf, isinf, lcm
from typing import TYPE_CHECKING, Any

from hp_schedule.searching.construct import Plan
from hp_schedule.searching.orders import interchangeable
from hp_schedule.searching.problem import Problem
from hp_schedule.searching.rows import Rows

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_EPSILON = 1e-6
_FINEST = 5_000
"""Ticks that the mean step has at most."""
_WHOLE = 400
"""Steps of a problem that is solved as a whole, and about as many as a window has at most."""
_ROUNDS = 2
"""How often the windows pass over a plan."""
_INSIDE = 1
"""What stands in the window: what comes before it is less, what comes behind is more."""
_SHARES = 10_000
"""Parts of which memory is counted."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes:
        plan: A plan of the problem at most as long as the one it began with.
        bound: No plan with the same steps outside of the window is shorter.
    """

    plan: Plan
    bound: float


def check_engine() -> None:
    """Refuse to go on without the solver.

    Raises:
        ValueError: If OR-Tools is not installed.
    """
    try:
        _engine()
    except ModuleNotFoundError as error:
        text = "exact (> 0) must have OR-Tools: pip install 'hp-schedule[exact]'"
        raise ValueError(text) from error


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
        window: Steps that start in it, the end not included, may start anywhere from it on.
    """
    model = _Model(problem, range(problem.num_ranks), keep_order=keep_order)
    model.free(plan, window)
    found = model.minimize(effort, plan)
    if found is None:
        return Solution(plan, 0.0)
    starts, bound = found
    sequence = sorted(range(problem.num_steps), key=lambda step: (starts[step], step))
    rows = Rows(problem, Plan(plan.starts, sequence, inf), keep_order=keep_order)
    if rows.makespan < plan.makespan - _EPSILON and rows.fits():
        plan = rows.plan()
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
    number = -(-2 * problem.num_steps // _WHOLE)
    rounds = [index / (number + 1) for index in range(number)] * _ROUNDS
    for start in rounds:
        length = 2 * plan.makespan / (number + 1)
        low = start * plan.makespan
        window = (low, low + length if low + length < plan.makespan else inf)
        share = effort / len(rounds)
        found = solve(problem, plan, effort=share, keep_order=keep_order, window=window)
        plan = found.plan
    return Solution(plan, 0.0)


def rank_bound(problem: Problem, rank: int, *, effort: float, keep_order: bool = False) -> float:
    """Return the shortest time in which a rank can do its steps if no other is ever busy.

    Args:
        problem: Problem whose plans are bounded.
        rank: The rank.
        effort: Deterministic time of the solver; if it does not suffice the bound is lower.
        keep_order: Whether microbatches must not overtake each other.
    """
    found = _Model(problem, [rank], keep_order=keep_order).minimize(effort, None)
    return 0.0 if found is None else found[1]


def _engine() -> "Any":
    from ortools.sat.python import cp_model  # noqa: PLC0415 - an optional extra

    return cp_model


class _Model:
    """A problem in the words of CP-SAT.

    Args:
        problem: The problem.
        ranks: Ranks that do one step at a time in their memory; the others have no limits.
        keep_order: Whether microbatches must not overtake each other.
    """

    def __init__(self, problem: Problem, ranks: Iterable[int], *, keep_order: bool) -> None:
        self._problem = problem
        self._ranks = tuple(ranks)
        self._tick = _tick(problem)
        self._duration = [self._ticks(time) for time in problem.duration]
        lags = map(self._ticks, (*problem.lag, *problem.lag_back))
        self._horizon = sum(self._duration) + sum(lags)
        self._cp = _engine()
        self._model: cp_model.CpModel = self._cp.CpModel()
        self._starts = [
            self._model.new_int_var(0, self._horizon, "") for _ in range(problem.num_steps)
        ]
        # Whether a step stands before the window, in it or behind it.
        self._parts = [_INSIDE] * problem.num_steps
        self._precede(keep_order)

    def free(self, plan: Plan, window: tuple[float, float]) -> None:
        """Keep the order of what a plan has before and behind a window."""
        low, high = window
        starts, model = self._starts, self._model
        self._parts = [(start >= low) + (start >= high) for start in plan.starts]
        for row in Rows(self._problem, plan, keep_order=False).rows:
            ahead, inside, behind = ([s for s in row if self._parts[s] == p] for p in range(3))
            fixed = [*pairwise(ahead), *pairwise(behind)]
            fixed += [(ahead[-1], step) for step in (*inside, *behind[:1]) if ahead]
            fixed += [(step, behind[0]) for step in inside if behind]
            for step, following in fixed:
                model.add(starts[following] >= starts[step] + self._duration[step])

    def minimize(self, effort: float, hint: Plan | None) -> tuple[list[int], float] | None:
        """Return starts in ticks and a bound of the makespan; None if nothing was found at all."""
        model, problem = self._model, self._problem
        for rank in self._ranks:
            self._add_rank(rank)
        makespan = model.new_int_var(0, self._horizon, "")
        for step, start in enumerate(self._starts):
            model.add(makespan >= start + self._duration[step])
        model.minimize(makespan)
        for step, start in enumerate(hint.starts if hint else ()):
            model.add_hint(self._starts[step], self._ticks(start))
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(model)
        bound = max(0.0, solver.best_objective_bound) * self._tick
        if status not in {self._cp.OPTIMAL, self._cp.FEASIBLE}:
            return None if hint else ([], bound)
        return [solver.value(self._starts[step]) for step in range(problem.num_steps)], bound

    def _ticks(self, time: float) -> int:
        return int(time / self._tick + _EPSILON)

    def _precede(self, keep_order: bool) -> None:
        """Let each step come after those that it waits for."""
        problem, model, starts = self._problem, self._model, self._starts
        before, lag, _ = problem.chains()
        for step, source in enumerate(before):
            if source >= 0:
                gap = self._duration[source] + self._ticks(lag[step])
                model.add(starts[step] >= starts[source] + gap)
        num = problem.num_microbatches
        groups = [list(range(num))] if keep_order else interchangeable(problem)
        for group in groups:
            for place, following in pairwise(group):
                for row in range(0, problem.num_steps, num):
                    end = starts[row + place] + self._duration[row + place]
                    model.add(starts[row + following] >= end)

    def _add_rank(self, rank: int) -> None:
        """Let a rank do one step at a time, in its memory."""
        problem, model, starts, parts = self._problem, self._model, self._starts, self._parts
        steps = [step for step in range(problem.num_steps) if problem.rank[step] == rank]
        interval: Callable[..., Any] = model.new_fixed_size_interval_var
        inside = [step for step in steps if parts[step] == _INSIDE]
        model.add_no_overlap([interval(starts[s], self._duration[s], "") for s in inside])
        if isinf(problem.memory_limit):
            return
        last = problem.num_steps - problem.part
        unit = max(problem.largest) / _SHARES or 1.0
        room = int(problem.memory_limit / unit + _EPSILON)
        held, sizes = [], []
        for cell in steps:
            if cell >= problem.part or not problem.acquires[cell]:
                continue
            size = int(problem.acquires[cell] / unit + _EPSILON)
            taken, given = parts[cell], parts[last + cell]
            if taken < _INSIDE < given:
                room -= size
            elif _INSIDE in {taken, given}:
                end = starts[last + cell] + self._duration[last + cell]
                time = model.new_int_var(0, self._horizon, "")
                held.append(model.new_interval_var(starts[cell], time, end, ""))
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
