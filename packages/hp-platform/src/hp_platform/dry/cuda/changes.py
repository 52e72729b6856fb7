"""Attributes of torch that are others inside a context."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch


def change(stack: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of a class or a module until `stack` is closed."""
    stack.enter_context(patch.multiple(owner, create=True, **values))
