"""Device memory that torch would reserve for a trace: its requests, replayed. No torch.

Whether a program fits depends not on its live tensors but on the memory that torch's caching
allocator reserves for them. `replay` passes the requests of a trace to a model of the allocator, in
order.

The time when memory that another stream has borrowed (`record_stream`) is free again depends on the
speed of the device. The replay assumes a slow device: the other stream is done when the host has
waited for it, or when the allocator itself waits for want of memory. So `reserved` is the worst
case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hp_dry.memory.caching import Block, CachingAllocator
from hp_dry.proof.clocks import Clocks, Epoch
from hp_dry.trace import Allocate, Borrow, Event, Release

BlockState: TypeAlias = Literal["allocated", "awaiting", "free"]
"""State of a piece of a segment: of a tensor, borrowed by a stream that is not done, or free."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of device memory that the allocator has reserved.

    Attributes:
        stream: Stream whose requests it serves.
        is_small: Whether it serves requests of up to 1 MiB, and not larger requests.
        expandable: Whether it is an expandable segment, which can grow.
        blocks: Size in bytes and state of each of its blocks, in the order of addresses; unmapped
            parts of an expandable segment are left out.
    """

    stream: int
    is_small: bool
    expandable: bool
    blocks: tuple[tuple[int, BlockState], ...]


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Request that the device could not meet, which ended the replay.

    Attributes:
        index: Index of the request in the trace.
        request: The request that failed.
        allocated: Bytes of tensors when it failed.
        reserved: Bytes that torch had reserved when it failed, after it freed unused segments.
        available: Bytes that torch may reserve.
    """

    index: int
    request: Allocate
    allocated: int
    reserved: int
    available: int

    def __str__(self) -> str:
        """Describe the failure in a sentence."""
        request = self.request
        return (
            f"out of memory at {request.at or 'an unknown line'}: {request.num_bytes} bytes for "
            f"{request.what} {request.dtype} {list(request.shape)}, with {self.allocated} "
            f"allocated and {self.reserved} reserved of {self.available}"
        )


@dataclass(slots=True, kw_only=True)
class Usage:
    """Memory of the allocator in a trace, in bytes; `allocated` and `reserved` as in `torch.cuda`.

    Attributes:
        indices: Indices, in the trace, of the events after which `allocated` or `reserved` may
            differ.
        allocated: Bytes of tensors, each rounded up to 512, after each of `indices`.
        reserved: Bytes that torch has reserved on the device, after each of `indices`.
        peak_allocated: Largest of `allocated`.
        peak_allocated_index: Index of the event that reached it first; -1 if nothing was allocated.
        peak_reserved: Largest of `reserved`.
        peak_reserved_index: Index of the event that reached it first; -1 if nothing was allocated.
        fragmentation: Share of the reserved memory that no tensor had at the peak of `reserved`, 0
            to 1.
        num_segments: Segments at the peak of `reserved`.
        num_retries: Number of requests for which free memory had to be returned to the device.
        segments: Segments after the last event.
        out_of_memory: Request that did not fit; None if all did.
    """

    indices: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    peak_allocated: int = 0
    peak_allocated_index: int = -1
    peak_reserved: int = 0
    peak_reserved_index: int = -1
    fragmentation: float = 0.0
    num_segments: int = 0
    num_retries: int = 0
    segments: tuple[Segment, ...] = ()
    out_of_memory: OutOfMemory | None = None


def replay(
    trace: Iterable[Event],
    *,
    total_bytes: int | None = None,
    overhead_bytes: int = 0,
    expandable_segments: bool = False,
    max_split_bytes: int | None = None,
) -> Usage:
    """Replay the requests of a trace through a model of torch's caching allocator.

    Args:
        trace: A `Trace`, or events in the order of the host.
        total_bytes: Bytes of memory of the device; None: no limit.
        overhead_bytes: Bytes outside the allocator: the CUDA context, communicators.
        expandable_segments: The option of this name in `PYTORCH_CUDA_ALLOC_CONF`.
        max_split_bytes: The option `max_split_size_mb`, in bytes; None: blocks of any size are
            split.

    Returns:
        Memory over time, peaks, and the request that failed if `total_bytes` is too small.

    Raises:
        ValueError: If the device is smaller than `overhead_bytes`, or `max_split_bytes` is not more
            than the 20 MiB of a segment.
    """
    if total_bytes is not None and total_bytes < overhead_bytes:
        raise ValueError(
            f"total_bytes ({total_bytes}) must be >= overhead_bytes ({overhead_bytes})"
        )
    if max_split_bytes is not None and max_split_bytes <= 20 * 2**20:
        raise ValueError(f"max_split_bytes ({max_split_bytes}) must be > 20 MiB")
    capacity = None if total_bytes is None else total_bytes - overhead_bytes
    run = _Replay(CachingAllocator(capacity, expandable_segments, max_split_bytes))
    for index, event in enumerate(trace):
        run.observe(index, event)
        if run.usage.out_of_memory is not None:
            break
    run.usage.num_retries = run.allocator.num_retries
    run.usage.segments = tuple(run.segments())
    return run.usage


