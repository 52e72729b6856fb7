"""A causal language model of transformers from its folder, without memory for weights."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hp_base.errors import ConfigError, told
from hp_base.messages import shown
from hp_trainer.config import ModelConfig
from hp_trainer.config.transformers_folder import config_of, text_config_of

_BALANCED = "output_router_logits"
"""Key of configs of transformers."""
_DRAWS = re.compile(r".*(drop(?!less)|jitter).*")


def on_meta(
    model: ModelConfig, dtype: torch.dtype, *, buffers: bool = False, balanced: bool = False
) -> Any:
    """Make `AutoModelForCausalLM` of a folder on the meta device, in training mode.

    Args:
        model: Model configuration with the folder.
        dtype: Dtype of parameters.
        buffers: Whether buffers are to have their values, on the CPU.
        balanced: Whether it is to compute the loss that balances experts, if its config says so.

    Raises:
        hp_base.errors.ConfigError: When transformers refuses to make it.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - of those who have it

    config = config_of(model.transformers, trust=model.trust_remote_code)
    try:
        with _parameters_on_meta() if buffers else torch.device("meta"):
            made = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
    except Exception as error:
        raise ConfigError(
            f"model.transformers ({shown(model.transformers)}) must be a causal language model "
            f"that can be made: {told(error, 300)}"
        ) from error
    for part in (made.config, text_config_of(made.config)) if not balanced else ():
        if getattr(part, _BALANCED, False):
            setattr(part, _BALANCED, False)
    if dtype == torch.float64:  # of which torch has no product of groups
        choose_experts(made, "eager")
    return made.train()


def is_balanced(model: ModelConfig) -> bool:
    """Tell whether the config of a folder asks for a loss that balances experts."""
    config = config_of(model.transformers, trust=model.trust_remote_code)
    return any(getattr(part, _BALANCED, False) for part in (config, text_config_of(config)))


def require_same_in_every_layout(model: Any) -> None:
    """Refuse a model that draws random numbers.

    Raises:
        hp_base.errors.ConfigError: About the first such thing.
    """
    for path, share in _drawn(model):
        raise ConfigError(
            f"{path} ({share:g}) of {type(model).__name__} must be 0, by its config.json: what "
            "torch's generators draw depends on the layout"
        )


def _drawn(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Shares of what a model drops in training, by place."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            if module.p:
                yield path, module.p
            continue
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and _DRAWS.fullmatch(name):
                yield f"{path}.{name}", value


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let matrices, one by one, lose their memory as soon as a module gets them.

    The rest, which is small, may have values that no rule but the constructor gives.
    """
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta and param.ndim > 1:
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            module._parameters[name] = empty  # noqa: SLF001 - not through what is replaced here

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def choose_experts(model: Any, implementation: str) -> None:
    """Say how experts are computed, by a name of transformers' registry."""
    for config in (model.config, text_config_of(model.config)):
        config._experts_implementation = implementation  # noqa: SLF001 - its own setter asks for more


def places_of(
    part: nn.Module, *, recurse: bool = True
) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Parameters of a part of a model, each with names and modules that have it.

    Args:
        part: The part.
        recurse: Whether modules in it belong to it.
    """
    found: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in part.named_modules() if recurse else [("", part)]:
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            found.setdefault(parameter, []).append((name, module))
    return found


def lists_of(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return what may be the list of layers of a model, with their paths.

    These are the lists that are as long as the config says, those with most parameters first.

    Raises:
        hp_base.errors.ConfigError: When there is none.
    """
    count = text_config_of(model.config).num_hidden_layers
    lists = [
        (path, part)
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} must have a list of num_hidden_layers ({count}) layers, which "
            "is how a model is cut into stages"
        )
    return sorted(lists, key=lambda it: -sum(p.numel() for p in it[1].parameters()))
