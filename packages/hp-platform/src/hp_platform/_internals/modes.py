# ruff: noqa: SLF001  # the purpose of this module
"""Private torch symbols for recordings of memory, and for modes that see operators."""

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "dump_memory_history",
    "end_memory_history",
    "has_modes",
    "in_backward",
    "in_transform",
    "record_memory_history",
    "without_modes",
]


def record_memory_history(*, most: int) -> None:
    """Begin to record allocations of CUDA memory, with Python stacks.

    Args:
        most: Number of the latest records that are stored.
    """
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=most)


def end_memory_history() -> None:
    """Stop recording and drop the records."""
    torch.cuda.memory._record_memory_history(None)


def dump_memory_history(path: str) -> None:
    """Write the records for the viewer at pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def in_backward() -> bool:
    """Tell whether this thread runs a backward pass: its code is recomputation or a hook."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Tell whether this code runs inside a transform of `torch.func`, such as `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_modes() -> bool:
    """Tell whether a mode intercepts the operators of this thread."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Disable all modes of this thread inside the context."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
