"""A guard that keeps a foreign core attention from masking its queries by their shape."""

from collections.abc import Callable
from functools import wraps
from types import MethodType

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class PositionsOnly(TorchFunctionMode):
    """Refuses attention calls that take the shape of their input for positions.

    Args:
        mode: Name of the mode of `ContextParallel`, for messages.
        mask_name: Parameter of the core attention that has the mask.
    """

    def __init__(self, mode: str, mask_name: str) -> None:
        super().__init__()
        self.mode, self.mask_name = mode, mask_name

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run `func` unless it is a call that is refused."""
        del types
        kwargs = kwargs or {}
        given = dict(kwargs)
        if func is F.scaled_dot_product_attention:
            given |= zip(_POSITIONAL, args, strict=False)
        self._check(func, given)
        return func(*args, **kwargs)

    def _check(self, func: Callable[..., object], given: dict[str, object]) -> None:
        if given.get("is_causal"):
            raise ValueError(
                f"{func.__name__}(is_causal=True) must not be called in "
                f"{self.mode}, where the queries are a part of the sequence: pass it the mask in "
                f"{self.mask_name}, or use ulysses_degree=None"
            )
        if given.get("dropout_p"):
            raise ValueError(
                f"dropout_p ({given['dropout_p']}) must be 0 in {self.mode}: "
                f"use ulysses_degree=None"
            )


def guard(module: nn.Module, mode: PositionsOnly) -> None:
    """Run the forward of `module` under `mode` from now on.

    The guarded forward is a method of the module, so that copies of the module guard their own.
    """
    original = module.forward
    of_instance = "forward" in vars(module)

    @wraps(original)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        run = original if of_instance else MethodType(type(self).forward, self)
        with mode:
            return run(*args, **kwargs)

    module.forward = MethodType(forward, module)
