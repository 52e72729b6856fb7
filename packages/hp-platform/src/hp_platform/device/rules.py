"""Which operands CUDA's kernels take from another device than the others are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_platform._internals import tree_leaves

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
_INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put_impl")
_FILLED = ("aten::fill", "aten::masked_fill")


def may_mix(func: Any, args: Any, is_there: Callable[[Tensor], bool]) -> bool:
    """Tell whether CUDA runs an operator although some operands are on the host.

    It takes copies, indices on the host, and scalars on the host (tensors of no dim) for operators
    that go element by element, though not for fused and foreach ones.

    Args:
        func: An overload of an operator.
        args: Its operands.
        is_there: Whether a tensor is on the device.
    """
    name = func.name()
    if name.startswith(_COPIES):
        return True
    if name.startswith(_INDEXED):  # the list of indices may be anywhere
        args = (args[0], *args[2:])
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    on_host = [x for x in tensors if not is_there(x)]
    if not on_host:
        return True
    takes_scalars = (torch.Tag.pointwise in func.tags and "::_f" not in name) or name.startswith(
        (*_INDEXED, *_FILLED)
    )
    writes_to_host = name.split(".")[0].endswith("_") and on_host[0] is tensors[0]
    return takes_scalars and not writes_to_host and all(x.dim() == 0 for x in on_host)
