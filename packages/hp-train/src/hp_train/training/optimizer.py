"""AdamW and its learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hp_train.config import TrainConfig
from hp_train.model.parameters import Parameter


def build_optimizer(parameters: Iterable[Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019); norms and biases are not decayed, however stacked."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in parameters:
        (decayed if parameter.spec.kind == "matrix" else others).append(parameter.local)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,  # one pass over memory instead of seven
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to ``min_learning_rate_ratio``.

    Args:
        step: Counted from 0.
        config: Its ``steps`` is where the cosine ends.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    share = min(1.0, (step - config.warmup_steps) / span)
    low = config.min_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
