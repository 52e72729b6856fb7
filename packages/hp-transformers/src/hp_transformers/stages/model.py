"""A causal language model of transformers: its type, and one of a folder without its weights."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Protocol, TypeVar

import torch
from torch import nn

from hp_base.errors import ConfigError, told
from hp_base.messages import shown
from hp_trainer.config import ModelConfig
from hp_trainer.config.transformers_folder import config_of, text_config_of

T = TypeVar("T")
_BALANCED = "output_router_logits"
"""Key of configs of transformers."""
_DRAWS = re.compile(r".*(drop(?!less)|jitter).*")


class CausalConfig(Protocol):
    """The parts of `PretrainedConfig` of transformers that stages use.

    Attributes:
        num_hidden_layers: Number of layers; of the part of the config for text.
    """

    num_hidden_layers: int
    _attn_implementation: str
    _experts_implementation: str


class CausalModel(nn.Module):
    """The parts of a `PreTrainedModel` of transformers that stages use.

    For type checkers: models come from :func:`on_meta`, and none derives from this class.

    Attributes:
        config: Config of the model.
        base_model_prefix: Path of the decoder in the model.
        tp_plan: Style of tensor parallelism by path of a module, where transformers has a plan.
        set_attn_implementation: Function that chooses attention by a name of the registry.
        get_input_embeddings: Function that returns the embedding of token ids.
        get_output_embeddings: Function that returns the output matrix, if there is one.
    """

    config: CausalConfig
    base_model_prefix: str
    tp_plan: Mapping[str, str] | None
    set_attn_implementation: Callable[[str], None]
    get_input_embeddings: Callable[[], nn.Embedding]
    get_output_embeddings: Callable[[], nn.Module | None]
    _initialize_weights: Callable[[nn.Module], None]
    _keys_to_ignore_on_load_unexpected: Sequence[str] | None


def by_folder(function: Callable[[ModelConfig], T]) -> Callable[[ModelConfig], T]:
    """Compute a function of the model of a folder once, whatever else configs of it say."""

    @cache
    def known(folder: str, trust: bool) -> T:
        return function(ModelConfig(transformers=folder, trust_remote_code=trust))

    return wraps(function)(lambda model: known(model.transformers, model.trust_remote_code))


def on_meta(
    model: ModelConfig, dtype: torch.dtype, *, buffers: bool = False, balanced: bool = False
) -> CausalModel:
    """Make `AutoModelForCausalLM` of a folder on the meta device, in training mode.

    Args:
        model: Model configuration with the folder.
        dtype: Dtype of parameters.
        buffers: Whether buffers get values, on the CPU, instead of being on the meta device, too.
        balanced: Whether the model computes the loss that balances experts, if its config says so.

    Raises:
        hp_base.errors.ConfigError: When transformers refuses to make it.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - of those who have it

    config = config_of(model.transformers, trust=model.trust_remote_code)
    try:
        with _parameters_on_meta() if buffers else torch.device("meta"):
            made: CausalModel = AutoModelForCausalLM.from_config(
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
    if dtype == torch.float64:  # in which torch has no grouped matrix product
        choose_experts(made, "eager")
    made.train()
    return made


def is_balanced(model: ModelConfig) -> bool:
    """Tell whether the config of a folder asks for a loss that balances experts."""
    config = config_of(model.transformers, trust=model.trust_remote_code)
    return any(getattr(part, _BALANCED, False) for part in (config, text_config_of(config)))


def require_same_in_every_layout(model: nn.Module) -> None:
    """Refuse a model that draws random numbers.

    Raises:
        hp_base.errors.ConfigError: About the first module that does.
    """
    for path, share in _drawn(model):
        raise ConfigError(
            f"{path} ({share:g}) of {type(model).__name__} must be 0, by its config.json: what "
            "torch's generators draw depends on the layout"
        )


def _drawn(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield each part of a model that draws in training: its path, and the share that it drops."""
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
    """Move each matrix to the meta device as soon as a module registers it.

    Vectors are small and stay: the constructor may give them values that no other rule gives.
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


def choose_experts(model: CausalModel, implementation: str) -> None:
    """Choose the implementation of experts, by its name in transformers' registry."""
    for config in (model.config, text_config_of(model.config)):
        config._experts_implementation = implementation  # noqa: SLF001 - its own setter asks for more


def owners_of(
    part: nn.Module, *, recurse: bool = True
) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Return the parameters of a part of a model, each with its names and the modules it is in.

    Args:
        part: Module of the model.
        recurse: Whether parameters of modules inside the part are among them.
    """
    found: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in part.named_modules() if recurse else [("", part)]:
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            found.setdefault(parameter, []).append((name, module))
    return found


def lists_of(model: CausalModel) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of modules that may be the layers of a model, with their paths.

    They are as long as the config says; those with most parameters come first.

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
