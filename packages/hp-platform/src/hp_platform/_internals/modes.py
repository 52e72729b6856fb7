# ruff: noqa: SLF001  # the purpose of this module
"""Every private torch symbol that hp-train itself uses, in one place; others are hp-platform's."""

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
    """Begin to note down allocations of CUDA memory, with Python's stacks.

    Args:
        most: Kept at once, the latest.
    """
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=most)


def end_memory_history() -> None:
    """Note down no more, and forget."""
    torch.cuda.memory._record_memory_history(None)


def dump_memory_history(path: str) -> None:
    """Write what was noted down for the viewer at pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def in_backward() -> bool:
    """Say if this thread is inside a backward pass: what runs here is recomputation, or a hook."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Tell whether this is inside of a transform of `torch.func`, such as `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_modes() -> bool:
    """Tell whether a mode sees the operators of this thread."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compute as if there were no modes, in this thread."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
