"""Layouts that differ in their schedules alone, bounded and priced together. No torch."""

from collections.abc import Sequence
from functools import cached_property
from operator import mul

from msgspec.structs import replace

from hp_plan.costs import modules
from hp_plan.costs.memory import in_turn
from hp_plan.price.prices import Prices, StagePrice, aligned, costs_of, reductions
from hp_schedule import Precedence
from hp_trainer.config import Config
from hp_trainer.layout.communicators import held
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import count_microbatches

Peaks = Sequence[Sequence[Sequence[int]]]


class Candidate:
    """Layouts that differ in their schedules alone, with the same stages on the same ranks.

    Args:
        prices: Prices of stages.
        layout: One of the layouts.
        stage_to_rank: Pipeline rank of each stage.

    Attributes:
        layout: One of the layouts.
        is_sharded: Whether schedules gather the parameters of stages.
        last: Seconds after the pipeline.
    """

    def __init__(self, prices: Prices, layout: Config, stage_to_rank: tuple[int, ...]) -> None:
        self.layout = layout
        self._all, self._stage_to_rank = prices, stage_to_rank
        node_size, config = prices.machine.node_size, layout
        self._ranks = [aligned(stage, node_size) for stage in Layout.of(config.mesh).stages]
        places = [self._ranks[rank] for rank in stage_to_rank]
        self._stages = modules.stages(config, prices.vocab_size, num_stages=len(stage_to_rank))
        self.is_sharded = config.mesh.gather == "stage" and self._ranks[0].is_sharded
        self._prices = prices.stages(config, self._stages, places)
        self._mine = [
            [stage for stage, at in enumerate(stage_to_rank) if at == rank]
            for rank in range(len(self._ranks))
        ]
        self._costs: list[float] = []
        self._held = [tuple(self._stages[stage] for stage in stages) for stages in self._mine]
        ends = [prices.ends(config, *pair) for pair in {*zip(self._held, self._ranks, strict=True)}]
        self.last = sum(max(end[name] for end in ends) for name in ends[0])

    @cached_property
    def by_block(self) -> "Candidate":
        """Return the same layouts with gathers by block."""
        mesh = replace(self.layout.mesh, gather="block")
        return Candidate(self._all, replace(self.layout, mesh=mesh), self._stage_to_rank)

    @cached_property
    def bound_by_block(self) -> float:
        """Return `by_block.bound`, without making that candidate."""
        times = reductions(self.layout)
        return self._bound([price.by_block(times) for price in self._prices])

    @cached_property
    def bound(self) -> float:
        """Return a lower bound on the seconds of a step, for any order of the schedule's steps.

        Each rank computes after its first input and parameters have arrived, and then reduces
        gradients. Its compute, without weight gradients, is followed by the backward of the stages
        in front of it. Its collectives run one after the other.
        """
        return self._bound(self._prices)

    def _bound(self, prices: Sequence[StagePrice]) -> float:
        number, longest = count_microbatches(self.layout), 0.0
        before, around = [0.0], [0.0]
        for price in prices:
            before.append(before[-1] + price.forward)
            around.append(around[-1] + price.forward + price.input_grad)
        for stages in self._mine:
            mine = [prices[stage] for stage in stages]
            ahead = [price.gathered for price in mine]
            after = [price.reduced for price in mine]
            first = min(stages)
            busy = number * sum(price.full for price in mine)
            waited_for = busy - number * sum(price.weight_grad for price in mine)
            longest = max(
                longest,
                max(before[first], min(ahead)) + busy + min(after),
                around[first] + waited_for,
                sum(ahead) + sum(after),
            )
        return longest + self.last

    def needed(self, peaks: Peaks) -> float:
        """Return the bytes of the fullest rank, with peaks of `hp_schedule.Precedence`."""
        kept = [price.kept for price in self._prices]
        return self._most([max(sum(map(mul, kept, time)) for time in times) for times in peaks])

    def least_needed(self, peaks: Peaks) -> float:
        """Return a lower bound on `needed` of any schedule with at least these peaks."""
        kept = [[self._prices[stage].kept for stage in stages] for stages in self._mine]
        return self._most(
            [
                max(sum(mine), min(mine) * max(map(sum, times)))
                for mine, times in zip(kept, peaks, strict=True)
            ]
        )

    def _most(self, activations: Sequence[float]) -> float:
        share = 1 + self._all.machine.fragmentation
        pairs = zip(self._fixed, activations, strict=True)
        return max(fixed + share * max(0.0, held - turn) for (fixed, turn), held in pairs)

    @cached_property
    def _fixed(self) -> list[tuple[int, int]]:
        """Return the bytes of each rank without activations, and those that replace activations."""
        config, prices = self.layout, self._all
        firsts = [stage.first for stage in Layout.of(config.mesh).stages]
        known: dict[object, tuple[int, int]] = {}
        found = []
        for stages, place, rank in zip(self._held, self._ranks, firsts, strict=True):
            nccl = held(config, rank, node_size=self._all.machine.node_size)
            key = (stages, place, nccl)
            if key not in known:
                total = prices.memory(config, stages, place, rank=rank, activations=0.0).total
                known[key] = total, in_turn(config, stages, place)
            found.append(known[key])
        return found

    def costs(self, order: Precedence) -> list[float]:
        """Return the costs of the steps of a schedule, which are the same for all schedules."""
        if not self._costs:
            config, machine = self.layout, self._all.machine
            self._costs = order.flat(costs_of(config, machine, self._prices, edges=order.edges))
        return self._costs
