"""The price of a plan: its seconds, and the bytes that it exchanges and holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_context import Deal, DealCost, deal_cost
from hp_packing.bound import lower_bound
from hp_packing.costs import Pipeline, Seconds, StepCosts, pure_work
from hp_packing.plan import PlannedMicrobatch, StepPlan, Team
from hp_schedule import Costs, Simulation, simulate


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The price of a step.

    Attributes:
        seconds: Seconds from its first forward to its last backward.
        pure: What each rank of the busiest stage would compute if work could be spread evenly, in
            seconds.
        bound: Proven: no plan takes less; see Note [Bound of a step].
        tokens: Most tokens whose activations a rank holds at once.
        fetched: Keys that ranks fetch from others, all ranks of a stage together, in forward.
        far: Those of them that come from another node.
        imbalance: Largest attention work of a rank, of the mean of its team, in the worst
            microbatch.
        padding: Share of positions that hold nothing.
    """

    seconds: float
    pure: float
    bound: float
    tokens: float
    fetched: float
    far: float
    imbalance: float
    padding: float

    @property
    def factor(self) -> float:
        """Seconds by what would be pure work."""
        return self.seconds / self.pure


def stage_costs(
    seconds: Sequence[Sequence[Seconds]],
    tokens: Sequence[float],
    *,
    message: float,
    num_stages: int,
) -> Costs:
    """Return what a schedule costs whose microbatches take so long in every stage.

    Args:
        seconds: Seconds of each microbatch in each stage, or in all alike.
        tokens: Positions of each on a rank.
        message: Seconds of a message for each of these.
        num_stages: Number of stages.
    """
    of_stages = list(zip(*seconds, strict=True))
    of_stages = of_stages if len(of_stages) == num_stages else of_stages * num_stages
    columns = [[list(column) for column in zip(*stage, strict=True)] for stage in of_stages]
    forward, input_grad, weight_grad = zip(*columns, strict=True)
    return Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activation=[list(map(float, tokens))] * num_stages,
        message=[[message * size for size in tokens]] * num_stages,
        bandwidth=1.0,
    )


def seconds_of(
    microbatch: PlannedMicrobatch, lengths: Sequence[int], costs: StepCosts
) -> tuple[Seconds, ...]:
    """Return what a microbatch takes in each of `StepCosts.stages`.

    Args:
        microbatch: The microbatch.
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
    """
    cost = dealt(microbatch, lengths, costs)
    return costs.of_parts(microbatch.deal.sizes, cost, heads=microbatch.heads)


def dealt(microbatch: PlannedMicrobatch, lengths: Sequence[int], costs: StepCosts) -> DealCost:
    """Return what the ranks of a microbatch compute and fetch."""
    found = lengths_of(microbatch, lengths)
    return cost_of_deal(microbatch.deal, found, costs, heads=microbatch.heads)


def cost_of_deal(deal: Deal, lengths: Sequence[int], costs: StepCosts, *, heads: int) -> DealCost:
    """Say what ranks compute and fetch that have documents of some lengths, padding among them."""
    node = costs.node if len(deal.parts) % costs.node == 0 else None
    return deal_cost(deal, lengths, windows=costs.windows, node=node, heads=heads)


def lengths_of(microbatch: PlannedMicrobatch, lengths: Sequence[int]) -> list[int]:
    """Lengths of what is in a microbatch; padding is a document at the end."""
    found = [lengths[document] for document in microbatch.documents]
    return [*found, microbatch.padding] if microbatch.padding else found


def costs_of(team: Team, lengths: Sequence[int], costs: StepCosts) -> Costs:
    """Return what the schedule of a team costs."""
    seconds = [seconds_of(each, lengths, costs) for each in team.microbatches]
    tokens = [max(each.deal.sizes) for each in team.microbatches]
    return stage_costs(seconds, tokens, message=costs.message, num_stages=team.schedule.num_stages)


def simulated(plan: StepPlan, lengths: Sequence[int], costs: StepCosts) -> list[Simulation]:
    """Every team's step."""
    return [simulate(team.schedule, costs_of(team, lengths, costs)) for team in plan.teams]


def price(
    plan: StepPlan, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> StepPrice:
    """Return what a plan takes.

    Args:
        plan: The plan.
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: The ranks.
    """
    found = simulated(plan, lengths, costs)
    every = [each for team in plan.teams for each in team.microbatches]
    found_costs = [dealt(each, lengths, costs) for each in every]
    return StepPrice(
        seconds=max(each.makespan for each in found),
        pure=pure_work(lengths, costs, pipeline).total,
        bound=lower_bound(lengths, costs, pipeline),
        tokens=max(max(each.peak_activations) for each in found),
        fetched=sum(sum(cost.fetched) for cost in found_costs),
        far=sum(sum(cost.far) for cost in found_costs),
        imbalance=max(cost.imbalance for cost in found_costs),
        padding=1 - sum(lengths) / sum(each.deal.seq_len for each in every),
    )
