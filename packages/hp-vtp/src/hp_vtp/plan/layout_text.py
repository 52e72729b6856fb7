"""A layout as text: its stages, its process groups, and the cost of an activation on each edge.

Needs no torch.
"""

from collections.abc import Sequence
from math import prod

from hp_vtp.plan import Algorithm
from hp_vtp.plan.cost import Links, bound_seconds, cut_traffic, predicted_seconds
from hp_vtp.plan.explain import format_algorithm, format_bytes, format_seconds
from hp_vtp.plan.planner import plan_edge
from hp_vtp.topology import PipelineLayout
from hp_vtp.topology.stages import Edge


def describe_layout(
    layout: PipelineLayout,
    shape: Sequence[int],
    *,
    itemsize: int,
    algorithm: Algorithm = "auto",
    links: Links = Links(),  # noqa: B008 (frozen)
) -> str:
    """Describe a layout and the transfer of one tensor over each of its edges.

    Args:
        layout: Layout to describe.
        shape: Global shape of the activation of one microbatch.
        itemsize: Bytes of an element.
        algorithm: Same as in `plan_transfer`.
        links: Speeds of the links, from which times are predicted.

    Returns:
        Several lines: the stages, then a table with a row per directed edge, which is a process
        group of its own: its ranks, messages and bytes over the cut, the busiest link, the bound,
        predicted time and its bound.

    Raises:
        ValueError: If a boundary of the stages does not fit the shape.
    """
    chain = " -> ".join(map(str, layout.chain))
    size = " x ".join(map(str, shape)) or "scalar"
    total = itemsize * prod(shape)
    title = (
        f"{layout.world_size} ranks, {len(layout.stages)} stages, chain {chain}, "
        f"{layout.num_domains} data-parallel pipeline(s)"
    )
    rows = [_HEAD, *(_row(edge, shape, itemsize, algorithm, links) for edge in layout.edges)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        [
            title,
            *_stages(layout),
            f"one activation: {size} of {itemsize} B = {format_bytes(total)}",
            *(table if layout.edges else ["nothing is transferred"]),
        ]
    )


_HEAD = (
    *("edge", "domain", "from", "to", "algorithm", "messages", "over the cut"),
    *("busiest link", "bound", "predicted", "at least"),
)


def _stages(layout: PipelineLayout) -> list[str]:
    lines = []
    for index, stage in enumerate(layout.stages):
        visits = [position for position, at in enumerate(layout.chain) if at == index]
        replicas = "; ".join(" ".join(map(str, part)) for part in stage.replicas)
        lanes = "" if stage.lanes is None else f", {stage.lanes} lane(s)"
        lines.append(
            f"stage {index}: TP {stage.tp_size}, ranks {replicas}, logical stage(s) "
            f"{' '.join(map(str, visits))}, boundary {stage.boundary}{lanes}"
        )
    return lines


def _row(
    edge: Edge, shape: Sequence[int], itemsize: int, algorithm: Algorithm, links: Links
) -> tuple[str, ...]:
    plan = plan_edge(edge, shape, itemsize=itemsize, algorithm=algorithm, links=links)
    traffic = cut_traffic(plan)
    return (
        f"{edge.source} -> {edge.destination}",
        str(edge.domain),
        " ".join(map(str, edge.source_ranks)),
        " ".join(map(str, edge.destination_ranks)),
        format_algorithm(plan),
        str(plan.num_messages),
        format_bytes(sum(traffic.sent)),
        format_bytes(max(*traffic.sent, *traffic.received)),
        format_bytes(plan.bound_bytes),
        format_seconds(predicted_seconds(plan, links)),
        format_seconds(bound_seconds(plan, links)),
    )
