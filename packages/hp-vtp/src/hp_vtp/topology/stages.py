"""Stages, edges between them, and placements of activations over ranks. Needs no torch."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank of the stage holds the whole tensor: plain tensor parallelism."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Rank i of k holds the slice `[n * i // k, n * (i + 1) // k)` of a dimension of length n.

    This is how sequence parallelism leaves an activation. Where k divides n, all slices are equal
    and the same as those of `torch.chunk`.

    Attributes:
        dim: The dimension that is cut, counted from 0.
    """

    dim: int = 0

    def __str__(self) -> str:
        return f"sharded({self.dim})"


Placement: TypeAlias = Replicated | Sharded


def cut(length: int, parts: int) -> tuple[int, ...]:
    """Return the ends of `parts` slices of `range(length)` whose lengths differ by at most one.

    Returns:
        parts + 1 ascending numbers, from 0 to `length`.
    """
    return tuple(length * part // parts for part in range(parts + 1))


def cut_by_lane(length: int, parts: int, lanes: int) -> tuple[int, ...]:
    """Return the ends of `parts` slices such that ranks of a link carry a `lanes`-th together.

    Rank i uses link `i * lanes // parts`. With at least as many lanes as parts this is `cut`.
    """
    if lanes >= parts:
        return cut(length, parts)
    ends = [0]
    per_lane = cut(length, lanes)
    for lane in range(lanes):
        first = -(-lane * parts // lanes)
        members = -(-(lane + 1) * parts // lanes) - first
        share = cut(per_lane[lane + 1] - per_lane[lane], members)
        ends += [per_lane[lane] + end for end in share[1:]]
    return tuple(ends)


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
    boundary: Placement = Replicated()
    lanes: int | None = None

    @property
    def tp_size(self) -> int:
        """Return the number of ranks that share each layer."""
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
        """Return the global ranks of both ends, ascending."""
        return tuple(sorted(self.source_ranks + self.destination_ranks))

    @property
    def is_forward(self) -> bool:
        """Tell whether activations go this way, rather than gradients."""
        return self.destination > self.source

    def __str__(self) -> str:
        what = "activations" if self.is_forward else "gradients"
        return f"edge {self.source} -> {self.destination} ({what}, domain {self.domain})"
