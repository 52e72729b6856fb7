"""Tensor parallelism of a stage by the plan that transformers has for the model.

Note [Plans of transformers]. A plan says of modules how ranks share them; ranks have all positions,
and equal activations between these modules. What is cut by columns gives each rank a part of the
channels, and sums the gradient of its input over ranks; what is cut by rows takes such a part, and
sums its output. So a parameter that is in no plan has its whole gradient on every rank, which is
not summed (`ParameterSpec.is_whole_on_tp`), but for those that see a part of the heads, which the
plan names. Stacked experts stay whole on every rank, whatever the plan says: hp-train deals them
out as `mesh.ep`. Styles that mix rows of a fused matrix are refused.

Shape symbols: B sequences, S positions, C channels.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert.hugging_face.layout import expert_modules
from hp_train.errors import ConfigError
from hp_train.layout.parameter import ParameterSpec
from hp_train.model import declare

COLUMNS, GATHERED, ROWS, SPLIT_ROWS = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
)
SUMMED, LATENT = "replicated_with_grad_allreduce", "mla_kv_a_proj"
_OF_OWNERS = ("local_params", "replicate")  # of modules whose parameters have entries of their own
_LINEAR = {COLUMNS: 0, GATHERED: 0, "colwise_rep": 0, ROWS: 1, "rowwise_rep": 1, SPLIT_ROWS: 1}
"""Styles of matrices, and the dim of the weight that is cut."""


def declare_cuts(model: Any, ranks: int) -> None:
    """Declare which dim of parameters tensor-parallel ranks share out.

    Args:
        model: Model of transformers, on the meta device.
        ranks: Number of ranks.

    Raises:
        hp_train.errors.ConfigError: When there is no plan, or it cannot be followed.
    """
    for module in model.modules():
        specs: Mapping[str, ParameterSpec] = module.__dict__.get("parameter_specs", {})
        declare(
            module, None, **{n: replace(spec, is_whole_on_tp=True) for n, spec in specs.items()}
        )
    for path, style, module, leaf in _planned(model):
        if leaf:
            dim = max(0, module.get_parameter(leaf).ndim - 2)
            _declare(module, leaf, path, ranks, tp_dim=dim, style=style)
        elif style in _LINEAR:
            _require_linear(module, path, style)
            rows = _LINEAR[style] == 1
            _declare(module, "weight", path, ranks, tp_dim=int(rows), style=style)
            if module.bias is not None and not rows:
                _declare(module, "bias", path, ranks, tp_dim=0, style=style)
        elif style == SUMMED:
            specs = module.__dict__["parameter_specs"]
            declare(module, None, **{n: replace(s, is_whole_on_tp=False) for n, s in specs.items()})
        elif style not in (LATENT, *_OF_OWNERS):
            raise ConfigError(
                f"mesh.tp must be 1 for {type(model).__name__}: transformers' plan has {style} for "
                f"{path}, which hp-train has not"
            )


def cut(model: Any, group: ProcessGroup) -> None:
    """Keep this rank's part of what `declare_cuts` has declared, and put sums where they belong.

    Args:
        model: Model of transformers, on the meta device.
        group: The tensor-parallel ranks.
    """
    for module in model.modules():
        specs: Mapping[str, ParameterSpec] = module.__dict__.get("parameter_specs", {})
        for leaf, parameter in [*module.named_parameters(recurse=False)]:
            if (dim := specs[leaf].tp_dim) is not None:
                part = parameter.chunk(group.size(), dim)[group.rank()]
                setattr(module, leaf, nn.Parameter(torch.empty_like(part)))
    for _, style, module, leaf in _planned(model):
        if not leaf and (style in _LINEAR or style == LATENT):
            module.forward = _forward_of(style, module, model, group)


def _forward_of(
    style: str, module: Any, model: Any, group: ProcessGroup
) -> Callable[[Tensor], Tensor]:
    if style == LATENT:
        rope = model.config.get_text_config().qk_rope_head_dim
        return partial(_latent, module.forward, rope=rope, group=group)
    if _LINEAR[style] == 1:
        return partial(_by_rows, module, group=group, splits=style == SPLIT_ROWS)
    return partial(_by_columns, module.forward, group=group, gathers=style != COLUMNS)


def _by_columns(
    forward: Callable[[Tensor], Tensor], x: Tensor, *, group: ProcessGroup, gathers: bool
) -> Tensor:
    """[..., C] that all ranks have, to this rank's channels, or those of all."""
    y = forward(summed_in_backward(x, group=group))
    return _gathered(y, group=group) if gathers else y


