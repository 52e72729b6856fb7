"""Searched schedules: valid, within memory, between the bound and every published one."""

import itertools
import math
import time
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_schedule import (
    Costs,
    MetaStep,
    ModelCosts,
    Schedule,
    SearchResult,
    add_send_recv,
    generate_stage_to_rank_mapping,
    search,
    simulate,
    validate,
)
from hp_schedule.schedule import PlacementStyle
from hp_schedule.searching.bounds import lower_bound
from hp_schedule.searching.construct import construct, tighten
from hp_schedule.searching.problem import Problem
from hp_schedule.searching.search import closed_forms

EPSILON = 1e-6


def problem(
    costs: Costs,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    memory_limit: float = math.inf,
    style: PlacementStyle = "loop",
) -> Problem:
    mapping = generate_stage_to_rank_mapping(num_ranks, num_stages, style)
    return Problem(
        costs,
        stage_to_rank=[mapping[stage] for stage in range(num_stages)],
        order=range(num_microbatches),
        memory_limit=memory_limit,
    )


def check(result: SearchResult, costs: Costs, *, memory_limit: float = math.inf) -> None:
    """Check that a result is what it says."""
    validate(result.schedule).raise_if_failed()
    validate(add_send_recv(result.schedule)).raise_if_failed()
    simulation = simulate(result.schedule, costs)
    assert simulation.makespan == result.makespan
    assert max(simulation.peak_activations) <= memory_limit + EPSILON
    assert result.lower_bound <= result.makespan + EPSILON


def shortest(costs: Costs, *, num_microbatches: int) -> float:
    """Return the makespan of the best of all schedules on two ranks with one stage each."""
    find = partial(search, num_ranks=2, num_microbatches=num_microbatches, virtual=(1,))
    template = find(costs, num_candidates=0)
    cells = [[str(step) for step in row] for row in template.schedule.steps]
    best = math.inf
    for rows in itertools.product(*(_orders(row) for row in cells)):
        schedule = _schedule(template.schedule, rows)
        if validate(schedule):
            best = min(best, simulate(schedule, costs).makespan)
    return best


def _orders(row: list[str]) -> list[tuple[str, ...]]:
    """Return the orders of a rank's steps that respect F before I before W and the microbatches."""

    def fits(order: tuple[str, ...]) -> bool:
        place = {step: position for position, step in enumerate(order)}
        return all(
            place[step] < place[after]
            for step in row
            for after in (step.replace("F", "I"), step.replace("I", "W"))
            if after != step
        )

    return [order for order in itertools.permutations(row) if fits(order)]


def _schedule(like: Schedule, rows: tuple[tuple[str, ...], ...]) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(step) for step in row] for row in rows],
        stage_to_rank=like.stage_to_rank,
        num_microbatches=like.num_microbatches,
    )


def test_non_divisible_microbatches_reach_the_bound_at_the_memory_of_1f1b() -> None:
    result = search(
        ModelCosts(),
        num_ranks=8,
        num_microbatches=13,
        virtual=(4,),
        memory_limit=8,
        num_candidates=5,
    )
    assert result.makespan == pytest.approx(40.75)  # torch needs 11.75 activations for that
    assert result.ended_by == "bound"
    check(result, ModelCosts().of_stages(8, 32), memory_limit=8)


def test_a_heavy_end_takes_longer_and_keeps_no_more() -> None:
    costs = ModelCosts(activation=2.0, first_scale=3.0, last_scale=5.0).of_stages(2, 4)
    assert costs.forward == [1.5, 0.5, 0.5, 2.5]
    assert costs.activation == [1.0] * 4


def test_latency_costs_less_than_in_the_best_published_schedule() -> None:
    model = ModelCosts(latency=0.2)
    result = search(model, num_ranks=4, num_microbatches=7, memory_limit=4, num_candidates=200)
    assert result.makespan < 25.10 - EPSILON
    check(result, model.of_stages(4, 4 * result.num_stages_per_rank), memory_limit=4)


