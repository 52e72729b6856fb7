"""Activation checkpointing: parts of the model that run again in backward instead of being kept.

A part that runs again takes the decisions of its routers from its first run. Nothing in the model
draws from a generator, so there is no state of one to restore.

Selective recomputation goes by operator: of a block that runs again, attention proper and the
products of experts in groups, which cost most for what they keep, are kept (Korthikanti et al.
2022 have it the other way round for attention that keeps its scores, which flash attention does
not). What a kernel of one's own launches is kept if its operator is named like those of torch.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final, Literal

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_expert import save_routing
from hp_train.base._internals import TorchDispatchMode

Recompute = Literal["none", "attention", "feed_forward", "selective", "full"]
"""What of a block is computed again."""

_KEPT: Final = ("attention", "attn", "grouped_mm")
"""Parts of the names of operators whose results are kept by "selective"."""


def recomputed_but_products(part: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a part of the model and keep its arguments, attention and products of experts."""
    result: Tensor = checkpoint(
        part,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(save_routing, _contexts),
    )
    return result


def _contexts() -> tuple["_KeptAlone", "_KeptAlone"]:
    first, again = create_selective_checkpoint_contexts(_policy)
    return _KeptAlone(first), _KeptAlone(again)


class _KeptAlone(TorchDispatchMode):
    """Shows a mode of torch the operators whose results are kept, and no others.

    torch's modes take an operator that only the second run has for a mistake. But parameters that
    FSDP gathers inside of a block may have been there in the first run, and not in the second.

    Args:
        mode: What keeps results, or gives them back.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As those of torch: what is compiled inside may run below it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, or take what it gave."""
        if _is_kept(func):
            return self._mode.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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
