"""Costs of a transfer plan on given links. Needs no torch.

A step takes as long as its busiest rank: the latency of every message that the rank sends or
receives, and the bytes on its link at the link's speed. Links are full duplex. Hops follow one
another; spreads within the destination stage run under later hops.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hp_vtp.plan import Step, StepKind, TransferPlan

# Plans within this factor of the cheapest count as equal, and the fewest messages decide: the
# speeds are rarely known better than that.
TOLERANCE = 1.02


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds of the links between and within stages.

    The default is 25 Gbit/s Ethernet between stages and PCIe 4.0 within them.

    Attributes:
        cross_bandwidth: Bytes per second of one lane between stages, each way.
        cross_latency: Seconds per message between stages.
        local_bandwidth: Bytes per second of one rank within its stage, each way.
        local_latency: Seconds per message within a stage.

    Raises:
        ValueError: If a bandwidth is not positive or a latency negative.
    """

    cross_bandwidth: float = 25e9 / 8
    cross_latency: float = 20e-6
    local_bandwidth: float = 24e9
    local_latency: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("cross_bandwidth", "local_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be greater than 0")
        for name in ("cross_latency", "local_latency"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each link carries over the cut.

    Attributes:
        sent: Bytes by link of the source stage.
        received: Bytes by link of the destination stage.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


def cut_traffic(plan: TransferPlan) -> Traffic:
    """Count the bytes on every link of the cut."""
    sent = [0] * plan.source_lanes
    received = [0] * plan.destination_lanes
    for step in plan.steps:
        if step.kind == StepKind.HOP:
            for move in step.moves:
                size = (move.stop - move.start) * plan.unit_bytes
                sent[link_of(move.sender, plan.num_sources, plan.source_lanes)] += size
                to = link_of(move.receiver, plan.num_destinations, plan.destination_lanes)
                received[to] += size
    return Traffic(tuple(sent), tuple(received))


def link_of(rank: int, ranks: int, lanes: int) -> int:
    """Return the link that a rank of a stage uses; consecutive ranks share one."""
    return rank * lanes // ranks


def step_seconds(plan: TransferPlan, step: Step, links: Links) -> float:
    """Predict the seconds of one step."""
    a, b = plan.num_sources, plan.num_destinations
    cross = step.kind == StepKind.HOP
    latency = links.cross_latency if cross else links.local_latency
    bandwidth = links.cross_bandwidth if cross else links.local_bandwidth
    sending = b if step.kind == StepKind.SPREAD else a
    receiving = a if step.kind == StepKind.COLLECT else b
    ends = (
        ([move.sender for move in step.moves], sending, plan.source_lanes if cross else sending),
        (
            [move.receiver for move in step.moves],
            receiving,
            plan.destination_lanes if cross else receiving,
        ),
    )
    sizes = [(move.stop - move.start) * plan.unit_bytes for move in step.moves]
    return max(
        _busiest(
            list(zip(at, sizes, strict=True)),
            lanes,
            ranks=ranks,
            latency=latency,
            bandwidth=bandwidth,
        )
        for at, ranks, lanes in ends
    )


def predicted_seconds(plan: TransferPlan, links: Links) -> float:
    """Predict the seconds of all steps: a spread starts after its hop and the spread before it."""
    crossed = spread = 0.0
    for step in plan.steps:
        seconds = step_seconds(plan, step, links)
        if step.kind == StepKind.SPREAD:
            spread = max(spread, crossed) + seconds
        else:
            crossed += seconds
    return max(crossed, spread)


def bound_seconds(plan: TransferPlan, links: Links) -> float:
    """Return a lower bound of the seconds of any algorithm: N distinct bytes cross the cut."""
    if plan.total_bytes == 0:
        return 0.0
    return links.cross_latency + plan.total_bytes / (plan.lanes * links.cross_bandwidth)


def choose(plans: Sequence[TransferPlan], links: Links) -> TransferPlan:
    """Return the cheapest plan; of those within 2 % of it, the first with the fewest messages."""
    seconds = [predicted_seconds(plan, links) for plan in plans]
    limit = min(seconds) * TOLERANCE
    good = [plan for plan, time in zip(plans, seconds, strict=True) if time <= limit]
    return min(good, key=lambda plan: sum(len(step.moves) for step in plan.steps))


def _busiest(
    loads: Sequence[tuple[int, int]], lanes: int, *, ranks: int, latency: float, bandwidth: float
) -> float:
    """Return the seconds of a step's busiest rank at one end; `loads` has (rank, bytes)."""
    messages, carried = Counter[int](), Counter[int]()
    for rank, size in loads:
        messages[rank] += 1
        carried[link_of(rank, ranks, lanes)] += size
    return max(
        count * latency + carried[link_of(rank, ranks, lanes)] / bandwidth
        for rank, count in messages.items()
    )