@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 2.0, 0.5, latency=0.3), Costs([2.0, 1.0])])
def test_the_shortest_of_all_schedules_is_found_and_not_below_the_bound(costs: Costs) -> None:
    result = search(costs, num_ranks=2, num_microbatches=2, virtual=(1,), num_candidates=5)
    best = shortest(costs, num_microbatches=2)
    assert result.makespan == pytest.approx(best)
    assert result.lower_bound <= best + EPSILON


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (4, 2), (4, 6), (5, 8)])
@pytest.mark.parametrize("latency", [0.0, 0.2])
def test_no_closed_form_of_the_same_memory_is_shorter(
    num_ranks: int, num_microbatches: int, latency: float
) -> None:
    memory = min(num_ranks, num_microbatches)
    model = ModelCosts(latency=latency, last_scale=1.3)
    result = search(
        model,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual=(1, 2, 3),
        memory_limit=memory,
        num_candidates=0,
    )
    for (number, style), makespan in result.makespans.items():
        costs = model.of_stages(num_ranks, num_ranks * number)
        for name, schedule in closed_forms(
            num_ranks,
            num_microbatches=num_microbatches,
            num_stages_per_rank=number,
            style=style,
        ):
            simulation = simulate(schedule, costs)
            if max(simulation.peak_activations) <= memory + EPSILON:
                assert makespan <= simulation.makespan + EPSILON, name


def test_the_same_arguments_give_the_same_schedule() -> None:
    def run(seed: int) -> Schedule:
        return search(
            ModelCosts(latency=0.1),
            num_ranks=4,
            num_microbatches=6,
            memory_limit=4,
            num_candidates=80,
            time_budget=math.inf,
            seed=seed,
        ).schedule

    assert run(0) == run(0)


def test_more_candidates_never_make_it_longer() -> None:
    makespans = [
        search(
            ModelCosts(latency=0.2),
            num_ranks=4,
            num_microbatches=9,
            memory_limit=3,
            num_candidates=number,
        ).makespan
        for number in (1, 5, 20, 60)
    ]
    assert makespans == sorted(makespans, reverse=True)


def test_microbatches_of_different_lengths_are_ordered_to_advantage() -> None:
    model = ModelCosts(microbatch_scale=(0.2, 2.0, 0.4, 1.0, 0.3, 1.6), latency=0.1)
    result = search(model, num_ranks=4, num_microbatches=6, num_candidates=150)
    check(result, model.of_stages(4, 4 * result.num_stages_per_rank))
    forms = closed_forms(4, num_microbatches=6, num_stages_per_rank=1, style="loop")
    costs = model.of_stages(4, 4)
    assert result.makespan < min(simulate(form, costs).makespan for _, form in forms)


def test_backwards_stay_whole_on_demand() -> None:
    result = search(
        ModelCosts(), num_ranks=4, num_microbatches=6, split_backward=False, num_candidates=30
    )
    kinds = {step.type.value for row in result.schedule.steps for step in row if step}
    assert kinds == {"F", "B"}
    check(result, ModelCosts().of_stages(4, 4 * result.num_stages_per_rank))


def test_a_slow_edge_and_large_messages_are_priced() -> None:
    fast = ModelCosts()
    slow = ModelCosts(latency={(0, 1): 3.0, (1, 0): 0.0}, message=2.0, bandwidth=4.0)
    find = partial(search, num_ranks=2, num_microbatches=4, virtual=(1,), num_candidates=40)
    result = find(slow)
    # Two messages of half a unit of time each share a channel.
    check(result, slow.of_stages(2, 2))
    assert result.makespan > find(fast).makespan + 3


