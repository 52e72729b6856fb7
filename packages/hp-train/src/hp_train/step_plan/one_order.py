"""One order of microbatches for all teams, for ranks of several teams that exchange in a step."""

from collections.abc import Sequence
from dataclasses import replace

from hp_schedule import search
from hp_train.errors import ConfigError
from hp_train.step_plan.costs import Seconds
from hp_train.step_plan.plan import StepPlan
from hp_train.step_plan.planner import Planner
from hp_train.step_plan.price import seconds_of, stage_costs


def in_one_order(plan: StepPlan, lengths: Sequence[int], planner: Planner) -> StepPlan:
    """The plan with one schedule for all teams: that of the dearest microbatches of each place.

    Experts, and parameters that are gathered block by block, are exchanged between teams in every
    forward and backward; so all of them must take these in one order.

    Args:
        plan: Its teams have as many microbatches each.
        lengths: Tokens of each document of the global batch.
        planner: Has made it.

    Raises:
        ConfigError: When no order fits the memory.
    """
    costs, pipeline = planner.costs, planner.pipeline
    places = list(zip(*(team.microbatches for team in plan.teams), strict=True))
    tokens = [max(max(each.deal.sizes) for each in place) for place in places]
    seconds = [
        [
            Seconds(*map(max, zip(*of_teams, strict=True)))
            for of_teams in zip(*(seconds_of(each, lengths, costs) for each in place), strict=True)
        ]
        for place in places
    ]
    try:
        found = search(
            stage_costs(seconds, tokens, costs, num_stages=pipeline.num_stages),
            num_ranks=pipeline.num_stages,
            num_microbatches=len(places),
            virtual=(1,),
            memory_limit=float(pipeline.tokens),
            split_backward=planner.split_backward,
            num_candidates=max(1, planner.effort),
        )
    except ValueError:
        raise ConfigError(
            f"microbatches of {max(tokens)} tokens must fit {pipeline.tokens} tokens in one order "
            f"of {len(plan.teams)} teams"
        ) from None
    teams = tuple([replace(team, schedule=found.schedule) for team in plan.teams])
    return replace(plan, teams=teams, origin=found.origin)
