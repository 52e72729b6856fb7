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
