"""One way to place the stages, and the best plans found for it so far."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from random import Random
from typing import NamedTuple

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.searching.bounds import lower_bound
from hp_schedule.searching.construct import Plan, construct, starts_of, template, tighten
from hp_schedule.searching.exact import rank_bound, solve_in_windows
from hp_schedule.searching.problem import (
    EPSILON,
    Order,
    Problem,
    Units,
    bounded,
    in_order,
    neighbour,
    while_sending,
    with_order,
)
from hp_schedule.searching.rows import Walk
from hp_schedule.simulation.simulate import simulate

_POOL_SIZE = 6
_SIDEWAYS = 0.3
"""Probability that a plan as long as the worst kept one takes its place."""
_OTHER_ORDER = 0.3
"""Probability that a pattern is followed in one of the first orders, not in the best plan's."""
_REORDERED = 0.4
"""Probability that a plan is varied with its microbatches in another order."""
_TRIED = 20
"""Orders that are tried at once."""
_KNOWN = 32
"""Orders whose problems are kept."""
_BOUNDING = 0.3
"""The part of an exact engine's time that bounds take."""
_MOVED = 8_000
"""Steps that are timed anew at once by a walk, each of whose moves times all of them."""
_MOVES = (4, 40)
"""Moves that a walk makes at once, at least and at most."""
_PATIENT = 8
"""Walks without a shorter plan after which another plan is the start."""


