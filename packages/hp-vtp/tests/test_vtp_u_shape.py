"""The searched order of a U-shape is never slower than the documented one, and can run."""

import math

import pytest

from hp_schedule import Costs, add_send_recv, validate
from hp_vtp.u_shape import documented_order, search_u_shape


def costs_of(num_ranks: int, latency: float) -> Costs:
    """A forward of the edge takes 1, one of the cloud 2; only ways to the edge have a latency."""
    times = [1.0, *[2.0] * (num_ranks - 1), 1.0]
    ranks = range(num_ranks)
    edges = {(a, b): latency if 0 in (a, b) else 0.0 for a in ranks for b in ranks if a != b}
    return Costs(forward=times, input_grad=times, weight_grad=times, latency=edges)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_the_search_is_never_slower_and_what_it_finds_is_free_of_deadlock(num_ranks: int) -> None:
    for num_microbatches in (1, 3, num_ranks + 2):
        for latency in (0.0, 1.0, 4.0):
            costs = costs_of(num_ranks, latency)
            documented = documented_order(num_ranks, num_microbatches=num_microbatches, costs=costs)
            found = search_u_shape(num_ranks, num_microbatches=num_microbatches, costs=costs)
            assert found.makespan <= documented.makespan
            schedule = found.schedule(num_ranks, num_microbatches)
            # Proven on every machine, also one on which each send and receive blocks.
            validate(add_send_recv(schedule, costs=costs)).raise_if_failed()


@pytest.mark.parametrize(
    ("num_ranks", "latency", "documented", "best"),
    [(2, 1.0, 153, 149), (4, 1.0, 165, 161), (3, 4.0, 227, 166), (8, 4.0, 257, 196)],
)
def test_long_batches_gain_as_much_as_an_exhaustive_search(
    num_ranks: int, latency: float, documented: float, best: float
) -> None:
    """Figures for 24 microbatches: documented, and the best of all orders with two extra."""
    costs = costs_of(num_ranks, latency)
    assert documented_order(num_ranks, num_microbatches=24, costs=costs).makespan == documented
    assert search_u_shape(num_ranks, num_microbatches=24, costs=costs).makespan <= best


def test_memory_limits_the_search() -> None:
    costs = costs_of(4, 2.0)
    free = search_u_shape(4, num_microbatches=12, costs=costs)
    limit = max(free.peak_activations) - 2
    held = search_u_shape(4, num_microbatches=12, costs=costs, memory_limit=limit)
    assert max(held.peak_activations) <= limit < max(free.peak_activations)
    assert held.makespan >= free.makespan
    with pytest.raises(ValueError, match=r"memory_limit \(0.5\) must let some order run"):
        search_u_shape(4, num_microbatches=12, costs=costs, memory_limit=0.5)
    assert not math.isinf(held.makespan)
