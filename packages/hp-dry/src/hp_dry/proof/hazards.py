"""Hazards between streams, with their descriptions. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hp_dry.trace import (
    Allocate,
    Collective,
    Event,
    HostAccess,
    HostWait,
    Launch,
    RecordEvent,
    WaitEvent,
    WaitWork,
)

HazardKind: TypeAlias = Literal[
    "read before it is written",
    "collective not waited for",
    "changed in flight",
    "written twice at once",
    "memory of another stream",
    "freed in flight",
    "used after it was freed",
    "waited for too early",
    "recorded again",
    "host too early",
]

_MEANING: dict[HazardKind, str] = {
    "read before it is written": "reads what another stream may still be writing",
    "collective not waited for": "uses the result of a collective without a wait for it",
    "changed in flight": "writes what another stream may still be reading",
    "written twice at once": "writes what another stream may still be writing",
    "memory of another stream": "uses memory that the allocator handed out for a stream whose work "
    "until then may still go on in it, without a wait for that stream",
    "freed in flight": "frees what another stream may still be using, without record_stream or a "
    "wait of the stream that allocated it: the next tensor there gets the memory",
    "used after it was freed": "uses memory that was given back",
    "waited for too early": "waits for what was not launched or recorded yet, and so for nothing",
    "recorded again": "waits for an event that was recorded again, on a stream that does not come "
    "after the first record",
    "host too early": "touches a buffer of the host that the device may still be copying",
}


_NAMES: dict[type[Event], str] = {
    Launch: "{0.what} on stream {0.stream}",
    Collective: "{0.op} of {0.group}",
    WaitEvent: "a wait for event {0.event} on stream {0.stream}",
    RecordEvent: "the record of event {0.event} on stream {0.stream}",
    WaitWork: "a wait for work {0.work} on stream {0.stream}",
    Allocate: "the allocation on stream {0.stream}",
    HostWait: "{0.what} of the host",
    HostAccess: "{0.what} of the host",
}


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two events of a rank without the order that they need.

    Attributes:
        kind: Rule that is broken, with its meaning in `str()`.
        first: Event that should have ended first; None if it has not begun.
        second: Event that does not wait for it.
        block: Number of the block of device memory, or of the host buffer for `"host too early"`;
            -1 if no memory is concerned.
        shape: Shape of the tensor for which the memory was allocated.
        dtype: Dtype of that tensor, such as `"bfloat16"`.
        times: Number of such hazards of the same two lines.
    """

    kind: HazardKind
    first: Event | None
    second: Event
    block: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    times: int = 1

    def __str__(self) -> str:
        """Describe the hazard in a sentence with both lines."""
        memory = f"; the memory is {self.dtype} {list(self.shape)}" if self.dtype else ""
        before = f"; the other is {_described(self.first)}" if self.first else ""
        again = f"; {self.times} times" if self.times > 1 else ""
        return (
            f"{self.kind}: {_described(self.second)} {_MEANING[self.kind]}{before}{memory}{again}"
        )


def _described(event: Event) -> str:
    place = f" ({event.place})" if event.place else ""
    words = _NAMES.get(type(event), f"the {type(event).__name__.lower()}").format(event)
    return f"{words} at {event.at or 'an unknown line'}{place}"
