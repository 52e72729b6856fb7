"""The process groups that a rank belongs to, and its edges to the stages of other ranks.

All ranks build the groups of all stages in one order, whatever the sizes of these.

Where all stages have the same number of ranks, each rank talks to the one of its own place in other
stages. Where they differ, or the chain of stages comes back to the first ranks for one more, hp-vtp
plans who sends what: between layers the tensor-parallel ranks of a stage have a slice of the
positions each, and slices of different lengths have to meet. Neither the schedule nor the stages
know the difference.

Shape symbols: B sequences of a microbatch, S positions that attention sees on a rank, D width of
what travels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import Runtime, mesh_of, new_group
from hp_schedule import Schedule
from hp_schedule import Transport as ScheduleTransport
from hp_schedule.runtime import TorchTransport, build_edge_groups
from hp_trainer.layout.ranks import (
    ALONE,
    GRIDS,
    GROUPS,
    WORLD,
    Layout,
    StageLayout,
    chunk,
    partitions,
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place and groups.

    Attributes:
        layout: The arithmetic of all stages.
        rank: Global rank.
        groups: Process groups by name, see :data:`hp_trainer.layout.ranks.GROUPS`.
        world: All ranks, for the step's scalars.
        device_type: ``"cpu"`` or ``"cuda"``.
        pp_index: Position in its pipeline.
        stage: The arithmetic of its own stage.
    """

    layout: Layout
    rank: int
    groups: Mapping[str, ProcessGroup]
    world: ProcessGroup
    device_type: str
    pp_index: int = field(init=False)
    stage: StageLayout = field(init=False)
    _places: dict[str, tuple[int, int]] = field(init=False, repr=False)
    _submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Work out the place of the rank, which nothing changes."""
        pp_index = self.layout.pp_index(self.rank)
        stage = self.layout.stages[pp_index]
        places = {
            name: (stage.size(*axes), stage.index(self.rank, *axes))
            for name, axes in GROUPS.items()
        }
        for name, value in ("pp_index", pp_index), ("stage", stage), ("_places", places):
            object.__setattr__(self, name, value)

    @property
    def dp_index(self) -> int:
        """Return which share of the sequences it sees."""
        return self.stage.index(self.rank, "dp_replicate", "dp_shard")

    @property
    def domain(self) -> int:
        """Return the index of the pipeline, among those side by side, that this rank is in."""
        return self.stage.index(self.rank, "dp_replicate", "dp_shard", "cp")

    def size(self, name: str) -> int:
        """Return the number of ranks of a group."""
        return self._places[name][0]

    def index(self, name: str) -> int:
        """Return the position of this rank in a group."""
        return self._places[name][1]

    def share(self, whole: range, name: str) -> range:
        """Return the part of some indices that this rank has, of those that a group shares out."""
        return chunk(whole, *self._places[name])

    def submesh(self, *names: str) -> DeviceMesh:
        """Return a mesh whose axes are some groups of one grid, outermost first, in any order."""
        if names not in self._submeshes:
            self._submeshes[names] = self._make_submesh(names)
        return self._submeshes[names]

    def _make_submesh(self, names: tuple[str, ...]) -> DeviceMesh:
        stage, wanted = self.stage, [axis for name in names for axis in GROUPS[name]]
        axes = [axis for grid in GRIDS for axis in grid if axis in wanted]
        mine = next(ranks for ranks in stage.ranks(*axes) if self.rank in ranks)
        mine.sort(key=lambda rank: [stage.index(rank, *GROUPS[name]) for name in names])
        ranks = torch.tensor(mine).view([self.size(name) for name in names]).tolist()
        return mesh_of(
            {name: self.groups[name] for name in names}, ranks, device_type=self.device_type
        )


def build_mesh(layout: Layout, runtime: Runtime, *, timeout: timedelta) -> Mesh:
    """Build every group of the layout. All ranks call this at the same point.

    Args:
        layout: Must fill the world.
        runtime: The initialised world.
        timeout: Time limit of every collective on these groups.

    Raises:
        ValueError: When the layout does not fill the world.
    """
    world_size, rank = runtime.info.world_size, runtime.info.rank
    if layout.world_size != world_size:
        raise ValueError(f"layout ({layout}) must fill the world ({world_size})")

    def build(name: str, ranks: list[list[int]]) -> ProcessGroup:
        mine = new_group(
            ranks,
            name=name,
            backend=runtime.backend,
            timeout=timeout,
            high_priority=name == "ep",
        )
        assert mine is not None, f"rank {rank} is in no {name} group"
        return mine

    made = {name: build(name, ranks) for name, ranks in partitions(layout).items()}
    groups = {name: made[name if name in made else ALONE] for name in GROUPS}
    return Mesh(
        layout=layout,
        rank=rank,
        groups=groups,
        world=made[WORLD],
        device_type=runtime.device.type,
    )


def small_group(mesh: Mesh, runtime: Runtime, *, timeout: timedelta) -> ProcessGroup | None:
    """Build the groups in which ranks that share experts exchange all that is not rows.

    All ranks call this together where pairs are overlapped; see `hp_expert.AllToAllDispatcher`.

    Args:
        mesh: Mesh of the run.
        runtime: The initialised world.
        timeout: Time limit of every collective on these groups.
    """
    return new_group(
        mesh.layout.ranks("ep"),
        name="beside rows",
        backend=runtime.backend,
        timeout=timeout,
        high_priority=True,
    )


Messages = ScheduleTransport[tuple[Tensor, ...]]
"""Moves the messages of one schedule."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Connects the stages of this rank with those of others, for any number of schedules.

    Attributes:
        transport: Gives what moves the messages of a schedule over the chain of stages for which
            the edges were made; takes it, shape and dtype of the activations, [B, S, D], of which
            the tensor-parallel ranks of a stage have a slice each.
        close: Ends what runs in the background. All ranks call it, after all transports are done.
    """

    transport: Callable[[Schedule, tuple[int, ...], torch.dtype], Messages]
    close: Callable[[], None]


def even_edges(mesh: Mesh, runtime: Runtime, timeout: timedelta) -> Edges:
    """Connect stages of equally many ranks, each rank with one of the next stage.

    All ranks call this together.

    Args:
        mesh: Mesh of the run.
        runtime: Device and backend.
        timeout: Time limit of every message.
    """
    pipelines = mesh.layout.pipelines()
    groups = build_edge_groups(pipelines, backend=runtime.backend, timeout=timeout)
    mine = next(ranks for ranks in pipelines if mesh.rank in ranks)
    return Edges(
        # Each end knows its own part of the activations, and both have the same.
        transport=lambda schedule, *_: TorchTransport(schedule, rank_of=mine, groups=groups),
        close=lambda: None,  # nothing runs in the background
    )


def tied_group(
    mesh: Mesh, runtime: Runtime, stage_to_rank: Sequence[int], *, timeout: timedelta
) -> ProcessGroup | None:
    """Build the groups of ranks that have copies of an embedding. All ranks call it together.

    Args:
        mesh: Mesh of the run; the first and the last stage have as many ranks of each axis.
        runtime: The initialised world.
        stage_to_rank: Pipeline rank of each stage.
        timeout: Time limit of every collective on these groups.

    Returns:
        This rank's; None if it has no copy, or the only one.
    """
    ends = sorted({stage_to_rank[0], stage_to_rank[-1]})
    if len(ends) == 1:
        return None
    pairs = list(zip(*(mesh.layout.stages[rank].members for rank in ends), strict=True))
    return new_group(pairs, name="tied embeddings", backend=runtime.backend, timeout=timeout)
