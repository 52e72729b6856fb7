"""What moves activations and their gradients between the stages of a pipeline.

Where all stages have the same number of ranks, each rank talks to the one of its own place in other
stages. Where they differ, or the chain of stages comes back to the first ranks for one more, hp-vtp
plans who sends what: between layers the tensor-parallel ranks of a stage have a slice of the
positions each, and slices of different lengths have to meet. Neither the schedule nor the stages
know the difference.

Shape symbols: B sequences of a microbatch, S positions that attention sees on a rank, D width of
what travels.
"""

from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from hp_platform import Runtime
from hp_schedule import Schedule
from hp_schedule import Transport as ScheduleTransport
from hp_schedule.runtime import TorchTransport, build_edge_groups
from hp_train.layout.communicators import pipeline_layout
from hp_train.layout.mesh import Mesh
from hp_vtp.pipeline import StageTransport
from hp_vtp.transport import TensorMeta, Transport


class Edges(Protocol):
    """Connects the stages of this rank with those of others, for any number of schedules."""

    def transport(
        self, schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype
    ) -> ScheduleTransport[tuple[Tensor, ...]]:
        """What moves the messages of a schedule.

        Args:
            schedule: Schedule over the chain of stages for which the edges were made.
            shape: Shape of the activations, [B, S, D], of which the tensor-parallel ranks of a
                stage have a slice each.
            dtype: Dtype of the activations.
        """
        ...

    def close(self) -> None:
        """End what runs in the background. All ranks call this, after all transports are done."""
        ...


def build_edges(
    schedule: Schedule, mesh: Mesh, runtime: Runtime, *, returns: bool, timeout: timedelta
) -> Edges:
    """Connect all stages. All ranks call this together.

    Args:
        schedule: Any schedule over the stages: on which pipeline ranks these are is what counts.
        mesh: Mesh of the run.
        runtime: Device and backend.
        returns: Whether the chain of stages comes back to the first rank for one more.
        timeout: Time limit of every message.
    """
    if mesh.layout.is_even and not returns:
        return _EvenEdges(mesh, runtime, timeout)
    return _UnevenEdges(schedule, mesh, runtime, timeout)


class _EvenEdges:
    def __init__(self, mesh: Mesh, runtime: Runtime, timeout: timedelta) -> None:
        pipelines = mesh.layout.pipelines()
        self._groups = build_edge_groups(pipelines, backend=runtime.backend, timeout=timeout)
        self._ranks = next(ranks for ranks in pipelines if mesh.rank in ranks)

    def transport(
        self, schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype
    ) -> ScheduleTransport[tuple[Tensor, ...]]:
        del shape, dtype  # each end knows its own part, and both have the same
        return TorchTransport(schedule, rank_of=self._ranks, groups=self._groups)

    def close(self) -> None:
        """Nothing runs in the background."""


class _UnevenEdges:
    def __init__(
        self, schedule: Schedule, mesh: Mesh, runtime: Runtime, timeout: timedelta
    ) -> None:
        self._domain = mesh.domain
        self._transport = Transport(
            pipeline_layout(mesh.layout, schedule.stage_to_rank),
            name="pipeline",
            backend=runtime.backend,
            timeout=timeout,
            device=runtime.device,
        )

    def transport(
        self, schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype
    ) -> ScheduleTransport[tuple[Tensor, ...]]:
        positions = range(1, self._transport.layout.num_stages)
        metas = {position: [TensorMeta(shape, dtype)] for position in positions}
        return StageTransport(self._transport, schedule, metas=metas, domain=self._domain)

    def close(self) -> None:
        self._transport.close()
