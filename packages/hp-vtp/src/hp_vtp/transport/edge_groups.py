"""The process groups of a layout's edges, made once, on all ranks, in one order."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from hp_platform import new_groups
from hp_vtp.topology import Edge, PipelineLayout
from hp_vtp.transport.channel import EdgeGroups


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
        layout: Layout whose edges get groups.
        name: Beginning of the names of all groups.
        backend: Backend of the groups that carry tensors.
        timeout: Time-out of each operation; by default that of the default group.
    """
    names = _names(layout, name)

    def lists(ending: str, ranks_of: Callable[[Edge], Sequence[int]]) -> dict[str, list[list[int]]]:
        """Return the ranks of all groups of a name, which have no rank in common."""
        found: dict[str, list[list[int]]] = {}
        for edge in layout.edges:
            if len(ranks := ranks_of(edge)) > 1:
                found.setdefault(names[edge] + ending, []).append([*ranks])
        return found

    cross = new_groups(lists("", lambda edge: edge.ranks), backend=backend, timeout=timeout)
    mine = [edge for edge in layout.edges if dist.get_rank() in edge.ranks]
    if backend == "gloo":
        return {edge: EdgeGroups(*[cross[names[edge]]] * 3) for edge in mine}
    control = new_groups(
        lists("/control", lambda edge: edge.ranks), backend="gloo", timeout=timeout
    )
    local = new_groups(
        lists("/local", lambda edge: sorted(edge.destination_ranks)),
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


def _names(layout: PipelineLayout, name: str) -> dict[Edge, str]:
    """Name edges; edges of one purpose with different ranks share a name over all domains."""
    found: dict[Edge, str] = {}
    taken: dict[str, set[int]] = {}
    for edge in layout.edges:
        numbered = (f"{name}/{edge.source}-{edge.destination}/{number}" for number in count())
        found[edge] = next(x for x in numbered if taken.get(x, set()).isdisjoint(edge.ranks))
        taken.setdefault(found[edge], set()).update(edge.ranks)
    return found
