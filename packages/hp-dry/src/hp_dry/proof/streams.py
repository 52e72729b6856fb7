"""Proof that the streams of a rank and the lifetimes of its memory are in order. No torch.

A GPU runs the streams of a process concurrently, and the host runs ahead of all of them. Nothing
checks that users of shared memory wait for each other: a program without a wait is right most of
the time. `Clocks` knows which operations precede others. The following rules of torch (its pages
"CUDA semantics" and `Tensor.record_stream`) are checked for every piece of memory:

- **Reads and writes.** A read comes after the last write, a write after the last write and all
  reads since. Reads may run concurrently. A stream that waits for the work of a collective may read
  its outputs; its inputs must not change before.
- **The allocator knows one stream**, the current stream of the allocation, and reuses memory as
  soon as the host releases it, because later work of that stream runs later. So another stream must
  wait for the earlier work of the allocating stream before it uses a new tensor, since that work
  may still use the memory. Memory that another stream has used must be released after a wait of the
  allocating stream, or after `record_stream`. A missing wait can be made up for until the next
  allocation of that stream from the same pool (up to 1 MiB, or above).
- **Collectives refer to their tensors.** `ProcessGroupNCCL` refers to the tensors of an
  asynchronous collective until a wait for its work, so that the host may drop them; a storage that
  is resized to nothing has no memory for any user. A wait makes the current stream wait, not the
  host.
- **Events.** A wait for an event without a record does nothing, and neither does a wait for a work
  before its launch. After a second record of an event the last record counts: if that record does
  not come after the first, the first is lost.
- **The host** may read the target of an asynchronous copy after a wait for it (`HostWait`), and
  must not change the source before.

Memory is checked by whole storages: two streams that use different parts of a storage are reported
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hp_dry.proof.clocks import Clocks, Epoch
from hp_dry.trace import (
    Allocate,
    Borrow,
    Collective,
    Event,
    HostAccess,
    HostWait,
    Launch,
    RecordEvent,
    Release,
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


_LARGEST_SMALL_BYTES = 2**20


def check_streams(trace: Iterable[Event]) -> list[Hazard]:
    """Find events of a rank that do not wait for events that they need.

    The time grows with the number of events times the number of streams.

    Args:
        trace: A `Trace`, or events in the order of the host.

    Returns:
        One hazard for every kind and pair of lines, in the order of the trace; none if all uses of
        memory are in order.
    """
    check = _Check()
    for event in trace:
        check.observe(event)
    return list(check.found.values())


@dataclass(slots=True)
class _Use:
    epoch: Epoch
    event: Launch | Collective


@dataclass(slots=True)
class _Memory:
    """Facts about a block, or a buffer of the host.

    Attributes:
        number: Number of the block, or of the host buffer.
        asked: Its allocation; None for memory from before the trace.
        since: Last operation of the allocating stream before the allocation.
        write: Last operation that wrote it.
        reads: Last read of each stream since that write, by position of the stream.
        last: Last operation of each stream that used it, by position of the stream.
        borrowers: Streams that `record_stream` named.
        works: Numbers of collectives on it without a wait so far, which refer to it.
        released: Event by which the host released it; None before.
    """

    number: int
    asked: Allocate | None = None
    since: Epoch | None = None
    write: _Use | None = None
    reads: dict[int, _Use] = field(default_factory=dict)
    last: dict[int, _Use] = field(default_factory=dict)
    borrowers: set[int] = field(default_factory=set)
    works: set[int] = field(default_factory=set)
    released: Release | None = None


@dataclass(slots=True)
class _Check:
    clocks: Clocks = field(default_factory=Clocks)
    found: dict[tuple[str, ...], Hazard] = field(default_factory=dict)
    blocks: dict[int, _Memory] = field(default_factory=dict)
    buffers: dict[int, _Memory] = field(default_factory=dict)
    records: dict[int, tuple[RecordEvent, Epoch]] = field(default_factory=dict)
    lost: dict[int, RecordEvent] = field(default_factory=dict)
    freed: dict[tuple[int, bool], list[_Memory]] = field(default_factory=dict)
    works: dict[int, list[_Memory]] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        if isinstance(event, WaitWork) and event.stream < 0:
            return  # the host waits for a message between hosts
        if isinstance(event, RecordEvent):
            self._record(event)
        elif not self.clocks.observe(event):
            self._report("waited for too early", None, event)
        self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Launch() | Collective():
                self._operation(event)
            case Allocate():
                self._allocate(event)
            case Release():
                self._release(event)
            case Borrow():
                self._memory(event.block).borrowers.add(event.stream)
            case WaitWork():
                self._wait_work(event)
            case WaitEvent() | HostWait():
                self._wait(event)
            case HostAccess():
                self._host_access(event)

    def _operation(self, event: Launch | Collective) -> None:
        use = _Use(self.clocks.now(event.stream), event)
        read = [self._memory(block) for block in event.reads]
        written = [self._memory(block) for block in event.writes]
        for memory in (*read, *(each for each in written if each.number not in event.reads)):
            self._begin(memory, use)
        for memory in read:
            self._after_write(memory, use, "read before it is written")
            memory.reads[use.epoch[0]] = use
        for memory in written:
            self._write(memory, use)
        if isinstance(event, Collective):
            if event.stream != event.issuer:  # its work refers to them until a wait
                self.works[event.work] = [*read, *written]
                for memory in self.works[event.work]:
                    memory.works.add(event.work)
            return
        for buffer in event.host_reads:
            self.buffers.setdefault(buffer, _Memory(buffer)).reads[use.epoch[0]] = use
        for buffer in event.host_writes:
            self.buffers.setdefault(buffer, _Memory(buffer)).write = use

    def _memory(self, block: int) -> _Memory:
        found = self.blocks.get(block)
        if found is None:
            found = self.blocks[block] = _Memory(block)
        return found

    def _begin(self, memory: _Memory, use: _Use) -> None:
        """Check the first use of memory after its allocation, and uses after its release."""
        position, stream = use.epoch[0], use.event.stream
        if memory.released is not None and not memory.works:
            self._report("used after it was freed", memory.released, use.event, memory)
        elif (
            memory.since is not None
            and memory.write is None
            and position not in memory.last
            and position != memory.since[0]
            and not self.clocks.is_before_current(memory.since, stream)
        ):
            self._report("memory of another stream", memory.asked, use.event, memory)
        memory.last[position] = use

    def _write(self, memory: _Memory, use: _Use) -> None:
        self._after_write(memory, use, "written twice at once")
        for read in memory.reads.values():
            if read.event is not use.event and not self._is_over(read, use):
                self._report("changed in flight", read.event, use.event, memory)
        memory.write = use
        memory.reads.clear()

    def _after_write(self, memory: _Memory, use: _Use, kind: HazardKind) -> None:
        write = memory.write
        if write is None or write is use or self._is_over(write, use):
            return
        if isinstance(write.event, Collective):
            kind = "collective not waited for"
        self._report(kind, write.event, use.event, memory)

    def _is_over(self, first: _Use, second: _Use) -> bool:
        return self.clocks.is_before_current(first.epoch, second.event.stream)

    def _allocate(self, event: Allocate) -> None:
        self.blocks[event.block] = _Memory(
            event.block, asked=event, since=self.clocks.now(event.stream)
        )
        for memory in self.freed.pop(_pool(event), ()):
            for use in self._in_flight(memory, event.stream):
                self._report("freed in flight", use.event, memory.released, memory)

    def _release(self, event: Release) -> None:
        memory = self._memory(event.block)
        memory.released = event
        if event.resized:
            memory.works.clear()
        if not memory.works:
            self._free(memory)

    def _wait_work(self, event: WaitWork) -> None:
        for memory in self.works.pop(event.work, ()):
            kept = bool(memory.works)
            memory.works.discard(event.work)
            if kept and memory.released is not None and not memory.works:
                self._free(memory)

    def _free(self, memory: _Memory) -> None:
        """Return memory to the allocator, which reuses it at the next request of its stream."""
        asked = memory.asked
        if asked is not None and self._in_flight(memory, asked.stream):
            self.freed.setdefault(_pool(asked), []).append(memory)

    def _in_flight(self, memory: _Memory, stream: int) -> list[_Use]:
        """List uses that neither `stream` nor a borrower of the memory has waited for."""
        waiting = (stream, *memory.borrowers)
        return [
            use
            for use in memory.last.values()
            if use.event.stream not in memory.borrowers
            and not any(self.clocks.is_before_next(use.epoch, each) for each in waiting)
        ]

    def _record(self, event: RecordEvent) -> None:
        before = self.records.get(event.event)
        self.clocks.observe(event)
        if before is not None and not self.clocks.is_recorded_by(before[1], event.event):
            self.lost[event.event] = before[0]
        self.records[event.event] = (event, self.clocks.now(event.stream))

    def _wait(self, event: WaitEvent | HostWait) -> None:
        self.records.pop(event.event, None)
        if lost := self.lost.pop(event.event, None):
            self._report("recorded again", lost, event)

    def _host_access(self, event: HostAccess) -> None:
        memory = self.buffers.get(event.buffer, _Memory(event.buffer))
        for use in (memory.write, *(memory.reads.values() if event.writes else ())):
            if use is not None and not self.clocks.is_known_to_host(use.epoch):
                self._report("host too early", use.event, event, memory)

    def _report(
        self,
        kind: HazardKind,
        first: Event | None,
        second: Event | None,
        memory: _Memory | None = None,
    ) -> None:
        if second is None:
            return
        key = (kind, first.at if first else "", second.at)
        if key in self.found:
            self.found[key] = replace(self.found[key], times=self.found[key].times + 1)
            return
        asked = memory.asked if memory else None
        self.found[key] = Hazard(
            kind,
            first,
            second,
            block=memory.number if memory else -1,
            shape=asked.shape if asked else (),
            dtype=asked.dtype if asked else "",
        )


def _pool(asked: Allocate) -> tuple[int, bool]:
    """Return the pool of a block: the allocator has two pools for every stream."""
    return asked.stream, asked.num_bytes <= _LARGEST_SMALL_BYTES
