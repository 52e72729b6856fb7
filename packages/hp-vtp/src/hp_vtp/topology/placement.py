"""Placements of an activation over the ranks of a stage, and its cuts. Needs no torch."""

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
