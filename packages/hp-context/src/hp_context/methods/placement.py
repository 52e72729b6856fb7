"""q, k, v as DTensors: the part of this rank goes through attention, its output is placed alike.

For tensor parallelism, where heads are sharded over another axis of the mesh. DTensors take seconds
to import, so that this module is imported where there are some.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement of q as a DTensor, which the output gets too."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def restored(self, local: Tensor) -> Tensor:
        """Return the DTensor whose part on this rank is `local`. Differentiable."""
        whole: Tensor = DTensor.from_local(local, self.mesh, self.placements, run_check=False)
        return whole


def local_parts(
    qkv: Sequence[Tensor], *, seq_dim: int, head_dim: int
) -> tuple[list[Tensor], Placed]:
    """Return the parts of this rank, and the placement of the whole.

    Args:
        qkv: q, k and v, all DTensors of one mesh and placement.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.

    Raises:
        TypeError: Some are DTensors and some are not.
        ValueError: They lie in different ways, or in one that attention cannot keep apart.
    """
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} ({type(x).__name__}) must be a DTensor as the others are")
    wholes = [x for x in qkv if isinstance(x, DTensor)]
    placed = Placed(wholes[0].device_mesh, tuple(wholes[0].placements))
    parts = []
    for name, x in zip("qkv", wholes, strict=True):
        if Placed(x.device_mesh, tuple(x.placements)) != placed:
            raise ValueError(
                f"placements of {name} ({x.placements} on {x.device_mesh}) must equal those of q "
                f"({placed.placements} on {placed.mesh})"
            )
        _check(name, x, {seq_dim: "the sequence", x.ndim - 1: "the head size"}, head_dim)
        parts.append(x.to_local())
    return parts, placed


def _check(name: str, x: DTensor, whole: dict[int, str], head_dim: int) -> None:
    shards = 1
    for axis, placement in enumerate(x.placements):
        names = x.device_mesh.mesh_dim_names
        where = f"{placement} on axis {names[axis] if names else axis}"
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:  # others, such as strided ones, derive from it
            raise ValueError(f"placement of {name} ({where}) must be Shard or Replicate")
        dim = placement.dim % x.ndim
        if dim in whole:
            raise ValueError(
                f"placement of {name} ({where}) must not shard {whole[dim]} (dim {dim}); heads "
                f"(dim {head_dim}) may be sharded"
            )
        shards = x.device_mesh.size(axis) * (shards if dim == head_dim else 1)
        if x.size(dim) % shards:
            raise ValueError(
                f"size of {name} ({x.size(dim)}) at dim {dim} must be divisible by the number of "
                f"its shards ({shards})"
            )
