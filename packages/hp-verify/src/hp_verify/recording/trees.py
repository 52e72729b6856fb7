"""Tensors inside of what modules are given and give: tuples, lists, mappings, dataclasses."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEY = re.compile(r"\['([^']*)'\]")
"""Of a mapping, as Python writes it."""


def expressions(value: object, text: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, with the Python that takes each from it.

    Args:
        value: Nested value with tensors.
        text: Python for `value` itself.
    """
    if isinstance(value, Tensor):
        yield text, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from expressions(item, f"{text}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from expressions(item, f"{text}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from expressions(getattr(value, item.name), f"{text}.{item.name}")


def tensors_in(value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, with what people call their places: ``a.b[0]``."""
    for text, tensor in expressions(value, ""):
        yield _KEY.sub(r".\1", text).lstrip("."), tensor


def is_compared(output: Tensor) -> bool:
    """Say if what a module gives is compared: not indices, and no single number, say a loss."""
    return output.ndim > 0 and (output.is_floating_point() or output.is_complex())


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a nested value with other tensors in place of its own; what else it has is shared.

    Args:
        value: Nested value with tensors.
        change: Returns the tensor that takes another's place.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if item.init]
        changes = {name: replaced(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **changes)
    return value


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Tell whether a value is a DTensor; before anything has imported them nothing is.

    A job that has none does not import `torch.distributed.tensor`, which takes 20 MiB.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
