"""Orders in which a pipeline may take its microbatches, and the next one to try."""

from collections.abc import Sequence
from random import Random

from hp_schedule.costs import Costs
from hp_schedule.packing import MICROBATCH_SHIFT, PLACE_MASK, encode_overlap, leaves
from hp_schedule.schedule import Schedule
from hp_schedule.searching.problem import Problem

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
