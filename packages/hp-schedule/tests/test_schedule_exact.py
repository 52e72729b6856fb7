"""Bounds of a rank with all its stages, and the exact engine, which needs OR-Tools."""

import math
import sys
from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_schedule import Costs, ModelCosts, add_send_recv, search, simulate, validate
from hp_schedule import generate_stage_to_rank_mapping as placed
from hp_schedule.schedule import PlacementStyle
from hp_schedule.searching.bounds import joined_bound, lower_bound
from hp_schedule.searching.construct import construct
from hp_schedule.searching.exact import rank_bound, solve, solve_in_windows
from hp_schedule.searching.problem import Problem
from hp_schedule.searching.rows import Walk

EPSILON = 1e-6

# Ranks, microbatches, stages per rank, placement, memory, latency; the least makespan, which CP-SAT
# has proven.
OPTIMA: list[tuple[int, int, int, PlacementStyle, float, float, float]] = [
    (4, 4, 2, "v", 2.5, 0.2, 19.6),
    (3, 4, 2, "v", 2.0, 0.1, 15.7),
    (3, 4, 1, "loop", 2.0, 0.2, 18.6),
    (4, 3, 2, "loop", 2.5, 0.4, 21.0),
    (4, 4, 1, "loop", 3.0, 0.2, 20.4),
]


Value = TypeVar("Value")


class Chooser(Protocol):
    """Takes one of some values: `Random.choice`, or a draw of Hypothesis."""

    def __call__(self, values: Sequence[Value], /) -> Value:
        """Return one of them."""


def chooser(data: st.DataObject) -> Chooser:
    """Return what lets Hypothesis choose."""

    def choose(values: Sequence[Value], /) -> Value:
        return data.draw(st.sampled_from(values))

    return choose


def drawn(choose: Chooser, *, largest: int = 4) -> Problem:
    """Draw a small problem whose microbatches all cost the same."""
    num_ranks, number = choose((1, 2, 3)), choose((1, 2))
    styles: tuple[PlacementStyle, ...] = ("loop", "v")
    style = choose(styles)
    num_stages = num_ranks * number

    def times() -> list[float]:
        return [choose((0.5, 1.0, 1.5, 2.0)) for _ in range(num_stages)]

    sizes = [1.0 + stage % 2 for stage in range(num_stages)]
    mapping = placed(num_ranks, num_stages, style)
    return Problem(
        Costs(
            times(),
            times(),
            times() if choose((True, False)) else 0.0,
            choose(([1.0] * num_stages, sizes)),
            latency=choose((0.0, 0.5)),
        ),
        stage_to_rank=[mapping[stage] for stage in range(num_stages)],
        order=range(choose(range(1, largest + 1))),
        memory_limit=choose((4.0, 5.0, 7.0)),
        split_backward=choose((True, False)),
    )


@pytest.mark.parametrize("point", OPTIMA)
def test_recorded_optima_are_found_and_proven_without_an_engine(
    point: tuple[int, int, int, PlacementStyle, float, float, float],
) -> None:
    num_ranks, num_microbatches, number, style, memory, latency, least = point
    result = search(
        ModelCosts(latency=latency),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual=(number,),
        placements=(style,),
        memory_limit=memory,
        num_candidates=100,
    )
    assert result.makespan == pytest.approx(least)
    assert result.lower_bound == pytest.approx(least)
    assert result.ended_by == "bound"
    validate(add_send_recv(result.schedule, costs=result.costs)).raise_if_failed()
    assert max(simulate(result.schedule, result.costs).peak_activations) <= memory


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_plan_is_shorter_than_a_rank_with_its_stages(data: st.DataObject) -> None:
    problem = drawn(chooser(data))
    random = Random(data.draw(st.integers(0, 100)))
    plan = construct(problem, [random.random() for _ in range(problem.num_steps)])
    assert plan is not None
    walk = Walk(problem, plan, random)
    walk.improve(150)
    assert lower_bound(problem) <= walk.best.makespan + EPSILON


