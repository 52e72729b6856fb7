"""One schedule made shorter for other costs than it was found for, without a search."""

from math import inf

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.searching.construct import Plan, tighten
from hp_schedule.searching.problem import Problem, Units, in_order
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
