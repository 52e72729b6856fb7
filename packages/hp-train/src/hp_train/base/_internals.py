# ruff: noqa: SLF001  # the purpose of this module
"""Every private torch symbol that hp-train itself uses, in one place; others are hp-platform's."""

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "dump_memory_history",
    "end_memory_history",
    "in_backward",
    "record_memory_history",
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
    """Whether this thread is inside a backward pass: what runs here is recomputation, or a hook."""
    return bool(torch._C._current_graph_task_id() != -1)
