"""Streams and events of a dry device: classes that stand for those of `torch.cuda`."""

from __future__ import annotations

from typing import Self

import torch

from hp_dry.recording.recorder import active
from hp_dry.trace import HostWait, RecordEvent, WaitEvent


class Stream:
    """A queue of the device.

    Attributes:
        number: Number of the stream in the trace; 0 is the default stream.
        cuda_stream: The handle that CUDA has for it: the same number.
        stream_id: The number that torch has for it: the same.
        priority: Priority as CUDA has it: streams with lower numbers go first.
    """

    device_type = 1

    def __init__(
        self, device: object = None, priority: int = 0, *, number: int = -1, **_: object
    ) -> None:
        """Take the next stream of the pool of a priority, or the one of a number."""
        del device
        if number < 0:
            number = active().next_in_pool(is_high=priority < 0)
        self.number = self.cuda_stream = self.stream_id = number
        self.priority = priority
        self._before: list[int] = []

    @property
    def device(self) -> torch.device:
        """The dry device."""
        return active().device

    @property
    def device_index(self) -> int:
        """Index of the dry device on its machine."""
        return active().index

    def wait_event(self, event: Event) -> None:
        """Go on when the event is reached."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Go on when all is done that the other one was given."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the end of what it was given so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait for all that it was given."""
        active().emit(HostWait(what="Stream.synchronize", stream=self.number))

    def query(self) -> bool:
        """Tell that all is done: the host is told so, and has not waited."""
        return True

    def is_capturing(self) -> bool:
        """Tell whether a graph is made of what it is given."""
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
    """A point in what a stream was given.

    Attributes:
        number: Number of the event in the trace.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Make an event that is not recorded."""
        self.number = active().new_event()

    def record(self, stream: Stream | None = None) -> None:
        """Be reached when all is done that a stream, by default the current one, was given."""
        active().emit(RecordEvent(event=self.number, stream=_number(stream)))

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream, by default the current one, wait for it."""
        active().emit(WaitEvent(event=self.number, stream=_number(stream)))

    def query(self) -> bool:
        """Tell that it is reached: the host is told so, and has not waited."""
        return True

    def synchronize(self) -> None:
        """Have the host wait for it."""
        active().emit(HostWait(what="Event.synchronize", stream=-1, event=self.number))

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to another event: nothing takes time."""
        del end
        return 0.0


def _number(stream: Stream | None) -> int:
    return active().current_stream() if stream is None else stream.number
