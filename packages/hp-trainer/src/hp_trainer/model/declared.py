"""Declarations of modules: kinds of their parameters, and published names.

Initialisation, weight decay, tensor parallelism, FSDP, checkpoints, conversion and `hp plan` read
this, and never what a parameter is called here.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from torch import nn

from hp_base.errors import ConfigError
from hp_expert import GroupedExperts, TopKRouter
from hp_trainer.layout.parameter import ParameterSpec

M = TypeVar("M", bound=nn.Module)

_EXPERTS = {
    name: ParameterSpec(
        "bias" if name.startswith("b") else "matrix",
        is_expert=True,
        hidden_dim=dim,
        is_residual=name == "w2",
    )
    for name, dim in GroupedExperts.hidden_dims.items()
}
_MATRIX = {"weight": ParameterSpec(), "bias": ParameterSpec("bias")}
_NORM = {"weight": ParameterSpec("norm"), "bias": ParameterSpec("bias")}
_KNOWN: dict[type[nn.Module], dict[str, ParameterSpec]] = {
    GroupedExperts: _EXPERTS,
    TopKRouter: _MATRIX,
    nn.Linear: _MATRIX,
    nn.Embedding: _MATRIX,
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
}
"""Modules of hp-expert and torch, which cannot say it themselves."""


class Declared(NamedTuple):
    """A parameter or buffer of a whole model.

    Attributes:
        shape: Shape of the whole of it.
        spec: What it is.
        published: Name in files of transformers, as most families have it.
    """

    shape: tuple[int, ...]
    spec: ParameterSpec
    published: str


def declare(module: M, published: str | None = None, **specs: ParameterSpec) -> M:
    """Say what the parameters of a module are.

    Modules that need not: `torch.nn`'s Linear, Embedding, LayerNorm and RMSNorm, those of hp-expert
    and those of `hp_trainer.model`.

    Args:
        module: Module whose own parameters, not those of its children, are described.
        published: Its path in published files, from that of the module around it; None: leave it.
        specs: What each parameter is, by its name in the module.

    Returns:
        The module.
    """
    module.__dict__.setdefault("parameter_specs", {}).update(specs)
    if published is not None:
        module.__dict__["published_path"] = published
    return module


def declared(model: nn.Module) -> dict[str, Declared]:
    """Return everything that a model, or a stage of a model, has declared, by global name.

    Args:
        model: Whole: neither cut nor sharded yet.

    Returns:
        Parameters first, in the order of `torch.nn.Module.named_parameters`, then buffers.

    Raises:
        hp_base.errors.ConfigError: When a parameter is not declared.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found: dict[str, Declared] = {}
    for path, published, module in _modules(model):
        of_kind = next((specs for kind, specs in _KNOWN.items() if isinstance(module, kind)), {})
        known = of_kind | module.__dict__.get("parameter_specs", {})
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for leaf, tensor in own:
            name = f"{path}.{leaf}".lstrip(".")
            if name not in parameters and name not in buffers:
                continue  # tied to one that was listed
            spec = known.get(leaf, ParameterSpec("bias") if name in buffers else None)
            if spec is None:
                raise ConfigError(
                    f"parameter {name} of the model must be declared: "
                    f"hp_trainer.model.declare(module, {leaf}=ParameterSpec(...))"
                )
            found[name] = Declared(tuple(tensor.shape), spec, f"{published}.{leaf}".lstrip("."))
    return {name: found[name] for name in (*parameters, *buffers)}


def _modules(
    module: nn.Module, path: str = "", published: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """Return all modules with their path here and in published files."""
    published = f"{published}.{module.__dict__.get('published_path', '')}".strip(".")
    yield path, published, module
    for name, child in module.named_children():
        yield from _modules(child, f"{path}.{name}".lstrip("."), published)
