"""Transports of activations and their gradients between the stages of a pipeline.

Where all stages have the same number of ranks, each rank talks to the one of its own place in other
stages. Where they differ, or the chain of stages comes back to the first ranks for one more, hp-vtp
plans who sends what: between layers the tensor-parallel ranks of a stage have a slice of the
positions each, and slices of different lengths have to meet. Neither the schedule nor the stages
know the difference.

Shape symbols: B sequences of a microbatch, S positions that attention sees on a rank, D width of
what travels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from hp_platform import Runtime
from hp_schedule import Schedule
from hp_schedule import Transport as ScheduleTransport
from hp_schedule.runtime import TorchTransport, build_edge_groups
from hp_trainer.layout.mesh import Mesh

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
