"""Context parallelism of a stage: transformers' registry of attention, and the trial of a model.

Note [A stage is tried as the whole is]. hp-context runs a model once, before its first forward, on
two short sequences that have tokens in common, to find what mixes positions besides attention. A
stage that is not the first gets some vector of each token for that; what it does to them is
compared as in the whole model.

Shape symbols: B sequences, S positions, D width of the stream.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import ConfigError
from hp_context import ContextParallel, register_attention
from hp_trainer.config.transformers_folder import text_config_of

_NAME = "hp_train"


def spread(model: Any, context: ContextParallel, group: ProcessGroup) -> None:
    """Let attention of a model see sequences that ranks share.

    Args:
        model: Model of transformers.
        context: How ranks exchange.
        group: The ranks.

    Raises:
        hp_base.errors.ConfigError: When the model takes no positions, or no other attention.
    """
    register_attention(
        group,
        name=_NAME,
        ulysses_degree=context.ulysses_degree,
        ring=context.ring,
        layout=context.layout,
    )
    try:
        model.set_attn_implementation(_NAME)
    except (ValueError, NotImplementedError) as error:
        raise not_spread(model, error) from error
    for config in (model.config, text_config_of(model.config)):
        if config._attn_implementation != _NAME:  # noqa: SLF001 - there is no other way to ask
            raise ConfigError(
                f"mesh.cp must be 1 for {type(model).__name__}: its attention is not by "
                "transformers' registry"
            )


def not_spread(model: Any, error: Exception) -> ConfigError:
    """Why ranks cannot share sequences of a model."""
    text = " ".join(str(error).split())[:300]
    return ConfigError(f"mesh.cp must be 1 for {type(model).__name__}: {text}")


def hidden_of(tokens: Tensor, width: tuple[int, ...]) -> Tensor:
    """Some vector of each token of a trial, float64 [B, S, D].

    Args:
        tokens: Token ids int64 [B, S].
        width: Sizes of hidden states behind those of sequences and positions.
    """
    drawn = torch.Generator().manual_seed(0)
    table = torch.randn(int(tokens.max()) + 1, *width, generator=drawn, dtype=torch.float64)
    return table.to(tokens.device)[tokens]
