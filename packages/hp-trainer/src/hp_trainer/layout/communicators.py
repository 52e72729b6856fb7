"""The communicators that a rank is in, and what they hold of a device. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import hp_vtp  # loads what is used, where stages have different numbers of ranks
from hp_base.beside_tensors import Held
from hp_base.dtypes import BYTES
from hp_trainer.layout.ranks import GROUPS, Axis, Layout, StageLayout
from hp_trainer.layout.schedules import has_even_edges, layers_of_stages, placement

if TYPE_CHECKING:
    from hp_trainer.config import Config, MeshConfig, ModelConfig


_POSITIONS = 1
"""The dim of positions in what travels between stages, [sequences, positions, width]."""


def pipeline_layout(layout: Layout, stage_to_rank: Sequence[int]) -> hp_vtp.PipelineLayout:
    """Return a layout as hp-vtp has it: tensor-parallel ranks of stages, pipelines side by side.

    Args:
        layout: Layout of the ranks of a run.
        stage_to_rank: Pipeline rank of each stage.
    """
    stages = (
        hp_vtp.StageLayout(tuple(map(tuple, stage.ranks("tp"))), hp_vtp.Sharded(_POSITIONS))
        for stage in layout.stages
    )
    # Stages that follow each other on the same ranks hand over without a message.
    chain = tuple(rank for rank, _ in groupby(stage_to_rank))
    return hp_vtp.PipelineLayout(tuple(stages), chain)


def held(config: Config, rank: int, *, node_size: int) -> Held:
    """Count what a rank will hold, if all attention is causal over whole sequences.

    Where a window or documents let a rank do without the keys of some others, it holds less; a ring
    whose keys do not go all the way round may send gradients home to one rank more.

    Args:
        config: Config of the run.
        rank: Global rank.
        node_size: Devices of a node.
    """
    mesh, pipeline, train = config.mesh, config.pipeline, config.train
    size = (train.microbatch_size, config.data.seq_len // mesh.cp, BYTES[train.dtype])
    is_equal = has_even_edges(config)
    if is_equal:
        size = (1, 1, 1)  # nothing depends on how large messages are
    stages = placement(pipeline, num_ranks=mesh.pp)
    layers = tuple(layers_of_stages(config))
    run = _Run(mesh, stages, is_equal, config.model, layers, size, pipeline.overlap)
    return _held(run, rank, node_size)


class _Run(NamedTuple):
    """The values of a config on which the process groups depend.

    Attributes:
        mesh: Axes of the mesh.
        stages: Pipeline rank of each stage.
        has_equal_edges: Whether each rank sends to one rank of the next stage.
        model: The model.
        layers: Layers of each stage.
        size: Sequences, positions and bytes of a number of what travels between stages.
        overlap: Whether a microbatch's forward runs beside another's backward.
    """

    mesh: MeshConfig
    stages: tuple[int, ...]
    has_equal_edges: bool
    model: ModelConfig
    layers: tuple[range, ...]
    size: tuple[int, int, int]
    overlap: bool


@lru_cache(maxsize=1 << 14)  # batches of one layout ask for the same
def _held(run: _Run, rank: int, node_size: int) -> Held:
    return Held.of(rank, _exchanges(run, rank), node_size=node_size)


def _exchanges(config: _Run, rank: int) -> Iterator[Sequence[int]]:
    """Return for each communicator of a rank the peers that it exchanges messages with."""
    mesh, layout = config.mesh, Layout.of(config.mesh)
    if layout.world_size == 1:
        return
    yield from ((), ())  # the default one, and WORLD
    index = layout.pp_index(rank)
    place = layout.stages[index]
    stages = config.stages
    talks = {"ep", "etp"} if _has_experts(config, index) else set()
    for name, axes in GROUPS.items():
        if place.size(*axes) > 1 and name != "cp":
            yield _group(place, rank, *axes) if name in talks else ()
    if config.overlap and place.size("ep") > 1:
        yield _group(place, rank, "ep") if "ep" in talks else ()  # beside the rows
    if mesh.cp > 1:
        yield from _of_sequence(config, _group(place, rank, "cp"), rank)
    if config.has_equal_edges:
        for step in {1, -1} if mesh.pp > 2 else range(1, mesh.pp):
            other = layout.stages[(index + step) % mesh.pp].first + rank - place.first
            yield from ((other,), (other,))  # an edge there and an edge back
    else:
        yield from _of_uneven_edges(config, layout, rank)
    if config.model.tie_embeddings and stages[0] != stages[-1] and index in (stages[0], stages[-1]):
        yield ()


def _of_sequence(config: _Run, members: Sequence[int], rank: int) -> Iterator[Sequence[int]]:
    """Return `_exchanges` of the ranks that share a sequence."""
    degree, at = config.mesh.heads_degree, members.index(rank)
    inner, outer = members[at - at % degree :][:degree], members[at % degree :: degree]
    if config.mesh.cp_ring:
        outer = [outer[(at // degree + step) % len(outer)] for step in (1, -1)]
    if 1 < degree < len(members):
        yield ()  # all of them, of whom those with the same heads and the others have their own
        yield inner
        yield outer
    else:
        yield inner if degree > 1 else outer


def _of_uneven_edges(config: _Run, layout: Layout, rank: int) -> Iterator[Sequence[int]]:
    """Return `_exchanges` of the messages that hp-vtp plans between stages."""
    sequences, positions, itemsize = config.size
    shape = (sequences, positions, config.model.stage_width)
    for edge in _edges(layout, config.stages):
        if rank not in edge.ranks:
            continue
        sources, destinations = edge.source_ranks, edge.destination_ranks
        across, inside = set[int](), set[int]()
        for step in hp_vtp.plan_edge(edge, shape, itemsize=itemsize).steps:
            is_spread = step.kind is hp_vtp.StepKind.SPREAD
            senders = destinations if is_spread else sources
            receivers = sources if step.kind is hp_vtp.StepKind.COLLECT else destinations
            for move in step.moves:
                ends = {senders[move.sender], receivers[move.receiver]}
                if rank in ends:
                    (inside if is_spread else across).update(ends)
        yield tuple(across)
        if rank in destinations and len(destinations) > 1:
            yield tuple(inside)


def _has_experts(config: _Run, index: int) -> bool:
    """Tell whether a pipeline rank has a layer of experts."""
    stages, model = config.stages, config.model
    last = max(config.layers[stage][-1] for stage, at in enumerate(stages) if at == index)
    return not model.is_dense(last + (model.num_mtp_modules if index == stages[-1] else 0))


@lru_cache(maxsize=4096)  # pipelines and batches of one mesh ask for the same
def _group(place: StageLayout, rank: int, *axes: Axis) -> Sequence[int]:
    return place.group(rank, *axes)


@lru_cache(maxsize=64)
def _edges(layout: Layout, stage_to_rank: tuple[int, ...]) -> Sequence[hp_vtp.Edge]:
    return pipeline_layout(layout, stage_to_rank).edges
