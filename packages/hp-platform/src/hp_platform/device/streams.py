"""Streams and events that are null on a CPU, so that code with streams runs everywhere.

A stream is a `torch.cuda.Stream` on CUDA and None on a CPU, where work is done when a call returns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that work of this thread on `device` goes to; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Send the work of this thread to `stream` inside the context; None: leave it as it is."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """Return the one stream of this process for a purpose on `device`; None on a CPU.

    torch hands out 32 streams of a device and then the same ones again, so that a stream for every
    call soon shares one with NCCL, with FSDP, or with another purpose, and waits for its work.

    Args:
        device: Device with its index.
        purpose: Purpose of the stream, such as `"read counts"`.
    """
    if device.type != "cuda":
        return None
    with _lock:
        if (device, purpose) not in _side_streams:
            _side_streams[device, purpose] = torch.cuda.Stream(device)
        return _side_streams[device, purpose]


_lock = Lock()
_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


class Event:
    """A point in the work of a stream; on a CPU it has always been reached."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        """Create an event for streams of `device`."""
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the end of what `stream` (by default the current one) was given so far."""
        if self._event is not None:
            self._event.record(stream or torch.cuda.current_stream(self._device))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make what `stream` (by default the current one) is given from now on wait for it."""
        if self._event is not None:
            self._event.wait(stream or torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Tell whether the point has been reached."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block the host until the point has been reached."""
        if self._event is not None:
            self._event.synchronize()
