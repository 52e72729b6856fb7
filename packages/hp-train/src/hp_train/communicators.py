"""Which process groups a run makes, and how many of them a rank holds. No torch.

Every axis has groups of its own even where the ranks coincide; only axes of one rank, along which
nothing is ever sent, share one, as every group costs threads, memory and time to start.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hp_train.config import Config
from hp_train.layout import Axis, Layout, StageLayout

GROUPS: Mapping[str, tuple[Axis, ...]] = {
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "expert_replicate": ("expert_replicate",),
    "expert_shard": ("expert_shard",),
    "ep": ("ep",),
    "etp": ("etp",),
    "sequence": ("cp", "tp"),
    "tokens": ("dp_replicate", "dp_shard", "cp", "tp"),
}
"""Each group, and the axes along which its ranks differ. None of them reaches beyond a stage."""

ALONE, WORLD = "alone", "world"
_RING = 4
"""Directed edges of a rank with two neighbours: to and from each."""


def partitions(layout: Layout) -> dict[str, list[list[int]]]:
    """Rank lists of all groups by name, in the order in which all ranks make them.

    Axes that have one rank in every stage stand under :data:`ALONE`, all ranks under :data:`WORLD`.
    """
    found: dict[str, list[list[int]]] = {}
    for name, axes in GROUPS.items():
        ranks = layout.ranks(*axes)
        found.setdefault(name if max(map(len, ranks)) > 1 else ALONE, ranks)
    return found | {WORLD: [list(range(layout.world_size))]}


class Held(NamedTuple):
    """What a rank holds of NCCL while a run lasts.

    Attributes:
        communicators: Of more than one rank, the default one included.
        peers: Ranks that it sends to or receives from one by one, in exchanges and along edges of
            the pipeline, each of them in each communicator; those on other nodes share a buffer
            and count as one.
    """

    communicators: int
    peers: int


def held(config: Config, place: StageLayout, *, node_size: int) -> Held:
    """Count what a rank of a stage holds.

    Args:
        config: Of the run.
        place: The stage.
        node_size: Devices of a node.
    """
    mesh = config.mesh
    if place.num_ranks * mesh.pp == 1:
        return Held(0, 0)
    groups = sum(place.size(*axes) > 1 for axes in GROUPS.values()) + len(("default", WORLD))
    edges = min(_RING, 2 * (mesh.pp - 1))
    tied = int(mesh.pp > 1 and config.model.tie_embeddings)
    degree = mesh.heads_degree
    hybrid = 2 * int(1 < degree < mesh.cp)
    peers = edges + num_peers(place.ranks("ep")[0], node_size)
    if degree > 1:
        peers += num_peers(place.ranks("cp")[0][:degree], node_size)
    return Held(groups + edges + tied + hybrid, peers)


def num_peers(ranks: Sequence[int], node_size: int) -> int:
    """Count the peers of a rank in a communicator, as `Held.peers` counts them.

    Args:
        ranks: The rank, then those that it sends to or receives from; it may be there again.
        node_size: Devices of a node.
    """
    others = {*ranks} - {ranks[0]}
    here = sum(rank // node_size == ranks[0] // node_size for rank in others)
    return here + int(here < len(others))