def _by_rows(module: Any, x: Tensor, *, group: ProcessGroup, splits: bool) -> Tensor:
    """This rank's channels [..., C] to what all ranks have; the bias is added once."""
    if splits:
        x = summed_in_backward(x, group=group).chunk(group.size(), -1)[group.rank()]
    y: Tensor = _Sum.apply(torch.nn.functional.linear(x, module.weight), group)
    return y if module.bias is None else y + module.bias


def _latent(
    forward: Callable[[Tensor], Tensor], x: Tensor, *, rope: int, group: ProcessGroup
) -> Tensor:
    """Compressed keys, and rotated ones, which every head of every rank reads as they are."""
    y = forward(x)
    compressed, rotated = y.split([y.shape[-1] - rope, rope], dim=-1)
    return torch.cat((compressed, summed_in_backward(rotated, group=group)), dim=-1)


def summed_in_backward(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """What all ranks have; its gradient is the sum of what each has computed."""
    y: Tensor = _SumOfGradients.apply(x, group)
    return y


def _gathered(x: Tensor, *, group: ProcessGroup) -> Tensor:
    y: Tensor = _Gather.apply(x, group)
    return y


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Parts of the last dim; all ranks go on with the whole, and so have its whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def _planned(model: Any) -> Iterator[tuple[str, str, Any, str]]:
    """What the plan is about: path, style, module, and parameter, if it is about that alone.

    A matrix that is an embedding, too, stays whole, and so does what is of another stage.

    Raises:
        hp_train.errors.ConfigError: When there is no plan.
    """
    plan = dict(model.tp_plan or {})
    if not any(style in _LINEAR for style in plan.values()):
        raise ConfigError(
            f"mesh.tp must be 1 for {type(model).__name__}: transformers has no tensor-parallel "
            "plan for it"
        )
    rules = [(re.compile(_pattern(key)), style) for key, style in plan.items()]
    left_out = {id(part) for _, part in expert_modules(model)}
    if (head := model.get_output_embeddings()) is not None:
        table = getattr(model.get_input_embeddings(), "weight", None)
        left_out |= {id(head)} if getattr(head, "weight", None) is table else set()
    for path, module in model.named_modules():
        own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        for pattern, style in rules if own and id(module) not in left_out else ():
            if pattern.fullmatch(path):
                yield path, style, module, ""
            for leaf in own:
                if pattern.fullmatch(f"{path}.{leaf}") and leaf not in ("weight", "bias"):
                    yield f"{path}.{leaf}", style, module, leaf


def _pattern(key: str) -> str:
    return r"\d+".join(map(re.escape, key.split("*")))


def _declare(module: Any, leaf: str, path: str, ranks: int, *, tp_dim: int, style: str) -> None:
    size = module.get_parameter(leaf).shape[tp_dim]
    if size % ranks:
        raise ConfigError(
            f"mesh.tp ({ranks}) must divide dim {tp_dim} of {path} ({size}), which transformers' "
            f"plan cuts ({style})"
        )
    spec = module.__dict__["parameter_specs"][leaf]
    declare(module, None, **{leaf: replace(spec, tp_dim=tp_dim, is_whole_on_tp=False)})


def _require_linear(module: Any, path: str, style: str) -> None:
    if not isinstance(module, nn.Linear):
        raise ConfigError(
            f"mesh.tp must be 1: {path} ({type(module).__name__}) must be a torch.nn.Linear to be "
            f"cut as transformers' plan says ({style})"
        )
