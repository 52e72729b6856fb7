"""Messages that hold up the rank which sends them, as part of the durations of its steps."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from hp_schedule.costs import Costs
from hp_schedule.packing import BWD_INPUT, FWD
from hp_schedule.searching.problem import Problem


def while_sending(costs: Costs, stage_to_rank: Sequence[int], num_microbatches: int) -> Costs:
    """Return costs in which a step lasts until its message has arrived, and messages no time.

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


def bounded(problem: Problem, free: Problem) -> list[Problem]:
    """Return problems no plan of which is longer than a plan whose messages hold up their ranks.

    A forward and a backward that are one step send their messages at the same time, so that the
    rank stands still for the longer of the two, not for both. In each of the two problems the
    messages of one direction hold up their ranks, and those of the other are only on their way: a
    pair is no shorter than its half without a hold-up followed by its other half.

    Args:
        problem: Problem of the steps priced by `while_sending`.
        free: Problem of the same steps whose messages hold up nobody.
    """
    if problem.num_microbatches == 1:
        return [problem]  # one half of every pair would wait for the other
    part = problem.part
    there, back = slice(0, part), slice(part, 2 * part)
    forward, backward = problem.duration.copy(), problem.duration.copy()
    forward[back], backward[there] = free.duration[back], free.duration[there]
    return [
        problem.with_times(forward, lag=problem.lag, lag_back=free.lag_back),
        problem.with_times(backward, lag=free.lag, lag_back=problem.lag_back),
    ]
