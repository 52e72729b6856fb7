"""Tensor parallelism of a model of transformers: linear layers cut over ranks.

Note [Tensor parallelism of a stranger's model]. Every rank has all positions, and the same numbers
between linear layers. A linear layer is cut by the rows of its weight, and what ranks compute is
put together behind it: that is right in any model, whatever it does with the output, unless it
reads the weight by itself; then it is not cut. Where transformers' own plan says that a module
needs no such exchange inside of it (columns of some layers feed rows of another, and nothing else
in there has parameters but what the plan names), its first layers give parts and the last one sums:
half of the exchanges. Heads must then be divisible; else the module is taken as any other. All else
is on every rank, whole, and has all of its gradient there.

Shape symbols: B sequences, S positions, D features, d of them on a rank.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hp_base.errors import ConfigError
from hp_platform import outside_graph
from hp_trainer.model import declare

Style = Literal["gathered", "columns", "rows", "summed"]
"""`gathered`: rows of the weight are cut, the output is put together. `columns`: the output stays
cut. `rows`: the input is cut, the output is summed. `summed`: nothing is cut; parts of the gradient
are summed."""


class Alone:
    """Stands for tensor-parallel ranks of which there is the first alone, to be counted.

    Args:
        size: Number of ranks.
        exchange: Hears of elements that they put together, half of both directions.
    """

    def __init__(self, size: int, exchange: Callable[[float], None]) -> None:
        self._size, self._exchange = size, exchange

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """Index of this one."""
        return 0

    def tell(self, elements: int, times: int) -> None:
        """Tell of an exchange in one direction; of a sum elements are put together twice."""
        self._exchange(elements * times / 2)


Ranks = ProcessGroup | Alone

_OF_PLAN: Mapping[str, Style] = {
    "colwise": "columns",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "summed",
}
_ACROSS = frozenset({"Gemma3nTextMLP"})
"""Modules that compute something over all features between their layers, which no plan tells."""


def styles_of(model: Any, layers: nn.Module, num_ranks: int) -> dict[str, Style]:
    """Return how modules of layers are cut, by their path in the list of layers.

    Args:
        model: The whole model, on the meta device.
        layers: Its list of layers.
        num_ranks: Tensor-parallel ranks.

    Raises:
        hp_base.errors.ConfigError: When there is nothing to be cut.
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
            # Of layers of other stages there is none.
            weight: Any = child.weight if _is_linear(child) else None
            if name in pair:
                found[f"{path}.{name}"] = pair[name]
            elif weight is None or weight in shared or _is_read(parent, name):
                continue
            elif weight.shape[_rows_of(child)] % num_ranks == 0:
                found[f"{path}.{name}"] = "gathered"
    if all(style == "summed" for style in found.values()):
        raise ConfigError(
            f"mesh.tp ({num_ranks}) must be 1 with {type(model).__name__}: it has no linear layer "
            "that so many ranks can share out"
        )
    return found


def _is_read(parent: nn.Module, name: str) -> bool:
    """Say if code of a module reads parameters of a child by itself, instead of calling it."""
    reads = re.compile(rf"\b{name}\.(weight|bias)")
    kinds: list[Any] = [kind for kind in type(parent).__mro__ if issubclass(kind, nn.Module)]
    return any(reads.search(_source(kind)) for kind in kinds if kind is not nn.Module)


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _is_linear(module: nn.Module) -> bool:
    """Tell whether a module computes nothing but a linear layer: torch's, or that of GPT-2."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _rows_of(module: nn.Module) -> int:
    """Dim of a linear layer's weight that is the output."""
    return int(type(module) is not nn.Linear)


def _planned(plan: Mapping[str, str], path: str) -> Style | None:
    return _OF_PLAN.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), ""))


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules have."""
    owners = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def _pair(parent: nn.Module, kinds: Mapping[str, Style | None], num_ranks: int) -> dict[str, Style]:
    """Styles of children of a module that needs no exchange inside; none: it is not one."""
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
    """Declare which dims of parameters ranks share out.

    Args:
        layers: List of layers.
        styles: How its modules are cut, by their path in it.
    """
    for module, leaf, dim in _cuts(layers, styles):
        spec = module.__dict__["parameter_specs"][leaf]
        declare(module, **{leaf: replace(spec, tp_dim=dim)})


def cut(layers: nn.Module, styles: Mapping[str, Style], group: Ranks) -> None:
    """Keep this rank's part of parameters, and let modules exchange what they must.

    Args:
        layers: List of layers, on the meta device; changed in place.
        styles: How its modules are cut, by their path in it.
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


def _told(x: Tensor, group: Ranks, times: int) -> None:
    if isinstance(group, Alone):
        group.tell(x.numel(), times)


def _cuts(layers: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[nn.Module, str, int]]:
    """Parameters that are cut: their modules, names in them, and dims."""
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
    """[..., D] of all features to [..., d] of this rank's."""
    copied: Tensor = _Copy.apply(x, group)
    weight: Any = module.weight
    return F.linear(copied, weight.t() if _rows_of(module) else weight, module.bias)  # type: ignore[arg-type]


@outside_graph
def _rows(module: nn.Module, group: Ranks, x: Tensor) -> Tensor:
    """[..., d] of this rank's features to [..., D] of all."""
    summed: Tensor = _Sum.apply(F.linear(x, module.weight), group)  # type: ignore[arg-type]
    return summed if module.bias is None else summed + module.bias  # type: ignore[operator]


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "gathered": _gathered,
    "columns": _columns,
    "rows": _rows,
}


def _with_summed_gradients(
    module: nn.Module, forward: Callable[..., Any], group: Ranks, *args: Any, **kwargs: Any
) -> Any:
    """Call a module that sees this rank's features alone, with parameters that all ranks have."""
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


class _Copy(torch.autograd.Function):
    """Identity on values that ranks go on with in parts: backward sums the gradients of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        _told(x, group, 2)  # in backward
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of what ranks have, on all of them."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: Ranks) -> Tensor:
        _told(x, group, 2)
        return _sum(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Features of all ranks, which go on with the same numbers: backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        _told(x, group, group.size())
        return _gather(x, -1, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _split(grad, -1, ctx.group), None
