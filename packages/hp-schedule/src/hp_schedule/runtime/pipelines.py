"""Ranks of the world that make up each pipeline."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import all_gather_json, resolve_group

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
