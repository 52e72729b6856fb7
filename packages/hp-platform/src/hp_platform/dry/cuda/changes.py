"""Attributes of torch that are others inside a context."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def change(stack: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of a class or a module until `stack` is closed."""
    for name, value in values.items():
        before = vars(owner).get(name, _ABSENT)
        if before is _ABSENT:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)
