"""What can go wrong between streams, and the words for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hp_platform.dry.trace import (
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


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two things that a rank does, and that nothing puts in order.

    Attributes:
        kind: Rule that is broken; `check_streams` says what each means.
        first: Event that should have ended first; None where nothing had begun.
        second: Event that did not wait for it.
        block: Number of the block of device memory, or of the host buffer for `"host too early"`;
            -1 if it is about no memory.
        shape: Shape of the tensor for which the memory was allocated.
        dtype: Dtype of that tensor, such as `"bfloat16"`.
        times: Times that the same two lines met in this way.
    """

    kind: HazardKind
    first: Event | None
    second: Event
    block: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    times: int = 1

    def __str__(self) -> str:
        """Say it in a sentence, with both lines."""
        memory = f"; the memory is {self.dtype} {list(self.shape)}" if self.dtype else ""
        before = f"; the other is {_said(self.first)}" if self.first else ""
        again = f"; {self.times} times" if self.times > 1 else ""
        return f"{self.kind}: {_said(self.second)} {_MEANING[self.kind]}{before}{memory}{again}"


def _said(event: Event) -> str:
    place = f" ({event.place})" if event.place else ""
    return f"{_name(event)} at {event.at or 'an unknown line'}{place}"


def _name(event: Event) -> str:
    match event:
        case Launch(what=what, stream=stream):
            name = f"{what} on stream {stream}"
        case Collective(op=op, group=group):
            name = f"{op} of {group}"
        case WaitEvent(event=number, stream=stream):
            name = f"a wait for event {number} on stream {stream}"
        case RecordEvent(event=number, stream=stream):
            name = f"the record of event {number} on stream {stream}"
        case WaitWork(work=number, stream=stream):
            name = f"a wait for work {number} on stream {stream}"
        case Allocate(stream=stream):
            name = f"the allocation on stream {stream}"
        case HostWait(what=what) | HostAccess(what=what):
            name = f"{what} of the host"
        case _:
            name = f"the {type(event).__name__.lower()}"
    return name
