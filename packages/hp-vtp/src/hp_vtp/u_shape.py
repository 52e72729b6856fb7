"""Search the order of a U-shaped pipeline for given times, latency and memory. Needs no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hp_schedule import Costs, DeadlockError, Schedule, simulate, u_shape

__all__ = [
    "UShapeOrder",
    "documented_order",
    "search_u_shape",
]


_STEPS = (
    *((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)),
    *((1, 1, 0), (-1, -1, 0), (1, 0, 1), (1, 1, 1), (2, 1, 0), (-2, -1, 0)),
)


@dataclass(frozen=True, slots=True)
class UShapeOrder:
    """A member of the family of `hp_schedule.u_shape`.

    Attributes:
        warm_up: Forwards of the first layers before anything else.
        turns: Forward and backward pairs of the last layers after that.
        extra: Microbatches in flight on the other stages beyond those of 1F1B.
        makespan: Duration in the simulator.
        peak_activations: Most memory that the activations of each rank take at once, in the unit of
            the costs.
    """

    warm_up: int
    turns: int
    extra: int
    makespan: float
    peak_activations: tuple[float, ...]

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return its compute steps; `hp_schedule.add_send_recv` adds the messages."""
        return u_shape(
            num_ranks,
            num_microbatches=num_microbatches,
            warm_up=self.warm_up,
            turns=self.turns,
            extra=self.extra,
        )


def documented_order(num_ranks: int, *, num_microbatches: int, costs: Costs) -> UShapeOrder:
    """Simulate the order that MindSpeed-MM documents.

    Args:
        num_ranks: Physical stages.
        num_microbatches: Number of microbatches of one step.
        costs: One entry per logical stage, num_ranks + 1 of them, or one number for all.
    """
    warm_up, turns = num_ranks + 1, (4 * num_ranks + 5) // 6
    found = _try(num_ranks, num_microbatches, costs, (warm_up, min(warm_up, turns), 0))
    if found is None:
        raise DeadlockError(f"the documented order of {num_ranks} ranks contradicts itself")
    return found


def search_u_shape(
    num_ranks: int,
    *,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float = math.inf,
    max_extra: int = 3,
) -> UShapeOrder:
    """Find the fastest order of the family that fits the memory; the documented one is no faster.

    From the documented order and from a few others it goes to the best neighbour as long as that is
    better; of equally fast orders the one with fewer activations.

    Args:
        num_ranks: Physical stages, at least 2.
        num_microbatches: Number of microbatches of one step.
        costs: One entry per logical stage, num_ranks + 1 of them, or one number for all; with the
            latency of messages.
        memory_limit: Most memory of a rank's activations, in the unit of the costs.
        max_extra: Most microbatches that the other stages may hold beyond those of 1F1B.

    Raises:
        ValueError: If no order that was tried fits the memory.
    """
    known: dict[tuple[int, int, int], UShapeOrder | None] = {}

    def cost(point: tuple[int, int, int]) -> tuple[float, float, tuple[int, int, int]]:
        if point not in known:
            known[point] = _try(num_ranks, num_microbatches, costs, point)
        order = known[point]
        if order is None or max(order.peak_activations) > memory_limit:
            return math.inf, math.inf, point
        return order.makespan, sum(order.peak_activations), point

    limit = max(num_ranks + 1, min(num_microbatches, 4 * num_ranks + 8))
    for start in _starts(num_ranks, limit, max_extra):
        here = start
        while True:
            best = min(_neighbours(here, limit, max_extra), key=cost)
            if cost(best) >= cost(here):
                break
            here = best
    best = min(known, key=cost)
    found = known[best]
    if found is None or cost(best)[0] == math.inf:
        raise ValueError(f"memory_limit ({memory_limit}) must let some order run, but none fits it")
    return found


def _starts(num_ranks: int, limit: int, max_extra: int) -> Iterator[tuple[int, int, int]]:
    yield num_ranks + 1, (4 * num_ranks + 5) // 6, 0
    yield 1, 0, 0
    for extra in range(max_extra + 1):
        warm_up = min(limit, num_ranks + 1 + extra)
        yield warm_up, int(0.6 * warm_up), extra


def _neighbours(
    point: tuple[int, int, int], limit: int, max_extra: int
) -> Iterator[tuple[int, int, int]]:
    warm_up, turns, extra = point
    for more, turned, added in _STEPS:
        w, k, e = warm_up + more, turns + turned, extra + added
        if 1 <= w <= limit and 0 <= k <= w and 0 <= e <= max_extra:
            yield w, k, e


def _try(
    num_ranks: int, num_microbatches: int, costs: Costs, point: tuple[int, int, int]
) -> UShapeOrder | None:
    """Simulate an order; None if its ranks would wait for each other."""
    warm_up, turns, extra = point
    try:
        schedule = u_shape(
            num_ranks, num_microbatches=num_microbatches, warm_up=warm_up, turns=turns, extra=extra
        )
        result = simulate(schedule, costs)
    except DeadlockError:
        return None
    return UShapeOrder(warm_up, turns, extra, result.makespan, result.peak_activations)
