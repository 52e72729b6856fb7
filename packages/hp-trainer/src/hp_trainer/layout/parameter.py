"""Kinds of parameters, whatever their names, and the part that a rank has. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hp_trainer.layout.ranks import Axis, StageLayout, chunk

Kind = Literal["matrix", "norm", "bias"]
"""What a parameter is for, whatever its number of dims. A matrix is drawn at random and decays, a
norm starts as ones, a bias as zeros."""

SIDE_BY_SIDE = 256 * 2**20
"""Most bytes of a copy of gradients that is summed over ranks; a larger one is not copied."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The kind of a parameter, declared by the model that makes the parameter.

    Attributes:
        kind: Whether it is a matrix, a norm or a bias.
        tp_dim: Dim that tensor-parallel ranks share out; None: each has all of it.
        is_expert: Whether dim 0 is the experts of a layer.
        hidden_dim: Dim of an expert's parameter that is the hidden width, which ranks with other
            parts of the same experts share out; None: each has all of it, and computes its whole
            gradient.
        is_residual: Whether its products are added to the residual stream. Such a matrix starts
            smaller, so that variance does not grow with depth (Radford et al., 2019).
        is_table: Whether it turns tokens into vectors or vectors into scores of tokens; Muon leaves
            such a matrix to AdamW.
        is_whole_on_tp: Whether tensor-parallel ranks that have copies each compute its whole
            gradient, and not that of their own positions or heads.
    """

    kind: Kind = "matrix"
    tp_dim: int | None = None
    is_expert: bool = False
    hidden_dim: int | None = None
    is_residual: bool = False
    is_table: bool = False
    is_whole_on_tp: bool = False

    @property
    def cuts(self) -> dict[Axis, int | None]:
        """Return the dim that ranks of an axis share out, before FSDP; None: they have copies."""
        return {"ep": 0, "etp": self.hidden_dim} if self.is_expert else {"tp": self.tp_dim}


def local_shape(
    shape: Sequence[int], spec: ParameterSpec, place: StageLayout, index: Mapping[str, int]
) -> tuple[int, ...]:
    """Shape of what a rank has of a parameter; see `hp_trainer.model.parallelize`.

    Args:
        shape: Shape of the whole parameter.
        spec: What it is.
        place: Stage of the rank, with the axes that cut the parameter.
        index: Index of the rank along ep, etp and expert_shard, or along tp and fsdp.
    """
    sizes = list(shape)

    def cut(dim: int | None, axis: str) -> None:
        if dim is not None and (ranks := getattr(place, axis)) > 1:
            sizes[dim] = len(chunk(range(sizes[dim]), ranks, index[axis]))

    for axis, dim in spec.cuts.items():
        cut(dim, axis)
    if spec.is_expert:
        # Along the experts, or inside them where there are fewer of them than shards.
        inside = sizes[0] < place.expert_shard and sizes[1] % place.expert_shard == 0
        cut(int(inside), "expert_shard")
    else:
        cut(0, "fsdp")
    return tuple(sizes)
