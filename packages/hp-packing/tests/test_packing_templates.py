"""What searching templates of planned steps costs."""

from typing import Any

import pytest

from hp_packing import Pipeline, Planner, StepCosts
from hp_packing.generators import draw
from hp_packing.planning.linear_program import Rates, best_shares
from hp_schedule import Costs, Schedule, SearchResult, search

K = 1024
COSTS = StepCosts.equal(token=6e-6, pair=2e-10, key=1e-7, far_key=9e-7, heads=5e-7, microbatch=6e-4)


@pytest.mark.sample
@pytest.mark.parametrize("stages", [4, 8, 16, 32])
def test_templates_of_many_stages_are_searched_no_longer(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program takes the square of its steps: with as many as for 4 stages, 16 took minutes."""
    steps: list[int] = []
    squares: list[int] = []

    def counted(costs: Costs, *, num_candidates: int, **options: Any) -> SearchResult:
        steps.append(num_candidates * options["num_ranks"] * options["num_microbatches"])
        assert sum(steps) <= 150_000
        return search(costs, num_candidates=num_candidates, **options)

    def solved(schedule: Schedule, rates: Rates) -> tuple[float, ...] | None:
        found = best_shares(schedule, rates)
        if found is not None:
            squares.append((len(rates.work) * len(rates.tokens)) ** 2)
            assert sum(squares) <= 14e6
        return found

    monkeypatch.setattr("hp_packing.planning.templates.search", counted)
    monkeypatch.setattr("hp_packing.planning.templates.best_shares", solved)
    lengths = draw("log-uniform", tokens=8192 * K, longest=128 * K, seed=0)
    pipeline = Pipeline(stages, 16, 128 * K)
    planner = Planner(COSTS, pipeline, team=16, typical=[lengths], one_order=True)
    assert planner.searched_templates()
    assert steps
