"""What `torch.compile` leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from hp_platform import _internals

P = ParamSpec("P")
R = TypeVar("R")


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function, with all it calls, out of compiled graphs: one break for each call.

    For what cannot be compiled, such as reading sizes on the host, so that graphs are cut in one
    place that was chosen. Like `torch.compiler.disable`, but a program that compiles nothing does
    not import the compiler, which takes seconds.

    Args:
        function: May be a method.
    """
    uncompiled = _internals.dynamo_disabled(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (uncompiled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    # torch counts compilations by code object, and stops at eight: each function needs its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return wraps(function)(call)