@pytest.mark.parametrize("style", ["loop", "v"])
def test_sends_that_hold_up_their_rank_are_searched_as_such(style: PlacementStyle) -> None:
    number = 1 if style == "loop" else 2
    model = ModelCosts(latency=0.2, message=0.1, bandwidth=2.0)
    result = search(
        model,
        num_ranks=4,
        num_microbatches=7,
        virtual=(number,),
        placements=(style,),
        memory_limit=4,
        blocking=True,
        num_candidates=40,
    )
    costs = model.of_stages(4, 4 * number)
    validate(add_send_recv(result.schedule, costs=costs)).raise_if_failed()
    simulation = simulate(result.schedule, costs, blocking=True)
    assert simulation.makespan == result.makespan
    assert max(simulation.peak_activations) <= 4
    assert simulate(result.schedule, costs).makespan <= result.makespan
    assert result.lower_bound <= result.makespan + EPSILON
    forms = closed_forms(4, num_microbatches=7, num_stages_per_rank=number, style=style)
    times = [
        simulate(form, costs, blocking=True).makespan
        for _, form in forms
        if max(simulate(form, costs).peak_activations) <= 4
    ]
    assert result.makespan < min(times) - EPSILON


def test_sends_that_block_cost_no_more_than_in_the_best_published_schedule() -> None:
    # 63.6 when the search did not know of them.
    result = search(
        ModelCosts(latency=0.2),
        num_ranks=4,
        num_microbatches=16,
        virtual=(1,),
        memory_limit=4,
        blocking=True,
        num_candidates=10,
    )
    assert result.makespan <= 58.0 + EPSILON


def test_latency_in_the_call_takes_the_place_of_that_of_the_costs() -> None:
    find = partial(search, num_ranks=2, num_microbatches=3, virtual=(1,), num_candidates=5)
    replaced = find(ModelCosts(), latency=0.5)
    assert replaced.makespan == find(ModelCosts(latency=0.5)).makespan


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**30])
def test_the_unit_of_time_and_memory_makes_no_difference(unit: float) -> None:
    def find(unit: float) -> SearchResult:
        costs = ModelCosts(unit, unit, unit, 3 * unit, last_scale=1.3, latency=unit / 10)
        return search(
            costs,
            num_ranks=3,
            num_microbatches=5,
            memory_limit=7.5 * unit,
            num_candidates=30,
        )

    normal, other = find(1.0), find(unit)
    assert other.schedule == normal.schedule
    assert other.makespan == normal.makespan * unit
    assert other.lower_bound == normal.lower_bound * unit
    costs = ModelCosts(unit, unit, unit, last_scale=1.3, latency=unit / 10)
    stages = costs.of_stages(3, other.schedule.num_stages)
    assert simulate(other.schedule, stages).makespan == other.makespan


def test_messages_laid_out_with_the_costs_take_no_time_from_the_schedule() -> None:
    model = ModelCosts(first_scale=0.7, last_scale=1.3, latency=0.2)
    result = search(model, num_ranks=4, num_microbatches=7, memory_limit=4, num_candidates=30)
    with_messages = add_send_recv(result.schedule, costs=result.costs)
    assert simulate(with_messages, result.costs).makespan == pytest.approx(result.makespan)


def test_microbatches_that_take_no_time_at_all_are_searched() -> None:
    costs = Costs(
        [[0.0, 2.0, 1.0]] * 4, [[0.0, 1.0, 1.0]] * 4, [[0.0, 1.0, 2.0]] * 4, activation=0.5
    )
    result = search(
        costs, num_ranks=2, num_microbatches=3, virtual=(2,), memory_limit=1, num_candidates=60
    )
    assert result.num_candidates == 60
    check(result, costs, memory_limit=1)


def test_infinite_costs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"forward \(inf\) must be >= 0 and finite"):
        search(ModelCosts(forward=math.inf), num_ranks=2, num_microbatches=2)
    assert Costs(bandwidth=math.inf).bandwidth == math.inf


def test_candidates_asked_for_are_built_however_long_they_take() -> None:
    find = partial(search, ModelCosts(latency=0.2), num_ranks=4, num_microbatches=8)
    assert find(num_candidates=25, memory_limit=2.5).num_candidates == 25
    assert find(num_candidates=25, memory_limit=2.5, time_budget=0).ended_by == "time"


