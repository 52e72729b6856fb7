"""The parameters of the whole model, and which part of each is on this rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hp_expert import GroupedExperts
from hp_train.mesh import Mesh

_HIDDEN_DIM = {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1}
"""Which dim of an expert's parameter is its hidden width."""


class Cut(NamedTuple):
    """One cut of a parameter over the ranks of a group.

    Attributes:
        group: Name, see :data:`hp_train.mesh.GROUPS`.
        dim: Dim that is cut, in chunks as `torch.chunk` makes them.
    """

    group: str
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter, known by its name in the whole model.

    Attributes:
        name: Global name.
        tensor: As the module has it: plain, or a DTensor where FSDP shards it.
        local: The values that are here, sharing the memory of ``tensor``; a leaf, for the
            optimizer.
        shape: Of the whole parameter.
        cuts: How the whole becomes the local part, one cut after the other.
        replicas: Groups whose ranks hold the same values, and whose gradients are to be summed
            after backward.
        is_expert: Whether dim 0 is the experts of a layer.
        span: Of each dim, first and last + 1 index of the local part in the whole.
    """

    name: str
    tensor: nn.Parameter
    local: Tensor
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    replicas: tuple[str, ...]
    is_expert: bool
    span: tuple[tuple[int, int], ...]

    @property
    def experts(self) -> range | None:
        """Global indices of the local experts; None if it is no expert's."""
        return range(*self.span[0]) if self.is_expert else None

    def collect_gradient(self) -> None:
        """Let ``local`` have what backward left on the module; zeros where that is nothing.

        An expert that nobody chose has no gradient.
        """
        gradient = self.tensor.grad
        if gradient is None:
            self.local.grad = self.local.new_zeros(self.local.shape)
        else:
            self.local.grad = local_part(gradient)
        self.tensor.grad = None

    def as_whole(self, local: Tensor, mesh: Mesh) -> Tensor:
        """Describe a tensor cut as this parameter is: a DTensor, or itself where nothing is cut.

        Args:
            local: Of the shape of the local part; memory is shared.
            mesh: Of the run.
        """
        if not self.cuts:
            return local
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return DTensor.from_local(
            local,
            mesh.submesh(*(cut.group for cut in self.cuts)),
            [Shard(cut.dim) for cut in self.cuts],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )


def named_parameters(stages: Iterable[nn.Module], mesh: Mesh | None = None) -> list[Parameter]:
    """All parameters of this rank's stages, in stage order, after they have been sharded.

    Args:
        stages: Modules whose parameters carry their global names.
        mesh: Of the run; None: nothing is cut.
    """
    found = []
    for stage in stages:
        owners = {n: m for n, m in stage.named_modules() if isinstance(m, GroupedExperts)}
        for name, tensor in stage.named_parameters():
            owner, _, last = name.rpartition(".")
            found.append(_describe(name, tensor, last, mesh, is_expert=owner in owners))
    return found


def local_part(tensor: Tensor) -> Tensor:
    """What is here of a tensor, without a graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(
    name: str, tensor: nn.Parameter, last: str, mesh: Mesh | None, *, is_expert: bool
) -> Parameter:
    if mesh is None:
        whole = tuple((0, size) for size in tensor.shape)
        return Parameter(
            name, tensor, local_part(tensor), tuple(tensor.shape), (), (), is_expert, whole
        )
    cuts, replicas = [], ["expert_replicate" if is_expert else "dp_replicate"]
    if is_expert:
        cuts.append(Cut("ep", 0))
        if last in _HIDDEN_DIM:
            cuts.append(Cut("etp", _HIDDEN_DIM[last]))
        else:
            replicas.append("etp")
    cuts = [cut for cut in cuts if mesh.size(cut.group) > 1]
    shape = list(tensor.shape)
    for cut in cuts:
        shape[cut.dim] *= mesh.size(cut.group)
    if isinstance(tensor, DTensor):
        (placement,) = tensor.placements
        assert isinstance(placement, Shard)
        cuts.append(Cut("expert_shard" if is_expert else "fsdp", placement.dim))
    return Parameter(
        name=name,
        tensor=tensor,
        local=local_part(tensor),
        shape=tuple(shape),
        cuts=tuple(cuts),
        replicas=tuple(group for group in replicas if mesh.size(group) > 1),
        is_expert=is_expert,
        span=_span(shape, cuts, mesh),
    )


def _span(shape: Iterable[int], cuts: Iterable[Cut], mesh: Mesh) -> tuple[tuple[int, int], ...]:
    bounds = [(0, size) for size in shape]
    for group, dim in cuts:
        start, stop = bounds[dim]
        chunk = -(-(stop - start) // mesh.size(group))
        first = min(start + chunk * mesh.index(group), stop)
        bounds[dim] = first, min(first + chunk, stop)
    return tuple(bounds)
