"""Declarations of the parameters of a model of transformers, under the model's own names."""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from hp_base.errors import ConfigError
from hp_expert.hugging_face.layout import expert_modules, refusal
from hp_trainer.layout.parameter import Kind, ParameterSpec
from hp_trainer.model import declare


def declare_all(model: nn.Module) -> None:
    """Declare all parameters of a model, and that their published names are those here.

    Parameters of two dims and more are matrices, which decay; others are biases, by their names,
    or what scales, which begin and decay as norms do.
    """
    for module in model.modules():
        specs = {leaf: _spec(leaf, p) for leaf, p in module.named_parameters(recurse=False)}
        declare(module, None, **specs)
        for name, child in module.named_children():
            declare(child, name)


def declare_experts(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Declare stacked weights of experts, which ranks are to share out.

    Raises:
        hp_base.errors.ConfigError: When ranks cannot share them.
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
    # What is frozen must not decay.
    decays = parameter.ndim > 1 and parameter.requires_grad
    kind: Kind = "matrix" if decays else "bias" if "bias" in leaf else "norm"
    return ParameterSpec(kind, is_whole_on_tp=True)
