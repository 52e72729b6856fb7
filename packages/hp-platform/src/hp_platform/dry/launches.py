"""How many kernels CUDA launches for an operator: a stored table.

The table holds what differs from one kernel. A number that depends on the operands comes from a
rule: operators on lists of tensors (`_foreach_*`, `_fused_*`) pack tensors and chunks of them into
the arguments of one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

NO_KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "detach",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "is_pinned",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "set_",
        "_version",
    )
)
"""Operators that only look at shapes, beside views."""

OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        "_foreach_zero_",
        "_foreach_copy_",
        "copy_",
        "exponential_",
        "fill_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)
"""Operators that write an argument and do not read it."""

KERNELS: dict[str, int] = {}
"""Operators with another number than one, by name without overload, such as `"aten::mm"`."""

_CHUNK = 65536  # elements that one block of threads takes, see MultiTensorApply.cuh of torch
_MAX_CHUNKS = 320  # of one kernel
_MAX_TENSORS = (110, 64, 48, 36, 30)  # of one kernel, by the number of lists


def num_kernels(base: str, dry: Sequence[Tensor], num_lists: int) -> int:
    """Kernels of an operator.

    Args:
        base: Name of the operator without overload.
        dry: Tensors on the device that it is given, those of lists one by one.
        num_lists: How many lists of tensors it takes.
    """
    if base in NO_KERNELS:
        return 0
    if base.startswith(("aten::_foreach_", "aten::_fused_")) and num_lists:
        return _packed(dry[: len(dry) // num_lists], num_lists)
    return KERNELS.get(base, 1)


def _packed(first: Sequence[Tensor], num_lists: int) -> int:
    chunks = sum(-(-x.numel() // _CHUNK) for x in first)
    tensors = _MAX_TENSORS[min(num_lists, len(_MAX_TENSORS)) - 1]
    return max(1, -(-chunks // _MAX_CHUNKS), -(-len(first) // tensors))


def flops_of(func: Any) -> Callable[..., int] | None:
    """What counts the flops of an operator, as torch's flop counter has it; None without any."""
    counted: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    if counted is None or "_scaled_dot_product_" not in func.name():
        return counted
    first = 1 if "backward" in func.name() else 0  # of query, key and value

    def count(*args: Any, **kwargs: Any) -> int:
        q, k, v = args[first : first + 3]
        if k.shape[1] != q.shape[1]:  # torch 2.11 counts none for heads that are shared
            k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        return counted(*args[:first], q, k, v, *args[first + 3 :], **kwargs)

    return count
