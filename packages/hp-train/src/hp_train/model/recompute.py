"""Activation checkpointing: parts of the model that run again in backward instead of being kept.

A part that runs again takes the decisions of its routers from its first run. Nothing in the model
draws from a generator, so there is no state of one to restore.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_expert import save_routing

Recompute = Literal["none", "attention", "feed_forward", "full"]
"""What of a block is computed again."""


def recomputed(part: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a part of the model and keep nothing but its arguments for its backward."""
    result: Tensor = checkpoint(
        part,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=save_routing,
        **kwargs,
    )
    return result
