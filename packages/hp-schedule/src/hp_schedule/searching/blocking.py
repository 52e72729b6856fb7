"""Messages that hold up the rank which sends them, as part of what the steps take."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from hp_schedule.costs import Costs
from hp_schedule.packing import BWD_INPUT, FWD


def while_sending(costs: Costs, stage_to_rank: Sequence[int], num_microbatches: int) -> Costs:
    """Return costs in which a step lasts until what it sends has arrived, and messages no time.

    Args:
        costs: Costs of the stages.
        stage_to_rank: Placement of one chain of stages.
        num_microbatches: Number of microbatches.
    """
    num_stages = len(stage_to_rank)
    tables = costs.durations(num_stages, num_microbatches)
    transmission = costs.transmission(num_stages, num_microbatches)

    def row(kind: int, stage: int, target: int, sender: int) -> list[float]:
        cells = slice(stage * num_microbatches, (stage + 1) * num_microbatches)
        if not 0 <= target < num_stages or stage_to_rank[target] == stage_to_rank[stage]:
            return tables[kind][cells]
        latency = costs.latency_of(stage_to_rank[stage], stage_to_rank[target])
        sent = transmission[sender * num_microbatches : (sender + 1) * num_microbatches]
        return [
            time + (message + latency)
            for time, message in zip(tables[kind][cells], sent, strict=True)
        ]

    stages = range(num_stages)
    return replace(
        costs,
        forward=[row(FWD, stage, stage + 1, stage) for stage in stages],
        input_grad=[row(BWD_INPUT, stage, stage - 1, stage - 1) for stage in stages],
        latency=0.0,
        message=0.0,
        bandwidth=inf,
        recompute=costs.forward if costs.recompute is None else costs.recompute,
    )
