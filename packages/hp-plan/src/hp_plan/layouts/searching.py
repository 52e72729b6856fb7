"""All layouts of some meshes in the order of their times, without a look at most of them. No torch.

Meshes that differ in what is sharded stand for each other, a mesh with microbatches of a size for
all its pipelines, and stages at their places for all orders of their steps. Each has a time that
nothing it stands for undercuts, and is only looked into when that is the least of all. The last
bound of a layout is that of paths: what was the longest way through the steps of its schedule with
other costs takes no longer than the longest with its own.
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
from hp_plan.price.estimate import plain_schedule
from hp_plan.price.gather import fits
from hp_plan.price.prices import Prices, StagePrice
from hp_schedule import Path, Precedence, length
from hp_trainer.config import Config, MeshConfig, PipelineConfig, rules
from hp_trainer.config.space import Axis
from hp_trainer.layout.ranks import Layout, StageLayout
from hp_trainer.layout.schedules import KINDS, count_microbatches, placement, split_layers

_PLAINEST = PipelineConfig(schedule="1f1b", stages_per_rank=1)
_MOST_PATHS = 12
_EXACT = 1e-9
"""Share of a time below which two are the same."""

_Narrower = Callable[[], "Iterator[_Found]"]
_Found = tuple[float, "_Narrower | Config"]
"""A bound, and what makes that of which it is into less; a config: it is a layout's time."""


@dataclass(slots=True)
class _Steps:
    """The steps of a schedule, and longest paths through them that were found."""

    order: Precedence
    paths: dict[Path, None] = field(default_factory=dict)


class _Computing(NamedTuple):
    """Seconds of a step that nothing of what is computed undercuts.

    Attributes:
        by_places: For the busiest rank, by the places of the stages of pipelines.
        through: Seconds of one microbatch, forward and back.
    """

    by_places: Mapping[tuple[int, ...], float]
    through: float

    @property
    def busy(self) -> float:
        """With the most even pipeline."""
        return min(self.by_places.values(), default=inf)

    @property
    def least(self) -> float:
        """Of both."""
        return max(self.busy, self.through)


