"""Context parallelism of a stage: transformers' registry of attention, and the trial of a model.

hp-context runs a model once, before its first forward, on two short sequences that have tokens in
common, to find modules besides attention that mix positions. Any stage but the first gets a random
vector for each token in that run, and its modules are compared as those of a whole model.

Shape symbols: B sequences, S positions, D width of the stream.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import ConfigError
from hp_context import ContextParallel, register_attention
from hp_trainer.config.transformers_folder import text_config_of
from hp_transformers.stages.model import CausalModel

_NAME = "hp_train"


def spread(model: CausalModel, context: ContextParallel, group: ProcessGroup) -> None:
    """Let attention of a model span sequences that ranks share.

    Args:
        model: Model of transformers.
        context: Method of context parallelism.
        group: Ranks that share sequences.

    Raises:
        hp_base.errors.ConfigError: When attention of the model cannot be replaced.
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


def not_spread(model: CausalModel, error: Exception) -> ConfigError:
    """Return the error that says why ranks cannot share sequences of a model."""
    text = " ".join(str(error).split())[:300]
    return ConfigError(f"mesh.cp must be 1 for {type(model).__name__}: {text}")


def hidden_of(tokens: Tensor, width: tuple[int, ...]) -> Tensor:
    """Return a random vector for each token of a trial, float64 [B, S, D].

    Args:
        tokens: Token ids int64 [B, S].
        width: Sizes of hidden states behind the dims of sequences and positions.
    """
    drawn = torch.Generator().manual_seed(0)
    table = torch.randn(int(tokens.max()) + 1, *width, generator=drawn, dtype=torch.float64)
    return table.to(tokens.device)[tokens]
