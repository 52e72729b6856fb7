"""Best-first branch and bound: layouts in ascending order of step time. No torch.

A node of the search tree is a set of layouts with a lower bound on the seconds of their steps. The
levels below the root: a family of meshes that differ only in sharding; the family with a microbatch
size; a mesh with its microbatches and recomputation; stages placed on ranks; one layout, a leaf. A
priority queue gives the node with the least bound, which is branched into its children, so most
sets are never branched. A leaf is simulated when its bound comes up. Its last bound before that is
a critical path: the length, with its own costs, of a path through its schedule that was the longest
with the costs of another layout.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_place
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count as counter
from itertools import product
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from hp_plan.costs import modules
from hp_plan.costs.memory import padding, static_memory
from hp_plan.costs.work import Work
from hp_plan.layouts.candidate import Candidate
from hp_plan.layouts.space import Axis
from hp_plan.price.estimate import fits, plain_schedule
from hp_plan.price.prices import Prices, StagePrice, once
from hp_schedule import Path, Precedence, length
from hp_trainer.config import Config, MeshConfig, PipelineConfig, rules
from hp_trainer.layout.ranks import Layout, StageLayout
from hp_trainer.layout.schedules import KINDS, count_microbatches, placement, split_layers

_PLAINEST = PipelineConfig(schedule="1f1b", stages_per_rank=1)
_MOST_PATHS = 12
_EXACT = 1e-9
"""Relative difference below which two times are the same."""

_Branch = Callable[[], "Iterator[_Node]"]
_Node = tuple[float, "_Branch | Config"]
"""A lower bound in seconds and the function that yields the children of the node; or the seconds of
a simulated layout and its config."""


@dataclass(slots=True)
class _Steps:
    """The steps of a schedule, and critical paths through them, with the costs of some layouts."""

    order: Precedence
    paths: dict[Path, None] = field(default_factory=dict)


class _ComputeBounds(NamedTuple):
    """Lower bounds on the seconds of a step, from compute alone.

    Attributes:
        by_places: Seconds of the busiest rank, by the ranks of the stages.
        through: Seconds of one microbatch, forward and back through all stages.
    """

    by_places: Mapping[tuple[int, ...], float]
    through: float

    @property
    def busy(self) -> float:
        """Return the seconds of the busiest rank with the most even pipeline."""
        return min(self.by_places.values(), default=inf)

    @property
    def least(self) -> float:
        """Return the larger bound."""
        return max(self.busy, self.through)


class BranchAndBound:
    """Best-first branch and bound over the layouts of meshes.

    Attributes:
        smallest: Layout that needs least memory of those pruned because they do not fit; None:
            none was pruned as a leaf.
        num_priced: Number of leaves that got a bound of their own.
        num_simulated: Number of leaves whose schedules were simulated.
        is_complete: Whether the search ended before `most` leaves were simulated.

    Args:
        axes: Axes along which layouts differ.
        prices: Prices of stages.
        most: Maximum number of leaves to simulate.
    """

    def __init__(self, axes: tuple[Axis, ...], prices: Prices, *, most: int = 1 << 20) -> None:
        self.smallest: Config | None = None
        self.num_priced = self.num_simulated = 0
        self.is_complete = True
        self._axes = {axis.key: axis for axis in axes}
        self._least_bytes = float("inf")
        self._least_hopeless: tuple[float, Config | None] = float("inf"), None
        self.prices, self._most = prices, most
        self._steps: dict[object, _Steps] = {}
        self._pipelines: dict[int, list[tuple[PipelineConfig, tuple[int, ...]]]] = {}
        self._compute_bounds: dict[object, _ComputeBounds] = {}
        self._known_shares: dict[object, set[tuple[tuple[int, int], ...]]] = {}

    def by_time(self, meshes: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        """Yield the seconds of a step and the config of layouts that fit, in ascending order.

        If devices share cores, the seconds are lower bounds: steps are slower while others run.
        After `most` simulations, the layouts that are simulated already follow.
        """
        order = counter()
        queue: list[tuple[float, int, _Branch | Config]] = [
            (bound, next(order), branch) for bound, branch in self._families(meshes)
        ]
        heapify(queue)
        while queue:
            least, _, node = heappop(queue)
            if isinstance(node, Config):
                yield least, node
            elif self.num_simulated >= self._most:
                self.is_complete = False
            else:
                for bound, child in node():
                    heappush(queue, (max(least, bound), next(order), child))

    def nearest(self) -> Config | None:
        """Return the pruned layout that needs least memory; None: none was pruned."""
        if self.smallest is None and self._least_hopeless[1] is not None:
            for _, places in self._placements(self._least_hopeless[1]):
                assert callable(places)
                for _, leaf in places():
                    assert callable(leaf)
                    list(leaf())  # sets `smallest`, as it does not fit
        return self.smallest

    def _families(self, meshes: Sequence[Config]) -> Iterator[_Node]:
        """Yield families of meshes that differ only in sharding, and so compute the same.

        A token takes least compute in the largest microbatch.
        """
        families: dict[MeshConfig, list[Config]] = {}
        for mesh in meshes:
            dp = mesh.mesh.dp_replicate * mesh.mesh.dp_shard
            families.setdefault(replace(mesh.mesh, dp_replicate=dp, dp_shard=1), []).append(mesh)
        for family, members in families.items():
            # Recomputation only adds compute.
            least = min(self._repeats(members[0]), key=lambda recompute: recompute != "none")
            found = [
                _with_train(replace(members[0], mesh=family), microbatch_size=size, recompute=least)
                for size in self._choices("train.microbatch_size", members[0].train.microbatch_size)
            ]
            sizes = [
                one
                for one in found
                if one.train.global_batch_size % one.batch_unit == 0 and rules.allows_batch(one)
            ]
            if sizes:
                shortest = sizes
                if self.prices.machine.launch_seconds:  # else large ones compute logits twice
                    shortest = [max(sizes, key=lambda one: one.train.microbatch_size)]
                bound = min(self._computing(one).busy for one in shortest)
                yield bound, partial(self._sizes, sizes, members)

    def _sizes(self, sizes: Sequence[Config], members: Sequence[Config]) -> Iterator[_Node]:
        """Yield a family of meshes with each microbatch size."""
        for size in sizes:
            yield self._computing(size).least, partial(self._batches, size, members)

    def _batches(self, size: Config, members: Sequence[Config]) -> Iterator[_Node]:
        """Yield the meshes of a family with a microbatch size, without recomputation first."""
        for member in members:
            found = replace(member, train=size.train)
            if rules.allows_batch(found):
                yield self.bound_of_batch(found), partial(self._recomputations, found)

    def _recomputations(self, found: Config) -> Iterator[_Node]:
        """Yield a mesh without and with each recomputation; prune those that cannot fit."""
        yield from self._if_it_may_fit(found, 0.0)
        for recompute in self._repeats(found):
            if recompute != found.train.recompute:
                more = _with_train(found, recompute=recompute)
                yield from self._if_it_may_fit(more, self.bound_of_batch(more))

    def _if_it_may_fit(self, found: Config, bound: float) -> Iterator[_Node]:
        needed = self.least_bytes(found)
        if needed <= self.prices.machine.memory:
            yield bound, partial(self._placements, found)
        elif needed < self._least_hopeless[0]:
            self._least_hopeless = needed, found

    def least_bytes(self, config: Config) -> float:
        """Return a lower bound on the memory of the fullest rank, for all pipelines of a mesh.

        It is the mean of all ranks: of their weights, and of one microbatch, whose activations are
        in all stages when its backward begins.
        """
        stages, place = self._as_one(config)
        tokens, padded = config.microbatch_tokens, padding(config, place)
        kept = sum(stage.kept_bytes(tokens, tp=place.tp, padded=padded) for stage in stages)
        tensors = (sum(static_memory(config, stages, place)) + kept) / config.mesh.pp
        machine = self.prices.machine
        return machine.context_memory + (1 + machine.fragmentation) * tensors

    def _as_one(self, config: Config) -> tuple[tuple[Work, ...], StageLayout]:
        """Return all layers as one stage, and the ranks that would share a stage."""
        stages = modules.stages(config, self.prices.vocab_size, num_stages=1)
        return stages, StageLayout.of(config.mesh, tp=config.mesh.tp, ep=config.mesh.ep)

    def bound_of_batch(self, config: Config) -> float:
        """Return a lower bound on the seconds of a step, for all pipelines of a mesh.

        Beside compute, the busiest rank gathers and reduces at least the mean of all parameters.
        """
        stages, place = self._as_one(config)
        gathered = sum(self.prices.gather(config, stages[0], place)) / config.mesh.pp
        return max(self._computing(config).least, gathered) + self._last(config)

    def _last(self, config: Config) -> float:
        """Return a lower bound on the seconds after the pipeline: the mean of all ranks."""
        return sum(self.prices.ends(config, *self._as_one(config)).values()) / config.mesh.pp

    def _computing(self, config: Config) -> _ComputeBounds:
        """Return bounds from compute alone, for all pipelines of a mesh.

        Layers are whole: some rank has no less than the busiest one of the most even pipeline. And
        a microbatch goes forward and back through all stages.
        """
        place = self._as_one(config)[1]
        place = replace_place(place, dp_replicate=place.dp, dp_shard=1)
        key = place, config.mesh.pp, config.train.microbatch_size, config.train.recompute
        return once(self._compute_bounds, key, lambda: self._computed(config, place))

    def _computed(self, config: Config, place: StageLayout) -> _ComputeBounds:
        plainest, number = replace(config, pipeline=_PLAINEST), config.model.num_layers
        vocab_size, pp = self.prices.vocab_size, config.mesh.pp
        layers = modules.stages(plainest, vocab_size, num_stages=number)
        prices = self.prices.stages(plainest, layers, (place,) * number)
        kinds = [prices.index(price) for price in prices]  # equal layers are of one kind
        busiest = {
            stage_to_rank: max(
                _least_seconds([(prices[kind], times) for kind, times in share])
                for share in self._shares(tuple(kinds), stage_to_rank, pp)
            )
            for stage_to_rank in {places for _, places in self._possible(config)}
        }
        whole = self.prices.stages(plainest, self._as_one(plainest)[0], (place,))[0]
        times = config.train.global_batch_size / config.batch_unit
        return _ComputeBounds(
            {places: times * most for places, most in busiest.items()},
            whole.forward + whole.input_grad,
        )

    def _shares(
        self, kinds: tuple[int, ...], stage_to_rank: tuple[int, ...], pp: int
    ) -> set[tuple[tuple[int, int], ...]]:
        """Return the numbers of layers of each kind that ranks have; each combination once."""
        key = kinds, stage_to_rank
        if key not in self._known_shares:
            shares: list[Counter[int]] = [Counter() for _ in range(pp)]
            cut = split_layers(len(kinds), len(stage_to_rank))
            for rank, layers in zip(stage_to_rank, cut, strict=True):
                shares[rank].update(kinds[layer] for layer in layers)
            self._known_shares[key] = {tuple(sorted(mine.items())) for mine in shares}
        return self._known_shares[key]

    def _placements(self, found: Config) -> Iterator[_Node]:
        """Yield the pipelines of a mesh, grouped by the ranks of their stages."""
        placed: dict[tuple[tuple[int, ...], int], list[PipelineConfig]] = {}
        for pipeline, stage_to_rank in self._possible(found):
            if not is_duplicate(replace(found, pipeline=pipeline)):
                placed.setdefault((stage_to_rank, self.prices.parts(pipeline)), []).append(pipeline)
        last = self._last(found)
        for (stage_to_rank, _), pipelines in placed.items():
            bound = self._computing(found).by_places[stage_to_rank] + last
            yield bound, partial(self._leaves, found, stage_to_rank, pipelines)

    def _leaves(
        self, found: Config, stage_to_rank: tuple[int, ...], pipelines: Sequence[PipelineConfig]
    ) -> Iterator[_Node]:
        """Yield the layouts with given stages on given ranks, which differ only in schedules."""
        candidate = Candidate(self.prices, replace(found, pipeline=pipelines[0]), stage_to_rank)
        for pipeline in pipelines:
            self.num_priced += 1
            yield candidate.bound, partial(self._fitting, candidate, pipeline)
            if candidate.is_sharded and not KINDS[pipeline.schedule].splits_backward:
                yield candidate.bound_by_block, partial(self._by_block, candidate, pipeline)

    def _by_block(self, candidate: Candidate, pipeline: PipelineConfig) -> Iterator[_Node]:
        """Yield a layout that gathers block by block."""
        mesh = replace(candidate.layout.mesh, gather="block")
        if not is_duplicate(replace(candidate.layout, mesh=mesh, pipeline=pipeline)):
            yield from self._fitting(candidate.by_block, pipeline)

    def _fitting(self, candidate: Candidate, pipeline: PipelineConfig) -> Iterator[_Node]:
        """Yield a layout with its bound, if it fits."""
        layout = replace(candidate.layout, pipeline=pipeline)
        if rules.allows_pipeline(layout) and self._fits(candidate, layout):
            yield candidate.bound, partial(self._simulated, candidate, layout)

    def _fits(self, candidate: Candidate, layout: Config) -> bool:
        """Tell whether activations of microbatches under way fit on all ranks of a layout."""
        pp, number = layout.mesh.pp, count_microbatches(layout)
        walk = partial(self._walk, layout.pipeline, pp, is_sharded=candidate.is_sharded)
        # Few microbatches reach no higher peak than many, in far fewer steps.
        needed = candidate.least_needed(walk(min(number, 2 * pp)).order.peaks)
        if fits(layout, needed, self.prices.machine):
            needed = candidate.needed(walk(number).order.peaks)
        is_there = fits(layout, needed, self.prices.machine)
        if not is_there and needed < self._least_bytes:
            self._least_bytes, self.smallest = needed, layout
        return is_there

    def _simulated(
        self, candidate: Candidate, layout: Config, known: float = 0.0
    ) -> Iterator[_Node]:
        """Yield the time of a layout; before that a tighter bound, of known critical paths.

        Args:
            candidate: Layouts that share stages with this one.
            layout: Layout to simulate.
            known: Earlier bound of critical paths, in seconds.
        """
        steps = self._walk(
            layout.pipeline,
            layout.mesh.pp,
            count_microbatches(layout),
            is_sharded=candidate.is_sharded,
        )
        costs = candidate.costs(steps.order)
        least = max((length(path, costs) for path in steps.paths), default=0.0)
        if least > known * (1 + _EXACT):
            yield least + candidate.last, partial(self._simulated, candidate, layout, least)
            return
        self.num_simulated += 1
        seconds, path = steps.order.longest(costs)
        steps.paths[path] = None
        if len(steps.paths) > _MOST_PATHS:
            del steps.paths[next(iter(steps.paths))]
        yield seconds + candidate.last, layout

    def _walk(self, pipeline: PipelineConfig, pp: int, number: int, *, is_sharded: bool) -> _Steps:
        """Return the steps of a schedule with a number of microbatches."""
        key = (pipeline.schedule, pipeline.stages_per_rank, pp, number, is_sharded)
        make = partial(plain_schedule, pipeline, pp, number, is_sharded=is_sharded)
        return once(self._steps, key, lambda: _Steps(Precedence(make())))

    def _choices(self, key: str, only: object) -> Sequence[object]:
        """Return the values of an axis; the only value of a key that is none."""
        return self._axes[key].choices if key in self._axes else (only,)

    def _repeats(self, found: Config) -> Sequence[object]:
        return self._choices("train.recompute", found.train.recompute)

    def _possible(self, found: Config) -> list[tuple[PipelineConfig, tuple[int, ...]]]:
        """Return pipelines with at least a layer for each stage, and the ranks of the stages."""
        pp = found.mesh.pp
        if pp not in self._pipelines:
            names = self._choices("pipeline.schedule", found.pipeline.schedule)
            sizes = self._choices("pipeline.stages_per_rank", found.pipeline.stages_per_rank)
            possible = []
            for name, per_rank in product(names, sizes):
                pipeline = replace(found.pipeline, schedule=name, stages_per_rank=per_rank)
                kind = KINDS[pipeline.schedule]
                if kind.stages_per_rank in (0, per_rank):
                    stage_to_rank = placement(pipeline, num_ranks=pp)
                    if len(stage_to_rank) <= found.model.num_layers:
                        possible.append((pipeline, stage_to_rank))
            self._pipelines[pp] = possible
        return self._pipelines[pp]


def _least_seconds(parts: Sequence[tuple[StagePrice, int]]) -> float:
    """Return the seconds of stages, each a number of times: of device or host, and exchanges."""
    device = sum(times * price.device for price, times in parts)
    host = sum(times * price.host for price, times in parts)
    return max(device, host) + sum(times * price.exchanges for price, times in parts)


def _with_train(config: Config, **keys: object) -> Config:
    return replace(config, train=replace(config.train, **keys))


def is_duplicate(config: Config) -> bool:
    """Tell whether another layout runs the same steps in the same order."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.pp > 1:
        return pipeline.stages_per_rank == 1 and bool(KINDS[pipeline.schedule].with_one_stage)
    # A single rank never waits, but the order decides how often it gathers a stage's parameters.
    decides = Layout.of(mesh).stages[0].is_sharded and mesh.gather == "stage"
    return not decides and pipeline.schedule != "1f1b"
