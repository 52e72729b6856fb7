"""Tensor parallelism of a model of transformers: linear layers cut over ranks.

Every rank has all positions, and the same numbers between linear layers. A linear layer is cut by
the rows of its weight, and its output is gathered: that is right in any model, whatever the model
does with the output, unless its code reads the weight directly; then the layer is not cut.
Transformers' own plan names modules that need no exchange inside: columns of some layers feed rows
of another, and nothing else in the module has parameters but what the plan names. There the first
layers keep parts of their outputs and the last one sums: half of the exchanges. The number of heads
must then be divisible by the ranks; else the module is treated as any other. Every rank has all
other parameters, whole, with all of their gradient.

Shape symbols: B sequences, S positions, D features, d of them on a rank.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hp_base.errors import ConfigError
from hp_platform import outside_graph
from hp_trainer.model import declare
from hp_transformers.stages.model import CausalModel

P = ParamSpec("P")
R = TypeVar("R")
Style = Literal["gathered", "columns", "rows", "summed"]
"""`gathered`: rows of the weight are cut and the output is gathered. `columns`: the output stays
cut. `rows`: the input is cut and the output is summed. `summed`: nothing is cut; ranks sum their
parts of the gradient."""


class Alone:
    """Stands for a group of tensor-parallel ranks when one process is counted as the first of them.

    Args:
        size: Number of ranks.
        exchange: Function that gets the elements of each exchange, averaged over forward and
            backward.
    """

    def __init__(self, size: int, exchange: Callable[[float], None]) -> None:
        self._size, self._exchange = size, exchange

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return the index of this rank."""
        return 0

    def count(self, elements: int, times: int) -> None:
        """Count an exchange in one direction; a sum exchanges its elements twice."""
        self._exchange(elements * times / 2)


Ranks = ProcessGroup | Alone

_OF_PLAN: Mapping[str, Style] = {
    "colwise": "columns",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "summed",
}
_ACROSS = frozenset({"Gemma3nTextMLP"})
"""Modules that compute something over all features between their layers, unknown to the plan."""


def styles_of(model: CausalModel, layers: nn.Module, num_ranks: int) -> dict[str, Style]:
    """Choose a style for each module of layers that is cut, by its path in the list of layers.

    Args:
        model: The whole model, on the meta device.
        layers: List of layers of the model.
        num_ranks: Number of tensor-parallel ranks.

    Raises:
        hp_base.errors.ConfigError: When no module can be cut.
    """
    prefix = next(path for path, part in model.named_modules() if part is layers)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    shared = _shared(model)
    found: dict[str, Style] = {}
    for path, parent in layers.named_modules():
        children = dict(parent.named_children())
        kinds = {name: _planned(plan, f"{prefix}.{path}.{name}") for name in children}
        pair = _pair(parent, kinds, num_ranks)
        for name, child in children.items():
            weight = child.weight if _is_linear(child) else None
            if name in pair:
                found[f"{path}.{name}"] = pair[name]
            elif not isinstance(weight, Tensor) or weight in shared or _is_read(parent, name):
                continue  # layers of other stages have no weight
            elif weight.shape[_rows_of(child)] % num_ranks == 0:
                found[f"{path}.{name}"] = "gathered"
    if all(style == "summed" for style in found.values()):
        raise ConfigError(
            f"mesh.tp ({num_ranks}) must be 1 with {type(model).__name__}: it has no linear layer "
            "that so many ranks can share out"
        )
    return found


def _is_read(parent: nn.Module, name: str) -> bool:
    """Tell whether the code of a module reads parameters of a child instead of calling it."""
    reads = re.compile(rf"\b{name}\.(weight|bias)")
    kinds: list[type] = [kind for kind in type(parent).__mro__ if issubclass(kind, nn.Module)]
    return any(reads.search(_source(kind)) for kind in kinds if kind is not nn.Module)


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a plain linear layer: torch's, or the `Conv1D` of GPT-2."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _rows_of(module: nn.Module) -> int:
    """Return the dim of a linear layer's weight that is its output."""
    return int(type(module) is not nn.Linear)