def test_a_machine_that_is_busy_with_other_work_takes_nothing_from_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = itertools.count(step=3600.0)
    for clock in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    find = partial(
        search, ModelCosts(latency=0.2), num_ranks=4, num_microbatches=8, memory_limit=2.5
    )
    assert find(num_candidates=25, time_budget=600) == find(num_candidates=25)
    # It is this thread's processor time that counts.
    seconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    found = find(time_budget=10)
    assert (found.ended_by, found.num_candidates) == ("time", 10)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_priorities_lead_to_the_end_in_the_least_memory(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    num_microbatches = data.draw(st.integers(1, 7))
    number = data.draw(st.integers(1, 3))
    style: PlacementStyle = data.draw(st.sampled_from(["loop", "v"]))
    forward, weight = data.draw(st.floats(0.1, 3)), data.draw(st.floats(0, 3))
    latency = data.draw(st.floats(0, 2))
    memory = data.draw(st.floats(1, 5))
    seed = data.draw(st.integers(0, 1000))
    share = 1 / number
    random = Random(seed)
    sizes = [
        [random.uniform(0.1, 1.0) * share for _ in range(num_microbatches)]
        for _ in range(num_ranks * number)
    ]
    costs = Costs(forward * share, share, weight * share, sizes, latency=latency)
    task = problem(
        costs,
        num_ranks=num_ranks,
        num_stages=num_ranks * number,
        num_microbatches=num_microbatches,
        memory_limit=memory,
        style=style,
    )
    priority = [random.random() for _ in range(task.num_steps)]
    plan = construct(task, priority, patience=random.choice((0.0, 1.0)))
    assert plan is not None
    assert construct(task.mirror, priority) is not None
    tight = tighten(task, task.mirror, plan, patience=0.0)
    assert lower_bound(task) - EPSILON <= tight.makespan <= plan.makespan + EPSILON
    simulation = simulate(task.schedule(plan.sequence), costs)
    assert simulation.makespan <= plan.makespan + EPSILON
    assert max(simulation.peak_activations) <= memory + EPSILON


def test_too_little_memory_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"memory_limit \(0.5\) must be >= .* \(1"):
        search(ModelCosts(), num_ranks=2, num_microbatches=2, memory_limit=0.5, num_candidates=3)


def test_costs_of_stages_are_for_one_number_of_stages() -> None:
    with pytest.raises(ValueError, match="virtual"):
        search(Costs(), num_ranks=2, num_microbatches=2, virtual=(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, r"num_ranks \(0\)"),
        ({"num_microbatches": 0}, r"num_microbatches \(0\)"),
        ({"virtual": ()}, "virtual"),
        ({"virtual": (0,)}, r"virtual \(0\)"),
        ({"memory_limit": 0.0}, r"memory_limit \(0.0\)"),
        ({"time_budget": math.nan}, r"time_budget \(nan\)"),
        ({"num_candidates": -1}, r"num_candidates \(-1\)"),
        ({"placements": (), "virtual": (2,)}, r"placements \(\[\]\)"),
        ({"placements": ("u",)}, r"placements \(\['u'\]\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"num_ranks": 2, "num_microbatches": 2} | change
    with pytest.raises(ValueError, match=message):
        search(ModelCosts(), **arguments)  # type: ignore[arg-type]


def test_one_number_of_stages_placement_or_way_needs_no_list() -> None:
    find = partial(search, ModelCosts(), num_ranks=2, num_microbatches=4, num_candidates=3)
    listed = find(virtual=[2], placements=["v"], memory_limit=2, retention=["recompute"])
    assert find(virtual=2, placements="v", memory_limit=2, retention="recompute") == listed
    with pytest.raises(ValueError, match=r"retention \(again\) must be"):
        find(virtual=1, retention="again")  # type: ignore[arg-type]
