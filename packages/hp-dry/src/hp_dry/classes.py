"""Classes of ranks that run the same program, one of which has a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Classes:
    """Ranks of a world, each with the one that stands for it.

    Attributes:
        members: Global ranks of each class, the representative among them, by the global rank of
            the representative.
        representative: Representative of each rank, by global rank.
    """

    members: Mapping[int, tuple[int, ...]]
    representative: tuple[int, ...]

    @classmethod
    def of(cls, members: Mapping[int, Sequence[int]] | None, *, world_size: int) -> Classes:
        """Read a map of representatives to ranks that they stand for.

        Args:
            members: Global ranks of each class, by the global rank of its representative, which may
                be left out. None: every rank has a process.
            world_size: Number of ranks.

        Raises:
            ValueError: If not every rank of the world has exactly one representative.
        """
        given = {rank: (rank,) for rank in range(world_size)} if members is None else members
        found = {key: tuple(sorted({key, *ranks})) for key, ranks in sorted(given.items())}
        if sorted(chain.from_iterable(found.values())) != list(range(world_size)):
            raise ValueError(
                f"representatives ({dict(given)}) must stand for every rank below world_size "
                f"({world_size}) once"
            )
        by_rank = {rank: key for key, ranks in found.items() for rank in ranks}
        return cls(found, tuple(by_rank[rank] for rank in range(world_size)))

    def size(self, rank: int) -> int:
        """Count the ranks that a representative stands for."""
        return len(self.members[rank])
