"""The process groups of a layout's edges, made once, on all ranks, in one order."""

from __future__ import annotations

from datetime import timedelta

from hp_platform import new_groups
from hp_vtp.channel import EdgeGroups
from hp_vtp.topology import Edge, PipelineLayout


def build_edge_groups(
    layout: PipelineLayout,
    *,
    name: str,
    backend: str,
    timeout: timedelta | None = None,
) -> dict[Edge, EdgeGroups]:
    """Create and connect the groups of all edges; return those of this rank's edges.

    Every rank of the world calls this with the same arguments, whether it has an edge or not: torch
    lets no rank skip the creation of a group, and a group that is connected late may connect while
    others wait for it.

    Args:
        layout: Whose edges.
        name: Begins the names of the groups.
        backend: Of the groups that carry tensors.
        timeout: Of each operation; by default that of the default group.
    """
    names = {
        edge: f"{name}/{edge.source}-{edge.destination}/{edge.domain}" for edge in layout.edges
    }
    cross = new_groups(
        {names[edge]: [edge.ranks] for edge in layout.edges}, backend=backend, timeout=timeout
    )
    mine = [edge for edge in layout.edges if names[edge] in cross]
    if backend == "gloo":
        return {edge: EdgeGroups(*[cross[names[edge]]] * 3) for edge in mine}
    control = new_groups(
        {f"{names[edge]}/control": [edge.ranks] for edge in layout.edges},
        backend="gloo",
        timeout=timeout,
    )
    local = new_groups(
        {
            f"{names[edge]}/local": [sorted(edge.destination_ranks)]
            for edge in layout.edges
            if len(edge.destination_ranks) > 1
        },
        backend=backend,
        timeout=timeout,
    )
    return {
        edge: EdgeGroups(
            cross[names[edge]],
            local.get(f"{names[edge]}/local"),
            control[f"{names[edge]}/control"],
        )
        for edge in mine
    }
