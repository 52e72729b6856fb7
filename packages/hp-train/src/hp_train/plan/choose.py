"""Compare all layouts of a number of devices and say why the best is best. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count as counter
from itertools import product
from typing import Protocol

from msgspec.structs import replace

from hp_schedule import Costs, Schedule, simulate
from hp_train.config import Config, rules
from hp_train.config.space import Axis, enumerate_meshes, layouts_of_mesh, with_keys
from hp_train.costs.machine import Machine
from hp_train.errors import ConfigError
from hp_train.layout.ranks import Layout
from hp_train.layout.schedules import KINDS, count_microbatches
from hp_train.plan.estimate import Estimate, Need, Plan

_PLAINEST: Mapping[str, object] = {"pipeline.schedule": "1f1b", "pipeline.stages_per_rank": 1}
_PER_MICROBATCH = ("train.microbatch_size", "train.recompute")
_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of a number of devices, compared.

    Attributes:
        best: Those that fit into memory, the fastest first.
        too_large: The one that lacks least of those that do not fit; None if all looked at fit.
        num_meshes: Those that the rules allow.
        num_simulated: Layouts whose schedules were laid out.
        is_complete: Whether no other one is among the best; else there were too many to lay out.
    """

    best: tuple[Estimate, ...]
    too_large: Estimate | None
    num_meshes: int
    num_simulated: int
    is_complete: bool


def plan_axes(config: Config, num_devices: int) -> tuple[Axis, ...]:
    """What layouts are made of: every divisor of the number of devices for every mesh axis."""
    divisors = tuple(n for n in range(1, num_devices + 1) if num_devices % n == 0)
    of_experts = divisors if config.model.has_experts else (1,)
    mesh = tuple(
        Axis(f"mesh.{axis}", of_experts if axis in ("ep", "etp") else divisors) for axis in _MESH
    )
    batch = config.train.global_batch_size
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= batch)
    return (
        *mesh,
        Axis("mesh.gather", ("stage", "block")),
        Axis("pipeline.schedule"),
        Axis("pipeline.stages_per_rank", (1, 2, 3, 4)),
        Axis("train.microbatch_size", tuple(sorted({*sizes, config.train.microbatch_size}))),
        Axis("train.recompute", tuple(dict.fromkeys(("none", "full", config.train.recompute)))),
    )


def choose(
    config: Config,
    num_devices: int,
    machine: Machine,
    *,
    vocab_size: int,
    count: int = 5,
    most: int = 800,
) -> Choice:
    """Find the fastest layouts that fit into memory, of those whose stages have the same sizes.

    Layouts are laid out in the order of a bound that none of them can undercut, until the next
    bound is above what was found; so none that was left out can be better, unless there are so many
    that the search ends before. Layouts of a mesh are not looked at before its own bound comes up.

    Args:
        config: Everything but the layout and the microbatch size comes from it.
        num_devices: Number of devices; all of them are used.
        machine: What they do.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        count: How many to find.
        most: How many to lay out at most.

    Raises:
        ConfigError: When no layout is allowed, or none fits.
    """
    config = replace(
        config,
        launch=replace(config.launch, num_processes=0),
        mesh=replace(config.mesh, stage_tp=(), stage_ep=()),
    )
    axes = plan_axes(config, num_devices)
    processes = range(num_devices, num_devices + 1)
    meshes = [mesh for _, mesh in enumerate_meshes(config, num_processes=processes, axes=axes)]
    if not meshes:
        raise ConfigError(f"no layout of {num_devices} processes is allowed for this config")
    search = _Search(axes, machine, vocab_size)
    found: list[Estimate] = []
    large: list[Estimate] = []
    simulated, is_complete = 0, True
    for least, layout in search.by_bound(meshes):
        if len(found) >= count and found[count - 1].seconds <= least:
            break
        if simulated == most:
            is_complete = False
            break
        simulated += 1
        estimate = Plan(layout, machine, vocab_size=vocab_size).estimate()
        if estimate.memory.total <= machine.memory:
            _put(found, estimate)
        else:
            large.append(estimate)
    if not large and search.smallest is not None:
        large.append(Plan(search.smallest, machine, vocab_size=vocab_size).estimate())
    nearest = min(large, key=lambda estimate: estimate.memory.total, default=None)
    if not found:
        assert nearest is not None
        none = "no layout" if is_complete else f"none of the {simulated} most promising layouts"
        raise ConfigError(
            f"{none} of {num_devices} processes fits: {nearest.memory.total / 1e9:.1f} GB "
            f"must be at most the memory of a device ({machine.memory / 1e9:.1f} GB)"
        )
    return Choice(tuple(found[:count]), nearest, len(meshes), simulated, is_complete)


class _Narrower(Protocol):
    """Makes something that stands for many layouts into what stands for fewer."""

    def __call__(self, config: Config, /) -> "Iterator[_Found]":
        """Bounds, what they are of, and what makes that narrower; None: it is a layout."""


_Found = tuple[float, Config, _Narrower | None]


