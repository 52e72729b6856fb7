"""Parameters of a stage, under the model's own names: declared, taken away, cast."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hp_base.errors import ConfigError
from hp_expert.hugging_face.modules import expert_modules, refusal
from hp_platform.device import lifting
from hp_trainer.layout.parameter import Kind, ParameterSpec
from hp_trainer.model import declare


def declare_all(model: nn.Module) -> None:
    """Declare all parameters of a model, and that their published names are those here.

    A parameter of two dims or more is a matrix, which decays. Another is a bias if its name says
    so, and else a norm, by which it is filled and does not decay.
    """
    for module in model.modules():
        specs = {leaf: _spec(leaf, p) for leaf, p in module.named_parameters(recurse=False)}
        declare(module, None, **specs)
        for name, child in module.named_children():
            declare(child, name)


def declare_experts(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Declare stacked weights of experts, so that ranks share them out.

    Raises:
        hp_base.errors.ConfigError: When ranks cannot share them out.
    """
    for block in blocks:
        for path, experts in expert_modules(block):
            if (why := refusal(experts)) is not None:
                raise ConfigError(
                    f"mesh.ep must be 1: {path} ({type(experts).__name__}) cannot be shared by "
                    f"ranks: {why}"
                )
            specs = {
                leaf: replace(_spec(leaf, parameter), is_expert=True)
                for leaf, parameter in experts.named_parameters(recurse=False)
            }
            declare(experts, None, **specs)
    if not any(True for _ in expert_modules(model)):
        raise ConfigError("mesh.ep must be 1: the model has no experts in stacked weights")


def _spec(leaf: str, parameter: Tensor) -> ParameterSpec:
    # A frozen parameter must not decay.
    decays = parameter.ndim > 1 and parameter.requires_grad
    kind: Kind = "matrix" if decays else "bias" if "bias" in leaf else "norm"
    return ParameterSpec(kind, is_whole_on_tp=True)


def take_away(
    stage: nn.Module, is_here: Callable[[str], bool], is_in_layer: Callable[[str], bool]
) -> list[tuple[nn.Module, str, torch.Size]]:
    """Take parameters of other stages out of the modules of a stage.

    Args:
        stage: Stage with the modules of the whole model.
        is_here: Function that tells whether the stage has the parameter of a name.
        is_in_layer: Function that tells whether the parameter of a name is in a layer.

    Returns:
        Parameters outside of layers that the model still reads: module, name in it and shape.
    """
    read = []
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    for module in [*stage.modules()]:
        for leaf, parameter in [*module.named_parameters(recurse=False)]:
            name = names[id(parameter)]
            if is_here(name):
                continue
            module.register_parameter(leaf, None)
            if not is_in_layer(name):
                del module._parameters[leaf]  # noqa: SLF001 - a plain tensor takes its place
                module.__dict__[leaf] = None
                read.append((module, leaf, parameter.shape))
    return read


def promoting(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Return a context in which code that asks for a narrower dtype than float64 gets float64.

    Args:
        dtype: Dtype of the computation; for others than float64 the context does nothing.
    """
    return lifting() if dtype == torch.float64 else contextlib.nullcontext()


@contextlib.contextmanager
def parameters_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let modules find their parameters in a dtype; gradients are those of the parameters."""
    replaced = []
    for module in modules:
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype and parameter.is_floating_point():
                module.__dict__[leaf] = parameter.to(dtype)  # found before what is registered
                replaced.append((module, leaf))
    try:
        yield
    finally:
        for module, leaf in replaced:
            module.__dict__.pop(leaf, None)
