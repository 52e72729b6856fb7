"""What parameters of a model of transformers are, and their names: the model's own."""

from torch import Tensor, nn

from hp_train.layout.parameter import Kind, ParameterSpec
from hp_train.model import declare


def declare_all(model: nn.Module) -> None:
    """Declare all parameters of a model, and that their published names are those here.

    Parameters of two dims and more are matrices, which decay; others are biases, by their names,
    or what scales, which begin and decay as norms do.
    """
    for module in model.modules():
        specs = {leaf: _spec(leaf, p) for leaf, p in module.named_parameters(recurse=False)}
        declare(module, **specs)
        for name, child in module.named_children():
            declare(child, name)


def _spec(leaf: str, parameter: Tensor) -> ParameterSpec:
    kind: Kind = "matrix" if parameter.ndim > 1 else "bias" if "bias" in leaf else "norm"
    return ParameterSpec(kind, sums_over_tp=False)
