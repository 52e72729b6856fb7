"""A schedule rebuilt for other costs: it runs, fits the memory and is never longer."""

from random import Random

import pytest

from hp_schedule import (
    Costs,
    add_send_recv,
    interleaved_1f1b,
    one_f_one_b,
    search,
    shorten,
    simulate,
    validate,
    zero_bubble,
)

RANKS = 4


def _costs(random: Random, num: int) -> Costs:
    sizes = [random.uniform(0.2, 2.0) for _ in range(num)]
    return Costs(
        forward=[sizes] * RANKS,
        input_grad=[[1.3 * size for size in sizes]] * RANKS,
        weight_grad=[[0.8 * size for size in sizes]] * RANKS,
        activation=[sizes] * RANKS,
        latency=0.02,
    )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_rebuilt_runs_fits_and_is_no_longer(seed: int) -> None:
    random = Random(seed)
    num = random.randint(4, 12)
    before, costs = _costs(random, num), _costs(random, num)
    found = search(before, num_ranks=RANKS, num_microbatches=num, virtual=(1,), num_candidates=10)
    limit = max(simulate(found.schedule, costs).peak_activations)
    result = shorten(found.schedule, costs, memory_limit=limit)
    assert result is not None
    schedule, run = result
    validate(add_send_recv(schedule, costs=costs)).raise_if_failed()
    again = simulate(schedule, costs)
    assert (again.makespan, again.peak_activations) == (run.makespan, run.peak_activations)
    assert max(run.peak_activations) <= limit
    assert run.makespan <= simulate(found.schedule, costs).makespan


def test_a_closed_form_gets_shorter_for_uneven_microbatches() -> None:
    costs = _costs(Random(1), 8)
    schedule = zero_bubble(RANKS, num_microbatches=8)
    result = shorten(schedule, costs)
    assert result is not None
    assert result[1].makespan < simulate(schedule, costs).makespan
    whole = shorten(one_f_one_b(RANKS, num_microbatches=8), costs)
    assert whole is not None
    assert whole[0].kinds == one_f_one_b(RANKS, num_microbatches=8).kinds


def test_units_do_not_matter() -> None:
    random = Random(3)
    before, costs = _costs(random, 8), _costs(random, 8)
    found = search(before, num_ranks=RANKS, num_microbatches=8, virtual=(1,), num_candidates=4)
    forward, input_grad, weight_grad, activation = (
        [[2.0**-30 * cell for cell in row] for row in getattr(costs, name)]
        for name in ("forward", "input_grad", "weight_grad", "activation")
    )
    scaled = Costs(forward, input_grad, weight_grad, activation, latency=2.0**-30 * 0.02)
    results = [shorten(found.schedule, each) for each in (costs, scaled)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0][0] == results[1][0]


def test_what_fits_no_memory_or_is_no_such_schedule_is_told() -> None:
    costs = _costs(Random(0), 6)
    assert shorten(one_f_one_b(RANKS, num_microbatches=6), costs, memory_limit=0.1) is None
    plain = one_f_one_b(RANKS, num_microbatches=6)
    with pytest.raises(ValueError, match="forwards and backwards of one chain"):
        shorten(add_send_recv(plain), costs)
    looped = interleaved_1f1b(2, num_microbatches=4, num_stages_per_rank=2)
    result = shorten(looped, Costs())
    assert result is not None
    assert result[1].makespan <= simulate(looped).makespan
