"""Operators of DTensor against plain tensors: placements x even and uneven shapes, both passes."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
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
from integration_tests.jobs.search.operator_catalogue import GROUPS, Operator, Shape
from integration_tests.jobs.search.tensors import error_of, laid_out, normal, whole


def cases() -> Iterator[Case]:
    """Return every operator with every placement of its tensors on two ranks."""
    for operators, shapes in GROUPS:
        for name, operator in operators.items():
            for kind, shape in shapes.items():
                if kind in operator.shapes:
                    for placements in _placements(operator, shape):
                        told = ", ".join(map(name_of, placements))
                        work = partial(compared, operator, shape, [(p,) for p in placements])
                        yield Case(f"{name} {kind} {told}", work)


def _placements(operator: Operator, shape: Shape) -> Iterator[tuple[Placement, ...]]:
    """Return what placements are tried of the tensors: of one all, of several some."""
    tensors = operator.made(shape)
    dims = len(shape)
    first = [*map(Shard, range(tensors[0].ndim)), *map(Partial, operator.partials)]
    if len(tensors) == 1:
        yield from ((placement,) for placement in first)
        return
    some: list[list[Placement]] = [[Replicate(), *first]]
    for tensor in tensors[1:]:
        more: list[Placement] = [Replicate(), *map(Shard, range(min(tensor.ndim, dims)))]
        some.append([*more, Partial()] if tensor.is_floating_point() else more)
    if len(tensors) > 2:
        some[2:] = [[each[0], each[-1]] for each in some[2:]]
    yield from (each for each in product(*some) if any(not p.is_replicate() for p in each))


def name_of(placement: Placement) -> str:
    """Return a short name of a placement."""
    return str(placement).replace("(", "").replace(")", "")


def compared(
    operator: Operator, shape: Shape, placements: Sequence[Sequence[Placement]], *mesh: int
) -> Errors:
    """Run an operator on DTensors and on plain tensors, forward and backward.

    Args:
        operator: Operator to run.
        shape: Shape that its tensors are made for.
        placements: Those of each tensor.
        *mesh: Sizes of the mesh; none: all ranks in a row.
    """
    sizes = mesh or (2,)
    ranks = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))
    plain = [each.requires_grad_(each.is_floating_point()) for each in operator.made(shape)]
    spread = [laid_out(t, ranks, p) for t, p in zip(plain, placements, strict=True)]
    expected, actual = _run(operator, plain), _run(operator, spread)
    errors = {
        f"output {i}": error_of(mine, theirs)
        for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True))
    }
    differentiable = [i for i, each in enumerate(expected) if each.requires_grad]
    if not differentiable:
        return errors
    weights = [normal(*expected[i].shape, seed=20 + i) for i in differentiable]
    theirs = _gradients([expected[i] for i in differentiable], plain, weights)
    outputs = [actual[i] for i in differentiable]
    parted = [_like(weight, output) for weight, output in zip(weights, outputs, strict=True)]
    mine = _gradients(outputs, spread, parted)
    for i, pair in enumerate(zip(mine, theirs, strict=True)):
        errors[f"gradient {i}"] = error_of(*pair)
    return errors


def _run(operator: Operator, tensors: Sequence[Tensor]) -> list[Tensor]:
    outputs = operator.run(*tensors)
    return [outputs] if isinstance(outputs, Tensor) else [*outputs]


def _like(weight: Tensor, output: Tensor) -> Tensor:
    """Return a gradient of an output, laid out as it is."""
    if not isinstance(output, DTensor):
        return weight
    weight = weight.to(output.dtype)
    placements = [Replicate() if p.is_partial() else p for p in output.placements]
    whole_weight = distribute_tensor(weight, output.device_mesh, [Replicate()] * len(placements))
    return whole_weight.redistribute(placements=placements)


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor | None]:
    asked = [each for each in inputs if each.requires_grad]
    weights = [w.to(o.dtype) for w, o in zip(weights, outputs, strict=True)]
    found = torch.autograd.grad(outputs, asked, weights, allow_unused=True)
    return [None if each is None else whole(each) for each in found]
