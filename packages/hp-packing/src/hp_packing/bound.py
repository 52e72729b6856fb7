"""A lower bound on the seconds of a step, whatever its plan.

Note [Bound of a step]
    Work. Whatever the microbatches, ranks and order, the ranks of a stage together compute all
    tokens and pairs, so the ranks of some team have at least the mean; and each microbatch has its
    fixed cost. Exchanges, padding and uneven divisions only add to that.
    Idle time. A stage behind h others starts the forward of a microbatch J after h forwards of J
    and as many messages, and after the forwards of all microbatches that come before J in any
    stage, one after another: a microbatch that is before J in a stage, but was behind J in the
    stage ahead, had to wait there for J, and J waits for it now. By then the stage has done at most
    its work for the microbatches before J. So it is idle for at least h forwards of J, less its
    work for the microbatches before J beyond one forward each, where a forward is the shortest of
    the stages ahead. Take microbatches in the order of the stage. If it is idle for D, a forward of
    the first takes at most D / h, a forward of the second D / h plus a share of the backward of the
    first, and so on: a geometric series, which also holds if they are sorted by size.
    Memory. A rank of the first stage keeps the activations of a microbatch while that goes forward
    and back through all stages: the sum over microbatches of tokens times seconds is at most the
    memory M times the step T. The product of a sum of tokens and a sum of seconds is at least the
    square of u, the sum over documents of the root of tokens times seconds (Cauchy and Schwarz).
    Together. With a fixed cost e of a microbatch and a price z of memory times seconds, a
    microbatch adds e + z u^2 to T: at least 2 sqrt(e z) u, and (sqrt(e) - sqrt(z) u)^2 more for the
    first ones, which the idle time keeps shorter than would be best. The sum is linear in tokens,
    pairs and roots, and so at least its mean for some team: T (1 + z M) is at least work +
    2 sqrt(e z) u + D + the extra cost of the first ones, for any z, and for the D that minimises
    it. The same holds for the weighted mean of this bound and that of the first stage, which never
    waits. The result is the largest of several such bounds.
    A document also goes forward and back through all stages, at best on all ranks of a stage.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_packing.costs import Pipeline, Seconds, StageCosts, StepCosts, mean_work, pairs_of

_Array = NDArray[np.float64]

_PRICES = (0.0, 0.7, 1.0, 1.2, 1.4, 2.0)
"""Prices of memory to try, divided by the best price for a stage that never waits."""
_WEIGHTS = (0.3, 0.5, 1.0)
"""Weights of a stage to try in the mean with the first stage."""
_IDLE, _FINENESS = 100, 1.05
"""Number of idle times to try, and the ratio of each to the one before."""
_MOST = 1000
"""Maximum number of first microbatches whose lengths are bounded."""


def lower_bound(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> float:
    """Return a lower bound on the seconds of a step; see Note [Bound of a step].

    Args:
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: Ranks and their memory.
    """
    tokens, pairs = mean_work(lengths, costs, pipeline)
    stages = costs.of_stages(pipeline.num_stages)
    each = sorted({*zip(lengths, pairs_of(lengths, costs), strict=True)})
    of_longest = [stage.alone(*(part / pipeline.ranks for part in each[-1])) for stage in stages]
    way = sum(seconds.forward + seconds.input_grad for seconds in of_longest)
    bounds = [way + of_longest[0].weight_grad]
    for hops, stage in enumerate(stages):
        work = stage.pure(tokens, pairs).total
        waits = hops * _least(stages[:hops]).alone(0, 0).forward if hops else 0.0
        number = max(1.0, tokens / pipeline.tokens)
        bounds.append(work + stage.microbatch.total * number + waits)
    bound = _Bound(lengths, costs, pipeline)
    return max(*bounds, *bound.of_first(), *bound.of_others())


def _least(stages: Sequence[StageCosts]) -> StageCosts:
    """Return the minimum of each forward cost over some stages."""
    token, pair, microbatch, least = (
        Seconds(min(getattr(stage, name).forward for stage in stages))
        for name in ("token", "pair", "microbatch", "least")
    )
    return StageCosts(token, pair, microbatch, least)


class _Front(NamedTuple):
    """Bounds on the first microbatches of a stage.

    Attributes:
        hops: Number of stages ahead.
        ratio: Largest ratio over documents of the stage's work beyond a forward ahead to that
            forward with its message.
        ahead: Fixed seconds of the forward of a microbatch in a stage ahead.
        behind: Fixed seconds of a microbatch in the stage itself, beyond those.
        root: Largest ratio over documents of u to a forward ahead with its message.
        first: Minimum idle time in seconds, that of an empty microbatch.
    """

    hops: int
    ratio: float
    ahead: float
    behind: float
    root: float
    first: float

    def lengths(self, idle: float) -> Iterator[tuple[float, float]]:
        """Yield the most seconds of the microbatches before each microbatch, and of itself."""
        before = 0.0
        for number in range(_MOST):
            room = idle + self.ratio * before + number * self.behind
            most = max(0.0, room / self.hops - self.ahead)
            yield before, most
            before += most


class _Bound:
    """Bounds that include memory; see Note [Bound of a step].

    Args:
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: Ranks and their memory.
    """

    def __init__(self, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> None:
        self._stages = costs.of_stages(pipeline.num_stages)
        self._memory = float(pipeline.tokens)
        self._ranks = pipeline.ranks
        self._tokens = np.array(lengths, dtype=np.float64)
        self._pairs = np.array(pairs_of(lengths, costs))
        self._message = costs.message * self._tokens
        on_its_way = 2 * (len(self._stages) - 1) * self._message
        there_and_back = [
            self._of(stage.token[kind], stage.pair[kind])
            for stage in self._stages
            for kind in (0, 1)
        ]
        first = self._stages[0]
        last = self._of(first.token.weight_grad, first.pair.weight_grad)
        self._roots = np.sqrt(self._tokens * (sum(there_and_back) + on_its_way + last))
        held = sum(each.microbatch.forward + each.microbatch.input_grad for each in self._stages)
        self._held = (held + first.microbatch.weight_grad) * self._tokens
        self._works = [self._of(each.token.total, each.pair.total) for each in self._stages]

    def of_first(self) -> Iterator[float]:
        """Yield bounds of the first stage."""
        overhead = self._stages[0].microbatch.total
        for price in self._prices(self._works[0], overhead):
            yield self._mean(self._priced(self._works[0], overhead, price)) / (
                1 + price * self._memory
            )

    def of_others(self) -> Iterator[float]:
        """Yield bounds of the other stages, each in the mean with the first one."""
        of_first = self._stages[0].microbatch.total
        for hops in range(1, len(self._stages)):
            front, forward = self._front(hops)
            for weight in _WEIGHTS:
                work = (1 - weight) * self._works[0] + weight * self._works[hops]
                own = self._stages[hops].microbatch.total
                overhead = (1 - weight) * of_first + weight * own
                for price in self._prices(work, overhead):
                    every = self._priced(work, overhead, price)
                    mean = self._mean(every)
                    # The least work ahead of a team with the mean of the priced work.
                    ahead = mean * float((forward / every).min())
                    waits = _waits(front, weight, overhead, price, ahead)
                    yield (mean + waits) / (1 + price * self._memory)

    def _of(self, token: float, pair: float) -> _Array:
        """Return the seconds of each document."""
        return token * self._tokens + pair * self._pairs

    def _mean(self, seconds: _Array) -> float:
        return float(seconds.sum()) / self._ranks

    def _priced(self, work: _Array, overhead: float, price: float) -> _Array:
        """Return the minimum cost of each document, with a price of memory."""
        return work + 2 * math.sqrt(overhead * price) * self._roots + price * self._held

    def _prices(self, work: _Array, overhead: float) -> Iterator[float]:
        """Yield prices of a token in memory for a second."""
        seconds, memory = self._mean(work), self._memory
        root = math.sqrt(overhead) * self._mean(self._roots)
        best = 0.0
        if root:
            best = math.sqrt((memory * seconds) ** 2 + 4 * memory * root**2) - memory * seconds
            best = (best / (2 * memory * root)) ** 2
        for by in _PRICES if best else (0.0,):
            yield by * best

    def _front(self, hops: int) -> tuple[_Front, _Array]:
        """Return bounds on the first microbatches, and each document's forward ahead."""
        ahead, stage = _least(self._stages[:hops]), self._stages[hops]
        forward = self._of(ahead.token.forward, ahead.pair.forward)
        arrival = forward + self._message
        front = _Front(
            hops,
            float(((self._works[hops] - forward) / arrival).max()),
            ahead.microbatch.forward,
            stage.microbatch.total - ahead.microbatch.forward,
            float((self._roots / arrival).max()),
            hops * ahead.alone(0, 0).forward,
        )
        return front, arrival


def _waits(front: _Front, weight: float, overhead: float, price: float, ahead: float) -> float:
    """Return the minimum of idle time plus the extra cost of short first microbatches.

    Between two idle times that are tried, the sum is at least the shorter idle time plus the extra
    cost at the longer one.

    Args:
        front: Bounds on the first microbatches.
        weight: Weight of the stage's idle time in the bound, > 0 and <= 1.
        overhead: Fixed seconds of a microbatch.
        price: Seconds of the step per token in memory for a second.
        ahead: Minimum seconds of the forwards of all microbatches in a stage ahead.
    """
    dear, cheap = math.sqrt(overhead), math.sqrt(price) * front.root
    idle, best = front.first, math.inf
    step = max(idle, front.hops * ahead / 1000)
    for _ in range(_IDLE):
        longer = max(idle * _FINENESS, idle + step / 50)
        short = 0.0
        for before, most in front.lengths(longer):
            if before >= ahead or dear <= cheap * most:
                break
            short += (dear - cheap * most) ** 2
        best = min(best, weight * idle + short)
        idle = longer
        if weight * idle >= best:
            return best
    return min(best, weight * idle)
