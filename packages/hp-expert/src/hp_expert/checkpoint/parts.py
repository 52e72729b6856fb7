"""Parts of stacked tensors that a rank has, and projections of single experts in them.

`to_hf` converts state dicts with stacked experts to state dicts with single experts, and `from_hf`
back. Tensors are renamed and viewed: nothing is gathered, and a rank has its part of the stacked
tensors.

Shape symbols: E experts, L local experts, R rows (out), C columns (in).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_checkpoint import Box, Part
from hp_expert.checkpoint import BIASES, PROJECTIONS, ExpertNames, Projection
from hp_expert.placement import placed_like


class StackedPart(Part):
    """The part of a stacked tensor that one rank has: a box of it.

    Attributes:
        local: Local values, in the storage of the parameter: a box of [E, R, C] or, of a bias, of
            [E, R].
        shape: Shape of the whole tensor, [E, R, C] or, of a bias, [E, R].
        offset: First index of the part in the whole, along each dim.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: Tensor, *, num_experts: int = 0, first_expert: int = 0) -> Self:
        """Return the local part of a tensor.

        Args:
            tensor: A `DTensor` with any sharding, or a plain tensor of some experts.
            num_experts: Number of experts, E, for a plain tensor; 0: the tensor has all.
            first_expert: Index of the first expert of a plain tensor.
        """
        part = super().of(tensor)
        if isinstance(tensor, DTensor):
            return part
        E, *rest = part.shape
        return cls(part.local, (num_experts or E, *rest), (first_expert, *part.offset[1:]))


class Piece(NamedTuple):
    """The local part of one projection of one expert.

    Attributes:
        destination: View of the local values.
        expert: Index of the expert among all experts.
        projection: Projection of the expert.
        shape: Shape of the whole projection, [R, C] or, of a bias, [R].
        box: Place of the piece in the whole projection.
    """

    destination: Tensor
    expert: int
    projection: Projection
    shape: tuple[int, ...]
    box: Box


def pieces(name: str, part: StackedPart) -> Iterator[Piece]:
    """Cut a part into projections of experts.

    Args:
        name: Name of the stacked tensor, without the path of its module.
        part: Local part of the stacked tensor.
    """
    projections = PROJECTIONS[name]
    rows = part.shape[1] // len(projections)
    first_row, last_row = part.offset[1], part.offset[1] + part.local.shape[1]
    offsets, sizes = part.offset[2:], tuple(part.local.shape[2:])
    for local_expert in range(part.local.shape[0]):
        for number, projection in enumerate(projections):
            begin = max(first_row, number * rows)
            end = min(last_row, (number + 1) * rows)
            if begin < end:
                yield Piece(
                    part.local[local_expert, begin - first_row : end - first_row],
                    part.offset[0] + local_expert,
                    projection,
                    (rows, *part.shape[2:]),
                    Box((begin - number * rows, *offsets), (end - begin, *sizes)),
                )


def stacked_parts(module: nn.Module) -> dict[str, StackedPart]:
    """Return the local parts of all stacked tensors of a module, by name.

    Args:
        module: Module that contains `GroupedExperts`, or experts of a transformers model; spread
            over ranks or not. Plain tensors must be a run of whole experts.

    Raises:
        ValueError: If the module has no experts, or plain tensors with a part of the hidden dim.
    """
    found = {}
    for path, experts, stacked in find_experts(module):
        total, first = getattr(experts, "num_experts", 0), getattr(experts, "first_expert", 0)
        for name in stacked:
            parameter = experts.get_parameter(name)
            key = f"{path}.{name}" if path else name
            found[key] = StackedPart.of(parameter, num_experts=total, first_expert=first)
    if not found:
        raise ValueError(f"module ({type(module).__name__}) must contain experts")
    return found


def find_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield the path, module and names of stacked tensors of each module with experts.

    Raises:
        ValueError: If plain tensors have an unknown part of the hidden dim.
    """
    for path, experts in module.named_modules():
        own = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
        stacked = stacked_names(own)
        if not stacked:
            continue
        ranks = getattr(experts, "ranks", None)
        if ranks is not None and ranks.tp_size > 1 and ranks.mesh is None:
            raise ValueError(
                f"{path or 'module'} must have whole experts, or be sharded on a mesh: its plain "
                f"tensors are one of {ranks.tp_size} parts of the hidden dim"
            )
        yield path, experts, stacked


def stacked_names(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return the names of a module's stacked tensors of experts, from names and shapes."""
    for required in ({"w1", "w2", "w3"}, {"gate_up_proj", "down_proj"}):
        if all(len(shapes.get(name, ())) == 3 for name in required):
            known = required | BIASES
            return [n for n in shapes if n in known and len(shapes[n]) == (2 if n in BIASES else 3)]
    return []


def keys_of(name: str, part: StackedPart, names: ExpertNames) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a checkpoint must have for a whole stacked tensor.

    Args:
        name: Path of the module and name of the stacked tensor.
        part: Any part of the stacked tensor.
        names: Names that the checkpoint uses, not stacked.
    """
    path, _, stacked = name.rpartition(".")
    projections, bias = PROJECTIONS[stacked], stacked in BIASES
    rows = part.shape[1] // len(projections)
    return {
        names.expert_key(path, expert, projection, bias=bias): (rows, *part.shape[2:])
        for expert in range(part.shape[0])
        for projection in projections
    }


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
