"""How many kernels CUDA launches for an operator: a stored table."""

from __future__ import annotations

from typing import Any

NO_KERNELS = frozenset(
    {
        "aten::detach",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::lift_fresh",
        "aten::resize_",
        "aten::set_",
        "aten::record_stream",
        "aten::_reshape_alias",
        "aten::_unsafe_view",
        "aten::is_pinned",
    }
)
"""Operators that only look at shapes, beside views."""

KERNELS: dict[str, int] = {}
"""Operators with another number than one, by name without overload."""


def num_kernels(name: str, tensors: int) -> int:
    """Kernels of an operator.

    Args:
        name: Such as `"aten::mm"`.
        tensors: That it is given, those of lists counted one by one.
    """
    del tensors
    return 0 if name in NO_KERNELS else KERNELS.get(name, 1)


def flops_of(func: Any) -> Any:
    """The function of torch that counts the flops of an operator; None if it has no products."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(func.overloadpacket)
