"""Other rules for the same documents, as plans of the same ranks: to be priced beside ours.

Static packs: the stream of documents is cut wherever a pack is full, so that its documents have
less attention than they would have whole; packs go round the data-parallel groups, in each of which
context-parallel ranks share every document of a pack evenly (head and tail of each). Greedy
balance: whole documents into as many packs by cost, sorted. Megatron's rule (its hybrid context
parallelism, which has no pipeline): a document gets 2^ceil(log2(length / longest of a rank)) ranks,
its work counts as length^2 / ranks, and microbatches over all ranks are filled by that; here each
goes through the pipeline under 1F1B, and what a rank has in one fits its memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_context import DealCost
from hp_context.batch.deal_cost import Piece, Work
from hp_packing.costs import Seconds, StepCosts, slowest
from hp_packing.generators import stream
from hp_packing.partition import partition
from hp_packing.pricing import stage_costs
from hp_packing.work import Pipeline, pairs_of
from hp_schedule import one_f_one_b, search, simulate


@dataclass(frozen=True, slots=True)
class RivalPrice:
    """The price of a step by another rule.

    Attributes:
        name: Name of the rule.
        seconds: Seconds of its slowest group of ranks.
        bound: Below which no schedule of its microbatches can be, where one was searched.
        tokens: Most tokens that a rank holds at once.
        fetched: Keys that ranks of a stage fetch from others, in forward.
    """

    name: str
    seconds: float
    bound: float
    tokens: float
    fetched: float


@dataclass(frozen=True, slots=True)
class _Microbatch:
    seconds: tuple[Seconds, ...]
    tokens: int
    fetched: float


class Rivals:
    """Prices plans by the rules of others.

    Args:
        costs: Costs of the stages.
        pipeline: The ranks and their memory.
        pack: Tokens of a pack.
        degree: Context-parallel ranks of a pack.
    """

    def __init__(self, costs: StepCosts, pipeline: Pipeline, *, pack: int, degree: int) -> None:
        self._costs, self._pipeline, self._pack, self._degree = costs, pipeline, pack, degree
        self._work = Work(costs.windows)
        self._groups = pipeline.ranks // degree

    def static(self, lengths: Sequence[int]) -> RivalPrice:
        """Static packs under 1F1B, in the order of the stream."""
        return self._priced("static packs, 1F1B", self._static_packs(lengths))

    def searched(self, lengths: Sequence[int], *, effort: int) -> RivalPrice:
        """Static packs with a searched schedule, which may take them in any order it finds."""
        return self._priced("static packs, searched", self._static_packs(lengths), effort=effort)

    def greedy(self, lengths: Sequence[int]) -> RivalPrice | None:
        """Whole documents into packs of equal cost, the dearest first; 1F1B. None: no such."""
        every = pairs_of(lengths, self._costs)
        stage = self._costs.busiest(sum(lengths), sum(every))
        work = [stage.pure(*each).total for each in zip(lengths, every, strict=True)]
        fewest = math.ceil(sum(lengths) / self._pack / self._groups)
        for count in range(fewest * self._groups, 2 * fewest * self._groups + 1, self._groups):
            parts = partition(work, lengths, [1 / count] * count, longest=self._pack)
            if parts is not None:
                break
        else:
            return None
        parts.sort(key=lambda part: -sum(work[i] for i in part))
        packs = [self._shared([lengths[i] for i in part]) for part in parts]
        return self._priced("greedy balance, 1F1B", self._in_turn(packs))

    def megatron(self, lengths: Sequence[int]) -> RivalPrice:
        """Megatron's rule, every microbatch over all ranks."""
        largest = math.ceil(self._pack / self._degree)  # so that a whole pack has a place
        left = sorted(lengths, reverse=True)
        microbatches = []
        while left:
            taken, left = _filled(left, ranks=self._pipeline.ranks, largest=largest)
            microbatches.append(self._by_rank(taken))
        return self._priced("Megatron's rule, 1F1B", [microbatches])

    def _static_packs(self, lengths: Sequence[int]) -> list[Sequence[_Microbatch]]:
        return self._in_turn([self._shared(p) for p in stream(lengths, seq_len=self._pack)])

    def _in_turn(self, packs: Sequence[_Microbatch]) -> list[Sequence[_Microbatch]]:
        """The packs of each group."""
        return [packs[group :: self._groups] for group in range(self._groups)]

    def _shared(self, pack: Sequence[int]) -> _Microbatch:
        """A pack every document of which all ranks share, head and tail each."""
        ranks = self._degree
        tokens = sum(pack) / ranks
        pairs = sum(pairs_of(pack, self._costs)) / ranks
        fetched = max(
            sum(self._fetched(length, ranks, rank) for length in pack) for rank in range(ranks)
        )
        cost = DealCost((pairs,), (fetched,))
        seconds = self._costs.of_parts([math.ceil(tokens)], cost)
        return _Microbatch(seconds, math.ceil(tokens), fetched * ranks)

    def _fetched(self, length: int, ranks: int, rank: int) -> float:
        """Keys that a rank of those that share a document, head and tail each, fetches."""
        if ranks == 1:
            return 0.0
        cuts = [i * length // (2 * ranks) for i in range(2 * ranks + 1)]
        places = (rank, 2 * ranks - 1 - rank)
        return self._work.fetched([Piece(0, cuts[i], cuts[i + 1]) for i in places])

    def _by_rank(self, taken: Sequence[tuple[int, Sequence[int]]]) -> _Microbatch:
        """A microbatch in which documents have ranks of their own."""
        ranks = self._pipeline.ranks
        tokens, pairs, fetched = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        for length, members in taken:
            work = self._work.before(length) / len(members)
            for place, rank in enumerate(members):
                tokens[rank] += length / len(members)
                pairs[rank] += work
                fetched[rank] += self._fetched(length, len(members), place)
        sizes = [math.ceil(each) for each in tokens]
        cost = DealCost(tuple(pairs), tuple(fetched))
        return _Microbatch(self._costs.of_parts(sizes, cost), max(sizes), sum(fetched))

    def _priced(
        self, name: str, groups: Sequence[Sequence[_Microbatch]], *, effort: int = 0
    ) -> RivalPrice:
        seconds, bound, tokens = 0.0, 0.0, 0.0
        stages = self._pipeline.num_stages
        busy = [group for group in groups if group]  # there may be fewer packs than groups
        # The slowest first.
        for group in sorted(busy, key=lambda g: -sum(slowest(each.seconds) for each in g)):
            costs = stage_costs(
                [each.seconds for each in group],
                [each.tokens for each in group],
                message=self._costs.message,
                num_stages=stages,
            )
            if effort:
                found = search(
                    costs,
                    num_ranks=stages,
                    num_microbatches=len(group),
                    virtual=(1,),
                    memory_limit=float(self._pipeline.tokens),
                    num_candidates=effort,
                )
                schedule = found.schedule
                bound = max(bound, found.lower_bound)
            else:
                schedule = one_f_one_b(stages, num_microbatches=len(group))
            run = simulate(schedule, costs)
            seconds = max(seconds, run.makespan)
            tokens = max(tokens, *run.peak_activations)
        fetched = sum(each.fetched for group in groups for each in group)
        return RivalPrice(name, seconds, bound, tokens, fetched)


def _filled(
    lengths: Sequence[int], *, ranks: int, largest: int
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Fill one microbatch over all ranks by Megatron's rule; what is left, longest first."""
    load, room = [0.0] * ranks, [largest] * ranks
    taken: list[tuple[int, list[int]]] = []
    left: list[int] = []
    for length in lengths:
        needed = min(ranks, max(1, 2 ** math.ceil(math.log2(length / largest))))
        share = -(-length // needed)
        starts = range(0, ranks - needed + 1, needed)
        free = [s for s in starts if min(room[s : s + needed]) >= share]
        if not free:
            left.append(length)
            continue
        start = min(free, key=lambda s: max(load[s : s + needed]))
        members = list(range(start, start + needed))
        for rank in members:
            load[rank] += length * length / needed
            room[rank] -= share
        taken.append((length, members))
    return taken, left