class Recipe(NamedTuple):
    """Parameters by which a plan is made from a periodic pattern: see `template` and `construct`.

    Attributes:
        stretch: Period of the pattern, in units of the busiest rank's work for one microbatch.
        slack: Time left between a stage and the next, in the same unit.
        fill: Share of the memory dealt out to the stages; infinite for none.
        weight_delay: How far behind its pattern W is put, in periods.
        patience: Patience of the construction.
    """

    stretch: float
    slack: float
    fill: float
    weight_delay: float
    patience: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that was found.

    Attributes:
        makespan: Duration of the schedule in the simulator.
        origin: Origin in words, such as the name of a closed form.
        problem: Problem of its space, with one order of the microbatches.
        plan: Its steps in that problem.
        patience: Patience with which it was built.
        schedule: A closed form as it is; None if the plan says it all.
    """

    makespan: float
    origin: str
    problem: Problem
    plan: Plan
    patience: float
    schedule: Schedule | None = None


class _Form(NamedTuple):
    """A closed form and the best order found for it."""

    makespan: float
    name: str
    schedule: Schedule
    order: Order


class Space:
    """All plans of one placement.

    Args:
        costs: Costs for its number of stages.
        stage_to_rank: The placement.
        orders: First orders of the microbatches.
        memory_limit: Most memory that the activations of a rank may take, in the unit of the costs.
        split_backward: Whether I and W are steps of their own.
        keep_order: Whether every stage must take the microbatches in the first of these orders.
        blocking: Whether a rank stands still until what it sends has arrived.
        units: Units of time and memory of the plans; all times of the space are in them.

    Attributes:
        costs: Costs as they were given.

    Raises:
        ValueError: If a rank cannot hold one microbatch in all its stages.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        stage_to_rank: Sequence[int],
        orders: Sequence[Order],
        memory_limit: float,
        split_backward: bool,
        keep_order: bool,
        blocking: bool,
        units: Units,
    ) -> None:
        self.costs = costs
        self._blocking = blocking
        self._in_units = units.apply(costs)
        self._priced = (
            while_sending(self._in_units, stage_to_rank, len(orders[0]))
            if blocking
            else self._in_units
        )
        problem = partial(
            Problem,
            stage_to_rank=stage_to_rank,
            order=orders[0],
            memory_limit=memory_limit / units.memory,
            split_backward=split_backward,
        )
        self._problem = problem(self._priced)
        self._bounded = (
            bounded(self._problem, problem(self._in_units)) if blocking else [self._problem]
        )
        self._units = units
        self._orders = orders[:1] if keep_order else orders
        self._keep_order = keep_order
        self._known: OrderedDict[Order, Problem] = OrderedDict()
        self._bound = max(map(lower_bound, self._bounded))
        self._pool: list[Candidate] = []
        for order in self._orders:
            self._keep(self._first(self._of(order)))
        self._loose = self._pool.copy()
        self._form: _Form | None = None
        self._walk: tuple[Walk, Candidate] | None = None
        self._idle = 0

    @property
    def best(self) -> Candidate:
        """Return the shortest candidate so far."""
        return self._pool[0]

    @property
    def bound(self) -> float:
        """Return a time that no plan of the space is below; 0 if one is: the bound was wrong."""
        return self._bound if self.best.makespan >= self._bound - EPSILON else 0.0

    @property
    def mean_latency(self) -> float:
        """Return the mean latency of a message in units of a mean step; 0 if steps take no time."""
        lags = [lag for lag in self._problem.lag if lag > 0]
        step = sum(self._problem.duration) / self._problem.num_steps
        return sum(lags) / len(lags) / step if lags and step > 0 else 0.0

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the schedule of a candidate of this space."""
        if candidate.schedule is not None:
            return candidate.schedule
        return candidate.problem.schedule(in_order(candidate.problem, candidate.plan.sequence))

    def makespan(self, candidate: Candidate) -> float:
        """Return a candidate's duration in the simulator; a plan's own sums round otherwise."""
        return simulate(self.schedule(candidate), self.costs, blocking=self._blocking).makespan

    def adopt(self, name: str, schedule: Schedule) -> None:
        """Keep a closed form if it fits the memory, in each of the orders to begin with."""
        for order in self._orders:
            form = self._formed(name, schedule, order)
            if form is not None:
                candidate = self._candidate(form)
                self._keep(candidate)
                self._loose.append(candidate)
                if self._form is None or form.makespan < self._form.makespan:
                    self._form = form
        self._loose.sort(key=lambda loose: loose.makespan)

    @property
    def can_reorder(self) -> bool:
        """Tell whether other orders of the microbatches make a difference."""
        return len(self._orders) > 1

    def reorder(self, random: Random) -> None:
        """Try the best closed form, or the best plan if none fits, in orders close to its own."""
        if self._form is None:
            self._rebuild(random)
            return
        before = self._form
        for _ in range(_TRIED):
            order = neighbour(self._form.order, random)
            form = self._formed(self._form.name, self._form.schedule, order)
            if form is not None and form.makespan <= self._form.makespan:
                self._form = form
        if self._form is not before:
            self._keep(self._candidate(self._form))

    def _rebuild(self, random: Random) -> None:
        """Build the best plan in orders close to its own, each from the best of them."""
        old = self.best
        problem, plan = old.problem, construct(old.problem, old.plan.starts)
        for _ in range(_TRIED):
            other = self._of(neighbour(problem.order, random))
            built = construct(other, (plan or old.plan).starts)
            if built is not None and (plan is None or built.makespan <= plan.makespan):
                problem, plan = other, built
        if plan is not None and problem is not old.problem:
            plan = tighten(problem, problem.mirror, plan, patience=old.patience)
            origin = f"{old.origin.removesuffix(', reordered')}, reordered"
            self._keep(Candidate(plan.makespan, origin, problem, plan, old.patience))

    def _formed(self, name: str, schedule: Schedule, order: Order) -> _Form | None:
        """Return a closed form in an order; None if it does not fit the memory."""
        permuted = with_order(schedule, order)
        result = simulate(permuted, self._in_units, blocking=self._blocking)
        if max(result.peak_activations) > self._problem.memory_limit + EPSILON:
            return None
        return _Form(result.makespan, name, schedule, order)

    def _candidate(self, form: _Form) -> Candidate:
        problem, permuted = self._of(form.order), with_order(form.schedule, form.order)
        starts, _ = starts_of(problem, permuted, self._priced)
        plan = Plan(starts, [], form.makespan)
        return Candidate(form.makespan, form.name, problem, plan, 1.0, permuted)

    def tighten_next(self) -> None:
        """Tighten the best of the plans that the space began with, if one is left."""
        if self._loose:
            old = self._loose.pop(0)
            plan = tighten(old.problem, old.problem.mirror, old.plan, patience=old.patience)
            if plan is not old.plan:
                origin = f"{old.origin}, tightened"
                self._keep(Candidate(plan.makespan, origin, old.problem, plan, old.patience))

    def follow(self, recipe: Recipe, random: Random) -> None:
        """Build a plan from a pattern, in the order of the best plan or in one of the first."""
        is_other = random.random() < _OTHER_ORDER
        order = random.choice(self._orders) if is_other else self.best.problem.order
        problem = self._of(order)
        pattern = template(problem, stretch=recipe.stretch, slack=recipe.slack)
        if pattern is None:
            return
        priority = pattern.priorities(problem.num_microbatches, weight_delay=recipe.weight_delay)
        windows = tuple(pattern.windows(problem, fill=recipe.fill))
        self._build(
            problem, priority, windows, patience=recipe.patience, origin=f"pattern {recipe}"
        )

    def vary(self, random: Random) -> None:
        """Disturb a kept plan's order, perhaps its windows too, and build it anew."""
        old = self._pick(random)
        problem = old.problem
        if len(self._orders) > 1 and random.random() < _REORDERED:
            problem = self._of(neighbour(problem.order, random))
        windows = _windows_of(old.problem, old.plan) if random.random() < 0.5 else None
        if windows and random.random() < 0.5:
            stage = random.randrange(len(windows))
            wider = max(1, windows[stage] + random.choice((-1, 1)))
            windows = (*windows[:stage], wider, *windows[stage + 1 :])
        patience = random.choice((0.0, 0.25, 0.5, 1.0, old.patience))
        origin = old.origin.removesuffix(", varied")
        sideways = random.random() < _SIDEWAYS
        priority = self._disturbed(old.plan, random)
        self._build(
            problem,
            priority,
            windows,
            patience=patience,
            origin=f"{origin}, varied",
            sideways=sideways,
        )

    def walk(self, random: Random) -> None:
        """Move steps of a kept plan within their rows, on from where the last walk came."""
        if self._walk is None or self._idle > _PATIENT:
            old = self._pick(random)
            self._walk = Walk(old.problem, old.plan, random, keep_order=self._keep_order), old
            self._idle = 0
        rows, old = self._walk
        fewest, most = _MOVES
        moves = min(most, max(fewest, _MOVED // self._problem.num_steps))
        self._idle = 0 if rows.improve(moves) else self._idle + 1
        plan = rows.best
        if not self._idle and plan.makespan < self._pool[-1].makespan - EPSILON:
            origin = f"{old.origin.removesuffix(', moved')}, moved"
            self._keep(Candidate(plan.makespan, origin, old.problem, plan, old.patience))

    def solve(self, effort: float) -> None:
        """Raise the bound and shorten the best plan by the exact engine, with so much effort."""
        problem, ranks = self.best.problem, range(self._problem.num_ranks)
        share = effort * _BOUNDING / len(ranks) / len(self._bounded)
        for task, rank in product(self._bounded, ranks):
            ordered = task.with_order(problem.order)
            bound = rank_bound(ordered, rank, effort=share, keep_order=self._keep_order)
            self._bound = max(self._bound, bound)
        if self.bound >= self.best.makespan - EPSILON:
            return
        old = self.best
        sequence = in_order(problem, old.plan.order())
        starts = [0.0] * problem.num_steps
        for step, renamed in zip(old.plan.order(), sequence, strict=True):
            starts[renamed] = old.plan.starts[step]
        plan = Plan(starts, sequence, old.plan.makespan)
        left = effort * (1 - _BOUNDING)
        found = solve_in_windows(problem, plan, effort=left, keep_order=self._keep_order)
        if self._problem in self._bounded:
            self._bound = max(self._bound, found.bound)
        if found.plan.makespan < old.makespan - EPSILON:
            origin = f"{old.origin}, solved"
            self._keep(Candidate(found.plan.makespan, origin, problem, found.plan, old.patience))

    def _pick(self, random: Random) -> Candidate:
        return self._pool[min(int(random.expovariate(1.0)), len(self._pool) - 1)]

    def _of(self, order: Order) -> Problem:
        """Return the problem with an order of the microbatches."""
        found = self._known.get(order)
        if found is None:
            found = self._problem.with_order(order)
            if len(self._known) == _KNOWN:
                self._known.popitem(last=False)
            self._known[order] = found
        return found

    def _build(
        self,
        problem: Problem,
        priority: Sequence[float],
        windows: tuple[int, ...] | None,
        *,
        patience: float,
        origin: str,
        sideways: bool = True,
    ) -> None:
        """Build a plan within windows, tighten it there and then without them."""
        narrow = problem if windows is None else problem.with_windows(windows)
        plan = construct(narrow, priority, patience=patience)
        if plan is None:
            return
        if windows is not None:
            plan = tighten(narrow, narrow.mirror, plan, patience=patience)
        plan = tighten(problem, problem.mirror, plan, patience=patience)
        if sideways or plan.makespan < self._pool[-1].makespan - EPSILON:
            self._keep(Candidate(plan.makespan, origin, problem, plan, patience))

    def _first(self, problem: Problem) -> Candidate:
        """Return the plan that prefers earlier microbatches."""
        priority = [float(step % problem.num_microbatches) for step in range(problem.num_steps)]
        plan = construct(problem, priority)
        if plan is None:
            needs = map(sum, zip(problem.largest, problem.reserve, strict=True))
            limit, least = (
                memory * self._units.memory for memory in (problem.memory_limit, max(needs))
            )
            raise ValueError(
                f"memory_limit ({limit:g}) must be >= what one microbatch holds on a rank "
                f"({least:g})"
            )
        return Candidate(plan.makespan, "microbatches in order", problem, plan, 1.0)

    def _disturbed(self, plan: Plan, random: Random) -> list[float]:
        """Return the start times with noise for each step, or for each part of a stage."""
        problem = self._problem
        mean = sum(problem.duration) / problem.num_ranks / problem.num_microbatches
        sigma = random.choice((0.03, 0.1, 0.2, 0.33)) * mean
        if random.random() < 0.5:
            return [start + random.gauss(0.0, sigma) for start in plan.starts]
        num = problem.num_microbatches
        shifts = [random.gauss(0.0, sigma) for _ in range(0, problem.num_steps, num)]
        return [start + shifts[step // num] for step, start in enumerate(plan.starts)]

    def _keep(self, candidate: Candidate) -> None:
        if self._priced.bandwidth < inf and candidate.schedule is None:
            # Messages that wait for each other are more than the problem knows of.
            schedule = candidate.problem.schedule(candidate.plan.sequence)
            makespan = simulate(schedule, self._in_units).makespan
            candidate = replace(candidate, makespan=makespan)
        if any(candidate.plan.starts == other.plan.starts for other in self._pool):
            return
        if len(self._pool) == _POOL_SIZE:
            if candidate.makespan > self._pool[-1].makespan + EPSILON:
                return
            self._pool.pop()
        self._pool.append(candidate)
        self._pool.sort(key=lambda kept: kept.makespan)


def _windows_of(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Return how many microbatches each stage holds at most in a plan."""
    num, last = problem.num_microbatches, problem.num_steps - problem.part
    windows = []
    for start in range(0, problem.part, num):
        window = freed = 0
        for place in range(num):
            while (
                freed < place
                and plan.starts[last + start + freed] + problem.duration[last + start + freed]
                <= plan.starts[start + place] + EPSILON
            ):
                freed += 1
            window = max(window, place + 1 - freed)
        windows.append(window)
    return tuple(windows)
