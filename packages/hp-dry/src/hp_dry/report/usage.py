"""Memory of a rank over a dry run: peaks by kind, blocks at the peak, the curve. No torch."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from hp_dry.memory.allocator import Usage
from hp_dry.report.sites import Site, site
from hp_dry.trace import KINDS, Allocate, Label, Launch, Release, Trace

_BUCKETS = 360
_NUM_LARGEST = 10


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that is alive at the peak.

    Attributes:
        bytes: Size of the block.
        kind: Purpose of the block, one of `KINDS`.
        shape: Shape of the tensor for which it was allocated; empty if it is not known.
        dtype: Dtype of that tensor, such as `"bfloat16"`; empty if it is not known.
        what: Operator that allocated it.
        at: Line that allocated it, and the lines that called it.
        place: Place of the rank, in the words of `hp_platform.doing`.
    """

    bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    what: str
    at: str
    place: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Moment of an event.

    Attributes:
        event: Index of the event in the trace.
        launches: Launches before it.
        place: Place of the rank, in the words of `hp_platform.doing`.
        step: Step of the optimizer, counted from 1; -1 outside of steps.
        schedule_step: Action of the pipeline schedule, such as `"1F3"`; empty outside of a
            schedule.
        microbatch: Index of the microbatch; -1 outside of one.
        module: Module, such as `"layers.3, experts"`.
        at: Line that issued the event, and the lines that called it.
    """

    event: int
    launches: int
    place: str
    step: int
    schedule_step: str
    microbatch: int
    module: str
    at: str


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Point of the curve, which JSON has as a list.

    Attributes:
        launches: Launches before it.
        live: Bytes of live tensors of each of `KINDS`, in that order.
        reserved: Bytes that the caching allocator has reserved; 0 if it was not replayed.
    """

    launches: int
    live: tuple[int, ...]
    reserved: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Part of the run: its name, and the launches before and after it; a list in JSON."""

    name: str
    begin: int
    end: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank over a run.

    Attributes:
        peak_live: Most bytes of tensors that were alive at once.
        peak_reserved: Most bytes that the caching allocator had reserved; None if not replayed.
        least: Fewest bytes with which the caching allocator meets all requests, by returning unused
            memory to the device; None if not replayed.
        fragmentation: Share of `peak_reserved` that no tensor had, 0 to 1.
        retries: Number of requests for which free memory was returned to the device.
        out_of_memory: Request that the device could not meet; empty if all were met.
        peak: Moment when the most bytes were alive.
        at_peak: Bytes that were alive at the peak, by kind.
        peak_by_kind: Most bytes of each kind that were alive at once, each at its own time.
        largest: Largest blocks that are alive at the peak, at most ten.
        at_end: Bytes that are alive at the end of the trace.
        curve: Points in order, limited in number, with exact peaks and troughs.
        spans: Parts of the run, in order.
    """

    peak_live: int
    peak_reserved: int | None
    least: int | None
    fragmentation: float
    retries: int
    out_of_memory: str
    peak: Moment | None
    at_peak: dict[str, int]
    peak_by_kind: dict[str, int]
    largest: tuple[Block, ...]
    at_end: int
    curve: tuple[Point, ...]
    spans: tuple[Span, ...]

    @property
    def highest(self) -> int:
        """Return the reserved bytes; live bytes if they are not known."""
        return max(self.peak_live, self.peak_reserved or 0)

    @property
    def needed(self) -> int:
        """Return the bytes that a device needs for tensors; live bytes without a replay."""
        return self.peak_live if self.least is None else self.least


class _Change(NamedTuple):
    """Memory after an event, in all and of each of `KINDS`."""

    event: int
    launches: int
    total: int
    live: tuple[int, ...]


def memory_of(trace: Trace, usage: Usage | None = None, *, least: int | None = None) -> Memory:
    """Account for the memory of a trace.

    Args:
        trace: Trace of one rank.
        usage: Replay of the same trace through the caching allocator.
        least: Fewest bytes with which the allocator meets all requests.
    """
    kinds, replayed = _kinds(trace), usage or Usage()
    changes = list(_changes(trace, kinds))
    highest = max(changes, key=lambda change: change.total, default=None)
    alive = [] if highest is None else _alive(trace, highest.event)
    largest = sorted(alive, key=lambda each: -each.num_bytes)[:_NUM_LARGEST]
    return Memory(
        peak_live=highest.total if highest else 0,
        peak_reserved=None if usage is None else usage.peak_reserved,
        least=least,
        fragmentation=replayed.fragmentation,
        retries=replayed.num_retries,
        out_of_memory=str(replayed.out_of_memory or ""),
        peak=None if highest is None else _moment(trace, highest),
        at_peak=_by_kind(highest.live if highest else ()),
        peak_by_kind=_by_kind(map(max, zip(*(change.live for change in changes), strict=True))),
        largest=tuple(_block(each, kinds) for each in largest),
        at_end=changes[-1].total if changes else 0,
        curve=tuple(_curve(changes, replayed)),
        spans=tuple(_spans(trace)),
    )


