"""Proves on the trace of a rank that streams and lifetimes are in order. No torch.

A GPU runs the streams of a process side by side, and the host runs ahead of all of them. Nothing
checks that what is shared is waited for: a program that forgets it is right most of the time.
`Clocks` says what is done before what. On top of that hold, for every piece of memory, the rules of
torch (its pages "CUDA semantics" and `Tensor.record_stream`):

- **Reads and writes.** A read comes after the last write, a write after the last write and all
  reads since. Reads may run side by side. What a collective writes is there for a stream that
  waited for its work; what it reads must not change before.
- **The allocator knows one stream**, the one that was current when memory was asked for, and hands
  memory out again as soon as the host lets go of it, because what comes next on that stream comes
  later. So another stream that begins to use a new tensor has to wait first for what the allocating
  stream had been given (the tenant before may still be at work), and memory that another stream
  used is let go of after a wait of the allocating stream, or after `record_stream`. A missing wait
  can be made up for until the next allocation of that stream from the same pool (up to 1 MiB, or
  above).
- **Collectives keep their tensors.** `ProcessGroupNCCL` holds what an asynchronous collective works
  on until its work is waited for, so the host may drop it; a storage that is resized to nothing is
  gone for all. Waiting makes the current stream wait, not the host.
- **Events.** To wait for one that was never recorded is to wait for nothing, and so is to wait for
  a work before its launch. One that is recorded again stands for the last record: if that one does
  not come after the first, the first is lost.
- **The host** sees what an asynchronous copy brings after it waited for it (`HostWait`), and leaves
  the source of one alone until then.

Memory is looked at in whole storages: two streams that use different parts of one are reported too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hp_dry.proof.clocks import Clocks, Epoch
from hp_dry.proof.hazards import Hazard, HazardKind
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

_LARGEST_SMALL_BYTES = 2**20


def check_streams(trace: Iterable[Event]) -> list[Hazard]:
    """Find what a rank does without waiting for what it needs.

    Takes time that grows with the number of events, times that of streams.

    Args:
        trace: A `Trace`, or events in the order of the host.

    Returns:
        One hazard for every kind and pair of lines, in the order of the trace; `[]` says that
        whatever shares memory is in order.
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
        asked: Its allocation; None if it was there before the trace began.
        since: Last operation that the allocating stream had been given before the allocation.
        write: Last operation that wrote it.
        reads: Last read of each stream since that write, by position of the stream.
        last: Last operation of each stream that used it, by position of the stream.
        borrowers: Streams that `record_stream` named.
        works: Numbers of the collectives on it whose work nobody has waited for yet: they keep it
            alive.
        released: The event by which the host let go of it; None while the host holds it.
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
            return  # the host waits for a message of hosts, which is no stream's
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
            if event.stream != event.issuer:  # its work keeps them until it is waited for
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
        """Forget what was released; what is new belongs to the stream that asked."""
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
        """Hand memory back to the allocator, which looks at it when its stream asks for memory."""
        asked = memory.asked
        if asked is not None and self._in_flight(memory, asked.stream):
            self.freed.setdefault(_pool(asked), []).append(memory)

    def _in_flight(self, memory: _Memory, stream: int) -> list[_Use]:
        """Uses that neither `stream` has waited for, nor are a borrower's or waited for by one."""
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
    """Find the pool of a block: the allocator has two for every stream."""
    return asked.stream, asked.num_bytes <= _LARGEST_SMALL_BYTES
