"""The price of a plan: seconds, tokens in memory, and fetched keys."""

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
        seconds: Seconds from the first forward to the last backward.
        pure: Seconds of a rank of the busiest stage if work were spread evenly.
        bound: Lower bound in seconds of any plan; see Note [Bound of a step].
        tokens: Most tokens whose activations a rank keeps at once.
        fetched: Keys that all ranks of a stage fetch from others, in forward.
        far: Keys that they fetch from other nodes, included in `fetched`.
        imbalance: Largest attention work of a rank divided by the mean of its team, in the worst
            microbatch.
        padding: Share of positions that are padding.
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
        """Return the seconds divided by those of pure work."""
        return self.seconds / self.pure


def stage_costs(
    seconds: Sequence[Sequence[Seconds]],
    tokens: Sequence[float],
    *,
    message: float,
    num_stages: int,
) -> Costs:
    """Return the costs of a schedule by the seconds and tokens of its microbatches.

    Args:
        seconds: Seconds of each microbatch in each stage, or once for all stages.
        tokens: Positions of each microbatch on a rank.
        message: Seconds of a message per position.
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


def dealt(microbatch: PlannedMicrobatch, lengths: Sequence[int], costs: StepCosts) -> DealCost:
    """Return the pairs and fetched keys of each rank of a microbatch."""
    found = lengths_of(microbatch, lengths)
    return cost_of_deal(microbatch.deal, found, costs, heads=microbatch.heads)


def cost_of_deal(deal: Deal, lengths: Sequence[int], costs: StepCosts, *, heads: int) -> DealCost:
    """Return the pairs and fetched keys of each rank of a deal, by lengths with padding."""
    node = costs.node if len(deal.parts) % costs.node == 0 else None
    return deal_cost(deal, lengths, windows=costs.windows, node=node, heads=heads)


def lengths_of(microbatch: PlannedMicrobatch, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the documents of a microbatch; padding is a document at the end."""
    found = [lengths[document] for document in microbatch.documents]
    return [*found, microbatch.padding] if microbatch.padding else found


def costs_of(team: Team, lengths: Sequence[int], costs: StepCosts) -> Costs:
    """Return the costs of the schedule of a team."""
    seconds = [
        costs.of_parts(each.deal.sizes, dealt(each, lengths, costs), heads=each.heads)
        for each in team.microbatches
    ]
    tokens = [max(each.deal.sizes) for each in team.microbatches]
    return stage_costs(seconds, tokens, message=costs.message, num_stages=team.schedule.num_stages)


def simulated(plan: StepPlan, lengths: Sequence[int], costs: StepCosts) -> list[Simulation]:
    """Simulate the step of each team."""
    return [simulate(team.schedule, costs_of(team, lengths, costs)) for team in plan.teams]


def price(
    plan: StepPlan, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> StepPrice:
    """Return the price of a plan.

    Args:
        plan: Plan of a step.
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: Ranks and their memory.
    """
    found = simulated(plan, lengths, costs)
    found_costs = [dealt(each, lengths, costs) for each in plan.microbatches]
    return StepPrice(
        seconds=max(each.makespan for each in found),
        pure=pure_work(lengths, costs, pipeline).total,
        bound=lower_bound(lengths, costs, pipeline),
        tokens=max(max(each.peak_activations) for each in found),
        fetched=sum(sum(cost.fetched) for cost in found_costs),
        far=sum(sum(cost.far) for cost in found_costs),
        imbalance=max(cost.imbalance for cost in found_costs),
        padding=1 - sum(lengths) / sum(each.deal.seq_len for each in plan.microbatches),
    )
