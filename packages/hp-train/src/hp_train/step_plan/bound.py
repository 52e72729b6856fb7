"""How long any plan of a step must take.

Note [Bound of a step]
    Whatever the microbatches, ranks and order: the ranks of a stage together compute all tokens and
    pairs, so that those of some team have at least the mean; each microbatch costs what every one
    of them costs, and there are as many as the memory asks for. Exchanges, padding and what is left
    over by dividing only add to that.
    Then stages wait. Behind h others, one does not start the forward of a microbatch J before h
    forwards of J, and the forwards of all that are before J in any stage, have run one after
    another: who comes before J in a stage, but was behind J in the one before, had to wait there
    for J, and J waits for it now. Of its own work, it has by then done at most what is to be done
    for those before J there. So it stands idle for at least h forwards of J, less what it computes
    for those before J beyond one forward; of the forwards of stages ahead, the shortest counts.
    Put microbatches in the order in which it takes them. If it is idle for D, a forward of the
    first takes at most D / h, one of the second D / h and what the backward of the first allows,
    and so on: behind a D, so many microbatches hold no more than a geometric series of work. All
    the work must fit, which gives the least D for each number of microbatches; and the number for
    which overhead and D together are least gives the bound.
    Besides, a document goes forward and back through all stages, on all ranks of a stage at best.
"""

from collections.abc import Sequence

from hp_train.step_plan.costs import Seconds, StageCosts, StepCosts
from hp_train.step_plan.work import Pipeline, mean_work, pairs_of

_MOST = 1000
"""Microbatches from which on no idle time is counted but that for the shortest."""


def lower_bound(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> float:
    """Seconds that no plan of a step can beat; see Note [Bound of a step].

    Args:
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: The ranks and their memory.
    """
    tokens, pairs = mean_work(lengths, costs, pipeline)
    documents = {*zip(lengths, pairs_of(lengths, costs), strict=True)}
    stages = costs.of_stages(pipeline.num_stages)
    longest = max(documents)
    of_longest = [stage.alone(*(each / pipeline.ranks for each in longest)) for stage in stages]
    way = sum(each.forward + each.input_grad for each in of_longest)
    bounds = [way + of_longest[0].weight_grad]
    ahead = stages[0]
    for hops, stage in enumerate(stages):
        if hops:
            ahead = _least(ahead, stages[hops - 1])
        work, each = stage.pure(tokens, pairs).total, stage.microbatch.total
        waits = hops * ahead.alone(0, 0).forward
        bounds.append(work + each * max(1.0, tokens / pipeline.tokens) + waits)
        ratio = _most_behind(documents, ahead, stage)
        bounds.append(work + _overhead(work, ahead, stage, ratio=ratio, hops=hops))
    return max(bounds)


def _least(one: StageCosts, other: StageCosts) -> StageCosts:
    """What both take at least in forward."""
    token, pair, microbatch, least = (
        Seconds(min(getattr(one, name).forward, getattr(other, name).forward))
        for name in ("token", "pair", "microbatch", "least")
    )
    return StageCosts(token, pair, microbatch, least)


def _overhead(
    work: float, ahead: StageCosts, stage: StageCosts, *, ratio: float, hops: int
) -> float:
    """Least seconds of what microbatches cost a stage each, and of waiting for them.

    Args:
        work: What the stage computes besides.
        ahead: What the stages ahead of it take at least.
        stage: What it takes itself.
        ratio: See `_most_behind`.
        hops: Stages ahead of it.
    """
    each, more = stage.microbatch.total, ahead.microbatch.forward
    if not hops:
        return each
    first = hops * ahead.alone(0, 0).forward
    forward = work / (1 + ratio)  # of all, ahead of it, at least
    best, room, lost = float("inf"), 0.0, 0.0
    for number in range(1, _MOST):
        # Forwards of so many take at most room * idle - lost, what each takes besides not counted.
        room = room * (1 + ratio / hops) + 1 / hops
        lost = lost * (1 + ratio / hops) + more - (number - 1) * (each - more) / hops
        idle = max(first, (forward + lost) / room)
        best = min(best, each * number + idle)
        if each * number + first >= best:
            return best
    return min(best, each * _MOST + first)


def _most_behind(documents: set[tuple[int, float]], ahead: StageCosts, stage: StageCosts) -> float:
    """What a stage computes for a document beyond a forward of those ahead, by that; at most."""
    found = 0.0
    for document in documents:
        forward = ahead.pure(*document).forward
        found = max(found, stage.pure(*document).total / forward - 1)
    return found
