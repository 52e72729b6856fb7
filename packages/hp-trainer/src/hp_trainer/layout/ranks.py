"""The numbering of ranks along the axes of the mesh: arithmetic alone, no torch.

Stages of the pipeline follow each other, each of them a run of ranks, and may have different
numbers of them: what is a size below is one stage's own. The ranks of a stage stand in two grids at
once. Attention and dense layers see ``dp_replicate x dp_shard x cp x tp``, the last one fastest, so
that tensor-parallel neighbours are neighbours on a node. Experts see the same ranks as
``expert_replicate x expert_shard x ep x etp``: the ranks that share out one set of experts are
neighbours too, and what remains of the stage holds copies of that set. Copies inside one dense
replica are sharded, others are replicated.

Every axis has groups of ranks of its own even where the ranks coincide; only axes of one rank,
along which nothing is ever sent, share one, as every group costs threads, memory and time to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from hp_trainer.config import MeshConfig


DenseAxis = Literal["dp_replicate", "dp_shard", "cp", "tp"]
ExpertAxis = Literal["expert_replicate", "expert_shard", "ep", "etp"]
Axis = DenseAxis | ExpertAxis
GRIDS: tuple[tuple[Axis, ...], ...] = (get_args(DenseAxis), get_args(ExpertAxis))

GROUPS: Mapping[str, tuple[Axis, ...]] = {
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "expert_replicate": ("expert_replicate",),
    "expert_shard": ("expert_shard",),
    "ep": ("ep",),
    "etp": ("etp",),
    "sequence": ("cp", "tp"),
    "tokens": ("dp_replicate", "dp_shard", "cp", "tp"),
}
"""Each group, and the axes along which its ranks differ. None of them reaches beyond a stage."""
ALONE, WORLD = "alone", "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """The ranks of one pipeline rank's stages, and the size of every axis there.

    Attributes:
        first: Lowest global rank.
        dp_replicate: Data-parallel ranks that hold all of the parameters.
        dp_shard: Data-parallel ranks that hold a shard of them each.
        cp: Context-parallel ranks, which share a sequence; they shard parameters too.
        tp: Tensor-parallel ranks.
        ep: Ranks that share out the experts.
        etp: Ranks that share out each expert's hidden width.
    """

    first: int = 0
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, config: MeshConfig, *, tp: int, ep: int, first: int = 0) -> StageLayout:
        """Return a stage of these sizes; what all stages have in common comes from the config."""
        return cls(
            first=first,
            dp_replicate=config.dp_replicate,
            dp_shard=config.dp_shard,
            cp=config.cp,
            tp=tp,
            ep=ep,
            etp=config.etp,
        )

    @property
    def dp(self) -> int:
        """Return the number of shares that the batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return the number of ranks that a dense parameter is sharded over."""
        return self.dp_shard * self.cp

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the stage."""
        return self.dp * self.cp * self.tp

    @property
    def members(self) -> range:
        """Return the global ranks of the stage."""
        return range(self.first, self.first + self.num_ranks)

    @property
    def expert_replicate(self) -> int:
        """Return the number of ranks with the same values of the same experts."""
        return self.num_ranks // (self.ep * self.etp * self.expert_shard)

    @property
    def expert_shard(self) -> int:
        """Return the number of ranks that a set of local experts is sharded over."""
        return max(1, self.fsdp * self.tp // (self.ep * self.etp))

    @property
    def is_sharded(self) -> bool:
        """Tell whether FSDP shards parameters."""
        return self.fsdp > 1 or self.expert_shard > 1

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks along some axes together."""
        sizes: list[int] = [getattr(self, axis) for axis in axes]
        return math.prod(sizes)

    def index(self, rank: int, *axes: Axis) -> int:
        """Return position of a rank along some axes of one grid together, the last axis fastest."""
        coordinates = self._coordinates(rank, _grid_of(axes))
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinates[axis]
        return index

    def ranks(self, *axes: Axis) -> list[list[int]]:
        """Return all groups of ranks that differ along some axes of one grid, each ascending."""
        grid = _grid_of(axes)
        within, firsts, stride = [0], [self.first], 1
        for axis in reversed(grid):
            steps = range(0, self.size(axis) * stride, stride)
            if axis in axes:
                within = [step + offset for step in steps for offset in within]
            else:
                firsts = [step + first for step in steps for first in firsts]
            stride *= len(steps)
        return [[first + offset for offset in within] for first in firsts]

    def group(self, rank: int, *axes: Axis) -> list[int]:
        """Return the group among `ranks` that a rank is in."""
        within, first, stride = [0], rank, 1
        coordinates = self._coordinates(rank, _grid_of(axes))
        for axis in reversed(_grid_of(axes)):
            steps = range(0, self.size(axis) * stride, stride)
            if axis in axes:
                within = [step + offset for step in steps for offset in within]
                first -= coordinates[axis] * stride
            stride *= len(steps)
        return [first + offset for offset in within]

    def _coordinates(self, rank: int, grid: tuple[Axis, ...]) -> dict[Axis, int]:
        found: dict[Axis, int] = {}
        place = rank - self.first
        for axis in reversed(grid):
            place, found[axis] = divmod(place, self.size(axis))
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of all pipeline ranks; their numbers of sequences and positions are the same.

    Attributes:
        stages: Stage layout of each pipeline rank, one behind the other.
    """

    stages: tuple[StageLayout, ...] = (StageLayout(),)

    @classmethod
    @lru_cache(maxsize=1024)  # schedules and batches of one mesh ask for the same
    def of(cls, config: MeshConfig) -> Layout:
        """Return the layout a config asks for."""
        stages: list[StageLayout] = []
        first = 0
        for tp, ep in zip(config.tp_sizes, config.ep_sizes, strict=True):
            stages.append(StageLayout.of(config, tp=tp, ep=ep, first=first))
            first += stages[-1].num_ranks
        return cls(tuple(stages))

    @property
    def pp(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.stages)

    @property
    def dp(self) -> int:
        """Return the number of shares that the batch is cut into."""
        return self.stages[0].dp

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return sum(stage.num_ranks for stage in self.stages)

    @property
    def is_even(self) -> bool:
        """Tell whether all stages have the same number of ranks."""
        return len({stage.num_ranks for stage in self.stages}) == 1

    def pp_index(self, rank: int) -> int:
        """Return which pipeline rank a rank belongs to."""
        return next(index for index, stage in enumerate(self.stages) if rank in stage.members)

    def ranks(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of all stages along some axes of one grid."""
        return [group for stage in self.stages for group in stage.ranks(*axes)]

    def pipelines(self) -> list[list[int]]:
        """Return the ranks of each pipeline, first stage first.

        Raises:
            ValueError: When stages have different numbers of ranks.
        """
        if not self.is_even:
            raise ValueError(f"stages of the layout ({self}) must have the same number of ranks")
        return [
            list(ranks) for ranks in zip(*(stage.members for stage in self.stages), strict=True)
        ]

    def __str__(self) -> str:
        dense, experts = GRIDS
        text = " x ".join([*self._listed(("pp",)), *self._listed(dense)]) or "one process"
        shared = " x ".join(self._listed(experts[2:]))
        return f"{text} ({shared})" if shared else text

    def _listed(self, axes: tuple[str, ...]) -> Iterator[str]:
        """Return axes with more than one rank; with the sizes of all stages where these differ."""
        for axis in axes:
            sizes = [self.pp] if axis == "pp" else [getattr(stage, axis) for stage in self.stages]
            if max(sizes) > 1:
                yield f"{axis} {sizes[0] if len(set(sizes)) == 1 else sizes}"


def partitions(layout: Layout) -> dict[str, list[list[int]]]:
    """Rank lists of all groups by name, in the order in which all ranks make them.

    Axes that have one rank in every stage stand under :data:`ALONE`, all ranks under :data:`WORLD`.
    """
    found: dict[str, list[list[int]]] = {}
    for name, axes in GROUPS.items():
        ranks = layout.ranks(*axes)
        found.setdefault(name if max(map(len, ranks)) > 1 else ALONE, ranks)
    return found | {WORLD: [list(range(layout.world_size))]}


def chunk(whole: range, num_chunks: int, index: int) -> range:
    """Return a chunk of consecutive indices as `torch.chunk` makes it; the last may be empty."""
    size = -(-len(whole) // num_chunks)
    return whole[size * index : size * (index + 1)]


@cache
def _grid_of(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the grid that has these axes.

    Raises:
        ValueError: When no grid has all of them.
    """
    for grid in GRIDS:
        if list(axes) == [axis for axis in grid if axis in axes]:
            return grid
    raise ValueError(f"axes ({axes}) must be of one grid and in its order ({GRIDS})")
