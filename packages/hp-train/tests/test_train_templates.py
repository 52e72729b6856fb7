"""What searching templates of planned steps costs."""

from typing import Any

import pytest

from hp_schedule import Costs, Schedule, SearchResult, search
from hp_train.step_plan import Pipeline, Planner, StepCosts
from hp_train.step_plan.generators import draw
from hp_train.step_plan.shares import Rates, best_shares, program_seconds

K = 1024
COSTS = StepCosts.equal(token=6e-6, pair=2e-10, key=1e-7, far_key=9e-7, heads=5e-7, microbatch=6e-4)


@pytest.mark.sample
@pytest.mark.parametrize("stages", [4, 8, 16, 32])
def test_templates_of_many_stages_are_searched_no_longer(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many searches and programs for 16 stages as for 4, a run began after minutes."""
    steps: list[int] = []
    seconds: list[float] = []

    def counted(costs: Costs, *, num_candidates: int, **options: Any) -> SearchResult:
        steps.append(num_candidates * options["num_ranks"] * options["num_microbatches"])
        return search(costs, num_candidates=num_candidates, **options)

    def timed(schedule: Schedule, rates: Rates) -> tuple[float, ...] | None:
        found = best_shares(schedule, rates)
        if found is not None:
            seconds.append(program_seconds(len(rates.work), len(rates.tokens)))
        return found

    monkeypatch.setattr("hp_train.step_plan.templates.search", counted)
    monkeypatch.setattr("hp_train.step_plan.templates.best_shares", timed)
    lengths = draw("log-uniform", tokens=8192 * K, longest=128 * K, seed=0)
    pipeline = Pipeline(stages, 16, 128 * K)
    planner = Planner(COSTS, pipeline, team=16, typical=[lengths], one_order=True)
    assert planner.searched_templates()
    assert sum(steps) <= 150_000
    assert sum(seconds) <= 10.0
