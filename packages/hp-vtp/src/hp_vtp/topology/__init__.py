"""Pipeline layouts as data: the ranks of each stage, and the order of the stages in the model.

A *stage* is a set of ranks that split layers among them by tensor parallelism; stages may have
different sizes. The *chain* lists the stages in the order in which a microbatch passes them, so a
position in the chain is a *logical stage*: `(0, 1, 2)` is a straight pipeline, `(0, 1, 2, 0)` a
U-shaped one whose first and last layers are on the same ranks. Data-parallel replicas of a stage
hold the same layers. A *domain* is one data-parallel pipeline; where a stage has fewer replicas
than there are domains, its replicas serve several domains in turn: domain d uses replica
`d % len(replicas)`.

Needs no torch and no process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from hp_vtp.topology.checks import (
    LayoutError,
    dump_layout,
    layout_problems,
    parse_long,
    parse_short,
)
from hp_vtp.topology.stages import Edge, StageLayout

__all__ = ["Edge", "LayoutError", "PipelineLayout", "StageLayout"]

_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Stages and the order in which the model passes them. Checked on construction.

    Attributes:
        stages: Physical stages.
        chain: Physical stage of each logical stage.
        world_size: Number of ranks; 0 (the default) takes as many as the stages name.

    Raises:
        LayoutError: With every problem of the layout.
    """

    stages: tuple[StageLayout, ...]
    chain: tuple[int, ...]
    world_size: int = 0

    def __post_init__(self) -> None:
        if self.world_size == 0:
            ranks = [rank for stage in self.stages for part in stage.replicas for rank in part]
            object.__setattr__(self, "world_size", max(ranks, default=-1) + 1)
        if problems := layout_problems(self.stages, self.chain, self.world_size):
            raise LayoutError(problems)

    @classmethod
    def straight(cls, tp_sizes: Sequence[int], *, dp: int | Sequence[int] = 1) -> "PipelineLayout":
        """Make a pipeline that visits stages of these sizes once, in order.

        Args:
            tp_sizes: Ranks of each stage.
            dp: Replicas of every stage, or of each one. Ranks are numbered domain by domain.

        Raises:
            LayoutError: With every problem of the layout.
        """
        return cls(_number(tp_sizes, dp), tuple(range(len(tp_sizes))))

    @classmethod
    def u_shaped(cls, tp_sizes: Sequence[int], *, dp: int | Sequence[int] = 1) -> "PipelineLayout":
        """Make a pipeline that returns to its first stage for the last layers.

        Args:
            tp_sizes: Ranks of each stage.
            dp: Same as in `straight`; `dp=[1, 2, 2]` lets one first stage serve two domains in
                turn.

        Raises:
            LayoutError: With every problem of the layout.
        """
        return cls(_number(tp_sizes, dp), (*range(len(tp_sizes)), 0))

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[Sequence[int]], *, chain: Sequence[int] | None = None
    ) -> "PipelineLayout":
        """Make a layout without replicas whose stages are these ranks; straight by default.

        Raises:
            LayoutError: With every problem of the layout.
        """
        order = range(len(ranks)) if chain is None else chain
        return cls(tuple(StageLayout((tuple(part),)) for part in ranks), tuple(order))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "PipelineLayout":
        """Read the result of `to_dict`, or the short form with `tp_sizes`, from TOML or JSON.

        The short form is `{"tp_sizes": [1, 4, 4], "shape": "u", "dp": 1}`, where `shape` is
        `"straight"` (the default) or `"u"`.

        Raises:
            LayoutError: With every problem, unknown keys and wrong types included.
        """
        if "tp_sizes" not in data:
            return cls(*parse_long(data))
        sizes, dp, shape = parse_short(data)
        build = cls.u_shaped if shape == "u" else cls.straight
        return build(sizes, dp=dp)

    def to_dict(self) -> dict[str, object]:
        """Return plain dictionaries, lists, strings and integers, for TOML or JSON."""
        return dump_layout(self.stages, self.chain, self.world_size)

    @property
    def num_stages(self) -> int:
        """Return the number of logical stages: how often a microbatch changes stage, plus one."""
        return len(self.chain)

    @property
    def num_domains(self) -> int:
        """Return the number of data-parallel pipelines."""
        return max(len(stage.replicas) for stage in self.stages)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks in one replica of each physical stage."""
        return tuple(stage.tp_size for stage in self.stages)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Return all directed edges: by chain position, forward first, then by domain."""
        return tuple(
            self._edge(source, destination, domain)
            for first in range(self.num_stages - 1)
            for source, destination in ((first, first + 1), (first + 1, first))
            for domain in range(self.num_domains)
        )

    def edge(self, source: int, destination: int, *, domain: int = 0) -> Edge:
        """Return the edge between two neighbouring logical stages.

        Raises:
            ValueError: If there is none.
        """
        last, domains = self.num_stages - 1, self.num_domains
        if abs(source - destination) != 1 or not (0 <= min(source, destination) < last):
            raise ValueError(
                f"source ({source}) and destination ({destination}) must be neighbours within "
                f"0..{last}"
            )
        if not 0 <= domain < domains:
            raise ValueError(f"domain ({domain}) must be less than num_domains ({domains})")
        return self._edge(source, destination, domain)

    def stage_of(self, rank: int) -> int:
        """Return the physical stage of a global rank.

        Raises:
            ValueError: If no stage has the rank.
        """
        return self._find(rank)[0]

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel replica of its stage that a global rank belongs to."""
        return self._find(rank)[1]

    def tp_rank_of(self, rank: int) -> int:
        """Return the position of a global rank among the ranks that share its layers."""
        return self._find(rank)[2]

    def is_leader(self, rank: int) -> bool:
        """Tell whether a global rank is the first of its replica. False for a rank of no stage."""
        return any(part[0] == rank for stage in self.stages for part in stage.replicas)

    def logical_stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the chain positions of a global rank; two or more at the ends of a U-shape."""
        stage = self.stage_of(rank)
        return tuple(position for position, at in enumerate(self.chain) if at == stage)

    def domains_of(self, rank: int) -> tuple[int, ...]:
        """Return the domains that a global rank serves."""
        stage, replica, _ = self._find(rank)
        step = len(self.stages[stage].replicas)
        return tuple(range(replica, self.num_domains, step))

    def ranks_of(self, logical_stage: int, *, domain: int = 0) -> tuple[int, ...]:
        """Return the global ranks of a logical stage in a domain, in tensor-parallel order."""
        replicas = self.stages[self.chain[logical_stage]].replicas
        return replicas[domain % len(replicas)]

    def leader_of(self, logical_stage: int, *, domain: int = 0) -> int:
        """Return the first rank of a logical stage."""
        return self.ranks_of(logical_stage, domain=domain)[0]

    def require_divisible(self, dims: Mapping[str, int]) -> None:
        """Check that every stage can split the model's dimensions evenly.

        Args:
            dims: Length by name, for example `{"num_heads": 16, "ffn": 4096}`.

        Raises:
            LayoutError: Naming every dimension and stage that do not fit.
        """
        problems = [
            f"{name} ({length}) must be divisible by the TP size of stage {index} ({size})"
            for name, length in dims.items()
            for index, size in enumerate(self.tp_sizes)
            if length % size
        ]
        if problems:
            raise LayoutError(problems)

    def _edge(self, source: int, destination: int, domain: int) -> Edge:
        sender = self.stages[self.chain[source]]
        receiver = self.stages[self.chain[destination]]
        return Edge(
            source=source,
            destination=destination,
            domain=domain,
            source_ranks=self.ranks_of(source, domain=domain),
            destination_ranks=self.ranks_of(destination, domain=domain),
            source_boundary=sender.boundary,
            destination_boundary=receiver.boundary,
            source_lanes=sender.lanes or sender.tp_size,
            destination_lanes=receiver.lanes or receiver.tp_size,
        )

    def _find(self, rank: int) -> tuple[int, int, int]:
        for index, stage in enumerate(self.stages):
            for replica, ranks in enumerate(stage.replicas):
                if rank in ranks:
                    return index, replica, ranks.index(rank)
        raise ValueError(f"rank ({rank}) must be less than world_size ({self.world_size})")


