"""Streams and events of a dry device, which replace the classes of `torch.cuda`."""

from __future__ import annotations

from typing import Self

import torch

from hp_dry.recording.recorder import active
from hp_dry.trace import HostWait, RecordEvent, WaitEvent


class Stream:
    """Queue of the device.

    Attributes:
        number: Number of the stream in the trace; 0 is the default stream.
        cuda_stream: Handle of the stream in CUDA: the same number.
        stream_id: Number of the stream in torch: the same number.
        priority: Priority as in CUDA: streams with lower numbers run first.
    """

    device_type = 1

    def __init__(
        self, device: object = None, priority: int = 0, *, number: int = -1, **_: object
    ) -> None:
        """Make the next stream of the pool of a priority, or the stream of a given number."""
        del device
        if number < 0:
            number = active().next_in_pool(is_high=priority < 0)
        self.number = self.cuda_stream = self.stream_id = number
        self.priority = priority
        self._before: list[int] = []

    @property
    def device(self) -> torch.device:
        """Return the dry device."""
        return active().device

    @property
    def device_index(self) -> int:
        """Return the index of the dry device on its machine."""
        return active().index

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for the work that another stream has so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the end of the work that this stream has so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        active().emit(HostWait(what="Stream.synchronize", stream=self.number))

    def query(self) -> bool:
        """Return True: all work is done, without a wait of the host."""
        return True

    def is_capturing(self) -> bool:
        """Tell whether a CUDA graph captures the work of this stream."""
        return False

    def __enter__(self) -> Self:
        self._before.append(active().current_stream())
        active().thread.stream = self.number
        return self

    def __exit__(self, *_: object) -> None:
        active().thread.stream = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream of a dry device, number {self.number}>"


class Event:
    """Point in the work of a stream.

    Attributes:
        number: Number of the event in the trace.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Make an event without a record."""
        self.number = active().new_event()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of the work of a stream (default: the current stream)."""
        active().emit(RecordEvent(event=self.number, stream=_number(stream)))

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of a stream (default: the current stream) wait for this event."""
        active().emit(WaitEvent(event=self.number, stream=_number(stream)))

    def query(self) -> bool:
        """Return True: the event is reached, without a wait of the host."""
        return True

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        active().emit(HostWait(what="Event.synchronize", stream=-1, event=self.number))

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to another event, which are always 0."""
        del end
        return 0.0


def _number(stream: Stream | None) -> int:
    return active().current_stream() if stream is None else stream.number