class Search:
    """Layouts of meshes in the order of their times.

    Attributes:
        smallest: The layout that needs least of those left out since they do not fit into a
            device's memory.
        num_priced: Layouts that were told apart by a bound of their own.
        num_laid_out: Those whose schedules were walked step by step.
        is_complete: Whether no more were to be laid out than may be.

    Args:
        axes: Axes along which layouts differ.
        prices: Prices them.
        most: Schedules to walk at most.
    """

    def __init__(self, axes: tuple[Axis, ...], prices: Prices, *, most: int = 1 << 20) -> None:
        self.smallest: Config | None = None
        self.num_priced = self.num_laid_out = 0
        self.is_complete = True
        self._axes = {axis.key: axis for axis in axes}
        self._least_bytes = float("inf")
        self._hopeless: tuple[float, Config | None] = float("inf"), None
        self.prices, self._most = prices, most
        self._steps: dict[object, _Steps] = {}
        self._pipelines: dict[int, list[tuple[PipelineConfig, tuple[int, ...]]]] = {}
        self._computes: dict[object, _Computing] = {}
        self._known_shares: dict[object, set[tuple[tuple[int, int], ...]]] = {}

    def by_time(self, meshes: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        """Yield times of a step and layouts that fit, in ascending order.

        Where devices share cores, what is yielded are bounds: their steps are slower while others
        run. At the end of what may be laid out, those follow that are laid out already.
        """
        order = counter()
        waiting: list[tuple[float, int, _Narrower | Config]] = [
            (bound, next(order), narrower) for bound, narrower in self._families(meshes)
        ]
        heapify(waiting)
        while waiting:
            least, _, found = heappop(waiting)
            if isinstance(found, Config):
                yield least, found
            elif self.num_laid_out >= self._most:
                self.is_complete = False
            else:
                for bound, narrower in found():
                    heappush(waiting, (max(least, bound), next(order), narrower))

    def nearest(self) -> Config | None:
        """The layout that lacks least of those that do not fit, of those looked at."""
        if self.smallest is None and self._hopeless[1] is not None:
            for _, places in self._of_pipelines(self._hopeless[1]):
                assert callable(places)
                for _, narrower in places():
                    assert callable(narrower)
                    list(narrower())  # finds that it does not fit
        return self.smallest

    def _families(self, meshes: Sequence[Config]) -> Iterator[_Found]:
        """Meshes in families: what they share out, they share out alike, whatever is sharded.

        A microbatch takes them equally long, and a token of one takes least where that is largest.
        """
        families: dict[MeshConfig, list[Config]] = {}
        for mesh in meshes:
            dp = mesh.mesh.dp_replicate * mesh.mesh.dp_shard
            families.setdefault(replace(mesh.mesh, dp_replicate=dp, dp_shard=1), []).append(mesh)
        for family, members in families.items():
            # What is computed again comes on top.
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
                if self.prices.machine.launch_seconds:  # else logits of large ones are made twice
                    shortest = [max(sizes, key=lambda one: one.train.microbatch_size)]
                bound = min(self._computing(one).busy for one in shortest)
                yield bound, partial(self._sizes, sizes, members)

    def _sizes(self, sizes: Sequence[Config], members: Sequence[Config]) -> Iterator[_Found]:
        """A family of meshes with microbatches of each size."""
        for size in sizes:
            yield self._computing(size).least, partial(self._batches, size, members)

    def _batches(self, size: Config, members: Sequence[Config]) -> Iterator[_Found]:
        """The meshes of a family with microbatches of a size, first with all that they keep."""
        for member in members:
            found = replace(member, train=size.train)
            if rules.allows_batch(found):
                yield self.bound_of_batch(found), partial(self._repeating, found)

    def _repeating(self, found: Config) -> Iterator[_Found]:
        """The same microbatches, and those with something computed again; those that may fit."""
        yield from self._if_it_may_fit(found, 0.0)
        for recompute in self._repeats(found):
            if recompute != found.train.recompute:
                more = _with_train(found, recompute=recompute)
                yield from self._if_it_may_fit(more, self.bound_of_batch(more))

    def _if_it_may_fit(self, found: Config, bound: float) -> Iterator[_Found]:
        needed = self.least_bytes(found)
        if needed <= self.prices.machine.memory:
            yield bound, partial(self._of_pipelines, found)
        elif needed < self._hopeless[0]:
            self._hopeless = needed, found

    def least_bytes(self, config: Config) -> float:
        """Return what the rank that needs most needs at least, with all pipelines of a mesh.

        That is the mean of what all need of weights, and to keep one microbatch, which all of its
        stages do when its backward begins.
        """
        stages, place = self._as_one(config)
        tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
        padded = padding(config, place)
        kept = sum(stage.kept_bytes(tokens, tp=place.tp, padded=padded) for stage in stages)
        tensors = (sum(static_memory(config, stages, place)) + kept) / config.mesh.pp
        machine = self.prices.machine
        return machine.context_memory + (1 + machine.fragmentation) * tensors

    def _as_one(self, config: Config) -> tuple[tuple[Work, ...], StageLayout]:
        """All layers as one stage, and the ranks that would share it in a pipeline."""
        stages = modules.stages(config, self.prices.vocab_size, num_stages=1)
        return stages, StageLayout.of(config.mesh, tp=config.mesh.tp, ep=config.mesh.ep)

    def bound_of_batch(self, config: Config) -> float:
        """Of all pipelines of a mesh with microbatches of a size.

        Besides what they compute, a rank gathers and reduces the mean of all parameters at least.
        """
        stages, place = self._as_one(config)
        gathered = sum(self.prices.gather(config, stages[0], place)) / config.mesh.pp
        return max(self._computing(config).least, gathered) + self._last(config)

    def _last(self, config: Config) -> float:
        """Seconds behind the pipeline, of which each rank takes the mean of all at least."""
        return sum(self.prices.ends(config, *self._as_one(config)).values()) / config.mesh.pp

    def _computing(self, config: Config) -> _Computing:
        """Say what all pipelines of a mesh compute with microbatches of a size, if no rank waits.

        Layers are not cut: some rank has no less than the busiest one of the most even pipeline.
        And a microbatch goes forward and back through all stages.
        """
        place = self._as_one(config)[1]
        place = replace_place(place, dp_replicate=place.dp, dp_shard=1)
        key = place, config.mesh.pp, config.train.microbatch_size, config.train.recompute
        if key not in self._computes:
            self._computes[key] = self._computed(config, place)
        return self._computes[key]

    def _computed(self, config: Config, place: StageLayout) -> _Computing:
        plainest, number = replace(config, pipeline=_PLAINEST), config.model.num_layers
        vocab_size, pp = self.prices.vocab_size, config.mesh.pp
        layers = modules.stages(plainest, vocab_size, num_stages=number)
        prices = self.prices.stages(plainest, layers, (place,) * number)
        kinds = [prices.index(price) for price in prices]  # of layers that are alike
        busiest = {
            stage_to_rank: max(
                _least_of([(prices[kind], times) for kind, times in held])
                for held in self._shares(tuple(kinds), stage_to_rank, pp)
            )
            for stage_to_rank in {places for _, places in self._possible(config)}
        }
        whole = self.prices.stages(plainest, self._as_one(plainest)[0], (place,))[0]
        times = config.train.global_batch_size / config.batch_unit
        return _Computing(
            {places: times * most for places, most in busiest.items()},
            whole.forward + whole.input_grad,
        )

    def _shares(
        self, kinds: tuple[int, ...], stage_to_rank: tuple[int, ...], pp: int
    ) -> set[tuple[tuple[int, int], ...]]:
        """Return what ranks have of layers of each kind; each combination once."""
        key = kinds, stage_to_rank
        if key not in self._known_shares:
            held: list[Counter[int]] = [Counter() for _ in range(pp)]
            cut = split_layers(len(kinds), len(stage_to_rank))
            for rank, layers in zip(stage_to_rank, cut, strict=True):
                held[rank].update(kinds[layer] for layer in layers)
            self._known_shares[key] = {tuple(sorted(mine.items())) for mine in held}
        return self._known_shares[key]

    def _of_pipelines(self, found: Config) -> Iterator[_Found]:
        """The pipelines of a mesh with microbatches of one size, by where their stages are."""
        placed: dict[tuple[tuple[int, ...], int], list[PipelineConfig]] = {}
        for pipeline, stage_to_rank in self._possible(found):
            if not is_repeated(replace(found, pipeline=pipeline)):
                placed.setdefault((stage_to_rank, self.prices.parts(pipeline)), []).append(pipeline)
        last = self._last(found)
        for (stage_to_rank, _), pipelines in placed.items():
            bound = self._computing(found).by_places[stage_to_rank] + last
            yield bound, partial(self._of_places, found, stage_to_rank, pipelines)

    def _of_places(
        self, found: Config, stage_to_rank: tuple[int, ...], pipelines: Sequence[PipelineConfig]
    ) -> Iterator[_Found]:
        """Pipelines that have the same stages, in parts that cost the same, at the same places."""
        candidate = Candidate(self.prices, replace(found, pipeline=pipelines[0]), stage_to_rank)
        for pipeline in pipelines:
            self.num_priced += 1
            yield candidate.bound, partial(self._fitting, candidate, pipeline)
            if candidate.is_sharded and not KINDS[pipeline.schedule].splits_backward:
                yield candidate.bound_by_block, partial(self._by_block, candidate, pipeline)

    def _by_block(self, candidate: Candidate, pipeline: PipelineConfig) -> Iterator[_Found]:
        """A layout that gathers block by block."""
        mesh = replace(candidate.layout.mesh, gather="block")
        if not is_repeated(replace(candidate.layout, mesh=mesh, pipeline=pipeline)):
            yield from self._fitting(candidate.by_block, pipeline)

    def _fitting(self, candidate: Candidate, pipeline: PipelineConfig) -> Iterator[_Found]:
        """A layout, if it fits."""
        layout = replace(candidate.layout, pipeline=pipeline)
        if rules.allows_pipeline(layout) and self._fits(candidate, layout):
            yield candidate.bound, partial(self._timed, candidate, layout)

    def _fits(self, candidate: Candidate, layout: Config) -> bool:
        """Tell whether a layout's ranks hold what is under way."""
        pp, number = layout.mesh.pp, count_microbatches(layout)
        walk = partial(self._walk, layout.pipeline, pp, is_sharded=candidate.is_sharded)
        # With few microbatches there are no more at once, and far fewer steps.
        needed = candidate.least_needed(walk(min(number, 2 * pp)).order.peaks)
        if fits(layout, needed, self.prices.machine):
            needed = candidate.needed(walk(number).order.peaks)
        is_there = fits(layout, needed, self.prices.machine)
        if not is_there and needed < self._least_bytes:
            self._least_bytes, self.smallest = needed, layout
        return is_there

    def _timed(self, candidate: Candidate, layout: Config, known: float = 0.0) -> Iterator[_Found]:
        """The time of a layout; or a better bound, of paths that were longest for others."""
        steps = self._walk(
            layout.pipeline,
            layout.mesh.pp,
            count_microbatches(layout),
            is_sharded=candidate.is_sharded,
        )
        costs = candidate.costs(steps.order)
        least = max((length(path, costs) for path in steps.paths), default=0.0)
        if least > known * (1 + _EXACT):
            yield least + candidate.last, partial(self._timed, candidate, layout, least)
            return
        self.num_laid_out += 1
        seconds, path = steps.order.longest(costs)
        steps.paths[path] = None
        if len(steps.paths) > _MOST_PATHS:
            del steps.paths[next(iter(steps.paths))]
        yield seconds + candidate.last, layout

    def _walk(self, pipeline: PipelineConfig, pp: int, number: int, *, is_sharded: bool) -> _Steps:
        """The steps of a schedule with a number of microbatches."""
        key = (pipeline.schedule, pipeline.stages_per_rank, pp, number, is_sharded)
        if key not in self._steps:
            schedule = plain_schedule(pipeline, pp, number, is_sharded=is_sharded)
            self._steps[key] = _Steps(Precedence(schedule))
        return self._steps[key]

    def _choices(self, key: str, only: object) -> Sequence[object]:
        """Values of an axis; where it is none, the only one."""
        return self._axes[key].choices if key in self._axes else (only,)

    def _repeats(self, found: Config) -> Sequence[object]:
        return self._choices("train.recompute", found.train.recompute)

    def _possible(self, found: Config) -> list[tuple[PipelineConfig, tuple[int, ...]]]:
        """Pipelines that have a layer for each stage, and where these are."""
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


def _least_of(parts: Sequence[tuple[StagePrice, int]]) -> float:
    """Seconds of parts of a stage, each so many times: of the device or its host, and exchanges."""
    device = sum(times * price.device for price, times in parts)
    host = sum(times * price.host for price, times in parts)
    return max(device, host) + sum(times * price.exchanges for price, times in parts)


def _with_train(config: Config, **keys: object) -> Config:
    return replace(config, train=replace(config.train, **keys))


def is_repeated(config: Config) -> bool:
    """Tell whether another layout runs the very same steps in the very same order."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.pp > 1:
        return pipeline.stages_per_rank == 1 and bool(KINDS[pipeline.schedule].with_one_stage)
    # One rank waits for nobody; but the order decides how often it gathers a stage's parameters.
    decides = Layout.of(mesh).stages[0].is_sharded and mesh.gather == "stage"
    return not decides and pipeline.schedule != "1f1b"
