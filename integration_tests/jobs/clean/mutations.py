"""Changes of a job from outside: its modules, gradients, weights, rates or samples, by name.

They listen to torch's hooks before the recorder does, so that it sees what they have changed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class _Names:
    """Names of modules and parameters below the first module that is called."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}

    def parameter(self, tensor: str) -> nn.Parameter | None:
        """Return the first parameter that has one of some names, joined by "|"."""
        found = (self.parameters[name] for name in tensor.split("|") if name in self.parameters)
        return next(found, None)

    def meet(self, module: nn.Module) -> bool:
        """Take in a module that was not known; tell whether it was not."""
        if id(module) in self.of:
            return False
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        for name, part in module.named_modules():
            self.of.setdefault(id(part), _plain(name) if is_trained else "")
        for name, parameter in module.named_parameters():
            self.of.setdefault(id(parameter), _plain(name))
            known = self.parameters.get(_plain(name))
            if known is None or not known.requires_grad:
                self.parameters[_plain(name)] = parameter
        return True


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def mutate(bug: str, *, is_last: bool) -> None:
    """Seed a bug named "kind:tensor" in what this process trains; any other name changes nothing.

    Args:
        bug: "forward:MODULE" and "input" change the last rank alone, "gradient:PARAMETER",
            "weight:PARAMETER", "start:PARAMETER" and "rate" all ranks.
        is_last: Whether this is the last rank.
    """
    kind, _, tensor = bug.partition(":")
    change = {
        "forward": _forward if is_last else None,
        "input": _input if is_last else None,
        "start": _start,
        "gradient": _gradient,
        "weight": _weight,
        "rate": _rate,
    }.get(kind)
    if change is not None:
        change(tensor)


def _known(then: Callable[[_Names], None] | None = None) -> _Names:
    names = _Names()

    def met(module: nn.Module, _args: object) -> None:
        if names.meet(module) and then is not None:
            then(names)

    modules.register_module_forward_pre_hook(met)
    return names


def _forward(tensor: str) -> None:
    names = _known()

    def changed(module: nn.Module, _args: object, output: object) -> Any:
        is_it = names.of.get(id(module)) in tensor.split("|")
        return output * 1.5 if is_it and isinstance(output, Tensor) else None

    modules.register_module_forward_hook(changed)


def _input(_tensor: str) -> None:
    stack: list[nn.Module] = []

    def entered(module: nn.Module, args: tuple[object, ...]) -> Any:
        stack.append(module)
        given = args[0] if args else None
        if len(stack) > 1 or not isinstance(given, Tensor) or not torch.is_grad_enabled():
            return None
        if given.is_floating_point():
            return (given + 0.01, *args[1:])
        other = given.clone()
        other[0, 0] = other[0, 0] % 3 + 1 + (other[0, 0] < 2)
        return (other, *args[1:])

    def left(_module: nn.Module, _args: object, _output: object) -> None:
        stack.pop()

    modules.register_module_forward_pre_hook(entered)
    modules.register_module_forward_hook(left, always_call=True)


def _start(tensor: str) -> None:
    done: list[str] = []

    def scaled(names: _Names) -> None:
        parameter = names.parameter(tensor)
        if parameter is not None and not done:
            done.append(tensor)
            with torch.no_grad():
                parameter.add_(0.125)

    _known(scaled)


def _gradient(tensor: str) -> None:
    names = _known()

    def before(_optimizer: object, _args: object, _kwargs: object) -> None:
        parameter = names.parameter(tensor)
        if parameter is not None and parameter.grad is not None:
            parameter.grad.mul_(1.5)

    optimizers.register_optimizer_step_pre_hook(before)


def _weight(tensor: str) -> None:
    names = _known()

    def after(_optimizer: object, _args: object, _kwargs: object) -> None:
        parameter = names.parameter(tensor)
        if parameter is not None:
            with torch.no_grad():
                parameter.mul_(1.1)

    optimizers.register_optimizer_step_post_hook(after)


def _rate(_tensor: str) -> None:
    def before(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1.1

    optimizers.register_optimizer_step_pre_hook(before)
