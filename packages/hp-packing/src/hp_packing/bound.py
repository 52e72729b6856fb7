"""A lower bound on the seconds of a step, whatever its plan.

Note [Bound of a step]
    Whatever the microbatches, ranks and order: the ranks of a stage together compute all tokens and
    pairs, so that those of some team have at least the mean; each microbatch costs what every one
    of them costs. Exchanges, padding and what is left over by dividing only add to that.
    Then stages wait. Behind h others, one does not start the forward of a microbatch J before h
    forwards of J have run and its output has travelled as often, and the forwards of all that are
    before J in any stage, one after another: who comes before J in a stage, but was behind J in the
    one before, had to wait there for J, and J waits for it now. Of its own work, it has by then
    done at most what is to be done for those before J there. So it stands idle for at least h
    forwards of J, less what it computes for those before J beyond one forward; of the forwards of
    stages ahead, the shortest counts. Put microbatches in the order in which it takes them. If it
    is idle for D, a forward of the first takes at most D / h, one of the second D / h and what the
    backward of the first allows, and so on: a geometric series, which also holds if they are put in
    order of size.
    Then there is memory. A rank of the first stage holds what it keeps of a microbatch while that
    goes forward and back through all stages: its tokens times seconds, of all microbatches, are at
    most the memory times the step T. The product of a sum of tokens and a sum of seconds is at
    least the square of u, the sum of the documents' roots of tokens times seconds (Cauchy).
    So a microbatch costs T its overhead e and, if z is a price for memory times seconds, z u^2
    besides: at least 2 sqrt(e z) u, and (sqrt(e) - sqrt(z) u)^2 more, where the first ones, which
    the idle time keeps short, are far from what would be best. The sum of all that is linear in
    tokens, pairs and roots, and so at least its mean for some team: with memory M, T (1 + z M) is
    at least work + 2 sqrt(e z) u + D + what the first ones cost more, for any z, and for the D for
    which this is least. So is its mean with the same of the first stage, which never waits. The
    largest of some such bounds counts.
    Besides, a document goes forward and back through all stages, on all ranks of a stage at best.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_packing.costs import Pipeline, Seconds, StageCosts, StepCosts, mean_work, pairs_of

_Array = NDArray[np.float64]

_PRICES = (0.0, 0.7, 1.0, 1.2, 1.4, 2.0)
"""Prices for memory that are tried, by the one that is best for a stage that never waits."""
_WEIGHTS = (0.3, 0.5, 1.0)
"""Weights of a stage that are tried beside the first one."""
_IDLE, _FINENESS = 100, 1.05
"""Idle times that are looked at, and the next one by each."""
_MOST = 1000
"""First microbatches of which it is known how long they are, at most."""


def lower_bound(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> float:
    """Seconds that no plan of a step can beat; see Note [Bound of a step].

    Args:
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages.
        pipeline: The ranks and their memory.
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
    """Return what each of some stages takes at least in forward."""
    token, pair, microbatch, least = (
        Seconds(min(getattr(stage, name).forward for stage in stages))
        for name in ("token", "pair", "microbatch", "least")
    )
    return StageCosts(token, pair, microbatch, least)


class _Front(NamedTuple):
    """The microbatches that a stage takes first, as far as they are known.

    Attributes:
        hops: Number of stages ahead of it.
        ratio: Largest ratio of what it computes for a document, beyond a forward of a stage ahead,
            to that forward with its message.
        ahead: Seconds that the forward of any microbatch takes ahead, besides its documents.
        behind: Seconds that any microbatch takes in the stage itself, beyond those.
        root: Largest u of a document by its forward ahead with its message.
        first: Least idle time, in seconds: that of an empty microbatch.
    """

    hops: int
    ratio: float
    ahead: float
    behind: float
    root: float
    first: float

    def lengths(self, idle: float) -> Iterator[tuple[float, float]]:
        """Yield for each microbatch what those before it take at most, and it itself."""
        before = 0.0
        for number in range(_MOST):
            room = idle + self.ratio * before + number * self.behind
            most = max(0.0, room / self.hops - self.ahead)
            yield before, most
            before += most


class _Bound:
    """Bounds that know the memory; see Note [Bound of a step].

    Args:
        lengths: See `lower_bound`.
        costs: See there.
        pipeline: See there.
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
        """Yield bounds of the others, each beside the first one."""
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
                    # What a team computes ahead at least that has so much of all.
                    ahead = mean * float((forward / every).min())
                    waits = _waits(front, weight, overhead, price, ahead)
                    yield (mean + waits) / (1 + price * self._memory)

    def _of(self, token: float, pair: float) -> _Array:
        """Seconds of each document."""
        return token * self._tokens + pair * self._pairs

    def _mean(self, seconds: _Array) -> float:
        return float(seconds.sum()) / self._ranks

    def _priced(self, work: _Array, overhead: float, price: float) -> _Array:
        """Return what each document costs at least, with memory at a price."""
        return work + 2 * math.sqrt(overhead * price) * self._roots + price * self._held

    def _prices(self, work: _Array, overhead: float) -> Iterator[float]:
        """Yield prices of a token that is held for a second."""
        seconds, memory = self._mean(work), self._memory
        root = math.sqrt(overhead) * self._mean(self._roots)
        best = 0.0
        if root:
            best = math.sqrt((memory * seconds) ** 2 + 4 * memory * root**2) - memory * seconds
            best = (best / (2 * memory * root)) ** 2
        for by in _PRICES if best else (0.0,):
            yield by * best

    def _front(self, hops: int) -> tuple[_Front, _Array]:
        """Return what is known of the first microbatches; a forward of each document ahead."""
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
    """Least of idle time and of what the first microbatches cost for being short.

    Between two idle times that are looked at there is at least the idle time of the shorter, and
    what the first ones cost with the longer.

    Args:
        front: What is known of them.
        weight: Share of the stage's idle time in the bound, > 0 and <= 1.
        overhead: Seconds that each microbatch costs besides its documents.
        price: Seconds of the step for a token that is held for a second.
        ahead: Seconds that forwards of all microbatches take ahead, at least.
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
