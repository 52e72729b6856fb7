"""All layouts of some meshes in the order of their times, without a look at most of them. No torch.

Layouts are parts of larger and larger sets: those of a pipeline's stages, of a size of microbatches,
of a mesh. Each set has a time that none of its layouts undercuts, and is only looked into when that
is the least of all. Of a layout the last bound but one is that of paths: whatever was the longest
way through the steps of its schedule for another layout takes that long here, or less than the
longest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import count as counter
from itertools import product
from operator import mul

from msgspec.structs import replace

from hp_schedule import Path, Precedence, length
from hp_train.config import Config, PipelineConfig, rules
from hp_train.config.space import Axis, with_keys
from hp_train.costs import modules
from hp_train.costs.machine import Machine
from hp_train.costs.work import Work
from hp_train.layout.ranks import Layout, StageLayout
from hp_train.layout.schedules import KINDS, count_microbatches, placement
from hp_train.layout.communicators import held
from hp_train.plan.estimate import cores_of, costs_of, plain_schedule, priced
from hp_train.plan.prices import Prices, StagePrice, aligned
from hp_train.plan.traffic import Spread

PER_MICROBATCH = ("train.microbatch_size", "train.recompute")
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
        machine: Prices them.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: Where the experts of a token are.
        most: Schedules to walk at most.
    """

    def __init__(
        self,
        axes: tuple[Axis, ...],
        machine: Machine,
        vocab_size: int,
        *,
        spread: Spread,
        most: int = 1 << 20,
    ) -> None:
        self.smallest: Config | None = None
        self.num_priced = self.num_laid_out = 0
        self.is_complete = True
        self._axes, self.machine, self._most = {axis.key: axis for axis in axes}, machine, most
        self.vocab_size, self._least_bytes = vocab_size, float("inf")
        self.prices = Prices(machine, spread)
        self._steps: dict[object, _Steps] = {}
        self._pipelines: dict[int, list[tuple[PipelineConfig, tuple[int, ...]]]] = {}

    def by_time(self, meshes: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        """Yield times of a step and layouts that fit, in ascending order.

        Where devices share cores, what is yielded are bounds: their steps are slower while others
        run. At the end of what may be laid out, those follow that are laid out already.
        """
        order = counter()
        waiting: list[tuple[float, int, _Narrower | Config]] = [
            (self.bound_of_mesh(mesh), next(order), partial(self._batches, mesh)) for mesh in meshes
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

    def bound_of_mesh(self, mesh: Config) -> float:
        """Of all layouts of a mesh: the mean rank computes its share in one microbatch."""
        size = max(1, mesh.train.global_batch_size // Layout.of(mesh.mesh).dp)
        train = replace(mesh.train, microbatch_size=size, recompute="none")
        return self._least_mean(replace(mesh, train=train))

    def _least_mean(self, config: Config) -> float:
        """Of all pipelines of a mesh with microbatches of a size.

        Each rank takes the mean of all at least, if it never waits; and a stage that is cut takes
        no less than the whole.
        """
        config = replace(config, pipeline=_PLAINEST)
        mesh = config.mesh
        stages = modules.stages(config, self.vocab_size, num_stages=1)
        place = StageLayout.of(mesh, tp=mesh.tp, ep=mesh.ep)
        price = self.priced(config, stages, (place,))[0]
        busy = max(count_microbatches(config) * price.full, 2 * price.sharded)
        return (busy + sum(self.prices.ends(config, stages, place).values())) / mesh.pp

    def _batches(self, mesh: Config) -> Iterator[_Found]:
        """What a mesh is made into first: microbatches of all sizes, kept or computed again."""
        varied = [self._axes[key] for key in PER_MICROBATCH if key in self._axes]
        for values in product(*(axis.choices for axis in varied)):
            keys = {axis.key: value for axis, value in zip(varied, values, strict=True)}
            found = with_keys(mesh, keys)
            if found.train.global_batch_size % found.batch_unit == 0 and rules.allows_batch(found):
                yield self._least_mean(found), partial(self._of_pipelines, found)

    def _of_pipelines(self, found: Config) -> Iterator[_Found]:
        """The pipelines of a mesh with microbatches of one size."""
        known: dict[tuple[int, ...], tuple[_Candidate, float]] = {}
        for pipeline, stage_to_rank in self._possible(found):
            if _is_repeated(found, pipeline):
                continue
            self.num_priced += 1
            layout = replace(found, pipeline=pipeline)
            if stage_to_rank not in known:
                candidate = _Candidate(self, layout, stage_to_rank)
                known[stage_to_rank] = candidate, candidate.bound()
            candidate, bound = known[stage_to_rank]
            if candidate.is_sharded and not KINDS[pipeline.schedule].splits_backward:
                # By block it may take less, of what is gathered before the first step.
                yield candidate.bound(gathers=False), partial(self._fitting, candidate, pipeline)
            else:
                yield bound, partial(self._fitting, candidate, pipeline)
    def _fitting(self, candidate: "_Candidate", pipeline: PipelineConfig) -> Iterator[_Found]:
        """A layout, if it fits; if not, the one that gathers block by block, if that does."""
        layout = replace(candidate.layout, pipeline=pipeline)
        if not rules.allows_pipeline(layout):
            return
        if self._fits(candidate, layout):
            yield candidate.bound(), partial(self._timed, candidate, layout)
        elif candidate.is_sharded:
            layout = replace(layout, mesh=replace(layout.mesh, gather="block"))
            if rules.allows_pipeline(layout) and not _is_repeated(layout, pipeline):
                candidate = candidate.by_block
                if self._fits(candidate, layout):
                    yield candidate.bound(), partial(self._timed, candidate, layout)

    def _fits(self, candidate: "_Candidate", layout: Config) -> bool:
        """Whether a layout's ranks hold what is under way; with few microbatches that is no more."""
        pp, number = layout.mesh.pp, count_microbatches(layout)
        needed = 0.0
        for many in dict.fromkeys((min(number, 2 * pp), number)):
            steps = self._walk(layout.pipeline, pp, many, is_sharded=candidate.is_sharded)
            needed = candidate.needed(steps.order.peaks)
            if needed > self.machine.memory:
                if needed < self._least_bytes:
                    self._least_bytes, self.smallest = needed, layout
                return False
        return True

    def _timed(
        self, candidate: "_Candidate", layout: Config, known: float = 0.0
    ) -> Iterator[_Found]:
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
            name, per_rank = pipeline.schedule, pipeline.stages_per_rank
            schedule = plain_schedule(name, pp, number, per_rank, is_sharded=is_sharded)
            self._steps[key] = _Steps(Precedence(schedule))
        return self._steps[key]

    def _possible(self, found: Config) -> list[tuple[PipelineConfig, tuple[int, ...]]]:
        """Pipelines that have a layer for each stage, and where these are."""
        pp = found.mesh.pp
        if pp not in self._pipelines:
            keys = ("pipeline.schedule", "pipeline.stages_per_rank")
            given = (found.pipeline.schedule,), (found.pipeline.stages_per_rank,)
            choices = [
                self._axes[key].choices if key in self._axes else only
                for key, only in zip(keys, given, strict=True)
            ]
            possible = []
            for name, per_rank in product(*choices):
                keys_of = {"schedule": name, "stages_per_rank": per_rank}
                pipeline = replace(found.pipeline, **keys_of)
                kind = KINDS[pipeline.schedule]
                if kind.stages_per_rank in (0, per_rank):
                    stage_to_rank = placement(pipeline, num_ranks=pp)
                    if len(stage_to_rank) <= found.model.num_layers:
                        possible.append((pipeline, stage_to_rank))
            self._pipelines[pp] = possible
        return self._pipelines[pp]

    def priced(
        self, config: Config, stages: tuple[Work, ...], places: Sequence[StageLayout]
    ) -> list[StagePrice]:
        """Prices of the stages of a layout."""
        _, slowed = cores_of(self.machine, Layout.of(config.mesh))
        return priced(self.prices, config, self.vocab_size, stages, places, slowed=slowed)


class _Candidate:
    """Layouts that differ in their schedules alone, which have their stages at the same places.

    Args:
        search: Its prices.
        layout: One of them.
        stage_to_rank: Pipeline rank of each stage.

    Attributes:
        layout: One of them.
        is_sharded: Whether schedules gather the parameters of stages.
        last: Seconds after the pipeline.
    """

    def __init__(self, search: Search, layout: Config, stage_to_rank: tuple[int, ...]) -> None:
        self.layout = layout
        self._search, self._stage_to_rank = search, stage_to_rank
        node_size, config = search.machine.node_size, layout
        self._ranks = [aligned(stage, node_size) for stage in Layout.of(config.mesh).stages]
        places = [self._ranks[rank] for rank in stage_to_rank]
        self._stages = modules.stages(config, search.vocab_size, num_stages=len(stage_to_rank))
        self.is_sharded = config.mesh.gather == "stage" and self._ranks[0].is_sharded
        self._prices = search.priced(config, self._stages, places)
        mine: list[list[int]] = [[] for _ in self._ranks]
        for stage, rank in enumerate(stage_to_rank):
            mine[rank].append(stage)
        self._mine = mine
        self._costs: list[float] = []
        self._held = [tuple(self._stages[stage] for stage in stages) for stages in mine]
        ends = [
            search.prices.ends(config, *pair) for pair in {*zip(self._held, self._ranks, strict=True)}
        ]
        self.last = sum(max(end[name] for end in ends) for name in ends[0])

    @cached_property
    def by_block(self) -> "_Candidate":
        """The same, gathered block by block."""
        mesh = replace(self.layout.mesh, gather="block")
        return _Candidate(self._search, replace(self.layout, mesh=mesh), self._stage_to_rank)

    def bound(self, *, gathers: bool = True) -> float:
        """No order of the steps takes less.

        Each rank computes its own after its first input and parameters, and reduces gradients after
        it; and its collectives go one by one.
        """
        number, longest, before = count_microbatches(self.layout), 0.0, [0.0]
        for price in self._prices:
            before.append(before[-1] + price.forward)
        for stages in self._mine:
            mine = [self._prices[stage] for stage in stages]
            sharded = [price.sharded if gathers else 0.0 for price in mine]
            first = max(before[min(stages)], min(sharded))
            busy = number * sum(price.full for price in mine)
            longest = max(longest, first + busy + min(sharded), 2 * sum(sharded))
        return longest + self.last

    def needed(self, peaks: Sequence[Sequence[Sequence[int]]]) -> float:
        """Bytes of the rank that needs most.

        Args:
            peaks: See `hp_schedule.Precedence`.
        """
        kept = [price.kept for price in self._prices]
        share = 1 + self._search.machine.fragmentation
        most = 0.0
        for fixed, times in zip(self._fixed, peaks, strict=True):
            held = max(sum(map(mul, kept, time)) for time in times)
            most = max(most, fixed + share * held)
        return most

    @cached_property
    def _fixed(self) -> list[int]:
        """What each rank needs whatever is under way."""
        config, prices = self.layout, self._search.prices
        firsts = [stage.first for stage in Layout.of(config.mesh).stages]
        known: dict[object, int] = {}
        found = []
        for stages, place, rank in zip(self._held, self._ranks, firsts, strict=True):
            nccl = held(config, rank, node_size=self._search.machine.node_size)
            key = (stages, place, nccl)
            if key not in known:
                known[key] = prices.memory(config, stages, place, rank=rank, activations=0.0).total
            found.append(known[key])
        return found

    def costs(self, order: Precedence) -> list[float]:
        """What the steps of one of their schedules cost; it is the same for all."""
        if not self._costs:
            config, search = self.layout, self._search
            self._costs = order.flat(
                costs_of(config, search.machine, self._prices, edges=order.edges)
            )
        return self._costs


def _is_repeated(config: Config, pipeline: PipelineConfig) -> bool:
    """Whether with another pipeline the very same steps run in the very same order."""
    mesh = config.mesh
    if mesh.pp > 1:
        return pipeline.stages_per_rank == 1 and bool(KINDS[pipeline.schedule].with_one_stage)
    # One rank waits for nobody; but the order decides how often it gathers a stage's parameters.
    decides = Layout.of(mesh).stages[0].is_sharded and mesh.gather == "stage"
    return not decides and pipeline.schedule != "1f1b"
