"""What of a model of transformers would depend on the layout, and is therefore refused."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from hp_train.config.transformers_folder import text_config_of
from hp_train.errors import ConfigError

_DRAWS = re.compile(r".*(drop(?!less)|jitter).*")


def require_same_in_every_layout(model: Any) -> None:
    """Refuse a model that draws random numbers, or sums what is of one batch.

    Raises:
        hp_train.errors.ConfigError: About the first such thing.
    """
    kind = type(model).__name__
    for path, share in _drawn(model):
        raise ConfigError(
            f"{path} ({share:g}) of {kind} must be 0, by its config.json: what torch's generators "
            "draw depends on the layout"
        )
    config = text_config_of(model.config)
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"output_router_logits (true) of {kind} must be false in its config.json: the loss "
            "that it adds to balance experts is of the batch of one call, which depends on the "
            "layout"
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
