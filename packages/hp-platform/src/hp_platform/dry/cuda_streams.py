"""Streams and events of a dry device, as classes that stand for those of `torch.cuda`."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hp_platform.dry.trace import HostWait, RecordEvent, WaitEvent

if TYPE_CHECKING:
    from hp_platform.dry.device import DryDevice

_POOL = 32
"""Streams of one priority that torch hands out before it begins again."""


class DryStream:
    """A queue of the device.

    Attributes:
        number: As in the trace; 0 is the default stream.
    """

    device_of_stream: Any = None
    numbers: Any = None

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int = -1, **_: Any) -> Any:
        stream = super().__new__(cls)
        if number < 0:
            pool = min(max(-priority, 0), 1)
            number = 1 + pool * _POOL + next(cls.numbers[pool]) % _POOL
        stream.number, stream.priority = number, priority
        return stream

    number: int
    priority: int

    @classmethod
    def of(cls, number: int) -> Any:
        """The stream of a number."""
        return cls(number=number)

    @property
    def device(self) -> torch.device:
        """That it is of."""
        return self.device_of_stream.device

    @property
    def device_index(self) -> int:
        """Of that device."""
        return self.device_of_stream.index

    device_type = 1

    @property
    def cuda_stream(self) -> int:
        """The handle of CUDA."""
        return self.number

    @property
    def stream_id(self) -> int:
        """The number that torch has for it."""
        return self.number

    def wait_event(self, event: Any) -> None:
        """Go on when the event is reached."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Go on when all is done that the other one was given."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Mark the end of what it was given so far."""
        event = type(self).events() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait for all that it was given."""
        self.device_of_stream.emit(HostWait(what="Stream.synchronize", stream=self.number))

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is made of what it is given."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DryStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __enter__(self) -> Any:
        thread = self.device_of_stream.thread
        self._before = thread.stream
        thread.stream = self.number
        return self

    def __exit__(self, *_: object) -> None:
        self.device_of_stream.thread.stream = self._before

    events: Any = None


class DryEvent:
    """A point in what a stream was given."""

    device_of_event: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Any:
        event = super().__new__(cls)
        event.number, event.is_recorded = cls.device_of_event.new_event(), False
        return event

    number: int
    is_recorded: bool

    def record(self, stream: Any = None) -> None:
        """Be reached when all is done that a stream, by default the current one, was given."""
        device = self.device_of_event
        self.is_recorded = True
        number = device.current_stream() if stream is None else stream.number
        device.emit(RecordEvent(event=self.number, stream=number))

    def wait(self, stream: Any = None) -> None:
        """Have a stream, by default the current one, wait for it."""
        device = self.device_of_event
        number = device.current_stream() if stream is None else stream.number
        if self.is_recorded:
            device.emit(WaitEvent(event=self.number, stream=number))

    def query(self) -> bool:
        """Whether it is reached."""
        return True

    def synchronize(self) -> None:
        """Have the host wait for it."""
        if self.is_recorded:
            what = "Event.synchronize"
            self.device_of_event.emit(HostWait(what=what, stream=-1, event=self.number))

    def elapsed_time(self, _: Any) -> float:
        """Milliseconds to another event: nothing takes time."""
        return 0.0


def stream_classes(device: DryDevice) -> tuple[Any, Any]:
    """Classes of streams and of events of `device`."""
    event = type("Event", (DryEvent,), {"device_of_event": device})
    numbers = {0: count(), 1: count()}
    values = {"device_of_stream": device, "numbers": numbers, "events": event}
    return type("Stream", (DryStream,), values), event
