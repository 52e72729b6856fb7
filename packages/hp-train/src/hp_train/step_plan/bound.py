"""How long any plan of a step must take.

Note [Bound of a step]
    Whatever the microbatches, ranks and order: the ranks of a stage together compute all tokens and
    pairs, so that those of some team have at least the mean; each microbatch costs what every one
    of them costs, and there are as many as the memory asks for. Exchanges, padding and what is left
    over by dividing only add to that.
    Then the last stage waits. Behind h others, it does not start the forward of a microbatch J
    before h forwards of J, and the forwards of all that are before J in any stage, have run one
    after another: who comes before J in a stage, but was behind J in the one before, had to wait
    there for J, and J waits for it now. Of its own work, it has by then done at most what is to be
    done for those before J there. So it stands idle for at least h forwards of J, less the
    backwards of those before J.
    Put microbatches in the order in which the last stage takes them. If it is idle for D, a forward
    of the first takes at most D / h, one of the second D / h and what the backward of the first
    allows, and so on: behind a D, so many microbatches hold no more than a geometric series of
    work. All the work must fit, which gives the least D for each number of microbatches; and the
    number for which overhead and D together are least gives the bound.
    Besides, a document goes forward and back through all stages, on all ranks of a stage at best.
"""

from collections.abc import Sequence
from itertools import count

from hp_train.step_plan.costs import StepCosts
from hp_train.step_plan.work import Pipeline, pairs_of, pure_work

_NEGLIGIBLE = 1e-9
"""Share of the work: idle time below it is not looked at."""


def lower_bound(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> float:
    """Seconds that no plan of a step can beat; see Note [Bound of a step].

    Args:
        lengths: Tokens of each document of the global batch.
        costs: Costs of a stage.
        pipeline: The ranks and their memory.
    """
    of_rank = sum(lengths) / pipeline.ranks
    work = pure_work(lengths, costs, pipeline).total + 2 * costs.expert * of_rank
    longest = pure_work([max(lengths)], costs, pipeline)
    chain = pipeline.num_stages * (longest.forward + longest.input_grad + 2 * costs.microbatch)
    many = 2 * costs.microbatch * max(1.0, of_rank / pipeline.tokens)
    waits = (pipeline.num_stages - 1) * costs.microbatch
    return max(
        work + many + waits,
        work + _overhead(lengths, work, costs, hops=pipeline.num_stages - 1),
        chain + longest.weight_grad,
    )


def _overhead(lengths: Sequence[int], work: float, costs: StepCosts, *, hops: int) -> float:
    """Least seconds of what microbatches cost each, and of waiting for them."""
    each = costs.microbatch
    if not hops:
        return 2 * each
    ratio = _most_backward(lengths, costs)
    forward = work / (1 + ratio)  # at least
    growth = 1 + ratio / hops
    best, room, lost = float("inf"), 0.0, 0.0
    for number in count(1):
        # Forwards of so many take at most room * idle - lost * each, overhead not counted.
        room = room * growth + 1 / hops
        lost = lost * growth + 1 - (number - 1) / hops
        idle = max(hops * each, (forward + lost * each) / room)
        best = min(best, 2 * each * number + idle)
        if 2 * each * number + hops * each >= best or forward / room < _NEGLIGIBLE * work:
            return best
    raise AssertionError("not reached: each number of microbatches has more room")


def _most_backward(lengths: Sequence[int], costs: StepCosts) -> float:
    """Seconds of backward by those of forward, of the document with most of it."""
    found = 0.0
    for tokens, pairs in {*zip(lengths, pairs_of(lengths, costs), strict=True)}:
        pure, experts = costs.pure(tokens, pairs), costs.expert * tokens
        back = pure.input_grad + pure.weight_grad + experts
        found = max(found, back / (pure.forward + experts))
    return found