class _Search:
    """Layouts in the order of their bounds.

    Attributes:
        smallest: The layout that needs least of those left out since they cannot fit into a
            device's memory.

    Args:
        axes: Axes along which layouts differ, those of the mesh first.
        machine: Prices them.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """

    def __init__(self, axes: tuple[Axis, ...], machine: Machine, vocab_size: int) -> None:
        self.smallest: Config | None = None
        self._axes, self._machine, self._vocab_size = axes, machine, vocab_size
        self._least_bytes = float("inf")
        self._schedules: dict[object, tuple[Schedule, tuple[float, ...]]] = {}
        self._needs: dict[object, list[Need]] = {}
        self._seconds: dict[object, float] = {}

    def by_bound(self, meshes: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        """Yield bounds and layouts, in ascending order; what is not asked for is not priced."""
        order = counter()
        waiting: list[tuple[float, int, Config, _Narrower | None]] = [
            (self.bound_of_mesh(mesh), next(order), mesh, self._batches) for mesh in meshes
        ]
        heapify(waiting)
        while waiting:
            least, _, config, narrower = heappop(waiting)
            if narrower is None:
                yield least, config
                continue
            for bound, found, further in narrower(config):
                heappush(waiting, (max(least, bound), next(order), found, further))

    def _batches(self, mesh: Config) -> Iterator[_Found]:
        """What a mesh is made into first: microbatches of all sizes, kept or computed again."""
        varied = [axis for axis in self._axes if axis.key in _PER_MICROBATCH]
        for values in product(*(axis.choices for axis in varied)):
            keys = {axis.key: value for axis, value in zip(varied, values, strict=True)}
            found = with_keys(mesh, {**_PLAINEST, **keys})
            if rules.allows_batch(found):
                yield self._plan(found).least_mean_seconds(), found, self._layouts

    def _layouts(self, found: Config) -> Iterator[_Found]:
        """The layouts with one size of microbatches."""
        axes = [axis for axis in self._axes if axis.key not in _PER_MICROBATCH]
        for _, layout in layouts_of_mesh(found, axes=axes):
            if _is_repeated(layout) or self._need_not_go_by_block(layout):
                continue
            bound = self.bound(layout)
            if bound is not None:
                yield bound, layout, None

    def _need_not_go_by_block(self, layout: Config) -> bool:
        """Whether parameters are gathered by block that fit into memory by stage."""
        if layout.mesh.gather == "stage":
            return False
        return self.bound(with_keys(layout, {"mesh.gather": "stage"})) is not None

    def bound_of_mesh(self, mesh: Config) -> float:
        """Of all layouts of a mesh: the mean rank computes its share in one microbatch."""
        batch = max(1, mesh.train.global_batch_size // Layout.of(mesh.mesh).dp)
        plainest = {
            **_PLAINEST,
            "train.microbatch_size": batch,
            "train.recompute": "none",
        }
        return self._plan(with_keys(mesh, plainest)).least_mean_seconds()

    def bound(self, layout: Config) -> float | None:
        """Of a layout; None where it cannot fit. Schedules that place stages alike share it."""
        schedule, in_flight = self._short_schedule(layout)
        train = layout.train
        key = (layout.mesh, schedule.stage_to_rank, train.microbatch_size, train.recompute)
        plan = None
        if key not in self._needs:
            plan = self._plan(layout)
            self._needs[key] = plan.needs(schedule)
        needed = max(
            need.least(most) for need, most in zip(self._needs[key], in_flight, strict=True)
        )
        if needed > self._machine.memory:
            if needed < self._least_bytes:
                self._least_bytes, self.smallest = needed, layout
            return None
        if key not in self._seconds:
            self._seconds[key] = (plan or self._plan(layout)).least_seconds(schedule)
        return self._seconds[key]

    def _plan(self, layout: Config) -> Plan:
        return Plan(layout, self._machine, vocab_size=self._vocab_size)

    def _short_schedule(self, layout: Config) -> tuple[Schedule, tuple[float, ...]]:
        """A schedule like that of a layout, and how much it has under way on each rank at most.

        It has few microbatches: stages are where they are with many, and no more is under way.
        """
        pipeline, pp = layout.pipeline, layout.mesh.pp
        few = min(count_microbatches(layout), 2 * pp)
        key = (pipeline.schedule, pp, few, pipeline.stages_per_rank)
        if key not in self._schedules:
            schedule = KINDS[pipeline.schedule].build(pp, few, pipeline.stages_per_rank)
            peaks = simulate(schedule, Costs(activation=1.0)).peak_activations
            self._schedules[key] = schedule, peaks
        return self._schedules[key]


def _put(found: list[Estimate], estimate: Estimate) -> None:
    """Put an estimate where its time belongs, instead of one that is the same in words."""
    twins = [other for other in found if _in_words(other.config) == _in_words(estimate.config)]
    if any(other.seconds <= estimate.seconds for other in twins):
        return
    found[:] = [other for other in found if other not in twins]
    found.append(estimate)
    found.sort(key=lambda estimate: estimate.seconds)


def _in_words(config: Config) -> tuple[object, ...]:
    """What tells a layout from others: with one pipeline rank, not the name of its schedule."""
    pipeline = config.pipeline if config.mesh.pp > 1 else None
    return config.mesh, pipeline, config.train.microbatch_size, config.train.recompute


def _is_repeated(config: Config) -> bool:
    """Whether another layout runs the very same steps in the very same order."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.pp > 1:
        return pipeline.stages_per_rank == 1 and bool(KINDS[pipeline.schedule].with_one_stage)
    # One rank waits for nobody; but the order decides how often it gathers a stage's parameters.
    decides = Layout.of(mesh).stages[0].is_sharded and mesh.gather == "stage"
    return not decides and pipeline.schedule != "1f1b"
