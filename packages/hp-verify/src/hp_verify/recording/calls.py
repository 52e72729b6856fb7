"""Wrappers for calls that torch has no hook for, and questions about the call under way."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

from hp_platform._internals import (
    FakeTensor,
    has_modes,
    in_backward,
    in_transform,
    without_modes,
)
from hp_verify.recording.trees import tensors_in

_DEPTH = 8
_FOR_SHAPES = {"_forward_metadata_inference"}
"""Functions of torch.distributed.pipelining that call a stage only to see what shapes it gives."""


def around(
    place: object,
    name: str,
    *,
    before: Callable[..., object],
    after: Callable[[Any], object] | None = None,
) -> None:
    """Have a function or method tell when it is called.

    Args:
        place: Module or class that has it.
        name: Name of the function there.
        before: Called with the same arguments; an iterator, which can be read once, as a list.
        after: Called with what it returned.
    """
    original = getattr(place, name)

    @functools.wraps(original)
    def told(*args: object, **kwargs: object) -> object:
        listed = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        named = {k: list(v) if isinstance(v, Iterator) else v for k, v in kwargs.items()}
        if args or kwargs:
            before(*listed, **named)
        result = original(*listed, **named)
        if after is not None:
            after(result)
        return result

    setattr(place, name, told)


def may_break_graphs() -> None:
    """Have torch.compile make several graphs where one is asked for: we look in between."""
    original = torch.compile

    @functools.wraps(original)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "fullgraph": False})

    torch.compile = compiled


def kwargs_of_call() -> dict[str, object]:
    """Return keyword arguments of the module's call that a global hook was called from.

    torch hands them to hooks of a module only. They are read from the frame of its call, which
    calls the hook; where no frame looks like one, there are none.
    """
    for frame in _callers(_DEPTH):
        found = frame.f_locals.get("kwargs")
        if frame.f_code.co_name in {"inner", "_call_impl"} and isinstance(found, dict):
            return found
    return {}


def apart() -> AbstractContextManager[None]:
    """Compute something of our own: what counts or changes operators of a job does not see it."""
    return without_modes() if has_modes() else nullcontext()


def is_unseen() -> bool:
    """Tell whether what is computed now is no part of a job's forward.

    It is computed again in a backward, traced, or transformed: tensors have no values of their own.
    """
    return (
        torch.compiler.is_compiling() or in_backward() or in_transform() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def has_values(value: object) -> bool:
    """Say if all tensors inside of a value are more than shapes: on no meta device, not fake."""
    return not any(t.is_meta or isinstance(t, FakeTensor) for _, t in tensors_in(value))


def is_checkpointed() -> bool:
    """Say if a root module is called to be called again in the backward, without gradients now.

    Called from a global hook of that call.
    """
    return any(f.f_code.co_filename == checkpoint.__file__ for f in _callers(2 * _DEPTH))


def is_for_shapes() -> bool:
    """Tell whether a library calls a root module to see shapes alone, with values that it makes up.

    Called from a global hook of that call.
    """
    return any(frame.f_code.co_name in _FOR_SHAPES for frame in _callers(_DEPTH))


def _callers(most: int) -> list[FrameType]:
    """Return the frames behind the caller's caller, a hook; the nearest first."""
    frame = sys._getframe(2).f_back  # noqa: SLF001 - documented, CPython
    found: list[FrameType] = []
    while frame is not None and len(found) < most:
        found.append(frame)
        frame = frame.f_back
    return found
