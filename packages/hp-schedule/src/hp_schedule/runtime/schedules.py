"""Runtimes that make their own schedule, pipelines, process groups and transport.

Messages have no tags (hp_schedule.runtime.transport), so a rank cannot see that what it receives is
of another microbatch than its own schedule says: gradients would be wrong without a word. So all
ranks check that they run one schedule.
"""

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import ClassVar, NamedTuple, Unpack

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import all_gather_json, resolve_group
from hp_schedule.passes.communication import add_send_recv
from hp_schedule.passes.fsdp import add_fsdp_reduce_grad, add_fsdp_unshard_reshard
from hp_schedule.runtime.runtime import PipelineScheduleRuntime, RuntimeOptions
from hp_schedule.runtime.shared import SharedParameterInfo, share_parameters
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.runtime.transport import EdgeGroups, TorchTransport, build_edge_groups
from hp_schedule.schedule import PlacementStyle, Schedule, generate_stage_to_rank_mapping
from hp_schedule.steps import FSDP_KINDS, KIND_MASK, RETENTION_KINDS, MetaStep

_OF_ONE_RANK = FSDP_KINDS | RETENTION_KINDS


def check_same_schedule(schedule: Schedule, ranks: Sequence[int]) -> None:
    """Refuse schedules that differ; every rank of the world calls this, and all of them raise.

    Steps that concern no other rank (FSDP, RECOMPUTE, OFFLOAD and RELOAD) may differ.

    Args:
        schedule: Schedule of this rank.
        ranks: The global ranks of its pipeline.

    Raises:
        ValueError: If ranks of one pipeline have different schedules, or pipelines different edges.
    """
    facts = _Facts(tuple(ranks), schedule.edges, _digest(schedule))
    every = all_gather_json(facts, of=_Facts, group=dist.group.WORLD)
    first: dict[tuple[int, ...], int] = {}
    for rank, (pipeline, edges, digest) in enumerate(every):
        same = first.setdefault(pipeline, rank)
        if digest != every[same].digest:
            raise ValueError(
                f"schedule of rank {rank} must equal that of rank {same}; if it was searched, do "
                "so on one rank and send it to the others"
            )
        if edges != every[0].edges:
            raise ValueError(
                f"edges of the schedule of rank {rank} ({edges}) must equal those of rank 0 "
                f"({every[0].edges})"
            )


class _Facts(NamedTuple):
    """Facts that ranks compare: the ranks of the pipeline, its edges, a digest of its steps."""

    pipeline: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    digest: str


def _digest(schedule: Schedule) -> str:
    shape = schedule.chains, schedule.stage_to_rank, schedule.num_microbatches
    found = sha256(repr(shape).encode())
    for row in schedule.steps:
        codes = (c for c in row.codes() if c >= 0 and c & KIND_MASK not in _OF_ONE_RANK)
        kept = array("q", codes)
        found.update(len(kept).to_bytes(8, "little") + kept.tobytes())
    return found.hexdigest()


Pipelines = Sequence[Sequence[int]] | DeviceMesh | ProcessGroup
"""The global ranks of every pipeline in order, or the pipeline axis of a mesh, or its group."""


def pipelines_of(given: Pipelines | None) -> Sequence[Sequence[int]]:
    """Return the global ranks of every pipeline, the same on every rank.

    Args:
        given: Ranks are returned as they are. Of a mesh or a group every rank of the world has to
            call, for each knows only its own; None is one pipeline over the whole world.

    Raises:
        ValueError: If a mesh has more than one axis, or no pipeline has this rank.
    """
    world = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    if isinstance(given, DeviceMesh | ProcessGroup):
        mine = dist.get_process_group_ranks(resolve_group(given))
        every = [mine]
        if len(mine) < len(world):
            every = all_gather_json(mine, of=list[int], group=dist.group.WORLD)
        return [list(ranks) for ranks in sorted(set(map(tuple, every)))]
    return [world] if given is None else given


