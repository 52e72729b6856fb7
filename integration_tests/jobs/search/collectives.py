"""Differentiable collectives in groups of ranks, against all ranks in one process."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.tensors import error_of, normal

Group = dist.ProcessGroup
GROUPS = {"all": (0, 1, 2, 3), "last two": (2, 3), "every second": (1, 3)}
_OPS = {
    "sum": (dist.ReduceOp.SUM, lambda x: x.sum(0)),
    "avg": (dist.ReduceOp.AVG, lambda x: x.mean(0)),
    "max": (dist.ReduceOp.MAX, lambda x: x.amax(0)),
    "min": (dist.ReduceOp.MIN, lambda x: x.amin(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
}
ROWS, WIDTH = 4, 3


def cases() -> Iterator[Case]:
    """Return collectives with reductions, groups and dims."""
    for group in GROUPS:
        for name in (
            "broadcast",
            "all_gather",
            "gather",
            "scatter",
            "all_to_all",
            "all_to_all_single",
        ):
            yield _case(name, group, "sum")
        for name in (
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "functional_all_reduce",
            "functional_reduce_scatter",
        ):
            for op in _OPS:
                yield _case(name, group, op)
        for name in ("functional_all_gather", "functional_all_to_all"):
            for dim in ("0", "1"):
                yield _case(name, group, dim)


def _case(name: str, group: str, how: str) -> Case:
    return Case(f"{name} {how}, {group}", partial(_compared, name, group, how), 4)


def _compared(name: str, group: str, how: str) -> Errors:
    warnings.simplefilter("ignore")
    members = GROUPS[group]
    made = dist.new_group(list(members))
    rank = dist.get_rank()
    if rank not in members:
        return {}
    assert isinstance(made, Group)
    size, place = len(members), members.index(rank)
    inputs = [normal(size * ROWS // 2, WIDTH, seed=20 + i).requires_grad_() for i in range(size)]
    expected = _EXPECTED[name.removeprefix("functional_")](inputs, how)
    weights = [normal(*each.shape, seed=40 + i) for i, each in enumerate(expected)]
    mine = inputs[place].detach().clone().requires_grad_()
    seen = _seen(name, mine, how, made, members)
    terms = [(e * w).sum() for e, w in zip(expected, weights, strict=True) if e.requires_grad]
    torch.autograd.backward(terms)
    (seen * weights[place]).sum().backward()
    given = name in ("reduce", "gather") and place > 0
    errors = {} if given else {"output": error_of(seen, expected[place])}
    return {**errors, "gradient": error_of(mine.grad, inputs[place].grad)}


def _seen(name: str, mine: Tensor, how: str, group: Group, members: Sequence[int]) -> Tensor:
    """Call a collective of torch's; what it gives as one tensor."""
    first, size = members[0], len(members)
    op = _OPS.get(how, _OPS["sum"])[0]
    parts = [*mine.chunk(size)]
    calls: dict[str, Callable[[], Tensor | Sequence[Tensor]]] = {
        "broadcast": lambda: differentiable.broadcast(mine, first, group),
        "all_gather": lambda: differentiable.all_gather(mine, group),
        "gather": lambda: differentiable.gather(mine, first, group),
        "scatter": lambda: differentiable.scatter(parts, first, group),
        "all_to_all": lambda: differentiable.all_to_all(
            [torch.empty_like(each) for each in parts], parts, group
        ),
        "all_to_all_single": lambda: differentiable.all_to_all_single(
            torch.empty_like(mine), mine, group=group
        ),
        "all_reduce": lambda: differentiable.all_reduce(mine, op, group),
        "reduce": lambda: differentiable.reduce(mine, first, op, group),
        "reduce_scatter": lambda: differentiable.reduce_scatter(
            torch.empty_like(parts[0]), parts, op, group
        ),
        "functional_all_reduce": lambda: functional.all_reduce(mine, how, group),
        "functional_reduce_scatter": lambda: functional.reduce_scatter_single(mine, how, 0, group),
        "functional_all_gather": lambda: functional.all_gather_single(mine, int(how), group),
        "functional_all_to_all": lambda: functional.all_to_all_single(mine, None, None, group),
    }
    found = calls[name]()
    return found if isinstance(found, Tensor) else torch.cat([*found])


def _all_to_all(inputs: Sequence[Tensor]) -> list[Tensor]:
    size = len(inputs)
    return [torch.cat([each.chunk(size)[i] for each in inputs]) for i in range(size)]


def _reduced(inputs: Sequence[Tensor], how: str) -> Tensor:
    reduced: Tensor = _OPS[how][1](torch.stack([*inputs]))
    return reduced


def _on_first(value: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what the first rank has; others have nothing that a loss may depend on."""
    return [value, *(torch.zeros_like(value) for _ in inputs[1:])]


_EXPECTED: dict[str, Callable[[Sequence[Tensor], str], list[Tensor]]] = {
    "broadcast": lambda x, _: [x[0] for _ in x],
    "all_gather": lambda x, how: [torch.cat([*x], int(how) if how.isdigit() else 0) for _ in x],
    "gather": lambda x, _: _on_first(torch.cat([*x]), x),
    "scatter": lambda x, _: [*x[0].chunk(len(x))],
    "all_to_all": lambda x, _: _all_to_all(x),
    "all_to_all_single": lambda x, _: _all_to_all(x),
    "all_reduce": lambda x, how: [_reduced(x, how) for _ in x],
    "reduce": lambda x, how: _on_first(_reduced(x, how), x),
    "reduce_scatter": lambda x, how: [*_reduced(x, how).chunk(len(x))],
}
