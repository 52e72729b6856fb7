"""Transports between stages of unequally many ranks, and of chains that return: hp-vtp's."""

from collections.abc import Sequence
from datetime import timedelta

import torch

from hp_platform import Runtime
from hp_schedule import Schedule
from hp_trainer.layout.communicators import pipeline_layout
from hp_trainer.layout.mesh import Edges, Mesh, Messages
from hp_vtp.pipeline import StageTransport
from hp_vtp.transport import TensorMeta, Transport


def uneven_edges(
    stage_to_rank: Sequence[int], mesh: Mesh, runtime: Runtime, timeout: timedelta
) -> Edges:
    """Connect all stages by a plan of who sends which positions. All ranks call this together.

    Args:
        stage_to_rank: Pipeline rank of each stage.
        mesh: Mesh of the run.
        runtime: Device and backend.
        timeout: Time limit of every message.
    """
    edges = Transport(
        pipeline_layout(mesh.layout, stage_to_rank),
        name="pipeline",
        backend=runtime.backend,
        timeout=timeout,
        device=runtime.device,
    )

    def transport(schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> Messages:
        metas = {p: [TensorMeta(shape, dtype)] for p in range(1, edges.layout.num_stages)}
        return StageTransport(edges, schedule, metas=metas, domain=mesh.domain)

    return Edges(transport, edges.close)
