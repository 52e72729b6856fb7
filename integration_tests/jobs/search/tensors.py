"""Tensors of combinations: made alike on every rank, laid out over a mesh, put together again."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

SEED = 7


def generator(seed: int = SEED) -> torch.Generator:
    """Return a generator that is the same on every rank."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = SEED) -> Tensor:
    """Return normal float64 numbers that are the same on every rank."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's values, put together from all ranks."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def error_of(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the norm of the difference, relative to the expected; of other shapes infinity."""
    if actual is None or expected is None:
        none = actual is None and expected is None
        return 0.0 if none or (_is_zero(actual) and _is_zero(expected)) else float("inf")
    actual, expected = whole(actual), whole(expected)
    if actual.shape != expected.shape:
        return float("inf")
    kind = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(kind), expected.to(kind)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    distance = torch.where(same, 0, actual - expected).norm()
    return float(distance / (torch.where(expected.isfinite(), expected, 0).norm() + 1e-300))


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is None or not bool(whole(tensor).any())


def errors_of(
    actual: Iterable[Tensor | None], expected: Iterable[Tensor | None], name: str
) -> dict[str, float]:
    """Return the errors of some tensors, which are named by their place."""
    pairs = zip(actual, expected, strict=True)
    return {f"{name} {i}": error_of(mine, theirs) for i, (mine, theirs) in enumerate(pairs)}


def laid_out(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a tensor laid out over a mesh; a partial one is of parts that are not alike.

    Args:
        tensor: Tensor that every rank has.
        mesh: Ranks.
        placements: One for each dim of the mesh.
    """
    parted = [dim for dim, each in enumerate(placements) if each.is_partial()]
    if not parted:
        spread = distribute_tensor(tensor.detach().clone(), mesh, placements)
        spread.requires_grad_(tensor.requires_grad)
        return spread
    local = tensor.detach()
    for dim in parted:
        local = _part(local, placements[dim], mesh.size(dim), mesh.get_local_rank(dim))
    others = [each for each in placements if not each.is_partial()]
    dims = [dim for dim in range(mesh.ndim) if dim not in parted]
    if dims:
        names = mesh.mesh_dim_names
        assert names is not None
        rest = mesh[tuple(names[dim] for dim in dims)]
        local = distribute_tensor(local, rest, others, src_data_rank=None).to_local()
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    leaf = made.detach().requires_grad_(tensor.requires_grad)
    assert isinstance(leaf, DTensor)
    return leaf


def _part(tensor: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """Return what a rank has of a partial tensor."""
    assert isinstance(placement, Partial)
    other = torch.rand(tensor.shape, generator=generator(11), dtype=torch.float64)
    other = other.to(tensor.dtype)
    match placement.reduce_op:
        case "sum":
            return tensor - (size - 1) * other if rank == 0 else other
        case "avg":
            return size * tensor - (size - 1) * other if rank == 0 else other
        case "max":
            return tensor if rank == size - 1 else tensor - 0.1 - other
        case "min":
            return tensor if rank == size - 1 else tensor + 0.1 + other
        case _:
            return tensor if rank == 0 else torch.ones_like(tensor)
