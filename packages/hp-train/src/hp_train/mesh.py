"""Where a rank stands in the layout, and the process groups it belongs to.

Ranks are numbered with the pipeline outermost: ``rank = pp_index * dp_replicate + dp_index``, so
data-parallel neighbours, and the expert-parallel ranks taken out of them, are neighbours on a
node. Experts borrow their ranks from data parallelism: ``dp_replicate = ep * expert replicas``.

Every axis has groups of its own even where the ranks coincide, built by all ranks in one order.
"""

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import ProcessGroup

from hp_platform import Runtime, new_group
from hp_train.config import MeshConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The arithmetic of a mesh: no process group, no torch.

    Attributes:
        pp: Pipeline ranks.
        dp: Data-parallel ranks.
        ep: Expert-parallel ranks, a divisor of ``dp``.
    """

    pp: int
    dp: int
    ep: int

    @classmethod
    def of(cls, config: MeshConfig) -> "Layout":
        """The layout a config asks for."""
        return cls(pp=config.pp, dp=config.dp_replicate, ep=config.ep)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(pp index, dp index) of a rank."""
        return divmod(rank, self.dp)

    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline, first stage first; one list per data-parallel index."""
        return [list(range(dp, self.world_size, self.dp)) for dp in range(self.dp)]

    def data_ranks(self) -> list[list[int]]:
        """Ranks that hold the same stages and see different sequences."""
        return [list(range(pp * self.dp, (pp + 1) * self.dp)) for pp in range(self.pp)]

    def expert_ranks(self) -> list[list[int]]:
        """Ranks that together hold all experts of their stages."""
        starts = range(0, self.world_size, self.ep)
        return [list(range(start, start + self.ep)) for start in starts]

    def expert_replica_ranks(self) -> list[list[int]]:
        """Ranks that hold the same experts."""
        return [ranks[shard :: self.ep] for ranks in self.data_ranks() for shard in range(self.ep)]

    def __str__(self) -> str:
        axes = f"pp {self.pp} x dp {self.dp}"
        return f"{axes} (ep {self.ep})" if self.ep > 1 else axes


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place and groups.

    Attributes:
        layout: The arithmetic.
        rank: Global rank.
        pp_index: Position in its pipeline.
        dp_index: Which share of the sequences it sees.
        dp: Ranks with the same stages.
        ep: Ranks that share out the experts.
        expert_replicas: Ranks with the same experts.
        world: All ranks, for the step's scalars.
    """

    layout: Layout
    rank: int
    pp_index: int
    dp_index: int
    dp: ProcessGroup
    ep: ProcessGroup
    expert_replicas: ProcessGroup
    world: ProcessGroup

    @property
    def expert_shard(self) -> int:
        """Index of this rank among those that share out the experts."""
        return self.dp_index % self.layout.ep

    @property
    def is_first_expert_replica(self) -> bool:
        """Whether this rank speaks for its experts where each must be counted once."""
        return self.dp_index < self.layout.ep


def build_mesh(layout: Layout, runtime: Runtime, *, timeout: timedelta) -> Mesh:
    """Build every group of the layout. All ranks call this at the same point.

    Args:
        layout: Must fill the world.
        runtime: The initialised world.
        timeout: Of every collective on these groups.

    Raises:
        ValueError: When the layout does not fill the world.
    """
    world_size, rank = runtime.info.world_size, runtime.info.rank
    if layout.world_size != world_size:
        raise ValueError(f"pp ({layout.pp}) x dp ({layout.dp}) must equal the world ({world_size})")
    pp_index, dp_index = layout.coordinates(rank)

    def group(name: str, ranks: list[list[int]], *, high_priority: bool = False) -> ProcessGroup:
        mine = new_group(
            ranks,
            name=name,
            backend=runtime.backend,
            timeout=timeout,
            high_priority=high_priority,
        )
        assert mine is not None, f"rank {rank} is in no {name} group"
        return mine

    return Mesh(
        layout=layout,
        rank=rank,
        pp_index=pp_index,
        dp_index=dp_index,
        dp=group("dp", layout.data_ranks()),
        ep=group("ep", layout.expert_ranks(), high_priority=True),
        expert_replicas=group("expert_replicas", layout.expert_replica_ranks()),
        world=group("world", [list(range(world_size))]),
    )