def least_bytes(
    trace: Sequence[Event], usage: Usage, *, apart: float = 0.01, expandable_segments: bool = False
) -> int:
    """Find the fewest bytes of a device with which torch meets the requests of a trace.

    Without a limit the allocator never returns segments to the device. With a limit, and a request
    that does not fit, it returns segments without tensors and waits for streams that have borrowed
    memory. So a program needs less than it reserves on a larger device.

    Args:
        trace: Events in the order of the host.
        usage: Replay of the same trace without a limit.
        apart: Relative error of the result, which is never too small.
        expandable_segments: Whether `usage` is a replay with expandable segments.

    Returns:
        Bytes of the allocator alone; at least `usage.peak_allocated`.
    """
    enough, too_few = usage.peak_reserved, usage.peak_allocated

    def suffices(num_bytes: int) -> bool:
        found = replay(trace, total_bytes=num_bytes, expandable_segments=expandable_segments)
        return found.out_of_memory is None

    if suffices(too_few):
        return too_few
    while enough - too_few > apart * too_few:
        middle = (enough + too_few) // 2
        if suffices(middle):
            enough = middle
        else:
            too_few = middle
    return enough


@dataclass(slots=True)
class _Replay:
    allocator: CachingAllocator
    usage: Usage = field(default_factory=Usage)
    clocks: Clocks = field(default_factory=Clocks)
    live: dict[int, Block] = field(default_factory=dict)
    borrowers: dict[int, set[int]] = field(default_factory=dict)
    awaiting: list[tuple[Block, tuple[Epoch, ...]]] = field(default_factory=list)
    host_changes: int = 0

    def observe(self, index: int, event: Event) -> None:
        self.clocks.observe(event)
        if isinstance(event, Allocate):
            self._allocate(index, event)
        elif isinstance(event, Release):
            self._release(event)
        elif isinstance(event, Borrow):
            self.borrowers.setdefault(event.block, set()).add(event.stream)
        else:
            return
        self._note(index)

    def segments(self) -> Iterator[Segment]:
        awaiting = {id(block) for block, _ in self.awaiting}
        for _, head in sorted(self.allocator.heads.items()):
            blocks: list[tuple[int, BlockState]] = []
            block: Block | None = head
            while block is not None:
                if block.is_mapped:
                    taken: BlockState = "awaiting" if id(block) in awaiting else "allocated"
                    blocks.append((block.size, taken if block.is_taken else "free"))
                block = block.after
            yield Segment(head.stream, head.pool.is_small, head.expandable, tuple(blocks))

    def _allocate(self, index: int, event: Allocate) -> None:
        if event.num_bytes == 0:
            return
        self._finish_borrowed()
        if (block := self._take(event)) is not None:
            self.live[event.block] = block
            return
        allocator = self.allocator
        self.usage.out_of_memory = OutOfMemory(
            index, event, allocator.allocated, allocator.reserved, allocator.capacity or 0
        )

    def _take(self, event: Allocate) -> Block | None:
        allocator, wanted, stream = self.allocator, event.num_bytes, event.stream
        block = allocator.take(wanted, stream)
        if block is None and allocator.give_back_oversized(wanted, stream):
            block = allocator.take(wanted, stream, cached=False)
        if block is None:
            for each, _ in self.awaiting:
                allocator.free(each)
            self.awaiting.clear()
            allocator.give_back()
            block = allocator.take(wanted, stream, cached=False)
        return block

    def _release(self, event: Release) -> None:
        block = self.live.pop(event.block, None)
        borrowers = self.borrowers.pop(event.block, set())
        if block is None:
            return
        self.allocator.forget(block)
        self._free(block, tuple(map(self.clocks.now, sorted(borrowers - {block.stream}))))

    def _finish_borrowed(self) -> None:
        """Free blocks whose borrowers are all done according to the host."""
        if self.host_changes == self.clocks.host_changes:
            return
        self.host_changes = self.clocks.host_changes
        awaiting, self.awaiting = self.awaiting, []
        for block, epochs in awaiting:
            self._free(block, epochs)

    def _free(self, block: Block, epochs: tuple[Epoch, ...]) -> None:
        """Free a block, now or when the host knows that these operations are done."""
        if all(map(self.clocks.is_known_to_host, epochs)):
            self.allocator.free(block)
        else:
            self.awaiting.append((block, epochs))

    def _note(self, index: int) -> None:
        allocator, usage = self.allocator, self.usage
        usage.indices.append(index)
        usage.allocated.append(allocator.allocated)
        usage.reserved.append(allocator.reserved)
        if allocator.allocated > usage.peak_allocated:
            usage.peak_allocated, usage.peak_allocated_index = allocator.allocated, index
        if allocator.reserved > usage.peak_reserved:
            usage.peak_reserved, usage.peak_reserved_index = allocator.reserved, index
            usage.num_segments = allocator.num_segments
            usage.fragmentation = 1 - allocator.allocated / allocator.reserved
