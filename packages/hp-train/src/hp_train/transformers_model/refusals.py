"""What of a model of transformers would depend on the layout, and is therefore refused."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from hp_train.errors import ConfigError

_DRAWS = re.compile(r".*(drop(?!less)|jitter).*")


def require_same_in_every_layout(model: Any) -> None:
    """Refuse a model that draws random numbers.

    Raises:
        hp_train.errors.ConfigError: About the first such thing.
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