def test_half_of_1f1b_memory_is_bounded_within_a_few_percent() -> None:
    # The bounds of each stage alone left 19.8 % open.
    result = search(
        ModelCosts(latency=0.2),
        num_ranks=4,
        num_microbatches=8,
        virtual=(2,),
        memory_limit=2.5,
        num_candidates=60,
    )
    assert result.makespan < 35.9 - EPSILON
    assert result.gap < 0.08


def test_without_the_engine_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ortools")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ValueError, match=r"exact \(> 0\) must have OR-Tools"):
        search(ModelCosts(), num_ranks=2, num_microbatches=2, num_candidates=1, exact=1.0)


@pytest.mark.parametrize("effort", [-1.0, math.nan, math.inf])
def test_effort_that_is_none_is_refused(effort: float) -> None:
    with pytest.raises(ValueError, match=r"exact \(.*\) must be >= 0 and finite"):
        search(ModelCosts(), num_ranks=2, num_microbatches=2, exact=effort)


class TestEngine:
    """What needs OR-Tools: `nox -s exact`."""

    @pytest.fixture(autouse=True)
    def _engine(self) -> None:
        pytest.importorskip("ortools")

    @given(data=st.data())
    @settings(deadline=None, max_examples=25)
    def test_a_rank_alone_is_bounded_by_no_more_than_its_optimum(self, data: st.DataObject) -> None:
        problem = drawn(chooser(data))
        for rank in range(problem.num_ranks):
            least = rank_bound(problem, rank, effort=60.0)
            assert joined_bound(problem, [rank]) <= least + EPSILON

    def test_walks_find_what_the_engine_proves_in_small_problems(self) -> None:
        # The same problems every time: of one in 150 a walk never finds the optimum.
        for seed in range(40):
            problem = drawn(Random(seed).choice, largest=3)
            plan = construct(problem, [float(step) for step in range(problem.num_steps)])
            assert plan is not None
            found = solve(problem, plan, effort=20.0)
            assert found.bound == pytest.approx(found.plan.makespan), seed
            random = Random(0)
            best = math.inf
            for _ in range(12):
                noisy = [start + random.gauss(0.0, 1.0) for start in plan.starts]
                start = construct(problem, noisy)
                assert start is not None
                walk = Walk(problem, start, random)
                walk.improve(150)
                best = min(best, walk.best.makespan)
            assert best == pytest.approx(found.plan.makespan), seed

    def test_one_long_microbatch_is_proven_in_a_given_order_and_in_any(self) -> None:
        lengths = [[4.0, *[1.0] * 7]] * 4
        costs = Costs(lengths, lengths, lengths)
        for keep_order, least in ((True, 54), (False, 46)):
            result = search(
                costs,
                num_ranks=4,
                num_microbatches=8,
                virtual=(1,),
                memory_limit=4,
                keep_order=keep_order,
                num_candidates=20,
                exact=20.0,
            )
            assert result.makespan == result.lower_bound == least
            assert result.ended_by == "bound"
            validate(add_send_recv(result.schedule, costs=costs)).raise_if_failed()
            assert max(simulate(result.schedule, costs).peak_activations) <= 4

    def test_windows_shorten_what_is_too_large_to_be_solved_at_once(self) -> None:
        mapping = placed(4, 8, "loop")
        problem = Problem(
            ModelCosts(latency=0.2).of_stages(4, 8),
            stage_to_rank=[mapping[stage] for stage in range(8)],
            order=range(18),
            memory_limit=2.5,
        )
        plan = construct(problem, [float(step % 18) for step in range(problem.num_steps)])
        assert plan is not None
        found = solve_in_windows(problem, plan, effort=4.0)
        assert found.plan.makespan < plan.makespan - 5
        schedule = problem.schedule(found.plan.sequence)
        costs = ModelCosts(latency=0.2).of_stages(4, 8)
        assert simulate(schedule, costs).makespan == pytest.approx(found.plan.makespan)
        assert max(simulate(schedule, costs).peak_activations) <= 2.5
