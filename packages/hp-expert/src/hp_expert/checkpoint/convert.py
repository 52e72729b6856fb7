"""State dicts with stacked experts converted to state dicts with single experts, and back.

Tensors are renamed and viewed: nothing is gathered, and a rank has its part of the stacked tensors.

Shape symbols: E experts, L local experts, R rows (out), C columns (in).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_expert.checkpoint import BIASES, PROJECTIONS, ExpertNames
from hp_expert.checkpoint.parts import Piece, StackedPart, pieces, stacked_names
from hp_expert.placement import placed_like


def to_hf(
    state_dict: Mapping[str, Tensor],
    names: ExpertNames | None = None,
    *,
    first_expert: int = 0,
) -> dict[str, Tensor]:
    """Name the experts of a state dict one by one; other tensors get the checkpoint's names.

    Args:
        state_dict: Tensors by name, such as `module.state_dict()`. Stacked tensors are plain
            tensors of some experts, or each is a `DTensor` that is sharded along any dims.
        names: Names that the checkpoint uses; None: `ExpertNames()`.
        first_expert: Index of the first expert of plain tensors.

    Returns:
        Views of the local experts; where other dims are sharded as well, each is a `DTensor` on the
        axes of the mesh that shard them.

    Raises:
        ValueError: If gate and up rows of one tensor are sharded together, or a placement is
            neither `Shard` nor `Replicate`.
    """
    names = names or ExpertNames()
    found: dict[str, Tensor] = {}
    stacked = _stacked_keys(state_dict)
    for key, tensor in state_dict.items():
        if key not in stacked or names.is_stacked:
            found[names.file_key(key)] = tensor
            continue
        path, _, name = key.rpartition(".")
        axes = _other_axes(key, tensor)
        for piece in pieces(name, _part(tensor, first_expert)):
            single = names.expert_key(path, piece.expert, piece.projection, bias=name in BIASES)
            found[single] = piece.destination if axes is None else axes.spread(piece)
    return found


def from_hf(
    state_dict: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    names: ExpertNames | None = None,
    *,
    first_expert: int = 0,
) -> dict[str, Tensor]:
    """Stack the experts of a state dict; the inverse of `to_hf`.

    Args:
        state_dict: Tensors by the names of a checkpoint; experts of other ranks may be missing.
        like: Stacked tensors with the wanted names, shapes and placements: the state dict of the
            module, which may be on the meta device.
        names: Names that the checkpoint uses; None: `ExpertNames()`.
        first_expert: Index of the first expert of plain tensors.

    Returns:
        Stacked tensors in new storage, of the dtype of `like`, and all other tensors as they are,
        those of other ranks' experts included.

    Raises:
        ValueError: If an expert is missing or of another shape.
    """
    names = names or ExpertNames()
    stacked = set() if names.is_stacked else _stacked_keys(like)
    device = next((t.device for t in state_dict.values()), torch.device("cpu"))
    found: dict[str, Tensor] = {}
    taken: set[str] = set()
    for key in stacked:
        path, _, name = key.rpartition(".")
        model = _part(like[key], first_expert)
        local = torch.empty(model.local.shape, dtype=model.local.dtype, device=device)
        for piece in pieces(name, StackedPart(local, model.shape, model.offset)):
            single = names.expert_key(path, piece.expert, piece.projection, bias=name in BIASES)
            if single not in state_dict:
                raise ValueError(f"state_dict must contain {single}")
            piece.destination.copy_(_slice_of(single, state_dict[single], piece))
            taken.add(single)
        found[key] = placed_like(like[key], local)
    others = {names.module_key(k): t for k, t in state_dict.items() if k not in taken}
    return others | found


class _Axes(NamedTuple):
    """The axes of a mesh that shard other dims than the experts."""

    mesh: DeviceMesh
    placements: Sequence[Placement]

    def spread(self, piece: Piece) -> DTensor:
        """Return a projection as a `DTensor` with this local part."""
        *outer, columns = piece.shape
        return DTensor.from_local(
            piece.destination,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(piece.shape),
            stride=(columns, 1) if outer else (1,),
        )


def _other_axes(key: str, tensor: Tensor) -> _Axes | None:
    if not isinstance(tensor, DTensor):
        return None
    axes, placements = [], []
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            raise ValueError(f"placement of {key} ({placement}) must be Shard or Replicate")
        if type(placement) is Shard and placement.dim != 0:
            axes.append(axis)
            placements.append(Shard(placement.dim - 1))
            if placement.dim == 1 and len(PROJECTIONS[key.rpartition(".")[2]]) > 1:
                raise ValueError(f"{key} ({placement}) must not be sharded across gate and up rows")
    if not axes:
        return None
    mesh, mesh_names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    if len(axes) < mesh.ndim:
        if mesh_names is None:
            raise ValueError(f"mesh of {key} ({mesh}) must have names of its dims")
        mesh = mesh[tuple(mesh_names[axis] for axis in axes)]
    return _Axes(mesh, placements)


def _part(tensor: Tensor, first_expert: int) -> StackedPart:
    return StackedPart.of(
        tensor, num_experts=first_expert + tensor.shape[0], first_expert=first_expert
    )


def _stacked_keys(state_dict: Mapping[str, Tensor]) -> set[str]:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in state_dict.items():
        path, _, name = key.rpartition(".")
        shapes.setdefault(path, {})[name] = tuple(tensor.shape)
    return {
        f"{path}.{name}" if path else name
        for path, own in shapes.items()
        for name in stacked_names(own)
    }


def _slice_of(key: str, tensor: Tensor, piece: Piece) -> Tensor:
    """Return the values of a piece from a projection, which may be sharded itself."""
    if tuple(tensor.shape) != piece.shape:
        raise ValueError(f"shape of {key} {tuple(tensor.shape)} must equal {piece.shape}")
    part = StackedPart.of(tensor)
    return part.local[piece.box.within(part.box)]
