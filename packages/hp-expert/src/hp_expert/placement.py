"""The ranks that experts are spread over, and parameters that are part of a larger tensor.

A parameter may be a `DTensor`, so that checkpoints, FSDP2 and gradient norms know the whole tensor.
The experts compute with the local part, whose gradient has the same placements: a rank receives all
rows of its experts, and so computes the whole gradient of its part.
"""

from dataclasses import dataclass
from typing import overload

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_platform import resolve_group


@overload
def local_part(parameter: Tensor) -> Tensor: ...
@overload
def local_part(parameter: None) -> None: ...
def local_part(parameter: Tensor | None) -> Tensor | None:
    """Return the local part of a parameter; not differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def placed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of the shape and placements of a parameter, from its local part."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


ExpertMesh = DeviceMesh | ProcessGroup | tuple[ProcessGroup, ProcessGroup]


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks that experts are spread over.

    Attributes:
        ep: Ranks with other experts; None: every rank has all experts.
        tp: Ranks with other parts of the hidden dim of the same experts; None: it is not sharded.
        mesh: Mesh of the parameters, which are DTensors; None: they are plain tensors.
        axes: Kind of each axis of the mesh, "ep" or "tp".
    """

    ep: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    axes: tuple[str, ...] = ()

    @classmethod
    def along(cls, axis: str, mesh_or_group: object) -> "ExpertRanks":
        """Return the ranks of a group or a mesh of one axis of any name, as "ep" or as "tp".

        Raises:
            ValueError: If the mesh has more than one axis.
            TypeError: If the argument is neither a group nor a mesh.
        """
        group = resolve_group(mesh_or_group)  # type: ignore[arg-type]  # refuses other types
        mesh = mesh_or_group if isinstance(mesh_or_group, DeviceMesh) else None
        groups: dict[str, ProcessGroup] = {axis: group}
        return cls(groups.get("ep"), groups.get("tp"), mesh, (axis,))

    @classmethod
    def of_two_axes(cls, mesh_or_groups: object, *, ep: str, tp: str) -> "ExpertRanks":
        """Return the ranks of a mesh whose axes have these names, in any order, or of two groups.

        Raises:
            ValueError: If the mesh has other axes.
            TypeError: If the argument is neither a mesh nor a pair of groups.
        """
        if isinstance(mesh_or_groups, DeviceMesh):
            names = mesh_or_groups.mesh_dim_names or ()
            if sorted(names) != sorted((ep, tp)):
                raise ValueError(
                    f"mesh_dim_names ({names}) must be ({ep!r}, {tp!r}): name the axes so, or "
                    f"select them with mesh[{ep!r}, {tp!r}]"
                )
            axes = tuple("ep" if name == ep else "tp" for name in names)
            groups = [mesh_or_groups.get_group(ep), mesh_or_groups.get_group(tp)]
            return cls(groups[0], groups[1], mesh_or_groups, axes)
        if isinstance(mesh_or_groups, tuple) and len(mesh_or_groups) == 2:
            return cls(resolve_group(mesh_or_groups[0]), resolve_group(mesh_or_groups[1]))
        kind = type(mesh_or_groups).__name__
        raise TypeError(f"mesh_or_groups ({kind}) must be a mesh of two axes or a pair of groups")

    def __deepcopy__(self, memo: dict[int, object]) -> "ExpertRanks":
        """Return itself: copies of a module share the groups, which cannot be copied."""
        return self

    @property
    def ep_size(self) -> int:
        """Return the number of runs that the experts are cut into."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def tp_size(self) -> int:
        """Return the number of parts that the hidden dim is cut into."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def ep_rank(self) -> int:
        """Return the index of the local run of experts."""
        return 0 if self.ep is None else self.ep.rank()

    @property
    def tp_rank(self) -> int:
        """Return the index of the local part of the hidden dim."""
        return 0 if self.tp is None else self.tp.rank()

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that are not None, tp first."""
        return [group for group in (self.tp, self.ep) if group is not None]