def _number(tp_sizes: Sequence[int], dp: int | Sequence[int]) -> tuple[StageLayout, ...]:
    """Number ranks domain by domain, each stage once per replica it has."""
    counts = [dp] * len(tp_sizes) if isinstance(dp, int) else list(dp)
    problems = []
    if len(counts) != len(tp_sizes):
        problems.append(f"len(dp) ({len(counts)}) must equal len(tp_sizes) ({len(tp_sizes)})")
    for name, values in (("tp_sizes", tp_sizes), ("dp", counts)):
        if any(value < 1 for value in values):
            problems.append(f"{name} ({list(values)}) must all be at least 1")
    if not problems and (ranks := sum(map(mul, tp_sizes, counts))) > _MOST_RANKS:
        problems.append(f"ranks ({ranks}) must be at most {_MOST_RANKS}")
    if problems:
        raise LayoutError(problems)
    replicas: list[list[tuple[int, ...]]] = [[] for _ in tp_sizes]
    first = 0
    for domain in range(max(counts, default=0)):
        for stage, (size, count) in enumerate(zip(tp_sizes, counts, strict=True)):
            if domain < count:
                replicas[stage].append(tuple(range(first, first + size)))
                first += size
    return tuple(StageLayout(tuple(part)) for part in replicas)
