"""All layouts of some meshes in the order of their times, without a look at most of them. No torch.

A mesh with microbatches of a size stands for all its pipelines, and stages at their places for all
orders of their steps. Each has a time that nothing it stands for undercuts, and is only looked into
when that is the least of all. The last bound of a layout is that of paths: what was the longest way
through the steps of its schedule with other costs takes no longer than the longest with its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count as counter
from itertools import product

from msgspec.structs import replace

from hp_schedule import Path, Precedence, length
from hp_train.config import Config, PipelineConfig, rules
from hp_train.config.space import Axis
from hp_train.costs import modules
from hp_train.costs.memory import padding, static_memory
from hp_train.costs.work import Work
from hp_train.layout.ranks import Layout, StageLayout
from hp_train.layout.schedules import KINDS, count_microbatches, placement
from hp_train.plan.candidate import Candidate
from hp_train.price.estimate import plain_schedule
from hp_train.price.gather import fits
from hp_train.price.prices import Prices

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

    def by_time(self, meshes: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        """Yield times of a step and layouts that fit, in ascending order.

        Where devices share cores, what is yielded are bounds: their steps are slower while others
        run. At the end of what may be laid out, those follow that are laid out already.
        """
        order = counter()
        waiting: list[tuple[float, int, _Narrower | Config]] = [
            (bound, next(order), narrower)
            for mesh in meshes
            for bound, narrower in self._batches(mesh)
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
            for _, narrower in self._of_pipelines(self._hopeless[1]):
                assert callable(narrower)
                list(narrower())  # finds that it does not fit
        return self.smallest

    def _batches(self, mesh: Config) -> Iterator[_Found]:
        """What a mesh is made into: microbatches of all sizes, first with all that they keep."""
        sizes, again = (
            self._axes[key].choices if key in self._axes else (getattr(mesh.train, name),)
            for key, name in ((f"train.{name}", name) for name in ("microbatch_size", "recompute"))
        )
        least = min(again, key=lambda recompute: recompute != "none")
        rest = [recompute for recompute in again if recompute != least]
        for size in sizes:
            found = _with_train(mesh, microbatch_size=size, recompute=least)
            if found.train.global_batch_size % found.batch_unit == 0 and rules.allows_batch(found):
                # What is computed again comes on top.
                yield self.bound_of_batch(found), partial(self._repeating, found, rest)

    def _repeating(self, found: Config, rest: Sequence[object]) -> Iterator[_Found]:
        """The same microbatches, and those with something computed again; those that may fit."""
        yield from self._if_it_may_fit(found, 0.0)
        for recompute in rest:
            more = _with_train(found, recompute=recompute)
            yield from self._if_it_may_fit(more, self.bound_of_batch(more))

    def _if_it_may_fit(self, found: Config, bound: float) -> Iterator[_Found]:
        needed = self.least_bytes(found)
        if needed <= self.prices.machine.memory:
            yield bound, partial(self._of_pipelines, found)
        elif needed < self._hopeless[0]:
            self._hopeless = needed, found

    def least_bytes(self, config: Config) -> float:
        """What the rank that needs most needs at least, with all pipelines of a mesh.

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

        Each rank takes the mean of all at least, if it never waits; a microbatch goes forward and
        back through all stages; and a stage that is cut takes no less than the whole.
        """
        config = replace(config, pipeline=_PLAINEST)
        mesh = config.mesh
        stages, place = self._as_one(config)
        price = self.prices.stages(config, stages, (place,))[0]
        busy = (
            max(count_microbatches(config) * price.full, price.gathered + price.reduced) / mesh.pp
        )
        last = sum(self.prices.ends(config, stages, place).values()) / mesh.pp
        return max(busy, price.forward + price.input_grad) + last

    def _of_pipelines(self, found: Config) -> Iterator[_Found]:
        """The pipelines of a mesh with microbatches of one size."""
        known: dict[tuple[int, ...], Candidate] = {}
        for pipeline, stage_to_rank in self._possible(found):
            layout = replace(found, pipeline=pipeline)
            if is_repeated(layout):
                continue
            self.num_priced += 1
            if stage_to_rank not in known:
                known[stage_to_rank] = Candidate(self.prices, layout, stage_to_rank)
            candidate = known[stage_to_rank]
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
        """Whether a layout's ranks hold what is under way."""
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


def _with_train(config: Config, **keys: object) -> Config:
    return replace(config, train=replace(config.train, **keys))


def is_repeated(config: Config) -> bool:
    """Whether another layout runs the very same steps in the very same order."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.pp > 1:
        return pipeline.stages_per_rank == 1 and bool(KINDS[pipeline.schedule].with_one_stage)
    # One rank waits for nobody; but the order decides how often it gathers a stage's parameters.
    decides = Layout.of(mesh).stages[0].is_sharded and mesh.gather == "stage"
    return not decides and pipeline.schedule != "1f1b"
