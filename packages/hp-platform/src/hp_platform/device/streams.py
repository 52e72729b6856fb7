"""Streams and events that do nothing on a CPU, so that code with streams runs everywhere.

A stream is a `torch.cuda.Stream` on CUDA and None on a CPU, which has finished when a call returns.
"""

from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of this thread on `device`; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make `stream` the current stream of this thread inside the context; None: change nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """Return the stream of this process for a purpose on `device`; None on a CPU.

    torch has a pool of 32 streams for a device. A new stream for every call would soon be a stream
    that NCCL, FSDP or another purpose uses too, and would wait for their work.

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
    """Point in the work of a stream, which a CPU has always reached."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        """Create an event for streams of `device`."""
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the end of the work that `stream` (default: the current stream) has so far."""
        if self._event is not None:
            self._event.record(stream or torch.cuda.current_stream(self._device))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make later work of `stream` (default: the current stream) wait for this point."""
        if self._event is not None:
            self._event.wait(stream or torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Tell whether the point has been reached."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block the host until the point has been reached."""
        if self._event is not None:
            self._event.synchronize()
