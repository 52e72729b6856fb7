"""The bound of a step: no plan that runs is shorter, and some plans are hardly longer."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_context import deal_documents
from hp_packing import Pipeline, PlannedMicrobatch, Planner, StepCosts, StepPlan, lower_bound, price
from hp_packing.costs import Seconds, StageCosts
from hp_packing.generators import draw
from hp_packing.plan import Team
from hp_packing.pricing import costs_of
from hp_schedule import one_f_one_b, search

MEMORY = 10**9


def _microbatch(documents: tuple[int, ...], lengths: list[int], ranks: int) -> PlannedMicrobatch:
    sizes = [lengths[document] for document in documents]
    padding = -sum(sizes) % ranks
    deal = deal_documents([*sizes, *[padding] * bool(padding)], ranks, pairs_per_key=0.0)
    return PlannedMicrobatch(documents, padding, deal)


def _team(
    parts: list[tuple[int, ...]],
    lengths: list[int],
    ranks: int,
    costs: StepCosts,
    stages: int,
    *,
    effort: int = 6,
    memory: float = math.inf,
) -> Team:
    """A team with a schedule that was searched for it."""
    microbatches = tuple(_microbatch(part, lengths, ranks) for part in parts)
    any_form = one_f_one_b(stages, num_microbatches=len(parts))
    of_stages = costs_of(Team(microbatches, any_form), lengths, costs)
    found = search(
        of_stages,
        num_ranks=stages,
        num_microbatches=len(parts),
        virtual=(1,),
        memory_limit=memory,
        num_candidates=effort,
    )
    return Team(microbatches, found.schedule)


@st.composite
def _stages(draw: st.DrawFn) -> StageCosts:
    """Costs of a stage, like none of the others."""
    factor = draw(st.sampled_from([1.0, 1.0, 0.6, 1.5]))
    token = factor * draw(st.sampled_from([1e-3, 1e-2]))
    pair = factor * draw(st.sampled_from([0.0, 1e-6, 1e-4]))
    each = draw(st.sampled_from([0.0, 1e-2, 1.0]))
    least = draw(st.sampled_from([0.0, 0.3]))
    return StageCosts(
        token=Seconds(token, draw(st.sampled_from([1.0, 2.0])) * token, token),
        pair=Seconds(pair, 2.5 * pair),
        microbatch=Seconds(each, each),
        least=Seconds(least, least, least),
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_plan_is_below_the_bound(data: st.DataObject) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=14))
    stages, ranks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    of_stages = tuple(draw(st.lists(_stages(), min_size=stages, max_size=stages)))
    costs = StepCosts(of_stages, message=draw(st.sampled_from([0.0, 1e-3])))
    order = draw(st.permutations(range(len(lengths))))
    if draw(st.booleans()):
        order.sort(key=lengths.__getitem__)
    teams = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0 and n <= len(lengths)]))
    found = []
    for number in range(teams):
        mine = order[number::teams]
        cuts = draw(st.lists(st.integers(1, len(mine)), max_size=6))
        edges = sorted({0, len(mine), *cuts})
        parts = [tuple(mine[a:b]) for a, b in pairwise(edges)]
        longest = max(sum(lengths[i] for i in part) for part in parts) * teams / ranks + 1
        memory = draw(st.sampled_from([math.inf, stages * longest]))
        found.append(_team(parts, lengths, ranks // teams, costs, stages, memory=memory))
    plan = StepPlan(len(lengths), tuple(found))
    of_plan = price(plan, lengths, costs, Pipeline(stages, ranks, MEMORY))
    # No more memory than the plan takes.
    pipeline = Pipeline(stages, ranks, math.ceil(of_plan.tokens))
    assert lower_bound(lengths, costs, pipeline) <= of_plan.seconds * (1 + 1e-12)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("each", [1e-3, 1.0])
def test_a_plan_whose_microbatches_grow_as_they_may_meets_the_bound(
    stages: int, each: float
) -> None:
    costs = StepCosts.equal(token=each / 1024, pair=0.0, microbatch=each)
    # Each as long as what is done of those before it in the last stage lets it come in time.
    forwards, back = [each * 1.5], 0.0
    while sum(forwards) < 60 * each:
        back += 2 * forwards[-1] - each
        forwards.append(forwards[0] + back / (stages - 1))
    forwards += forwards[::-1]  # and shorter again: all but the last stage wait for the last ones
    lengths = [round((forward - each) * 1024 / each) for forward in forwards]
    parts: list[tuple[int, ...]] = [(document,) for document in range(len(lengths))]
    team = _team(parts, lengths, 1, costs, stages, effort=30)
    pipeline = Pipeline(stages, 1, MEMORY)
    found = price(StepPlan(len(lengths), (team,)), lengths, costs, pipeline)
    assert found.bound <= found.seconds < 1.04 * found.bound


def test_the_memory_asks_for_microbatches_and_each_costs_something() -> None:
    lengths = draw("mock", tokens=768 * 1024, longest=32 * 1024, seed=1)
    costs = StepCosts.equal(token=6e-6, pair=2e-10, microbatch=5e-3)
    bounds = [lower_bound(lengths, costs, Pipeline(4, 16, m * 1024)) for m in (10**6, 32, 16)]
    assert 1.03 * bounds[0] < bounds[2]
    plan = Planner(costs, Pipeline(4, 16, 32 * 1024), prepared=6).plan(lengths)
    found = price(plan, lengths, costs, Pipeline(4, 16, 32 * 1024))
    assert bounds[0] < bounds[1] == found.bound <= found.seconds < 1.06 * found.bound
