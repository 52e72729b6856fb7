"""Parts of stacked tensors that a rank has, and projections of single experts in them.

Shape symbols: E experts, R rows (out), C columns (in).
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_checkpoint import Box, Part
from hp_expert.checkpoint import BIASES, PROJECTIONS, ExpertNames, Projection


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
