"""A stage of a layout and an edge between two stages. Needs no torch."""

from dataclasses import dataclass

from hp_vtp.topology.placement import Placement, Replicated


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The ranks that hold one part of the model.

    Attributes:
        replicas: Global ranks of each data-parallel replica, in tensor-parallel order. They need
            not be contiguous. All replicas of a stage have the same size.
        boundary: Placement of the activations that enter and leave the stage.
        lanes: Independent links by which a replica reaches other stages, shared by consecutive
            ranks; None: one link per rank.
    """

    replicas: tuple[tuple[int, ...], ...]
    boundary: Placement = Replicated()  # noqa: RUF009 (frozen)
    lanes: int | None = None

    @property
    def tp_size(self) -> int:
        """Number of ranks that share each layer."""
        return len(self.replicas[0])


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed edge between two neighbouring logical stages of one domain.

    Attributes:
        source: Logical stage that sends.
        destination: Logical stage that receives: `source + 1` for activations, `source - 1` for
            gradients.
        domain: Data-parallel pipeline.
        source_ranks: Global ranks that send, in tensor-parallel order.
        destination_ranks: Global ranks that receive.
        source_boundary: Placement of a tensor over the sending ranks.
        destination_boundary: Placement over the receiving ranks.
        source_lanes: Independent links of the sending ranks.
        destination_lanes: Independent links of the receiving ranks.
    """

    source: int
    destination: int
    domain: int
    source_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    source_boundary: Placement
    destination_boundary: Placement
    source_lanes: int
    destination_lanes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ascending global ranks of both ends."""
        return tuple(sorted(self.source_ranks + self.destination_ranks))

    @property
    def is_forward(self) -> bool:
        """Tell whether activations go this way, rather than gradients."""
        return self.destination > self.source

    def __str__(self) -> str:
        what = "activations" if self.is_forward else "gradients"
        return f"edge {self.source} -> {self.destination} ({what}, domain {self.domain})"