def own_pipeline(pipelines: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the pipeline of this rank.

    Raises:
        ValueError: If none has it.
    """
    me = dist.get_rank() if dist.is_initialized() else 0
    for ranks in pipelines:
        if me in ranks:
            return ranks
    raise ValueError(f"pipelines ({[list(ranks) for ranks in pipelines]}) must contain rank {me}")


class ScheduleOptions(RuntimeOptions, total=False):
    """Keyword arguments of `PipelineSchedule`."""

    pipelines: Pipelines | None
    groups: EdgeGroups | None
    overlap_p2p: bool
    max_active_stages: int
    shared_parameters: Sequence[SharedParameterInfo]


Rows = Iterable[Iterable[MetaStep | None]]
"""One row of compute steps per rank."""


class PipelineSchedule(PipelineScheduleRuntime):
    """A runtime that makes its own schedule. Subclass it and say in which order steps run.

    Messages are inserted, the schedule is checked, and process groups are made for its edges, so
    every rank of the world constructs one, in the same order as its other groups. The ranks of a
    pipeline need one and the same schedule: search on one of them and send it to the others.

    Args:
        stages: This rank's stage or stages.
        num_microbatches: Number of microbatches of each run.
        pipelines: For each of several pipelines side by side the global ranks of its ranks in
            order; or the pipeline axis of a `DeviceMesh`, as in ``mesh["pp"]``, or its group.
            Default one over the whole world.
        groups: Groups of an earlier schedule with the same edges; default new ones.
        overlap_p2p: Whether sends go on while the rank computes; otherwise it waits for each.
        max_active_stages: Most stages whose parameters a rank has gathered at once, if `sharding`
            is given and the order has no FSDP steps of its own.
        shared_parameters: Parameters that several stages have.
        **options: See `PipelineScheduleRuntime`.

    Raises:
        ScheduleError: If the schedule is not valid.
        ValueError: If stages, pipelines and schedule do not fit each other, or, where groups are
            made, another rank has another schedule.
    """

    placement: ClassVar[PlacementStyle] = "loop"
    """Placement of the stages if `construct_exec_order` returns rows."""

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        num_microbatches: int,
        *,
        pipelines: Pipelines | None = None,
        groups: EdgeGroups | None = None,
        overlap_p2p: bool = True,
        max_active_stages: int = 3,
        shared_parameters: Sequence[SharedParameterInfo] = (),
        **options: Unpack[RuntimeOptions],
    ) -> None:
        stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        if not stages:
            raise ValueError("len(stages) (0) must be >= 1")
        pipelines = pipelines_of(pipelines)
        ranks = own_pipeline(pipelines)
        self.num_microbatches = num_microbatches
        self.num_ranks = len(ranks)
        self.num_stages = stages[0].num_stages
        schedule = self._with_messages()
        if options.get("sharding") is not None and not schedule.kinds & FSDP_KINDS:
            schedule = add_fsdp_unshard_reshard(
                add_fsdp_reduce_grad(schedule), max_active_stages=max_active_stages
            )
        transport = None
        if schedule.edges:
            if groups is None:
                check_same_schedule(schedule, ranks)
                groups = build_edge_groups(pipelines, edges=schedule.edges)
            transport = TorchTransport(
                schedule, rank_of=ranks, groups=groups, max_sends_in_flight=8 if overlap_p2p else 0
            )
        self.groups = groups
        super().__init__(
            stages,
            schedule,
            pipeline_rank=ranks.index(dist.get_rank()) if len(ranks) > 1 else 0,
            transport=transport,
            shared_parameters=share_parameters(
                shared_parameters, stages, schedule=schedule, pipelines=pipelines
            )
            if shared_parameters
            else None,
            **options,
        )

    @abstractmethod
    def construct_exec_order(self) -> Rows | Schedule:
        """Return the order of the compute steps, one row per rank, or a whole schedule.

        `num_ranks`, `num_stages` and `num_microbatches` say how large it is to be. Rows are placed
        as `placement` says; a whole schedule has its own placement, and may have messages.
        """

    @property
    def num_stages_per_rank(self) -> int:
        """Return the number of stages on every rank.

        Raises:
            ValueError: If they are not equally many.
        """
        if self.num_stages % self.num_ranks:
            raise ValueError(
                f"num_stages ({self.num_stages}) must be a multiple of num_ranks ({self.num_ranks})"
            )
        return self.num_stages // self.num_ranks

    def _with_messages(self) -> Schedule:
        order = self.construct_exec_order()
        if not isinstance(order, Schedule):
            places = generate_stage_to_rank_mapping(self.num_ranks, self.num_stages, self.placement)
            order = Schedule.from_steps(
                order,
                stage_to_rank=[places[stage] for stage in range(self.num_stages)],
                num_microbatches=self.num_microbatches,
            )
        if order.num_ranks != self.num_ranks:
            raise ValueError(
                f"num_ranks ({order.num_ranks}) of the schedule must equal the length of the "
                f"pipelines ({self.num_ranks})"
            )
        return order if order.has_communication else add_send_recv(order)


class _GivenSchedule(PipelineSchedule):
    """Runs a schedule that was made elsewhere."""

    def __init__(
        self,
        schedule: Schedule,
        stages: PipelineStage | Sequence[PipelineStage],
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self._given = schedule
        super().__init__(stages, schedule.num_microbatches, **options)

    def construct_exec_order(self) -> Schedule:
        return self._given


def from_schedule(
    schedule: Schedule,
    stages: PipelineStage | Sequence[PipelineStage],
    **options: Unpack[ScheduleOptions],
) -> PipelineSchedule:
    """Return a runtime for a schedule that was searched, read from a file or generated.

    Args:
        schedule: Schedule to run; messages are inserted if it has none.
        stages: Stages of this rank.
        **options: See `PipelineSchedule`.
    """
    return _GivenSchedule(schedule, stages, **options)
