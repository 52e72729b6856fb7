"""How long a plan takes, what it exchanges and holds; and how long any plan must take.

Note [Bound of a step]
    Whatever the microbatches, ranks and order: the ranks of a stage together compute all tokens and
    pairs, so that one of them has at least the mean; and as many microbatches as the memory asks
    for cost what every one of them costs. The last stage waits for a forward of each stage before
    it. And a document goes forward and back through all stages, on all ranks of a stage at best.
    Exchanges, padding and what is left over by dividing only add to that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_context import DealCost, deal_cost
from hp_context.batch.deal_cost import Work
from hp_schedule import Costs, Simulation, simulate
from hp_train.step_plan.costs import Seconds, StepCosts
from hp_train.step_plan.plan import PlannedMicrobatch, StepPlan, Team


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ranks that a step is planned for.

    Attributes:
        num_stages: Stages of the pipeline, one on each rank.
        ranks: Ranks of each stage, over which documents are spread: data and context parallel.
        tokens: Memory: most tokens whose activations a rank holds at once.
    """

    num_stages: int
    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be >= 1")


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step takes.

    Attributes:
        seconds: Seconds from its first forward to its last backward.
        pure: What each rank would compute if work could be spread evenly, in seconds.
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


def pairs_of(lengths: Sequence[int], costs: StepCosts) -> list[float]:
    """Pairs of a query and a key of each document, in the mean over layers."""
    before = Work(costs.windows).before
    known: dict[int, float] = {}
    for length in lengths:
        if length not in known:
            known[length] = before(length)
    return [known[length] for length in lengths]


def pure_work(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> Seconds:
    """What a rank would compute if work could be spread evenly."""
    pairs = sum(pairs_of(lengths, costs))
    return costs.pure(sum(lengths) / pipeline.ranks, pairs / pipeline.ranks)


def lower_bound(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> float:
    """Seconds that no plan of a step can beat; see Note [Bound of a step]."""
    work = pure_work(lengths, costs, pipeline).total
    fewest = max(1, math.ceil(sum(lengths) / pipeline.ranks / pipeline.tokens))
    expert = 2 * costs.expert * sum(lengths) / pipeline.ranks
    even = work + expert + (2 * fewest + pipeline.num_stages - 1) * costs.microbatch
    longest = pure_work([max(lengths)], costs, pipeline)
    chain = pipeline.num_stages * (longest.forward + longest.input_grad + 2 * costs.microbatch)
    return max(even, chain + longest.weight_grad)


def stage_costs(
    seconds: Sequence[Seconds], tokens: Sequence[int], costs: StepCosts, *, num_stages: int
) -> Costs:
    """What a schedule costs whose microbatches take so long in every stage.

    Args:
        seconds: Seconds of each microbatch.
        tokens: Positions of each on a rank.
        costs: Costs of a stage.
        num_stages: Number of stages.
    """
    forward, input_grad, weight_grad = map(list, zip(*seconds, strict=True))
    return Costs(
        forward=[forward] * num_stages,
        input_grad=[input_grad] * num_stages,
        weight_grad=[weight_grad] * num_stages,
        activation=[list(map(float, tokens))] * num_stages,
        latency=costs.message * max(tokens),
    )


def seconds_of(microbatch: PlannedMicrobatch, lengths: Sequence[int], costs: StepCosts) -> Seconds:
    """What a microbatch takes in a stage."""
    cost = dealt(microbatch, lengths, costs)
    return costs.of_parts(microbatch.deal.sizes, cost, heads=microbatch.heads)


def dealt(microbatch: PlannedMicrobatch, lengths: Sequence[int], costs: StepCosts) -> DealCost:
    """What the ranks of a microbatch compute and fetch."""
    ranks = len(microbatch.deal.parts)
    return deal_cost(
        microbatch.deal,
        lengths_of(microbatch, lengths),
        windows=costs.windows,
        node=costs.node if ranks % costs.node == 0 else None,
        heads=microbatch.heads,
    )


def lengths_of(microbatch: PlannedMicrobatch, lengths: Sequence[int]) -> list[int]:
    """Lengths of what is in a microbatch; padding is a document at the end."""
    found = [lengths[document] for document in microbatch.documents]
    return [*found, microbatch.padding] if microbatch.padding else found


def costs_of(team: Team, lengths: Sequence[int], costs: StepCosts) -> Costs:
    """What the schedule of a team costs."""
    seconds = [seconds_of(each, lengths, costs) for each in team.microbatches]
    tokens = [max(each.deal.sizes) for each in team.microbatches]
    return stage_costs(seconds, tokens, costs, num_stages=team.schedule.num_stages)


def simulated(plan: StepPlan, lengths: Sequence[int], costs: StepCosts) -> list[Simulation]:
    """Every team's step."""
    return [simulate(team.schedule, costs_of(team, lengths, costs)) for team in plan.teams]


def price(
    plan: StepPlan, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> StepPrice:
    """What a plan takes.

    Args:
        plan: The plan.
        lengths: Tokens of each document of the global batch.
        costs: Costs of a stage.
        pipeline: The ranks.
    """
    found = simulated(plan, lengths, costs)
    every = [each for team in plan.teams for each in team.microbatches]
    found_costs = [dealt(each, lengths, costs) for each in every]
    positions = sum(each.deal.seq_len for each in every)
    return StepPrice(
        seconds=max(each.makespan for each in found),
        pure=pure_work(lengths, costs, pipeline).total,
        bound=lower_bound(lengths, costs, pipeline),
        tokens=max(max(each.peak_activations) for each in found),
        fetched=sum(sum(cost.fetched) for cost in found_costs),
        far=sum(sum(cost.far) for cost in found_costs),
        imbalance=max(cost.imbalance for cost in found_costs),
        padding=1 - sum(lengths) / positions,
    )
