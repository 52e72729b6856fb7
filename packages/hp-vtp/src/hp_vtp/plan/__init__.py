"""The transfer plan as data: the steps that bring one tensor from a stage to the next.

Legend: a source ranks, b destination ranks, N elements. A plan moves *units*. If both ends are
replicated a unit is one element of the flattened tensor; if one is sharded, a unit is one slice of
length 1 along the sharded dimension, so that every shard is a range of units.

A plan has up to three kinds of steps, each a list of messages between two ranks:

- COLLECT, within the source stage: bring shards to the leader;
- HOP, across the cut between the stages;
- SPREAD, within the destination stage: complete the replicas.

A plan in chunks has one HOP and one SPREAD per chunk: while one chunk is spread, the next one
crosses.

Needs no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Literal, NamedTuple

from hp_vtp.topology.stages import Placement, Replicated, Sharded, cut

Algorithm = Literal["auto", "direct", "interval", "leader"]


class StepKind(IntEnum):
    """The place of a step's messages: within a stage or across the cut."""

    COLLECT = 0
    HOP = 1
    SPREAD = 2


class Move(NamedTuple):
    """The units `[start, stop)` go from one rank to another; ranks are positions in a stage."""

    sender: int
    receiver: int
    start: int
    stop: int


class Step(NamedTuple):
    """Moves that may run at the same time; all earlier steps come first.

    Attributes:
        kind: Kind of the step, which tells the stages of the senders and of the receivers.
        round: Counts the steps of one kind.
        moves: Ascending by sender, then receiver.
    """

    kind: StepKind
    round: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The steps that bring one tensor from a stage to the next. Made by `hp_vtp.plan_transfer`.

    Attributes:
        shape: Global shape of the tensor.
        itemsize: Bytes of an element.
        num_sources: a, ranks of the source stage.
        num_destinations: b, ranks of the destination stage.
        source: Placement over the source stage.
        destination: Placement over the destination stage.
        source_lanes: Independent links of the source stage.
        destination_lanes: Independent links of the destination stage.
        algorithm: The one that was chosen; never `"auto"`.
        chunks: Parts that cross one after the other, each spread while the next one crosses.
        steps: Steps in order of round, then kind. A step needs only units that its senders had at
            the start or got in earlier steps.
    """

    shape: tuple[int, ...]
    itemsize: int
    num_sources: int
    num_destinations: int
    source: Placement
    destination: Placement
    source_lanes: int
    destination_lanes: int
    algorithm: Algorithm
    chunks: int = 1
    steps: tuple[Step, ...] = ()

    @property
    def dim(self) -> int | None:
        """Return the dimension along which units are counted; None: units are elements."""
        for placement in (self.source, self.destination):
            if isinstance(placement, Sharded):
                return placement.dim
        return None

    @property
    def extent(self) -> int:
        """Return the number of units."""
        return prod(self.shape) if self.dim is None else self.shape[self.dim]

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one unit."""
        return 0 if self.extent == 0 else self.total_bytes // self.extent

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def lanes(self) -> int:
        """Return the number of independent links that the cut offers."""
        return min(self.source_lanes, self.destination_lanes)

    @property
    def bound_bytes(self) -> int:
        """Return a lower bound of the bytes on the busiest link of the cut, in whole units."""
        return -(-self.extent // self.lanes) * self.unit_bytes

    @property
    def num_messages(self) -> int:
        """Return the number of messages that cross the cut."""
        return sum(len(step.moves) for step in self.steps if step.kind == StepKind.HOP)

    def source_range(self, index: int) -> tuple[int, int]:
        """Return the units that a source rank holds at the start."""
        return _owned(self.source, self.num_sources, index, self.extent)

    def destination_range(self, index: int) -> tuple[int, int]:
        """Return the units that a destination rank holds at the end."""
        return _owned(self.destination, self.num_destinations, index, self.extent)

    def workspace_range(self, index: int, *, at_destination: bool) -> tuple[int, int]:
        """Return the units that a rank needs room for: its own and those that it passes on."""
        own = self.destination_range(index) if at_destination else self.source_range(index)
        touched = [own]
        for step in self.steps:
            for move in step.moves:
                sends = (step.kind == StepKind.SPREAD) == at_destination and move.sender == index
                receives = (
                    step.kind == StepKind.COLLECT
                ) != at_destination and move.receiver == index
                if sends or receives:
                    touched.append((move.start, move.stop))
        touched = [(start, stop) for start, stop in touched if start < stop] or [own]
        return min(start for start, _ in touched), max(stop for _, stop in touched)

    def range_shape(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the shape of the tensor that holds some units; 1-D where units are elements."""
        if self.dim is None:
            return (stop - start,)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def source_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the tensor that a source rank holds."""
        if isinstance(self.source, Replicated):
            return self.shape
        return self.range_shape(*self.source_range(index))

    def destination_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the tensor that a destination rank gets."""
        if isinstance(self.destination, Replicated):
            return self.shape
        return self.range_shape(*self.destination_range(index))


def _owned(placement: Placement, parts: int, index: int, extent: int) -> tuple[int, int]:
    if isinstance(placement, Replicated):
        return 0, extent
    ends = cut(extent, parts)
    return ends[index], ends[index + 1]


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
