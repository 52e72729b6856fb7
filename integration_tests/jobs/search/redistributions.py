"""Redistributions of DTensor: from every layout to every other, there and back, with gradients."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.tensors import error_of, laid_out, normal

_ONE: tuple[Placement, ...] = (
    Replicate(),
    Shard(0),
    Shard(1),
    Shard(2),
    *map(Partial, ("sum", "avg", "max", "min")),
)
_TWO: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
_MERGED: tuple[Placement, ...] = (Partial(), Partial("avg"), Partial("max"), Shard(0))
_SHAPES = ((4, 8, 4), (5, 3, 7), (1, 9, 2))
_HOWS = ("", "asynchronous", "local gradient", "plain", "through a view")


def cases() -> Iterator[Case]:
    """Return pairs of layouts on 2 and on 4 ranks, and on 2 x 2 of these."""
    for mesh in ((2,), (4,)):
        for one, other in product(_ONE, _ONE):
            yield _case(mesh, (one,), (other,), "")
    for source, target in product(product(_TWO, _TWO), product(_TWO, _TWO)):
        yield _case((2, 2), source, target, "")
    for source, target in product(product(_MERGED, _MERGED), product(_TWO, _TWO)):
        yield _case((2, 2), source, target, "flattened")
    for how in _HOWS[1:]:
        for one, other in product(_ONE[:5], _ONE[:5]):
            yield _case((2,), (one,), (other,), how)


def _case(
    mesh: tuple[int, ...], source: Sequence[Placement], target: Sequence[Placement], how: str
) -> Case:
    told = f"{'x'.join(map(str, mesh))} {_name(source)} to {_name(target)}"
    work = partial(_compared, mesh, source, target, how)
    ranks = mesh[0] * (mesh[1] if len(mesh) > 1 else 1)
    return Case(f"{told}{', ' if how else ''}{how}", work, ranks)


def _name(placements: Sequence[Placement]) -> str:
    return "".join(map(str, placements)).replace("(", "").replace(")", "")


def _compared(
    mesh: tuple[int, ...], source: Sequence[Placement], target: Sequence[Placement], how: str
) -> Errors:
    names = tuple("xyz"[: len(mesh)])
    ranks = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if how == "flattened":
        ranks._flatten("all")
    errors: dict[str, float] = {}
    for shape in _SHAPES:
        plain = normal(*shape).requires_grad_()
        weight = normal(*shape, seed=8)
        spread = laid_out(plain, ranks, source)
        there = spread.redistribute(placements=target, async_op=how == "asynchronous")
        if how == "through a view":
            turned = (there.transpose(0, 1) * 1).transpose(0, 1)
            assert isinstance(turned, DTensor)
            there = turned
        errors[f"{shape} value"] = error_of(there, plain)
        back = there.redistribute(placements=source)
        errors[f"{shape} and back"] = error_of(back, plain)
        if how == "plain":
            (there.full_tensor() * weight).sum().backward()
        elif how == "local gradient":
            local = there.to_local()
            again = DTensor.from_local(
                local, ranks, target, run_check=False, shape=plain.shape, stride=plain.stride()
            )
            _backward(again, weight)
        else:
            _backward(there, weight)
        errors[f"{shape} gradient"] = error_of(spread.grad, weight)
    return errors


def _backward(output: DTensor, weight: torch.Tensor) -> None:
    """Go backward with the same gradient, laid out like the output."""
    places = [Replicate() if each.is_partial() else each for each in output.placements]
    output.backward(distribute_tensor(weight, output.device_mesh, places))
