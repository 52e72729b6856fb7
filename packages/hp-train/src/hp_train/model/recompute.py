"""Activation checkpointing: parts of the model that run again in backward instead of being kept.

A part that runs again takes the decisions of its routers from its first run. Nothing in the model
draws from a generator, so there is no state of one to restore.

Selective recomputation goes by operator: of a block that runs again, attention proper and the
products of experts in groups, which cost most for what they keep, are kept (Korthikanti et al.
2022 have it the other way round for attention that keeps its scores, which flash attention does
not). What a kernel of one's own launches is kept if its operator is named like those of torch.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, Literal

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_expert import save_routing

Recompute = Literal["none", "attention", "feed_forward", "selective", "full"]
"""What of a block is computed again."""

_KEPT: Final = ("attention", "attn", "grouped_mm")
"""Parts of the names of operators whose results are kept by "selective"."""


def recomputed_but_products(part: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a part of the model and keep its arguments, attention and products of experts."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    result: Tensor = checkpoint(
        part,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(save_routing, contexts),
    )
    return result


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if _is_kept(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_kept(operator: Any) -> bool:
    name = str(operator)
    return "backward" not in name and any(word in name for word in _KEPT)


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
