"""Let an unmodified model put off its weight gradients."""

from functools import partial

from torch import Tensor, nn

from hp_platform import linear


def defer_weight_gradients(module: nn.Module) -> nn.Module:
    """Make every `torch.nn.Linear` inside compute with `hp_platform.linear` from now on.

    The numbers stay the same to the bit. A backward that is split then puts the gradients of these
    layers off in one pass over the graph (`hp_schedule.runtime.DeferringSplitter`): no operation
    runs twice, recompute and FSDP included. Outside a split backward nothing changes.

    Subclasses of Linear are left alone, since they may compute something else.

    Args:
        module: Changed in place: each such layer gets a `forward` of its own.

    Returns:
        The module itself.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return module


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
