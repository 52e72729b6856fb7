"""A transfer plan as text. Needs no torch."""

from hp_vtp.plan import Step, StepKind, TransferPlan
from hp_vtp.plan.cost import Links, bound_seconds, cut_traffic, predicted_seconds, step_seconds
from hp_vtp.plan.planner import ALGORITHMS, plan_transfer

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


def format_bytes(size: int) -> str:
    """Return a size with a binary unit, such as `8.00 MiB`."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


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
        f"{format_bytes(plan.total_bytes)}, {plan.source} -> {plan.destination}: "
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
    lines = [f"{_name(step)}: {len(step.moves)} messages, {format_bytes(total)}"]
    for move in step.moves:
        size = format_bytes((move.stop - move.start) * plan.unit_bytes)
        way = f"{ends[0]}{move.sender} -> {ends[1]}{move.receiver}"
        lines.append(f"  {way}  [{move.start}, {move.stop})  {size}")
    return lines


def _links(plan: TransferPlan) -> list[str]:
    traffic = cut_traffic(plan)
    sent = ", ".join(map(format_bytes, traffic.sent))
    received = ", ".join(map(format_bytes, traffic.received))
    busiest = format_bytes(max(*traffic.sent, *traffic.received))
    bound = f"{format_bytes(plan.bound_bytes)} (N / {plan.lanes} links)"
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
