"""The order of microbatches as part of a search, and plans whose steps move within their rows."""

import math
import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_schedule import (
    Costs,
    MetaStepType,
    ModelCosts,
    Schedule,
    add_send_recv,
    dualpipe_v,
    generate_stage_to_rank_mapping,
    search,
    simulate,
    validate,
)
from hp_schedule.schedule import PlacementStyle
from hp_schedule.searching.construct import Plan, construct
from hp_schedule.searching.problem import Problem, first_orders, in_order, neighbour, with_order
from hp_schedule.searching.rows import Walk

EPSILON = 1e-6
POSITIONS = range(8) if os.environ.get("HP_WHOLE") == "1" else (0, 7)


def one_long(position: int) -> Costs:
    """Four ranks, eight microbatches, one of them four times as long as the others."""
    lengths = [[4.0 if index == position else 1.0 for index in range(8)]] * 4
    return Costs(lengths, lengths, lengths)


def drawn(random: Random, *, num_stages: int, num_microbatches: int) -> Costs:
    """Microbatches of a few different lengths, of which memory is a part of its own."""
    lengths = [random.choice((0.0, 0.5, 1.0, 1.0, 3.0)) for _ in range(num_microbatches)]
    sizes = [[random.choice((0.5, 1.0)) for _ in lengths]] * num_stages
    return Costs(
        [lengths] * num_stages,
        [[1.2 * length for length in lengths]] * num_stages,
        [[0.8 * length for length in lengths]] * num_stages,
        sizes,
        latency=random.choice((0.0, 0.3)),
    )


def orders_of(schedule: Schedule, kind: MetaStepType) -> list[list[int]]:
    """Return the microbatches of each stage in the order of one kind of step."""
    found: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for row in schedule.steps:
        for step in row:
            for leaf in step.leaves() if step else ():
                if leaf.type is kind and leaf.stage_index is not None:
                    assert leaf.microbatch_index is not None
                    found[leaf.stage_index].append(leaf.microbatch_index)
    return found


@pytest.mark.parametrize("position", POSITIONS)
def test_one_long_microbatch_costs_no_more_wherever_it_comes(position: int) -> None:
    # In the order given, an exact engine proves 54, 52, 50, 48, 51, 52, 53 and 54.
    result = search(
        one_long(position),
        num_ranks=4,
        num_microbatches=8,
        virtual=(1,),
        memory_limit=4,
        num_candidates=150,
    )
    assert result.makespan <= 48
    validate(result.schedule).raise_if_failed()
    simulation = simulate(result.schedule, one_long(position))
    assert simulation.makespan == result.makespan
    assert max(simulation.peak_activations) <= 4
    with_messages = add_send_recv(result.schedule, costs=result.costs)
    validate(with_messages).raise_if_failed()
    assert simulate(with_messages, result.costs).makespan == pytest.approx(result.makespan)


def test_an_order_that_is_to_be_kept_is_kept_in_every_stage() -> None:
    costs = one_long(0)
    result = search(
        costs,
        num_ranks=4,
        num_microbatches=8,
        virtual=(1,),
        memory_limit=4,
        keep_order=True,
        num_candidates=60,
    )
    assert result.makespan == 54
    for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT):
        assert orders_of(result.schedule, kind) == [list(range(8))] * 4


def test_microbatches_that_cost_the_same_stay_in_order() -> None:
    result = search(
        ModelCosts(latency=0.2),
        num_ranks=4,
        num_microbatches=4,
        virtual=(2,),
        memory_limit=2.5,
        num_candidates=120,
    )
    assert "moved" in result.origin
    for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT):
        assert orders_of(result.schedule, kind) == [list(range(4))] * 8


def test_microbatches_of_different_lengths_give_the_same_schedule_every_time() -> None:
    def run(seed: int) -> Schedule:
        costs = drawn(Random(3), num_stages=6, num_microbatches=7)
        return search(
            costs,
            num_ranks=3,
            num_microbatches=7,
            virtual=(2,),
            memory_limit=4,
            num_candidates=70,
            seed=seed,
        ).schedule

    assert run(1) == run(1)


def test_first_orders_are_one_where_all_cost_the_same() -> None:
    assert first_orders(Costs(), 2, 4) == [(0, 1, 2, 3)]
    lengths = [[3.0, 1.0, 4.0, 2.0]] * 2
    orders = first_orders(Costs(lengths), 2, 4)
    assert orders == [(0, 1, 2, 3), (1, 0, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (2, 3, 1, 0)]
    assert all(sorted(neighbour(order, Random(0))) == [0, 1, 2, 3] for order in orders)


def test_a_closed_form_in_another_order_has_other_microbatches_at_the_same_places() -> None:
    pairs = dualpipe_v(2, num_microbatches=5)
    order = (4, 2, 0, 1, 3)
    renamed = with_order(pairs, order)
    validate(renamed).raise_if_failed()
    for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT):
        for before, after in zip(orders_of(pairs, kind), orders_of(renamed, kind), strict=True):
            assert after == [order[index] for index in before]
    assert simulate(renamed).makespan == simulate(pairs).makespan


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_steps_move_to_plans_that_run_in_the_memory_and_the_time_they_say(
    data: st.DataObject,
) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    number = data.draw(st.integers(1, 2))
    style: PlacementStyle = data.draw(st.sampled_from(["loop", "v"]))
    num_microbatches = data.draw(st.integers(1, 6))
    keep_order = data.draw(st.booleans())
    random = Random(data.draw(st.integers(0, 1000)))
    num_stages = num_ranks * number
    costs = drawn(random, num_stages=num_stages, num_microbatches=num_microbatches)
    memory = number * data.draw(st.sampled_from([1.0, 1.5, 3.0, math.inf]))
    mapping = generate_stage_to_rank_mapping(num_ranks, num_stages, style)
    problem = Problem(
        costs,
        stage_to_rank=[mapping[stage] for stage in range(num_stages)],
        order=range(num_microbatches),
        memory_limit=memory,
        split_backward=data.draw(st.booleans()),
    )
    start = construct(problem, [random.random() for _ in range(problem.num_steps)])
    assert start is not None
    walk = Walk(problem, start, random, keep_order=keep_order)
    first = walk.best
    walk.improve(60)
    assert walk.best.makespan <= first.makespan <= start.makespan + EPSILON
    for plan in (walk.best, Plan(walk.best.starts, in_order(problem, walk.best.sequence), 0.0)):
        schedule = problem.schedule(plan.sequence)
        validate(schedule).raise_if_failed()
        simulation = simulate(schedule, costs)
        assert simulation.makespan <= walk.best.makespan + EPSILON
        assert max(simulation.peak_activations) <= memory + EPSILON
    if keep_order:
        every = list(range(num_microbatches))
        schedule = problem.schedule(walk.best.sequence)
        assert orders_of(schedule, MetaStepType.FWD) == [every] * num_stages
