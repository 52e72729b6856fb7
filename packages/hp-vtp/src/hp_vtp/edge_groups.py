"""The process groups of a layout's edges, made once, on all ranks, in one order."""

from __future__ import annotations

from datetime import timedelta

from hp_platform import new_group
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
    found: dict[Edge, EdgeGroups] = {}
    for edge in layout.edges:
        label = f"{name}/{edge.source}-{edge.destination}/{edge.domain}"
        cross = new_group([edge.ranks], name=label, backend=backend, timeout=timeout)
        if backend == "gloo":
            if cross is not None:
                found[edge] = EdgeGroups(cross, cross, cross)
            continue
        control = new_group([edge.ranks], name=f"{label}/control", backend="gloo", timeout=timeout)
        local = None
        if len(edge.destination_ranks) > 1:
            members = sorted(edge.destination_ranks)
            local = new_group([members], name=f"{label}/local", backend=backend, timeout=timeout)
        if cross is not None and control is not None:
            found[edge] = EdgeGroups(cross, local, control)
    return found