def _planned(plan: Mapping[str, str], path: str) -> Style | None:
    return _OF_PLAN.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), ""))


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that several modules have."""
    owners = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def _pair(parent: nn.Module, kinds: Mapping[str, Style | None], num_ranks: int) -> dict[str, Style]:
    """Return the styles of children of a module that needs no exchange inside; of others none."""
    children = dict(parent.named_children())
    with_parameters = [n for n, child in children.items() if any(True for _ in child.parameters())]
    known = {name: kind for name in with_parameters if (kind := kinds[name]) is not None}
    own = [*parent.named_parameters(recurse=False)]
    if own or len(known) < len(with_parameters) or not {"columns", "rows"} <= {*known.values()}:
        return {}
    if type(parent).__name__ in _ACROSS or any(_is_read(parent, name) for name in known):
        return {}
    head = getattr(parent, "head_dim", 1)
    for name, kind in known.items():
        child = children[name]
        if kind == "summed":
            continue
        if type(child) is not nn.Linear:
            return {}
        width = child.out_features if kind == "columns" else child.in_features
        if not isinstance(head, int) or width % head or (width // head) % num_ranks:
            return {}
    return known


def declare_cuts(layers: nn.Module, styles: Mapping[str, Style]) -> None:
    """Declare the dims of parameters that ranks share out.

    Args:
        layers: List of layers.
        styles: Styles of modules, by their path in the list.
    """
    for module, leaf, dim in _cuts(layers, styles):
        spec = module.__dict__["parameter_specs"][leaf]
        declare(module, **{leaf: replace(spec, tp_dim=dim)})


def cut(layers: nn.Module, styles: Mapping[str, Style], group: Ranks) -> None:
    """Keep this rank's part of parameters, and replace forwards of modules by ones that exchange.

    Args:
        layers: List of layers, on the meta device; changed in place.
        styles: Styles of modules, by their path in the list.
        group: The tensor-parallel ranks.
    """
    for module, leaf, dim in [*_cuts(layers, styles)]:
        part = _split(module.get_parameter(leaf), dim, group)
        setattr(module, leaf, nn.Parameter(torch.empty_like(part)))
    for path, style in styles.items():
        module = layers.get_submodule(path)
        if style == "summed":
            module.forward = partial(_with_summed_gradients, module, module.forward, group)
        else:
            module.forward = partial(_FORWARDS[style], module, group)


def _count(x: Tensor, group: Ranks, times: int) -> None:
    if isinstance(group, Alone):
        group.count(x.numel(), times)


def _cuts(layers: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the parameters that are cut: module, name in it and dim."""
    for path, style in styles.items():
        module = layers.get_submodule(path)
        if style == "rows":
            yield module, "weight", 1
        elif style != "summed":
            yield module, "weight", _rows_of(module)
            if module.bias is not None:
                yield module, "bias", 0


@outside_graph
def _gathered(module: nn.Module, group: Ranks, x: Tensor) -> Tensor:
    whole: Tensor = _Gather.apply(_columns(module, group, x), group)
    return whole


@outside_graph
def _columns(module: nn.Module, group: Ranks, x: Tensor) -> Tensor:
    """Compute this rank's features [..., d] from all features [..., D]."""
    copied: Tensor = _Copy.apply(x, group)
    weight, bias = _weights_of(module)
    return F.linear(copied, weight.t() if _rows_of(module) else weight, bias)


@outside_graph
def _rows(module: nn.Module, group: Ranks, x: Tensor) -> Tensor:
    """Compute all features [..., D] from this rank's features [..., d]."""
    weight, bias = _weights_of(module)
    summed: Tensor = _Sum.apply(F.linear(x, weight), group)
    return summed if bias is None else summed + bias


def _weights_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return weight, bias


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "gathered": _gathered,
    "columns": _columns,
    "rows": _rows,
}


def _with_summed_gradients(
    module: nn.Module, forward: Callable[P, R], group: Ranks, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a module with whole parameters that gets this rank's features alone."""
    before = {}
    for leaf, _ in [*module.named_parameters(recurse=False)]:
        before[leaf] = module.__dict__.get(leaf)
        module.__dict__[leaf] = _Copy.apply(getattr(module, leaf), group)
    try:
        return forward(*args, **kwargs)
    finally:
        for leaf, value in before.items():
            if value is None:
                del module.__dict__[leaf]
            else:
                module.__dict__[leaf] = value


def _gather(x: Tensor, dim: int, group: Ranks) -> Tensor:
    if isinstance(group, Alone):
        return torch.cat([x] * group.size(), dim)
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _split(x: Tensor, dim: int, group: Ranks) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _sum(x: Tensor, group: Ranks) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    if not isinstance(group, Alone):
        dist.all_reduce(summed, group=group)
    return summed


class _Context(Protocol):
    """The attribute that autograd keeps from forward for backward."""

    group: Ranks


class _Copy(torch.autograd.Function):
    """Identity on values of which each rank uses a part: backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        _count(x, group, 2)  # in backward
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum of the ranks' tensors, on each of them."""

    @staticmethod
    def forward(_ctx: object, x: Tensor, group: Ranks) -> Tensor:
        _count(x, group, 2)
        return _sum(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(_ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Features of all ranks, on each of them: backward returns the gradient of this rank's."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        _count(x, group, group.size())
        return _gather(x, -1, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return _split(grad, -1, ctx.group), None
