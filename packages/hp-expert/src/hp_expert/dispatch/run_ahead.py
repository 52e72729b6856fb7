"""A bound on how far the host may run ahead of the device."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from hp_platform import Event


class Mark(Protocol):
    """A point in the work of a device, such as `hp_platform.Event`."""

    def record(self) -> None:
        """Mark the end of what the device was given so far."""

    def synchronize(self) -> None:
        """Block the host until the device has got there."""


class RunAhead:
    """Lets the host be at most `limit` marks ahead of the device.

    A layer that never reads the host never waits for the device either. The host then queues the
    kernels of many microbatches, and allocates for all of them before the first has given anything
    back. One object serves a whole model, in any number of threads. On a CPU it does nothing, and
    likewise while a CUDA graph is captured.

    Args:
        limit: How many marks the device may not have reached yet, at least 1.
        make_mark: Makes a mark for a device.
    """

    def __init__(
        self, limit: int, *, make_mark: Callable[[torch.device], Mark] | None = None
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit ({limit}) must be at least 1")
        self.limit = limit
        self._make_mark = make_mark
        self._ahead: deque[Mark] = deque()
        self._lock = threading.Lock()

    def mark(self, device: torch.device) -> None:
        """Mark this point, and wait while the device has not reached the one `limit` marks ago."""
        if self._make_mark is None and (
            device.type != "cuda" or torch.cuda.is_current_stream_capturing()
        ):
            return
        mark = (self._make_mark or Event)(device)
        mark.record()
        with self._lock:
            self._ahead.append(mark)
            due = self._ahead.popleft() if len(self._ahead) > self.limit else None
        # Outside the lock: a thread that waits holds up no other.
        if due is not None:
            due.synchronize()