def _by_kind(sizes: Iterable[int]) -> dict[str, int]:
    """Return the sizes of `KINDS` that are not 0."""
    return {kind: size for kind, size in zip(KINDS, sizes, strict=False) if size}


def _kinds(trace: Trace) -> dict[int, str]:
    """Return the kind of each block: its last label, else a kind by the place of its allocation."""
    kinds: dict[int, str] = {}
    for event in trace.events:
        if isinstance(event, Allocate):
            in_module = site(event.place).microbatch >= 0
            kinds[event.block] = "activations" if in_module else "other"
        elif isinstance(event, Label):
            kinds[event.block] = event.kind
    return kinds


def _changes(trace: Trace, kinds: Mapping[int, str]) -> Iterator[_Change]:
    """Yield the live memory after every allocation and every release."""
    places = {kind: place for place, kind in enumerate(KINDS)}
    live = [0] * len(KINDS)
    sizes: dict[int, int] = {}
    launches = 0
    for index, event in enumerate(trace.events):
        if isinstance(event, Launch):
            launches += event.num_kernels
        elif isinstance(event, Allocate | Release):
            place = places[kinds.get(event.block, "other")]
            live[place] -= sizes.pop(event.block, 0)
            if isinstance(event, Allocate):
                sizes[event.block] = event.num_bytes
                live[place] += event.num_bytes
            yield _Change(index, launches, sum(live), tuple(live))


def _curve(changes: Sequence[_Change], usage: Usage) -> Iterator[Point]:
    """Yield the points of the curve, with reserved memory."""
    kept = _kept(changes, list(zip(usage.indices, usage.reserved, strict=True)))
    for change in changes:
        if change.event in kept:
            before = bisect_right(usage.indices, change.event)
            yield Point(change.launches, change.live, usage.reserved[before - 1] if before else 0)


def _kept(changes: Sequence[_Change], reserved: Sequence[tuple[int, int]]) -> set[int]:
    """Choose the events of the curve: the highest and the lowest of each part of the run."""
    if not changes:
        return set()
    kept = {changes[0].event, changes[-1].event}
    size = -(-len(changes) // _BUCKETS)
    for begin in range(0, len(changes), size):
        part = changes[begin : begin + size]
        kept.add(max(part, key=lambda change: change.total).event)
        kept.add(min(part, key=lambda change: change.total).event)
    size = max(-(-len(reserved) // _BUCKETS), 1)
    for begin in range(0, len(reserved), size):
        kept.add(max(reserved[begin : begin + size], key=lambda point: point[1])[0])
    return kept


def _alive(trace: Trace, until: int) -> list[Allocate]:
    """Return the blocks that are alive after an event."""
    alive: dict[int, Allocate] = {}
    for event in trace.events[: until + 1]:
        if isinstance(event, Allocate):
            alive[event.block] = event
        elif isinstance(event, Release):
            alive.pop(event.block, None)
    return list(alive.values())


def _block(each: Allocate, kinds: dict[int, str]) -> Block:
    return Block(
        bytes=each.num_bytes,
        kind=kinds[each.block],
        shape=each.shape,
        dtype=each.dtype,
        what=each.what,
        at=each.at,
        place=each.place,
    )


def _moment(trace: Trace, change: _Change) -> Moment:
    event = trace.events[change.event]
    where = site(event.place)
    return Moment(
        event=change.event,
        launches=change.launches,
        place=event.place,
        step=where.step,
        schedule_step=where.schedule_step,
        microbatch=where.microbatch,
        module=where.module,
        at=event.at,
    )


def _spans(trace: Trace) -> Iterator[Span]:
    """Yield the parts of the run with launches: build, pipeline of each step, and others."""
    launches = 0
    events = (e for e in trace.events if isinstance(e, Launch) and e.num_kernels)
    for name, inside in groupby(events, key=lambda event: _part(site(event.place))):
        begin, launches = launches, launches + sum(event.num_kernels for event in inside)
        yield Span(name, begin, launches)


def _part(where: Site) -> str:
    inside = where.schedule_step or where.phase in {"", "between", "backward"}
    return f"step {where.step}" if where.step >= 0 and inside else where.phase
