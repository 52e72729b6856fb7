"""How ranks are numbered along the axes of the mesh: arithmetic alone, no torch.

The ranks of a pipeline stage stand in two grids at once. Attention and dense layers see
``dp_replicate x dp_shard x cp x tp``, the last one fastest, so that tensor-parallel neighbours are
neighbours on a node. Experts see the same ranks as
``expert_replicate x expert_shard x ep x etp``: the ranks that share out one set of experts are
neighbours too, and what remains of the stage holds copies of that set. Copies inside one dense
replica are sharded, others are replicated. Stages are outermost in both.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from hp_train.config import MeshConfig

DenseAxis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
ExpertAxis = Literal["pp", "expert_replicate", "expert_shard", "ep", "etp"]
Axis = DenseAxis | ExpertAxis
GRIDS: tuple[tuple[Axis, ...], ...] = (get_args(DenseAxis), get_args(ExpertAxis))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of every axis.

    Attributes:
        pp: Pipeline ranks.
        dp_replicate: Data-parallel ranks that hold all of the parameters.
        dp_shard: Data-parallel ranks that hold a shard of them each.
        cp: Context-parallel ranks, which share a sequence; they shard parameters too.
        tp: Tensor-parallel ranks.
        ep: Ranks that share out the experts.
        etp: Ranks that share out each expert's hidden width.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, config: MeshConfig) -> "Layout":
        """The layout a config asks for."""
        return cls(**{name: getattr(config, name) for name in cls.__slots__})

    @property
    def dp(self) -> int:
        """Shares that the batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that a dense parameter is sharded over."""
        return self.dp_shard * self.cp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.stage_size

    @property
    def expert_replicate(self) -> int:
        """Ranks with the same values of the same experts."""
        return self.stage_size // (self.ep * self.etp * self.expert_shard)

    @property
    def expert_shard(self) -> int:
        """Ranks that a set of local experts is sharded over."""
        return max(1, self.fsdp * self.tp // (self.ep * self.etp))

    def size(self, *axes: Axis) -> int:
        """Ranks along some axes together."""
        return math.prod(int(getattr(self, axis)) for axis in axes)

    def index(self, rank: int, *axes: Axis) -> int:
        """Position of a rank along some axes of one grid together, the last axis fastest."""
        coordinates = self._coordinates(rank, _grid_of(axes))
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinates[axis]
        return index

    def ranks(self, *axes: Axis) -> list[list[int]]:
        """All groups of ranks that differ along some axes of one grid alone, each ascending."""
        grid = _grid_of(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self._coordinates(rank, grid)
            elsewhere = tuple(coordinates[axis] for axis in grid if axis not in axes)
            groups.setdefault(elsewhere, []).append(rank)
        return list(groups.values())

    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline, first stage first."""
        return self.ranks("pp")

    def _coordinates(self, rank: int, grid: tuple[Axis, ...]) -> dict[Axis, int]:
        found: dict[Axis, int] = {}
        for axis in reversed(grid):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def __str__(self) -> str:
        def listed(axes: Iterator[Axis]) -> str:
            return " x ".join(f"{axis} {self.size(axis)}" for axis in axes if self.size(axis) > 1)

        dense, experts = GRIDS
        text = listed(iter(dense)) or "one process"
        shared = listed(itertools.chain(experts[3:]))
        return f"{text} ({shared})" if shared else text


def _grid_of(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The grid that has these axes, in its order.

    Raises:
        ValueError: When no grid has all of them.
    """
    for grid in GRIDS:
        if list(axes) == [axis for axis in grid if axis in axes]:
            return grid
    raise ValueError(f"axes ({axes}) must be of one grid and in its order ({GRIDS})")
