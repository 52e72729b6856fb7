"""One batch of documents planned by all rules: seconds of a step, memory and exchanges."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_context import DealCost
from hp_context.batch.deal_cost import Piece, Work
from hp_packing.costs import Pipeline, Seconds, StepCosts, pairs_of, pure_work, slowest
from hp_packing.generators import stream
from hp_packing.planning.partition import partition
from hp_packing.planning.planner import Planner
from hp_packing.pricing import price, simulated, stage_costs
from hp_packing.proof import prove
from hp_schedule import Timeline, one_f_one_b, search, simulate

PLANNED = "planned"
_EFFORT = 4
"""Schedules searched for static packs."""


@dataclass(frozen=True, slots=True)
class RulePrice:
    """The price of a step by one rule.

    Attributes:
        name: Name of the rule.
        seconds: Seconds of the slowest group of ranks.
        pure: Seconds of pure work, if it could be spread evenly over ranks.
        tokens: Most tokens whose activations a rank keeps at once.
        fetched: Keys that ranks of a stage fetch from others in forward, in one layer.
        bound: Lower bound in seconds of any schedule of the microbatches, if one was searched.
    """

    name: str
    seconds: float
    pure: float
    tokens: float
    fetched: float
    bound: float = 0.0

    @property
    def factor(self) -> float:
        """Return the seconds divided by those of pure work."""
        return self.seconds / self.pure


@dataclass(frozen=True, slots=True)
class Comparison:
    """A batch by all rules.

    Attributes:
        rows: Prices by each rule; the plan is the last.
        pure: Seconds of pure work.
        bound: Lower bound in seconds of any plan.
        searched_bound: Lower bound in seconds of any schedule of static packs.
        imbalance: Imbalance of attention in the plan, see `StepPrice`.
        cpu_seconds: CPU seconds of planning.
        problems: Reasons why the plan would not run; empty for a proven plan.
        timeline: Timeline of the slowest team.
    """

    rows: tuple[RulePrice, ...]
    pure: float
    bound: float
    searched_bound: float
    imbalance: float
    cpu_seconds: float
    problems: tuple[str, ...]
    timeline: Timeline

    @property
    def by_name(self) -> Mapping[str, RulePrice]:
        """Return the prices by the names of their rules."""
        return {row.name: row for row in self.rows}


def compare(lengths: Sequence[int], planner: Planner, *, pack: int, degree: int) -> Comparison:
    """Price a batch by all rules.

    Args:
        lengths: Tokens of each document of the batch.
        planner: Planner of the steps.
        pack: Tokens of a pack by other rules.
        degree: Ranks that share a pack.
    """
    costs, pipeline = planner.costs, planner.pipeline
    rivals = _Rivals(lengths, costs, pipeline, pack=pack, degree=degree)
    searched = rivals.searched(effort=_EFFORT)
    others = [rivals.static(), searched, rivals.megatron(), rivals.greedy()]
    if planner.prepared:  # templates, which a run searches once
        planner.plan([length + 1 for length in lengths])
    began = time.thread_time()
    plan = planner.plan(lengths)
    cpu_seconds = time.thread_time() - began
    found = price(plan, lengths, costs, pipeline)
    planned = RulePrice(PLANNED, found.seconds, found.pure, found.tokens, found.fetched)
    return Comparison(
        rows=(*(each for each in others if each is not None), planned),
        pure=found.pure,
        bound=found.bound,
        searched_bound=searched.bound,
        imbalance=found.imbalance,
        cpu_seconds=cpu_seconds,
        problems=prove(plan, lengths, costs, pipeline),
        timeline=max(simulated(plan, lengths, costs), key=lambda run: run.makespan).timeline,
    )


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A microbatch by another rule: seconds in each stage, tokens of a rank, fetched keys."""

    seconds: tuple[Seconds, ...]
    tokens: int
    fetched: float


class _Rivals:
    """Prices of a batch by other rules.

    All rules plan for the same ranks. Static packs: the stream of documents is cut wherever a pack
    is full, so that documents that are cut have less attention than whole ones; packs go round the
    data-parallel groups, in each of which context-parallel ranks share every document of a pack
    evenly, by head and tail. Greedy balance: whole documents are put into as many packs, the most
    expensive first. Megatron's rule (its hybrid context parallelism, which has no pipeline): a
    document gets 2^ceil(log2(length / longest of a rank)) ranks, its work counts as length^2 /
    ranks, and microbatches over all ranks are filled by that; here each microbatch goes through the
    pipeline under 1F1B, and each rank's part of one fits its memory.

    Args:
        lengths: Tokens of each document of the batch.
        costs: Costs of the stages.
        pipeline: Ranks and their memory.
        pack: Tokens of a pack.
        degree: Context-parallel ranks of a pack.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        costs: StepCosts,
        pipeline: Pipeline,
        *,
        pack: int,
        degree: int,
    ) -> None:
        self._lengths, self._pure = lengths, pure_work(lengths, costs, pipeline).total
        self._costs, self._pipeline, self._pack, self._degree = costs, pipeline, pack, degree
        self._work = Work(costs.windows)
        self._groups = pipeline.ranks // degree

    def static(self) -> RulePrice:
        """Price static packs under 1F1B, in the order of the stream."""
        return self._priced("static packs, 1F1B", self._static_packs())

    def searched(self, *, effort: int) -> RulePrice:
        """Price static packs with a searched schedule, in any order."""
        return self._priced("static packs, searched", self._static_packs(), effort=effort)

    def greedy(self) -> RulePrice | None:
        """Price whole documents in packs of equal cost under 1F1B; None: no such packs fit."""
        lengths, every = self._lengths, pairs_of(self._lengths, self._costs)
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

    def megatron(self) -> RulePrice:
        """Price Megatron's rule, with every microbatch over all ranks."""
        largest = math.ceil(self._pack / self._degree)  # so that a whole pack fits its ranks
        left = sorted(self._lengths, reverse=True)
        microbatches = []
        while left:
            taken, left = _filled(left, ranks=self._pipeline.ranks, largest=largest)
            microbatches.append(self._by_rank(taken))
        return self._priced("Megatron's rule, 1F1B", [microbatches])

    def _static_packs(self) -> list[Sequence[_Microbatch]]:
        return self._in_turn([self._shared(p) for p in stream(self._lengths, seq_len=self._pack)])

    def _in_turn(self, packs: Sequence[_Microbatch]) -> list[Sequence[_Microbatch]]:
        """Return the packs of each group."""
        return [packs[group :: self._groups] for group in range(self._groups)]

    def _shared(self, pack: Sequence[int]) -> _Microbatch:
        """Return a pack each of whose documents all ranks of a group share, by head and tail."""
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
        """Return the keys that a rank fetches of a document that ranks share by head and tail."""
        if ranks == 1:
            return 0.0
        cuts = [i * length // (2 * ranks) for i in range(2 * ranks + 1)]
        places = (rank, 2 * ranks - 1 - rank)
        return self._work.fetched([Piece(0, cuts[i], cuts[i + 1]) for i in places])

    def _by_rank(self, taken: Sequence[tuple[int, Sequence[int]]]) -> _Microbatch:
        """Return a microbatch whose documents have ranks of their own."""
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
    ) -> RulePrice:
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
        return RulePrice(name, seconds, self._pure, tokens, fetched, bound)


def _filled(
    lengths: Sequence[int], *, ranks: int, largest: int
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Fill one microbatch over all ranks by Megatron's rule.

    Returns:
        Documents of the microbatch with their ranks, and the lengths that are left, longest first.
    """
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
