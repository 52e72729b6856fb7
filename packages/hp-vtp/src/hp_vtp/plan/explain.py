"""Transfer plans and layouts as text. Needs no torch."""

from collections.abc import Sequence
from math import prod

from hp_base.messages import size
from hp_vtp.plan import (
    Algorithm,
    Links,
    Step,
    StepKind,
    TransferPlan,
    bound_seconds,
    cut_traffic,
    predicted_seconds,
    step_seconds,
)
from hp_vtp.plan.planner import ALGORITHMS, plan_edge, plan_transfer
from hp_vtp.topology import PipelineLayout
from hp_vtp.topology.stages import Edge

# Letters of the stages that send and receive: S the source stage, D the destination stage.
_ENDS = {StepKind.COLLECT: "SS", StepKind.HOP: "SD", StepKind.SPREAD: "DD"}


def explain(plan: TransferPlan, links: Links = Links()) -> str:  # noqa: B008 (frozen)
    """Describe the messages of a plan, their costs, and a bound that no plan can beat.

    Args:
        plan: Plan of the transfer, from `plan_transfer`.
        links: Speeds of the links, from which the time is predicted.

    Returns:
        Several lines: the messages of each step, bytes on each link of the cut, predicted time
        with the bound, and the times of the other algorithms.
    """
    return "\n".join([_title(plan), *_messages(plan), *_links(plan), *_costs(plan, links)])


def format_seconds(seconds: float) -> str:
    """Return a time with a fitting unit, such as `1.36 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _title(plan: TransferPlan) -> str:
    shape = "x".join(map(str, plan.shape)) or "scalar"
    chunks = f" in {plan.chunks} chunks" if plan.chunks > 1 else ""
    return (
        f"{plan.num_sources} -> {plan.num_destinations} ranks, {shape} of {plan.itemsize} B = "
        f"{size(plan.total_bytes)}, {plan.source} -> {plan.destination}: "
        f"{plan.algorithm}{chunks}"
    )


def _messages(plan: TransferPlan) -> list[str]:
    shown = [step for step in plan.steps if step.round == 0 or plan.chunks == 1]
    lines = [line for step in shown for line in _step_lines(plan, step)]
    if plan.chunks > 1:
        lines.append(f"and so on for {plan.chunks} chunks, each spread under the hop of the next")
    return lines


def _step_lines(plan: TransferPlan, step: Step) -> list[str]:
    ends = _ENDS[step.kind]
    total = sum(move.stop - move.start for move in step.moves) * plan.unit_bytes
    lines = [f"{_name(step)}: {len(step.moves)} messages, {size(total)}"]
    for move in step.moves:
        told = size((move.stop - move.start) * plan.unit_bytes)
        way = f"{ends[0]}{move.sender} -> {ends[1]}{move.receiver}"
        lines.append(f"  {way}  [{move.start}, {move.stop})  {told}")
    return lines


def _links(plan: TransferPlan) -> list[str]:
    traffic = cut_traffic(plan)
    sent = ", ".join(map(size, traffic.sent))
    received = ", ".join(map(size, traffic.received))
    busiest = size(max(*traffic.sent, *traffic.received))
    bound = f"{size(plan.bound_bytes)} (N / {plan.lanes} links)"
    return [
        f"bytes per link of the cut: sent {sent}; received {received}",
        f"busiest link: {busiest}, bound {bound}; {plan.num_messages} messages over the cut",
    ]


def _costs(plan: TransferPlan, links: Links) -> list[str]:
    parts = [
        f"{_name(step)} {format_seconds(step_seconds(plan, step, links))}"
        for step in plan.steps
        if step.round == 0 or plan.chunks == 1
    ]
    steps = ", ".join(parts) or "nothing to send"
    total = format_seconds(predicted_seconds(plan, links))
    others = ", ".join(
        f"{format_algorithm(other)} {format_seconds(predicted_seconds(other, links))}"
        for other in _alternatives(plan)
    )
    return [
        f"predicted: {total} ({steps}), bound {format_seconds(bound_seconds(plan, links))}",
        f"alternatives: {others}",
    ]


def format_algorithm(plan: TransferPlan) -> str:
    """Return the algorithm of a plan, with its chunks if there are several."""
    return f"{plan.algorithm} in {plan.chunks}" if plan.chunks > 1 else plan.algorithm


def _name(step: Step) -> str:
    return f"{step.kind.name.lower()} {step.round}"


def _alternatives(plan: TransferPlan) -> list[TransferPlan]:
    return [
        plan_transfer(
            plan.shape,
            num_sources=plan.num_sources,
            num_destinations=plan.num_destinations,
            itemsize=plan.itemsize,
            source=plan.source,
            destination=plan.destination,
            source_lanes=plan.source_lanes,
            destination_lanes=plan.destination_lanes,
            algorithm=name,
        )
        for name in ALGORITHMS
        if name != plan.algorithm or plan.chunks > 1
    ]


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
    sizes = " x ".join(map(str, shape)) or "scalar"
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
            f"one activation: {sizes} of {itemsize} B = {size(total)}",
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
        size(sum(traffic.sent)),
        size(max(*traffic.sent, *traffic.received)),
        size(plan.bound_bytes),
        format_seconds(predicted_seconds(plan, links)),
        format_seconds(bound_seconds(plan, links)),
    )
