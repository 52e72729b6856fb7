"""DTensors, told from other tensors without importing what they need.

A job that has none does not import `torch.distributed.tensor`, which takes 20 MiB.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor; before anything has imported them nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
